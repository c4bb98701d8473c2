"""Decode against a contiguous cache: a few query tokens per sequence, all problems of the batch at once.

The tiles stop at the longest live length, which is read at run time: what is allotted but unused costs nothing.
"""

import jax
import jax.numpy as jnp
from jax import lax

from dispatch_core.calls import AttentionCall
from dispatch_core.tiling import TileConfig
from pallas_kernels.xla.attention import Run, Tile, attend
from pallas_kernels.xla.layout import common_zero, dequantised, folded, folded_heads, unfolded
from pallas_kernels.xla.spans import last_positions, seen_from


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
      kv_lengths: live keys, those of the query tokens included, int32 (B,); clamped to [0, S].
      k_scale: float32 (B, Hkv), or None.
      v_scale: float32 (B, Hkv), or None.
      sinks: float32 (Hq,), or None.

    Returns:
      o (B, Tq, Hq, Dv) in the call's output type, and lse float32 (B, Tq, Hq) if the call asks for it.
    """
    capacity = k.shape[1]
    size = min(tile.block_kv, capacity)
    kv_lengths = jnp.clip(kv_lengths, 0, capacity)

    def read(j: jax.Array) -> Tile:
        first = jnp.minimum(j * size, capacity - size)  # the last tile is moved back to fit, and skips what it repeats
        number = first + jnp.arange(size, dtype=jnp.int32)

        def part(x: jax.Array, scale: jax.Array | None) -> jax.Array:
            x = lax.dynamic_slice_in_dim(x, first, size, axis=1)
            return folded(dequantised(x, None if scale is None else scale[:, None]), call.kv_heads)

        return Tile(part(k, k_scale), part(v, v_scale), jnp.where(number >= j * size, number, -1)[None])

    seen = seen_from(call, last_positions(kv_lengths, q.shape[1]), kv_lengths[:, None], is_causal=True)
    zero = common_zero(q, k, v, kv_lengths, k_scale, v_scale, sinks)
    return attend_tokens(call, q.astype(jnp.float32) + zero, [Run(seen.per_row(call), size, read)], sinks)


def attend_tokens(
    call: AttentionCall, q: jax.Array, runs: list[Run], sinks: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """Attention of float32 query tokens (B, Tq, Hq, D), all rows at once: o in the call's output type, and lse or None."""
    batch, tokens = q.shape[:2]
    sink = None if sinks is None else folded_heads(sinks, batch, tokens, call.kv_heads)
    o, lse = attend(call, call.softmax_scale * folded(q, call.kv_heads), runs, sink)
    o = unfolded(o, batch, tokens).astype(call.o_dtype)
    return o, unfolded(lse, batch, tokens) if call.return_lse else None
