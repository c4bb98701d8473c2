"""Paged decode, paged prefill and append.

New tokens are written to their pages first, and the old ones are then read from the updated pools: each pool has one reader
after one writer, so that a donated pool is updated in place. A call attends its new tokens from the arrays it was given, as they
are, whether or not the cache has room for them.
"""

import jax
import jax.numpy as jnp
from jax import lax

from dispatch_core.calls import FLOAT8, AttentionCall
from dispatch_core.tiling import TileConfig
from pallas_kernels.xla.attention import Run, Tile
from pallas_kernels.xla.blocks import Keys, array_keys, attend_in_blocks
from pallas_kernels.xla.decode import attend_tokens
from pallas_kernels.xla.layout import common_zero, folded, folded_rows, unfolded
from pallas_kernels.xla.pages import page_run
from pallas_kernels.xla.rope import rotated
from pallas_kernels.xla.spans import Span, last_positions, seen_from, segments

E4M3_MAX = 448.0


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
    """The pools (P, page, Hkv, D or Dv) with packed tokens k (T, Hkv, D) and v (T, Hkv, Dv) appended to their sequences.

    A token past the capacity, or whose page does not exist, is dropped.

    Args:
      call: the facts; the rope style and rotary_dim.
      tile: not read.
      k: new keys.
      v: new values.
      k_pages: pool of keys.
      v_pages: pool of values.
      page_table: int32 (B, max_pages).
      lengths: int32 (B,), before the append.
      cu_seqlens: int32 (B + 1,).
      inv_freq: float32 (rotary_dim / 2,), or None for keys that are stored as they come.
      k_scale: float32 (B, Hkv), or None.
      v_scale: float32 (B, Hkv), or None.
    """
    sequence, index, live = segments(cu_seqlens, k.shape[0])
    position = lengths[sequence] + index
    if inv_freq is not None:
        k = rotated(k, position, inv_freq, call.rope)
    pool_size, page_size = k_pages.shape[:2]
    column = position // page_size
    page = page_table.at[sequence, column].get(mode="clip")
    exists = live & (column < page_table.shape[1]) & (page >= 0) & (page < pool_size)
    where = (jnp.where(exists, page, pool_size), position % page_size)

    def stored(pages: jax.Array, x: jax.Array, scale: jax.Array | None) -> jax.Array:
        x = _quantised(x, None if scale is None else scale[sequence], pages.dtype)
        return pages.at[where].set(x, mode="drop")

    return lax.optimization_barrier((stored(k_pages, k, k_scale), stored(v_pages, v, v_scale)))


def _quantised(x: jax.Array, scale: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
    """X (T, Hkv, D) as a cache of that type holds it, divided by its scale (T, Hkv)."""
    if scale is not None:
        x = x.astype(jnp.float32) / scale[..., None]
    if dtype == FLOAT8:
        x = jnp.clip(x.astype(jnp.float32), -E4M3_MAX, E4M3_MAX)
    return x.astype(dtype)


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
    """Attention of the last Tq positions of each sequence, causal among themselves, after appending them if they are new.

    Args:
      call: the facts.
      tile: keys of a tile.
      q: (B, Tq, Hq, D).
      k_pages: (P, page, Hkv, D).
      v_pages: (P, page, Hkv, Dv).
      page_table: int32 (B, max_pages).
      kv_lengths: live keys, int32 (B,): before the append if there is one, else with the query tokens.
      k_new: keys of the query tokens (B, Tq, Hkv, D), or None where the cache holds them.
      v_new: their values (B, Tq, Hkv, Dv), or None.
      inv_freq: float32 (rotary_dim / 2,), or None for no rotation of q and the new keys.
      k_scale: float32 (B, Hkv), or None.
      v_scale: float32 (B, Hkv), or None.
      sinks: float32 (Hq,), or None.

    Returns:
      o (B, Tq, Hq, Dv) in the call's output type, lse float32 (B, Tq, Hq) or None, and with new keys both pools.
    """
    batch, tokens = q.shape[:2]
    zero = common_zero(q, k_pages, v_pages, page_table, kv_lengths, k_new, v_new, inv_freq, k_scale, v_scale, sinks)
    length = kv_lengths if k_new is None else kv_lengths + tokens
    position = last_positions(length, tokens)
    if inv_freq is not None:
        q = rotated(q, position, inv_freq, call.rope)
    seen = seen_from(call, position, length[:, None], is_causal=True)
    written, runs = (), []
    if k_new is not None:
        if inv_freq is not None:
            k_new = rotated(k_new, position, inv_freq, call.rope)
        k_pages, v_pages = written = append(
            call, tile, k=_packed(k_new), v=_packed(v_new), k_pages=k_pages, v_pages=v_pages, page_table=page_table,
            lengths=kv_lengths, cu_seqlens=tokens * jnp.arange(batch + 1, dtype=jnp.int32), inv_freq=None,
            k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip
        new = Tile(*(folded(x.astype(jnp.float32), call.kv_heads) for x in (k_new, v_new)), jnp.arange(tokens, dtype=jnp.int32)[None])
        runs.append(Run(seen.within(kv_lengths[:, None], tokens), tokens, lambda j: new))
    columns = page_table.shape[1]
    in_use = jnp.arange(columns, dtype=jnp.int32)[None] * k_pages.shape[1] < kv_lengths[:, None]
    scales = [None if x is None else jnp.repeat(x[:, None], columns, axis=1) for x in (k_scale, v_scale)]
    cached = page_run(tile, (k_pages, v_pages), page_table, in_use, scales)
    runs.append(Run(seen.within(0, kv_lengths[:, None]), cached.tile_size, cached.read))
    return *attend_tokens(call, q, runs, sinks, zero), *written


def _packed(x: jax.Array) -> jax.Array:
    return x.reshape(-1, *x.shape[2:])


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
    """Attention of packed chunks over what the cache holds of their sequences and over themselves, and the append of the chunks.

    The pages in use of all sequences, laid end to end, are the keys of one long run: a row sees a span of its own sequence's.

    Args:
      call: the facts.
      tile: rows and keys of a block.
      q: (T, Hq, D).
      k: (T, Hkv, D).
      v: (T, Hkv, Dv).
      k_pages: (P, page, Hkv, D).
      v_pages: (P, page, Hkv, Dv).
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
    tokens, page_size = q.shape[0], k_pages.shape[1]
    sequence, index, live = segments(cu_seqlens_q, tokens)
    cached, chunk = cache_lengths[sequence], jnp.diff(cu_seqlens_q)[sequence]
    position = cached + index
    if inv_freq is not None:
        q, k = (rotated(x, position, inv_freq, call.rope) for x in (q, k))
    k_pages, v_pages = append(
        call, tile, k=k, v=v, k_pages=k_pages, v_pages=v_pages, page_table=page_table, lengths=cache_lengths,
        cu_seqlens=cu_seqlens_q, inv_freq=None, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip

    cu_pages = jnp.pad(jnp.cumsum(-(-cache_lengths // page_size), dtype=jnp.int32), (1, 0))
    owner, column, in_use = segments(cu_pages, page_table.size)
    page = page_table.at[owner, column].get(mode="clip")
    scales = [None if x is None else x[owner][None] for x in (k_scale, v_scale)]
    old = page_run(tile, (k_pages, v_pages), page[None], in_use[None], scales)

    def of_rows(x: jax.Array) -> jax.Array:
        return folded_rows(x[None], call.q_heads, call.kv_heads)

    seen = seen_from(call, position, cached + chunk, call.is_causal).where(live)
    seen_old = seen.within(0, cached).shifted(cu_pages[sequence] * page_size)
    seen_new = seen.within(cached, chunk).shifted(cu_seqlens_q[sequence])
    q, k, v = (folded(x[None].astype(jnp.float32) + zero, call.kv_heads) for x in (q, k, v))
    keys = [
        Keys(Span(*map(of_rows, seen_old)), old.tile_size, lambda n, j: old.read(j, head=n)),
        array_keys(Span(*map(of_rows, seen_new)), k, v, tile.block_kv),
    ]
    sink = None if sinks is None else of_rows(jnp.broadcast_to(sinks[None], (tokens, call.q_heads)))
    o, lse = attend_in_blocks(call.softmax_scale * q, keys, sink, call.softcap, call.v_dim, tile.block_q, call.o_dtype)
    return unfolded(o, 1, tokens)[0], unfolded(lse, 1, tokens)[0] if call.return_lse else None, k_pages, v_pages
