"""Attention under an arbitrary mask and additive bias.

Arrays of scores are what such a call is about (the mask itself may have their size), so this is the one formulation that holds
them all, (B, Hq, Sq, Skv) in float32, and is left to autodiff.
"""

import jax
import jax.numpy as jnp
from jax import lax


def masked_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: jax.Array | None,
    bias: jax.Array | None,
    sinks: jax.Array | None,
    scale: float,
    softcap: float | None,
) -> tuple[jax.Array, jax.Array]:
    """softmax(mask(softcap(scale * q k^T) + bias)) v, with float32 scores and sums.

    A row whose keys are all masked, or have a bias of -inf, gives 0 and -inf (its sink, if there is one), and no NaN in the
    derivative. NaN in a masked key or value does reach the result, through 0 * NaN.

    Args:
      q: (B, Sq, Hq, D).
      k: (B, Skv, Hkv, D).
      v: (B, Skv, Hkv, Dv).
      mask: bool, broadcastable to (B, Hq, Sq, Skv), of 4 axes; True where a query sees a key.
      bias: float, broadcastable likewise.
      sinks: (Hq,) logits that join the denominator.
      scale: factor on q k^T.
      softcap: c in c * tanh(s / c), or None.

    Returns:
      o (B, Sq, Hq, Dv) of q's type and lse float32 (B, Sq, Hq).
    """
    batch, tokens, q_heads, dim = q.shape
    kv_heads = k.shape[2]
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else lax.Precision.DEFAULT

    def by_head(x: jax.Array) -> jax.Array:
        heads = (1, 1) if x.shape[1] == 1 else (kv_heads, q_heads // kv_heads)
        return x.reshape(x.shape[0], *heads, *x.shape[2:])

    grouped = q.reshape(batch, tokens, kv_heads, q_heads // kv_heads, dim)
    s = scale * jnp.einsum("btkgd,bskd->bkgts", grouped, k, precision=precision, preferred_element_type=jnp.float32)
    if softcap is not None:
        s = softcap * jnp.tanh(s / softcap)
    if bias is not None:
        s = s + by_head(bias.astype(jnp.float32))
    if mask is not None:
        s = jnp.where(by_head(mask), s, -jnp.inf)

    sink = jnp.full(1, -jnp.inf) if sinks is None else sinks.astype(jnp.float32)
    sink = by_head(sink[None, :, None, None])
    top = lax.stop_gradient(jnp.maximum(jnp.max(s, axis=-1, keepdims=True, initial=-jnp.inf), sink))
    base = jnp.where(top == -jnp.inf, 0, top)
    p = jnp.exp(s - base)
    total = jnp.sum(p, axis=-1, keepdims=True) + jnp.exp(sink - base)
    is_empty = total == 0
    nonzero = jnp.where(is_empty, 1, total)
    lse = jnp.where(is_empty, -jnp.inf, base + jnp.log(nonzero))

    p = (p / nonzero).astype(v.dtype)
    o = jnp.einsum("bkgts,bske->btkge", p, v, precision=precision, preferred_element_type=jnp.float32)
    lse = lse[..., 0].transpose(0, 3, 1, 2)
    return o.reshape(batch, tokens, q_heads, v.shape[-1]).astype(q.dtype), lse.reshape(batch, tokens, q_heads)
