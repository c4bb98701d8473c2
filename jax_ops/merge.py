"""Attention over a union of keys, from the partial results over its parts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ops import checks

_OP = "merge_attention"


def merge_attention(o_a: Any, lse_a: Any, o_b: Any, lse_b: Any) -> tuple[jax.Array, jax.Array]:
    """Attention over two disjoint sets of keys, from the results over each; exact, whatever the order.

    Any op's result merges with any other's over the same queries: halves of a context, a shared prefix and what follows it,
    the shards of a sequence-parallel decode. More than two parts are merged one after another.

        lse = log(exp(lse_a) + exp(lse_b)),  o = exp(lse_a - lse) o_a + exp(lse_b - lse) o_b, in float32

    A part that saw no key has lse -inf: it is neutral, whatever its o holds. Where one of two parts is such, the other passes
    through unchanged, to the bit; where both are, o is 0 and lse -inf. An lse of NaN or +inf (an overflow of the scores)
    gives a NaN row. A sink belongs to one part: give `sinks` to one of the calls, since each would count them.

    Args:
      o_a: (..., H, Dv), of any op: float16, bfloat16 or float32.
      lse_a: float32 (..., H), the natural-log lse that the op returned with o_a (`return_lse=True`).
      o_b: like o_a.
      lse_b: like lse_a.

    Returns:
      (o, lse): o like o_a, lse like lse_a.

    Raises:
      ValueError: shapes that differ, by argument and shape.
      TypeError: element types, by argument.

    Differentiable, without NaN where an lse is -inf. Idea: Milakov and Gimelshein, Online normalizer calculation, 2018.

    Example:
      >>> import jax.numpy as jnp
      >>> q, kv = jnp.ones((1, 2, 8)), jnp.arange(48.0).reshape(1, 6, 1, 8) / 48
      >>> near = gqa_decode(q, kv[:, 4:], kv[:, 4:], return_lse=True)
      >>> far = gqa_decode(q, kv[:, :4], kv[:, :4], return_lse=True)
      >>> o, lse = merge_attention(*far, *near)
      >>> bool(jnp.allclose(o, gqa_decode(q, kv, kv), rtol=1e-6))
      True
    """
    o_a, lse_a, o_b, lse_b = (x if checks.is_array(x) else jnp.asarray(x) for x in (o_a, lse_a, o_b, lse_b))
    _check(o_a, lse_a, o_b, lse_b)
    return _merged(o_a, lse_a, o_b, lse_b)


@jax.jit
def _merged(o_a: jax.Array, lse_a: jax.Array, o_b: jax.Array, lse_b: jax.Array) -> tuple[jax.Array, jax.Array]:
    empty_a, empty_b = lse_a == -jnp.inf, lse_b == -jnp.inf
    lone = empty_a | empty_b
    real_a, real_b = (jnp.where(e[..., None], 0, o.astype(jnp.float32)) for e, o in ((empty_a, o_a), (empty_b, o_b)))
    finite_a, finite_b = jnp.where(lone, 0, lse_a), jnp.where(lone, 0, lse_b)

    top = lax.stop_gradient(jnp.maximum(finite_a, finite_b))
    weight_a, weight_b = jnp.exp(finite_a - top), jnp.exp(finite_b - top)
    total = weight_a + weight_b
    o = real_a * (weight_a / total)[..., None] + real_b * (weight_b / total)[..., None]
    lse = top + jnp.log(total)

    o = jnp.where(empty_a[..., None], real_b, jnp.where(empty_b[..., None], real_a, o))
    return o.astype(o_a.dtype), jnp.where(empty_a, lse_b, jnp.where(empty_b, lse_a, lse))


def _check(o_a: Any, lse_a: Any, o_b: Any, lse_b: Any) -> None:
    if len(o_a.shape) < 1:
        raise checks.fail(_OP, "o_a", f"has shape {o_a.shape}", "(..., heads, head_dim_v)")
    if o_b.shape != o_a.shape:
        raise checks.fail(_OP, "o_b", f"has shape {o_b.shape}", f"{o_a.shape}, as o_a has")
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        if lse.shape != o_a.shape[:-1]:
            raise checks.fail(_OP, name, f"has shape {lse.shape}", f"{o_a.shape[:-1]}, the shape of o_a without its last axis")
    if str(o_a.dtype) not in checks.ACCEPTED_TYPES:
        raise checks.wrong_type(_OP, "o_a", f"has element type {o_a.dtype}", f"one of {', '.join(checks.ACCEPTED_TYPES)}")
    if o_b.dtype != o_a.dtype:
        raise checks.wrong_type(_OP, "o_b", f"has element type {o_b.dtype}", f"{o_a.dtype}, as o_a has")
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        if str(lse.dtype) != "float32":
            raise checks.wrong_type(_OP, name, f"has element type {lse.dtype}", "float32, as the ops return it")
