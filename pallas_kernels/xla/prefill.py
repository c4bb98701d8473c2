"""Dense and packed prefill, and their gradients.

A packed array is one sequence whose rows see spans of their own keys; a padded batch has its lengths in its spans. From there on
both are the same problems. Scales and layout are ordinary functions of the arguments, whose derivatives JAX knows; only
attention itself has a derivative of its own.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dispatch_core.calls import AttentionCall
from dispatch_core.tiling import TileConfig
from pallas_kernels.xla.blocks import Result, array_keys, attend_in_blocks, attend_vjp
from pallas_kernels.xla.layout import common_zero, dequantised, folded, folded_rows, unfolded
from pallas_kernels.xla.spans import Span, dense_spans, packed_spans, segments

Arrays = dict[str, Any]


class Problems(NamedTuple):
    """Float32 operands, one problem per (sequence, KV head): scaled q (N, M, D), k and v (N, S, D or Dv), sink (N, M) or None."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    sink: jax.Array | None


def dense_prefill(call: AttentionCall, tile: TileConfig, **arrays: Any) -> tuple[jax.Array, jax.Array | None]:
    """Attention of a batch.

    Args:
      call: the facts.
      tile: rows and keys of a block.
      **arrays: q (B, Sq, Hq, D), k (B, Skv, Hkv, D), v (B, Skv, Hkv, Dv); or None: q_lengths, kv_lengths int32 (B,), q_scale,
        k_scale, v_scale float32 (B, Hkv), sinks float32 (Hq,).

    Returns:
      o (B, Sq, Hq, Dv) in the call's output type, and lse float32 (B, Sq, Hq) if the call asks for it.
    """
    o, lse = _attend(call, tile, _dense_span(call, arrays), _problems(call, tile, arrays, _of_batch))
    batch, tokens = arrays["q"].shape[:2]
    return unfolded(o, batch, tokens), unfolded(lse, batch, tokens) if call.return_lse else None


def dense_prefill_vjp(
    call: AttentionCall, tile: TileConfig, arrays: Arrays, o: jax.Array, lse: jax.Array, do: jax.Array, dlse: jax.Array
) -> Arrays:
    """Cotangents, by name, of q, k, v and of the scales and sinks that are given."""
    return _vjp(call, tile, arrays, _of_batch, _dense_span(call, arrays), Result(o, lse, do, dlse))


def packed_prefill(call: AttentionCall, tile: TileConfig, **arrays: Any) -> tuple[jax.Array, jax.Array | None]:
    """Attention within packed sequences.

    Args:
      call: the facts.
      tile: rows and keys of a block.
      **arrays: q (Tq, Hq, D), k (Tkv, Hkv, D), v (Tkv, Hkv, Dv), cu_seqlens_q and cu_seqlens_kv int32 (B + 1,); or None: q_scale,
        k_scale, v_scale float32 (B, Hkv), sinks float32 (Hq,).

    Returns:
      o (Tq, Hq, Dv) in the call's output type, and lse float32 (Tq, Hq) if the call asks for it.
    """
    o, lse = _attend(call, tile, _packed_span(call, arrays), _problems(call, tile, arrays, _of_pack))
    tokens = arrays["q"].shape[0]
    return unfolded(o, 1, tokens)[0], unfolded(lse, 1, tokens)[0] if call.return_lse else None


def packed_prefill_vjp(
    call: AttentionCall, tile: TileConfig, arrays: Arrays, o: jax.Array, lse: jax.Array, do: jax.Array, dlse: jax.Array
) -> Arrays:
    """Cotangents, by name, of q, k, v and of the scales and sinks that are given."""
    result = Result(o[None], lse[None], do[None], dlse[None])
    return _vjp(call, tile, arrays, _of_pack, _packed_span(call, arrays), result)


def _dense_span(call: AttentionCall, arrays: Arrays) -> Span:
    span = dense_spans(call, arrays["q"], arrays["k"], arrays["q_lengths"], arrays["kv_lengths"])
    return _of_rows(call, span)


def _packed_span(call: AttentionCall, arrays: Arrays) -> Span:
    span = packed_spans(call, arrays["q"].shape[0], arrays["cu_seqlens_q"], arrays["cu_seqlens_kv"])
    return _of_rows(call, Span(span.start[None], span.stop[None]))


def _of_rows(call: AttentionCall, span: Span) -> Span:
    return Span(*(folded_rows(x, call.q_heads, call.kv_heads) for x in span))


def _of_batch(arrays: Arrays) -> Arrays:
    """A batch's arrays with scales as (B, 1, Hkv), one token standing for all."""
    scales = {name: arrays[name] for name in ("q_scale", "k_scale", "v_scale")}
    return arrays | {name: None if x is None else x[:, None] for name, x in scales.items()}


def _of_pack(arrays: Arrays) -> Arrays:
    """A pack's arrays as a batch of one, with scales as (1, T, Hkv), one for each token."""
    of_token = dict(zip(("q", "k", "v"), ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_kv"), strict=True))
    batch = arrays | {name: arrays[name][None] for name in of_token}
    for name, cu_seqlens in of_token.items():
        scale = arrays[f"{name}_scale"]
        if scale is not None:
            batch[f"{name}_scale"] = scale[segments(arrays[cu_seqlens], arrays[name].shape[0]).sequence][None]
    return batch


def _problems(call: AttentionCall, tile: TileConfig, arrays: Arrays, as_batch: Callable[[Arrays], Arrays]) -> Problems:
    zero = common_zero(*arrays.values())
    batch = as_batch(arrays)

    def problems(name: str) -> jax.Array:
        return folded(dequantised(batch[name], batch[f"{name}_scale"]) + zero, call.kv_heads)

    sinks = batch["sinks"]
    if sinks is not None:
        every_token = jnp.broadcast_to(sinks[None, None] + zero, batch["q"].shape[:3])
        sinks = folded_rows(every_token, call.q_heads, call.kv_heads)
    return Problems(call.softmax_scale * problems("q"), problems("k"), problems("v"), sinks)


def _attend(call: AttentionCall, tile: TileConfig, seen: Span, of: Problems) -> tuple[jax.Array, jax.Array]:
    keys = array_keys(seen, of.k, of.v, tile.block_kv)
    return attend_in_blocks(of.q, [keys], of.sink, call.softcap, call.v_dim, tile.block_q, call.o_dtype)


def _vjp(
    call: AttentionCall, tile: TileConfig, arrays: Arrays, as_batch: Callable[[Arrays], Arrays], seen: Span, result: Result
) -> Arrays:
    floats = {name: x for name, x in arrays.items() if x is not None and jnp.issubdtype(x.dtype, jnp.floating)}
    of, pull = jax.vjp(lambda floats: _problems(call, tile, arrays | floats, as_batch), floats)
    rows = Result(*(folded(x.astype(jnp.float32), call.kv_heads) for x in result))
    (cotangents,) = pull(Problems(*attend_vjp(*of, seen, rows, call.softcap, tile.block_q, tile.block_kv)))
    return cotangents
