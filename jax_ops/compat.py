"""The calls other libraries make: `jax.nn.dot_product_attention`, and the attention function of Flax layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dispatch_core import Device, Kernel
from jax_ops import checks
from jax_ops.bands import Band, Operands, Rules, attend
from jax_ops.options import present

_JAX_OP, _FLAX_OP = "dot_product_attention", "flax_attention_fn"


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
    softcap: float | None = None,
    sinks: Any = None,
    build: str | None = None,
    kernel_map: Mapping[str, Kernel] | None = None,
    device: str | Device | None = None,
    interpret: bool = False,
) -> Any:
    """`jax.nn.dot_product_attention` on this library's kernels: the same arguments, with the same meaning.

    Causal masks and windows align top-left, as they do there and nowhere else in this library: query i stands at key i,
    whatever the lengths. With 3 queries and 5 keys, causal:

        key     0 1 2 3 4
        query 0 x
        query 1 x x
        query 2 x x x

    The alignment is converted exactly. Keys that no query sees are not read; traced lengths together with a causal mask or a
    window cost one reordering of the inputs and the output.

    Where jax.nn differs: a query that sees no key gives 0 (there: the mean of the values), as do rows past a query length,
    and NaN past a length has no effect. Grouped heads, all head sizes and a head size of its own for value are served.

    Args:
      query: (B, T, N, H) or (T, N, H), float16, bfloat16 or float32.
      key: (B, S, K, H) or (S, K, H) of query's type; N is a multiple of K.
      value: (B, S, K, Hv) or (S, K, Hv) of query's type.
      bias: float, added to the scaled scores; its axes are those of (B, N, T, S), or 1, and leading ones may be missing.
      mask: bool likewise, True where a query sees a key. A call with a bias or a mask has no kernel: XLA computes it, and holds
        its scores (B, N, T, S) in float32 (logged once for each such call, at level INFO). Causal masks, windows and padding
        are cheaper said by the arguments below.
      scale: factor on the scores, static; None: H ** -0.5.
      is_causal: key j is visible to query i iff j <= i.
      query_seq_lengths: int32 (B,): rows past them give 0.
      key_value_seq_lengths: int32 (B,): keys past them are not seen.
      local_window_size: (left, right), or one int for both: key j is visible to query i iff i - left <= j <= i + right.
      implementation: None: the kernels chosen as for `gqa_prefill`; "xla": the XLA build of them; "cudnn": the call is handed
        to `jax.nn.dot_product_attention` as it is, with cuDNN's rules and errors.
      return_residual: also return the log-sum-exp.
      softcap, sinks, build, kernel_map, device, interpret: as in `gqa_prefill`.

    Returns:
      An array of query's shape with Hv for H. With return_residual, (output, residual): the natural-log lse of the output's
      shape without its last axis, in query's type and without derivative, as there; -inf where no key is seen.

    Raises:
      ValueError, TypeError: shapes, element types, and options that contradict each other, by name.
      NoImplementationError, ReplacementRefusedError: as `gqa_prefill`.

    Differentiable in query, key, value, bias and sinks.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> q, kv = jnp.ones((2, 5, 6, 16)), jnp.arange(448.0).reshape(2, 7, 2, 16)
      >>> ours = dot_product_attention(q, kv, kv, is_causal=True)
      >>> bool(jnp.allclose(ours, jax.nn.dot_product_attention(q, kv, kv, is_causal=True), rtol=1e-5))
      True
    """
    op = _JAX_OP
    static = {"scale": scale, "softcap": softcap, "is_causal": is_causal, "local_window_size": local_window_size}
    checks.check_static(op, {**static, "implementation": implementation, "return_residual": return_residual})
    returns_residual = checks.static_bool(op, "return_residual", return_residual)
    if implementation not in (None, "xla", "cudnn"):
        raise checks.fail(op, "implementation", f"is {implementation!r}", "None, 'xla' or 'cudnn'")
    if implementation is not None and build not in (None, implementation):
        raise checks.fail(op, "build", f"is {build!r} and implementation is {implementation!r}", "one of the two")
    if implementation == "cudnn":
        ours = {"softcap": softcap, "sinks": sinks, "kernel_map": kernel_map, "device": device}
        for name, value_given in {**ours, "interpret": interpret or None}.items():
            if value_given is not None:
                raise checks.fail(op, name, "is given and implementation is 'cudnn'", "implementation None or 'xla'")
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            bias,
            mask,
            scale=scale,
            is_causal=is_causal,
            query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths,
            local_window_size=local_window_size,
            implementation="cudnn",
            return_residual=return_residual,
        )
    left, right = _window(op, local_window_size)
    band = Band(None if left is None else -left, right)
    if checks.static_bool(op, "is_causal", is_causal):
        band = band.within(None, 0)
    q, k, v = (_batched(op, name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    operands = Operands(q, k, v, **present(q_lengths=query_seq_lengths, kv_lengths=key_value_seq_lengths, sinks=sinks))
    rules = Rules(op, scale, softcap, implementation or build, kernel_map, device, interpret)
    o, lse = attend(rules, operands, band, bias, mask, returns_residual)
    shape = np.shape(query)[:-1]
    o = o.reshape(*shape, o.shape[-1])
    if lse is None or not returns_residual:
        return o
    return o, lax.stop_gradient(lse.astype(o.dtype)).reshape(shape)


def flax_attention_fn(
    *,
    is_causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    build: str | None = None,
    kernel_map: Mapping[str, Kernel] | None = None,
    device: str | Device | None = None,
    interpret: bool = False,
) -> Any:
    """An `attention_fn` for the attention layers of Flax, NNX and Linen, on this library's kernels.

        nnx.MultiHeadAttention(..., attention_fn=flax_attention_fn(is_causal=True))
        nn.MultiHeadDotProductAttention(..., attention_fn=flax_attention_fn(is_causal=True))

    Say causal and window here rather than as the layer's `mask`: a mask is an array, whose meaning no kernel can know, so XLA
    computes such a call and holds its scores (logged once for each such call, at level INFO). That includes the mask the
    layers make when they decode. NNX's own `is_causal` argument is understood (Flax aligns it top-left).

    What the layers can ask for and attention weights that are never formed cannot give is an error that names it: dropout
    (unless deterministic), sowing the weights, other einsums. `precision` is met as it is: float32 is computed in float32.
    Equal options give the same function, so that modules made twice compare equal.

    Args:
      is_causal, window, scale, softcap, build, kernel_map, device, interpret: as in `gqa_prefill`, bottom-right alignment
        included; all static.

    Returns:
      attention(query, key, value, bias=None, mask=None, **what the layer passes), for arrays (..., T, N, H), (..., S, K, H) and
      (..., S, K, Hv) with any batch axes; it returns (..., T, N, Hv), in the layer's `dtype` if it has one.

    Raises:
      ValueError, TypeError: options, by name; when called, also as `dot_product_attention`.

    Example:
      >>> import jax.numpy as jnp
      >>> attention = flax_attention_fn(is_causal=True)
      >>> attention(jnp.ones((2, 5, 4, 8)), jnp.ones((2, 5, 4, 8)), jnp.ones((2, 5, 4, 8)), dropout_rate=0.0).shape
      (2, 5, 4, 8)
    """
    sides = checks.static_window(_FLAX_OP, window)
    return _flax_function(
        checks.static_bool(_FLAX_OP, "is_causal", is_causal),
        None if sides is None else (sides.left, sides.right),
        Rules(
            _FLAX_OP,
            scale=checks.static_number(_FLAX_OP, "scale", scale),
            softcap=checks.static_softcap(_FLAX_OP, softcap),
            build=build,
            device=device,
            interpret=interpret,
        ),
        tuple(sorted((kernel_map or {}).items(), key=lambda item: item[0])),
    )


# What layers pass that changes nothing here: how to drop weights that are not dropped, and a precision that is met anyway.
_IDLE_FLAX_ARGUMENTS = frozenset({"dropout_rng", "broadcast_dropout", "precision", "promote_dtype", "force_fp32_for_softmax"})


@lru_cache(maxsize=256)
def _flax_function(
    causal: bool, window: tuple[int | None, int | None] | None, rules: Rules, replacements: tuple[tuple[str, Kernel], ...]
) -> Any:
    rules = replace(rules, kernel_map=dict(replacements) or None)
    left, right = window or (None, None)

    # Linen passes only what is named here, so everything that must be refused is named.
    def attention(
        query: Any,
        key: Any,
        value: Any,
        bias: Any = None,
        mask: Any = None,
        *,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        module: Any = None,
        is_causal: bool = False,
        qk_attn_weights_einsum: Any = None,
        attn_weights_value_einsum: Any = None,
        **others: Any,
    ) -> jax.Array:
        for name in sorted(others.keys() - _IDLE_FLAX_ARGUMENTS):
            raise checks.wrong_type(_FLAX_OP, name, "was passed by the layer", "a layer that does without it")
        if dropout_rate > 0 and not deterministic:
            came = f"is {dropout_rate} and deterministic is {deterministic}"
            remedy = "Build the layer with dropout_rate=0, or call it with deterministic=True."
            raise checks.fail(_FLAX_OP, "dropout_rate", came, "no dropout of attention weights, which are never formed", remedy)
        weights = {"qk_attn_weights_einsum": qk_attn_weights_einsum, "attn_weights_value_einsum": attn_weights_value_einsum}
        for name, given in {"module": module, **weights}.items():
            if given is not None:
                came = "was passed by the layer (sow_weights)" if name == "module" else "was passed by the layer"
                raise checks.fail(_FLAX_OP, name, came, "no use of the attention weights, which are never formed")
        element = jnp.result_type(query, key, value) if dtype is None else dtype
        query, key, value = (jnp.asarray(x).astype(element) for x in (query, key, value))
        batch = query.shape[:-3]
        operands = Operands(*(_batched(_FLAX_OP, n, x, batch) for n, x in (("query", query), ("key", key), ("value", value))))
        offset = operands.k.shape[1] - operands.q.shape[1]
        band = Band(None if left is None else offset - left, None if right is None else offset + right)
        band = band.within(None, offset if causal else None)
        band = band.within(None, 0 if checks.static_bool(_FLAX_OP, "is_causal", is_causal) else None)
        bias, mask = (None if x is None else _one_batch_axis(jnp.asarray(x), batch) for x in (bias, mask))
        mask = None if mask is None else mask.astype(bool)
        o, _ = attend(rules, operands, band, bias, mask, False)
        return o.reshape(*query.shape[:-1], o.shape[-1])

    return attention


def _one_batch_axis(x: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    """A mask or bias over (*batch, N, T, S), or broadcastable to it, as one of 4 axes."""
    x = x.reshape((1,) * (len(batch) + 3 - x.ndim) + x.shape)
    if all(n == 1 for n in x.shape[:-3]):
        return x.reshape(1, *x.shape[-3:])
    return jnp.broadcast_to(x, (*batch, *x.shape[-3:])).reshape(math.prod(batch), *x.shape[-3:])


def _window(op: str, window: Any) -> tuple[int | None, int | None]:
    """A local_window_size as (left, right); None is unbounded."""
    if window is None:
        return None, None
    pair = window if isinstance(window, (tuple, list)) else (window, window)
    if len(pair) != 2:
        raise checks.wrong_type(op, "local_window_size", f"is {window!r}", "an int, or a pair (left, right)")
    for side in pair:
        if isinstance(side, bool) or not isinstance(side, (int, np.integer)):
            raise checks.wrong_type(
                op, "local_window_size", f"is {window!r}", "an int, or a pair (left, right) of ints, static"
            )
        if side < 0:
            raise checks.fail(op, "local_window_size", f"is {window!r}", "ints of 0 or more, or None for no window")
    return int(pair[0]), int(pair[1])


def _batched(op: str, name: str, x: Any, batch: tuple[int, ...] | None = None) -> jax.Array:
    """An array (..., tokens, heads, head size) with its batch axes made one: `batch`, or one or none where that is None."""
    x = jnp.asarray(x)
    if batch is None and x.ndim not in (3, 4):
        raise checks.fail(op, name, f"has shape {x.shape}", "4 axes (batch, tokens, heads, head size), or 3 without batch")
    if batch is not None and (x.ndim < 3 or x.shape[:-3] != batch):
        raise checks.fail(op, name, f"has shape {x.shape}", f"the axes {batch} of query, then (tokens, heads, head size)")
    return x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])
