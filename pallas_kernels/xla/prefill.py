"""Dense and packed prefill, and their gradients.

A packed array is a batch of one whose rows see spans of their own keys; a padded batch has its lengths in its spans. From there
on both are the same problems. Their layout is an ordinary function of the arguments, whose derivative JAX knows; only attention
itself has a derivative of its own.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypedDict, Unpack

import jax
import jax.numpy as jnp

from dispatch_core.calls import AttentionCall
from dispatch_core.tiling import TileConfig
from pallas_kernels.xla.blocks import Problems, Result, array_run, attend_in_blocks, attend_vjp
from pallas_kernels.xla.layout import common_zero, dequantised, folded, folded_heads, unfolded
from pallas_kernels.xla.spans import Span, dense_spans, packed_spans, segments

Arrays = Mapping[str, Any]


class DenseArrays(TypedDict):
    """The arrays of a batch; scales float32 (B, Hkv), sinks float32 (Hq,), lengths int32 (B,)."""

    q: jax.Array  # (B, Sq, Hq, D)
    k: jax.Array  # (B, Skv, Hkv, D)
    v: jax.Array  # (B, Skv, Hkv, Dv)
    q_lengths: jax.Array | None
    kv_lengths: jax.Array | None
    q_scale: jax.Array | None
    k_scale: jax.Array | None
    v_scale: jax.Array | None
    sinks: jax.Array | None


class PackedArrays(TypedDict):
    """The arrays of packed sequences; scales float32 (B, Hkv), sinks float32 (Hq,), cumulative lengths int32 (B + 1,)."""

    q: jax.Array  # (Tq, Hq, D)
    k: jax.Array  # (Tkv, Hkv, D)
    v: jax.Array  # (Tkv, Hkv, Dv)
    cu_seqlens_q: jax.Array
    cu_seqlens_kv: jax.Array
    q_scale: jax.Array | None
    k_scale: jax.Array | None
    v_scale: jax.Array | None
    sinks: jax.Array | None


def dense_prefill(call: AttentionCall, tile: TileConfig, **arrays: Unpack[DenseArrays]) -> tuple[jax.Array, jax.Array | None]:
    """Attention of a batch: o (B, Sq, Hq, Dv) in the call's output type, and lse (B, Sq, Hq) if the call asks for it."""
    problems = _problems(call, arrays, _of_batch)
    o, lse = _attend(call, tile, problems, _dense_span(call, arrays))
    batch, tokens = arrays["q"].shape[:2]
    return unfolded(o, batch, tokens), unfolded(lse, batch, tokens) if call.return_lse else None


def dense_prefill_vjp(
    call: AttentionCall, tile: TileConfig, arrays: DenseArrays, o: jax.Array, lse: jax.Array, do: jax.Array, dlse: jax.Array
) -> dict[str, jax.Array]:
    """Cotangents, by name, of q, k, v and, where given, sinks; scales come with FP8, which has none."""
    return _vjp(call, tile, arrays, _of_batch, _dense_span(call, arrays), Result(o, lse, do, dlse))


def packed_prefill(call: AttentionCall, tile: TileConfig, **arrays: Unpack[PackedArrays]) -> tuple[jax.Array, jax.Array | None]:
    """Attention within packed sequences: o (Tq, Hq, Dv) in the call's output type, and lse (Tq, Hq) if the call asks for it."""
    problems = _problems(call, arrays, _of_pack)
    o, lse = _attend(call, tile, problems, _packed_span(call, arrays))
    tokens = arrays["q"].shape[0]
    return unfolded(o, 1, tokens)[0], unfolded(lse, 1, tokens)[0] if call.return_lse else None


def packed_prefill_vjp(
    call: AttentionCall, tile: TileConfig, arrays: PackedArrays, o: jax.Array, lse: jax.Array, do: jax.Array, dlse: jax.Array
) -> dict[str, jax.Array]:
    """Cotangents, by name, of q, k, v and, where given, sinks; scales come with FP8, which has none."""
    result = Result(o[None], lse[None], do[None], dlse[None])
    return _vjp(call, tile, arrays, _of_pack, _packed_span(call, arrays), result)


def _dense_span(call: AttentionCall, arrays: DenseArrays) -> Span:
    return dense_spans(call, arrays["q"], arrays["k"], arrays["q_lengths"], arrays["kv_lengths"]).per_row(call)


def _packed_span(call: AttentionCall, arrays: PackedArrays) -> Span:
    seen = packed_spans(call, arrays["q"].shape[0], arrays["cu_seqlens_q"], arrays["cu_seqlens_kv"])
    return Span(seen.start[None], seen.stop[None]).per_row(call)


def _of_batch(arrays: Arrays) -> Arrays:
    """A batch's arrays with scales as (B, 1, Hkv): one for all tokens."""
    scales = {name: arrays[name] for name in ("q_scale", "k_scale", "v_scale")}
    return {**arrays, **{name: None if x is None else x[:, None] for name, x in scales.items()}}


def _of_pack(arrays: Arrays) -> Arrays:
    """A pack's arrays as a batch of one, with scales as (1, T, Hkv): one for each token."""
    batch = dict(arrays)
    for name, cu_seqlens in (("q", "cu_seqlens_q"), ("k", "cu_seqlens_kv"), ("v", "cu_seqlens_kv")):
        batch[name], scale = arrays[name][None], arrays[f"{name}_scale"]
        if scale is not None:
            of_token = segments(arrays[cu_seqlens], arrays[name].shape[0]).sequence
            batch[f"{name}_scale"] = scale[of_token][None]
    return batch


def _problems(call: AttentionCall, arrays: Arrays, as_batch: Callable[[Arrays], Arrays]) -> Problems:
    zero = common_zero(*arrays.values())
    batch = as_batch(arrays)
    q, k, v = (folded(dequantised(batch[name], batch[f"{name}_scale"]) + zero, call.kv_heads) for name in "qkv")
    sinks = batch["sinks"]
    sink = None if sinks is None else folded_heads(sinks + zero[None], batch["q"].shape[0], batch["q"].shape[1], call.kv_heads)
    return Problems(call.softmax_scale * q, k, v, sink)


def _attend(call: AttentionCall, tile: TileConfig, of: Problems, seen: Span) -> tuple[jax.Array, jax.Array]:
    return attend_in_blocks(call, tile, of.q, [array_run(seen, of.k, of.v, tile.block_kv)], of.sink)


def _vjp(
    call: AttentionCall, tile: TileConfig, arrays: Arrays, as_batch: Callable[[Arrays], Arrays], seen: Span, result: Result
) -> dict[str, jax.Array]:
    floats = {name: arrays[name] for name in ("q", "k", "v", "sinks") if arrays[name] is not None}
    of, pull = jax.vjp(lambda floats: _problems(call, {**arrays, **floats}, as_batch), floats)
    per_row = Result(*(folded(x.astype(jnp.float32), call.kv_heads) for x in result))
    (cotangents,) = pull(attend_vjp(call, tile, of, seen, per_row))
    return cotangents
