"""Append on Pallas-Triton: packed new tokens go to their places in the pools, and nothing else is touched.

A program takes a few tokens, finds the sequence of each among the bounds, its page in the table, and copies whole rows of
all KV heads, which lie together in the tokens as in the pools. The pools are outputs that alias inputs. XLA only rotates
and quantises what is stored.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from dispatch_core.calls import FLOAT8, AttentionCall
from dispatch_core.tiling import TileConfig
from pallas_kernels.sm80.blocks import Chunk, div_mod, existing, head_chunks, iota
from pallas_kernels.sm80.words import in_pairs, out_of_pairs
from pallas_kernels.xla.paged import quantised
from pallas_kernels.xla.rope import rotated
from pallas_kernels.xla.spans import Segments, segments

Array = jax.Array
ELEMENTS = 4096  # of each pool in one program: 64 bytes a thread
WARPS = 4
BOUNDS = 128  # sequence bounds looked at together
_POOLS = 2  # where the kernel's operands have the pool of keys, and that of values after it


@dataclass(frozen=True)
class _Problem:
    """Sizes of a launch: sequences, packed tokens, pages of the pools and of a table row, and tokens a page and a program."""

    batch: int
    tokens: int
    num_pages: int
    max_pages: int
    page_size: int
    block: int


def _kernel(k: Any, v: Any, k_in: Any, v_in: Any, table: Any, lengths: Any, cu: Any, *pools: Any, p: _Problem) -> None:
    del k_in, v_in  # the same memory as the pools
    token = pl.program_id(0) * p.block + iota(p.block)

    def passed(first: int) -> Array:
        """How many of some bounds lie at or before each token."""
        bound = first + iota(BOUNDS)
        bound = plt.load(cu.at[bound], mask=bound <= p.batch, other=p.tokens)
        return jnp.sum((bound[None, :] <= token[:, None]).astype(jnp.int32), axis=1)

    b = functools.reduce(jnp.add, (passed(first) for first in range(0, p.batch + 1, BOUNDS))) - 1
    live = (b >= 0) & (b < p.batch) & (token < p.tokens)
    b = jnp.clip(b, 0, p.batch - 1)
    offset = token - plt.load(cu.at[b], mask=live, other=0)
    column, place = div_mod(plt.load(lengths.at[b], mask=live, other=0) + jnp.maximum(offset, 0), p.page_size)
    page = plt.load(table.at[b, column], mask=live & (column < p.max_pages), other=-1)
    live = (page >= 0) & (page < p.num_pages)
    page = jnp.where(live, page, p.num_pages)  # the interpreter stores what was there where masked, and -1 is a page to it
    for pool, rows in zip(pools, (k, v), strict=True):
        for chunk in head_chunks(rows.shape[1], ELEMENTS // p.block):
            _copy(pool, rows, token, page, place, live, chunk)


def _copy(pool: Any, rows: Any, token: Array, page: Array, place: Array, live: Array, chunk: Chunk) -> None:
    shape = (token.shape[0], chunk.width)
    down = functools.partial(lax.broadcast_in_dim, shape=shape, broadcast_dimensions=(0,))
    column = lax.broadcast_in_dim(chunk.start + iota(chunk.width), shape, (1,))
    mask = existing(live, *shape[:1], chunk)
    value = plt.load(rows.at[down(token), column], mask=mask, other=jnp.zeros((), rows.dtype))
    plt.store(pool.at[down(page), down(place), column], value, mask=mask)


def stored(x: Array, scale: Array | None, token: Segments, dtype: jnp.dtype) -> Array:
    """Tokens (T, Hkv, D) as a cache of that type, with scales (B, Hkv), holds them."""
    return quantised(x, None if scale is None else scale[token.sequence], dtype)


def write(
    k: Array, v: Array, k_pages: Array, v_pages: Array, page_table: Array, lengths: Array, cu_seqlens: Array, *, interpret: bool
) -> tuple[Array, Array]:
    """The pools (P, page_size, Hkv, ...) with packed tokens (T, Hkv, ...) of their type behind their sequences' lengths."""
    num_pages, page_size = k_pages.shape[:2]
    pools = [k_pages.reshape(num_pages, page_size, -1), v_pages.reshape(num_pages, page_size, -1)]
    rows = [k.reshape(len(k), -1), v.reshape(len(v), -1)]
    is_paired = k.dtype == FLOAT8 and rows[0].shape[1] % 2 == rows[1].shape[1] % 2 == 0
    if is_paired:
        pools, rows = [[in_pairs(x) for x in group] for group in (pools, rows)]
    elif k.dtype == FLOAT8:
        pools, rows = [[lax.bitcast_convert_type(x, jnp.uint8) for x in group] for group in (pools, rows)]
    widest = max(pl.next_power_of_2(x.shape[1]) for x in rows)
    p = _Problem(len(lengths), len(k), num_pages, page_table.shape[1], page_size, max(1, ELEMENTS // widest))
    pools = pl.pallas_call(
        functools.partial(_kernel, p=p),
        grid=(pl.cdiv(p.tokens, p.block),),
        out_shape=[jax.typeof(x) for x in pools],
        input_output_aliases={_POOLS: 0, _POOLS + 1: 1},
        compiler_params=plt.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpret,
        name="gqa_append",
    )(*rows, *pools, page_table, lengths, cu_seqlens)
    if is_paired:
        pools = [out_of_pairs(x) for x in pools]
    elif k.dtype == FLOAT8:
        pools = [lax.bitcast_convert_type(x, FLOAT8) for x in pools]
    return pools[0].reshape(k_pages.shape), pools[1].reshape(v_pages.shape)


def rotated_and_appended(
    call: AttentionCall, q: Array, k: Array, v: Array, k_pages: Array, v_pages: Array, page_table: Array, cu_seqlens: Array,
    cache_lengths: Array, inv_freq: Array | None, k_scale: Array | None, v_scale: Array | None, *, interpret: bool,
) -> tuple[Array, Array, Array, Array]:  # fmt: skip
    """Packed q and k rotated to their positions, and the pools with k and v behind their sequences' cache_lengths."""
    token = segments(cu_seqlens, len(q))
    if inv_freq is not None:
        position = cache_lengths[token.sequence] + token.offset
        q, k = (rotated(x, position, inv_freq, call.rope) for x in (q, k))
    new = stored(k, k_scale, token, k_pages.dtype), stored(v, v_scale, token, v_pages.dtype)
    return q, k, *write(*new, k_pages, v_pages, page_table, cache_lengths, cu_seqlens, interpret=interpret)


def append(
    call: AttentionCall,
    tile: TileConfig | None,
    *,
    interpret: bool = False,
    k: Array,
    v: Array,
    k_pages: Array,
    v_pages: Array,
    page_table: Array,
    lengths: Array,
    cu_seqlens: Array,
    inv_freq: Array | None,
    k_scale: Array | None,
    v_scale: Array | None,
) -> tuple[Array, Array]:
    """The pools with packed tokens appended; a token past the capacity, or whose page does not exist, is dropped.

    Args:
      call: the facts: how keys are rotated.
      tile: not read.
      interpret: run on the host.
      k: (T, Hkv, D).
      v: (T, Hkv, Dv).
      k_pages: (P, page_size, Hkv, D).
      v_pages: (P, page_size, Hkv, Dv).
      page_table: int32 (B, max_pages).
      lengths: int32 (B,), before the append.
      cu_seqlens: int32 (B + 1,).
      inv_freq: float32 (rotary_dim / 2,), or None for keys that are stored as they come.
      k_scale: float32 (B, Hkv), or None.
      v_scale: float32 (B, Hkv), or None.
    """
    token = segments(cu_seqlens, len(k))
    k = rotated(k, lengths[token.sequence] + token.offset, inv_freq, call.rope)
    k, v = stored(k, k_scale, token, k_pages.dtype), stored(v, v_scale, token, v_pages.dtype)
    return write(k, v, k_pages, v_pages, page_table, lengths, cu_seqlens, interpret=interpret)
