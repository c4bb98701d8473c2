"""Decode against a contiguous cache: a few query tokens per sequence, all problems of the batch at once.

The tiles stop at the longest live length, which is read at run time: what is allotted but unused costs nothing.
"""

import jax
import jax.numpy as jnp
from jax import lax

from dispatch_core.calls import AttentionCall
from dispatch_core.tiling import TileConfig
from pallas_kernels.xla.attention import Run, Tile, attend
from pallas_kernels.xla.layout import common_zero, dequantised, folded, folded_rows, unfolded
from pallas_kernels.xla.spans import Span, last_positions, seen_from


def decode(
    call: AttentionCall,
    tile: TileConfig,
    *,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv_lengths: jax.Array,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    sinks: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
    """Attention of the last Tq positions of each sequence, causal among themselves.

    Args:
      call: the facts.
      tile: keys of a tile.
      q: (B, Tq, Hq, D).
      k: (B, S, Hkv, D).
      v: (B, S, Hkv, Dv).
      kv_lengths: live keys, those of the query tokens included, int32 (B,).
      k_scale: float32 (B, Hkv), or None.
      v_scale: float32 (B, Hkv), or None.
      sinks: float32 (Hq,), or None.

    Returns:
      o (B, Tq, Hq, Dv) in the call's output type, and lse float32 (B, Tq, Hq) if the call asks for it.
    """
    size = min(tile.block_kv, k.shape[1])

    def read(j: jax.Array) -> Tile:
        first = jnp.minimum(j * size, k.shape[1] - size)  # the last tile is moved back to fit, and skips what it repeats
        number = first + jnp.arange(size, dtype=jnp.int32)

        def part(x: jax.Array, scale: jax.Array | None) -> jax.Array:
            return folded(dequantised(lax.dynamic_slice_in_dim(x, first, size, axis=1), scale), call.kv_heads)

        of_tokens = [None if scale is None else scale[:, None] for scale in (k_scale, v_scale)]
        return Tile(part(k, of_tokens[0]), part(v, of_tokens[1]), jnp.where(number >= j * size, number, -1)[None])

    seen = seen_from(call, last_positions(kv_lengths, q.shape[1]), kv_lengths[:, None], is_causal=True)
    zero = common_zero(q, k, v, kv_lengths, k_scale, v_scale, sinks)
    return attend_tokens(call, q, [Run(seen, size, read)], sinks, zero)


def attend_tokens(
    call: AttentionCall, q: jax.Array, runs: list[Run], sinks: jax.Array | None, zero: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """Attention of query tokens (B, Tq, Hq, D), all at once, over runs with spans per token (B, Tq); `zero` as of `common_zero`."""

    def of_rows(x: jax.Array) -> jax.Array:
        return folded_rows(x, call.q_heads, call.kv_heads)

    sink = None if sinks is None else of_rows(jnp.broadcast_to(sinks[None, None], q.shape[:3]))
    scaled = call.softmax_scale * folded(q.astype(jnp.float32) + zero, call.kv_heads)
    runs = [run._replace(seen=Span(*map(of_rows, run.seen))) for run in runs]
    o, lse = attend(scaled, runs, sink, call.softcap, call.v_dim)
    o = unfolded(o, *q.shape[:2]).astype(call.o_dtype)
    return o, unfolded(lse, *q.shape[:2]) if call.return_lse else None
