"""Paged decode, paged prefill and append.

New tokens are written to their pages first, and the old ones are read from the updated pools: each pool has one writer before
one reader, so that a donated pool is updated in place. (An FP8 pool is not on a CPU: XLA has no FP8 there and converts what it
updates.) A call attends its new tokens from the arrays it was given, as they are, whether or not the cache has room for them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dispatch_core.calls import FLOAT8, AttentionCall
from dispatch_core.tiling import TileConfig
from pallas_kernels.xla.attention import Run, Tile
from pallas_kernels.xla.blocks import array_run, attend_in_blocks
from pallas_kernels.xla.decode import attend_tokens
from pallas_kernels.xla.layout import common_zero, folded, folded_heads, unfolded
from pallas_kernels.xla.pages import page_list
from pallas_kernels.xla.rope import rotated
from pallas_kernels.xla.spans import Span, last_positions, seen_from, segments

E4M3_MAX = 448.0


class Cache(NamedTuple):
    """Pools (P, page_size, Hkv, D or Dv), the page table int32 (B, max_pages), and the scales float32 (B, Hkv) or None."""

    k_pages: jax.Array
    v_pages: jax.Array
    page_table: jax.Array
    k_scale: jax.Array | None
    v_scale: jax.Array | None

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.k_pages.shape[1]

    def written(self, k: jax.Array, v: jax.Array, sequence: jax.Array, position: jax.Array, live: jax.Array) -> "Cache":
        """This cache with tokens k (T, Hkv, D) and v (T, Hkv, Dv) in it, but for those that have no page or are not `live`."""
        pool_size, page_size = self.k_pages.shape[:2]
        column = position // page_size
        page = self.page_table.at[sequence, column].get(mode="clip")
        exists = live & (column < self.page_table.shape[1]) & (page >= 0) & (page < pool_size)
        where = (jnp.where(exists, page, pool_size), position % page_size)

        def updated(pool: jax.Array, x: jax.Array, scale: jax.Array | None) -> jax.Array:
            x = quantised(x, None if scale is None else scale[sequence], pool.dtype)
            return pool.at[where].set(x, mode="drop")

        pools = updated(self.k_pages, k, self.k_scale), updated(self.v_pages, v, self.v_scale)
        # Without the barrier XLA fuses the update into the reader as well, which then needs a copy of the pool as it was.
        k_pages, v_pages = lax.optimization_barrier(pools)
        return self._replace(k_pages=k_pages, v_pages=v_pages)


def quantised(x: jax.Array, scale: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
    """Tokens (T, Hkv, D) as a cache of that type holds them, divided by their scale (T, Hkv)."""
    if dtype != FLOAT8:
        return x.astype(dtype)
    x = x.astype(jnp.float32)
    x = x if scale is None else x / scale[..., None]
    return jnp.clip(x, -E4M3_MAX, E4M3_MAX).astype(dtype)


def append(
    call: AttentionCall,
    tile: TileConfig,
    *,
    k: jax.Array,
    v: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    cu_seqlens: jax.Array,
    inv_freq: jax.Array | None,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """The pools (P, page_size, Hkv, D or Dv) with packed tokens appended to their sequences.

    A token past the capacity, or whose page does not exist, is dropped.

    Args:
      call: the facts: how keys are rotated.
      tile: not read.
      k: (T, Hkv, D).
      v: (T, Hkv, Dv).
      k_pages: pool of keys.
      v_pages: pool of values.
      page_table: int32 (B, max_pages).
      lengths: int32 (B,), before the append.
      cu_seqlens: int32 (B + 1,).
      inv_freq: float32 (rotary_dim / 2,), or None for keys that are stored as they come.
      k_scale: float32 (B, Hkv), or None.
      v_scale: float32 (B, Hkv), or None.
    """
    sequence, offset, live = segments(cu_seqlens, k.shape[0])
    position = lengths[sequence] + offset
    k = rotated(k, position, inv_freq, call.rope)
    cache = Cache(k_pages, v_pages, page_table, k_scale, v_scale).written(k, v, sequence, position, live)
    return cache.k_pages, cache.v_pages


def paged_decode(
    call: AttentionCall,
    tile: TileConfig,
    *,
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    kv_lengths: jax.Array,
    k_new: jax.Array | None,
    v_new: jax.Array | None,
    inv_freq: jax.Array | None,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    sinks: jax.Array | None,
) -> tuple[jax.Array | None, ...]:
    """Attention of the last Tq positions of each sequence, causal among themselves; they are appended if they are new.

    Args:
      call: the facts.
      tile: keys of a tile.
      q: (B, Tq, Hq, D).
      k_pages: (P, page_size, Hkv, D).
      v_pages: (P, page_size, Hkv, Dv).
      page_table: int32 (B, max_pages).
      kv_lengths: live keys, int32 (B,): before the append if there is one, else with the query tokens;
        clamped to [0, max_pages * page_size].
      k_new: keys of the query tokens (B, Tq, Hkv, D), or None where the cache holds them.
      v_new: their values (B, Tq, Hkv, Dv), or None.
      inv_freq: float32 (rotary_dim / 2,), or None for no rotation of q and the new keys.
      k_scale: float32 (B, Hkv), or None.
      v_scale: float32 (B, Hkv), or None.
      sinks: float32 (Hq,), or None.

    Returns:
      o (B, Tq, Hq, Dv) in the call's output type, lse float32 (B, Tq, Hq) or None, and with new keys both pools.
    """
    zero = common_zero(q, k_pages, v_pages, page_table, kv_lengths, k_new, v_new, inv_freq, k_scale, v_scale, sinks)
    (batch, tokens), columns = q.shape[:2], page_table.shape[1]
    cache = Cache(k_pages, v_pages, page_table, k_scale, v_scale)
    kv_lengths = jnp.clip(kv_lengths, 0, columns * cache.page_size)
    length = kv_lengths if k_new is None else kv_lengths + tokens
    position = last_positions(length, tokens)
    seen = seen_from(call, position, length[:, None], is_causal=True)
    q = rotated(q, position, inv_freq, call.rope).astype(jnp.float32) + zero
    runs = []
    if k_new is not None and v_new is not None:
        k_new = rotated(k_new, position, inv_freq, call.rope)
        sequence = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), tokens)
        k, v = (x.reshape(batch * tokens, *x.shape[2:]) for x in (k_new, v_new))
        cache = cache.written(k, v, sequence, position.reshape(-1), jnp.full_like(sequence, True, bool))
        k, v = (folded(x.astype(jnp.float32), call.kv_heads) for x in (k_new, v_new))
        new = Tile(k, v, jnp.arange(tokens, dtype=jnp.int32)[None])
        runs.append(Run(seen.within(kv_lengths[:, None], tokens).per_row(call), tokens, lambda j: new))

    in_use = jnp.arange(columns, dtype=jnp.int32)[None] * cache.page_size < kv_lengths[:, None]
    of_pages = [None if x is None else jnp.repeat(x[:, None], columns, axis=1) for x in (k_scale, v_scale)]
    old = page_list((cache.k_pages, cache.v_pages), page_table, in_use, of_pages, tile.block_kv)
    runs.append(Run(seen.within(0, kv_lengths[:, None]).per_row(call), old.tile_size, old.read))
    o, lse = attend_tokens(call, q, runs, sinks)
    return (o, lse) if k_new is None else (o, lse, cache.k_pages, cache.v_pages)


def paged_prefill(
    call: AttentionCall,
    tile: TileConfig,
    *,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    cu_seqlens_q: jax.Array,
    cache_lengths: jax.Array,
    inv_freq: jax.Array | None,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    sinks: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None, jax.Array, jax.Array]:
    """Attention of packed chunks over themselves and what the cache holds of their sequences; the chunks are appended.

    The pages in use of all sequences, laid end to end, are the keys of one run, of which a row sees a span.

    Args:
      call: the facts.
      tile: rows and keys of a block.
      q: (T, Hq, D).
      k: (T, Hkv, D).
      v: (T, Hkv, Dv).
      k_pages: (P, page_size, Hkv, D).
      v_pages: (P, page_size, Hkv, Dv).
      page_table: int32 (B, max_pages).
      cu_seqlens_q: int32 (B + 1,).
      cache_lengths: int32 (B,), before the append.
      inv_freq: float32 (rotary_dim / 2,), or None for no rotation of q and k.
      k_scale: float32 (B, Hkv), or None.
      v_scale: float32 (B, Hkv), or None.
      sinks: float32 (Hq,), or None.

    Returns:
      o (T, Hq, Dv) in the call's output type, lse float32 (T, Hq) or None, and both pools.
    """
    zero = common_zero(q, k, v, k_pages, v_pages, page_table, cu_seqlens_q, cache_lengths, inv_freq, k_scale, v_scale, sinks)
    tokens = q.shape[0]
    sequence, offset, live = segments(cu_seqlens_q, tokens)
    cached, chunk = cache_lengths[sequence], jnp.diff(cu_seqlens_q)[sequence]
    position = cached + offset
    q, k = (rotated(x, position, inv_freq, call.rope) for x in (q, k))
    cache = Cache(k_pages, v_pages, page_table, k_scale, v_scale).written(k, v, sequence, position, live)

    cu_pages = jnp.pad(jnp.cumsum(-(-cache_lengths // cache.page_size), dtype=jnp.int32), (1, 0))
    owner, column, in_use = segments(cu_pages, page_table.size)
    pages = page_table.at[owner, column].get(mode="clip")
    of_pages = [None if x is None else x[owner][None] for x in (k_scale, v_scale)]
    old = page_list((cache.k_pages, cache.v_pages), pages[None], in_use[None], of_pages, tile.block_kv)

    def per_row(seen: Span) -> Span:
        return Span(seen.start[None], seen.stop[None]).per_row(call)

    seen = seen_from(call, position, cached + chunk, call.is_causal).where(live)
    seen_old = per_row(seen.within(0, cached).shifted(cu_pages[sequence] * cache.page_size))
    seen_new = per_row(seen.within(cached, chunk).shifted(cu_seqlens_q[sequence]))
    q, k, v = (folded(x[None].astype(jnp.float32) + zero, call.kv_heads) for x in (q, k, v))
    runs = [Run(seen_old, old.tile_size, old.read), array_run(seen_new, k, v, tile.block_kv)]
    sink = None if sinks is None else folded_heads(sinks, 1, tokens, call.kv_heads)
    o, lse = attend_in_blocks(call, tile, call.softmax_scale * q, runs, sink)
    o, lse = unfolded(o, 1, tokens)[0], unfolded(lse, 1, tokens)[0]
    return o, lse if call.return_lse else None, cache.k_pages, cache.v_pages
