"""Paged prefill on Pallas-Triton: packed chunks attend the cache of their sequences and themselves, and are appended to it.

o[t, h] = sum_j softmax_j(scale * q[t, h] . k[j, h // G]) v[j, h // G] over the keys j that token t sees: those of its
sequence's pages, at positions before cache_lengths, then those of its chunk, at the positions that follow; q (T, Hq, D),
k (T, Hkv, D), v (T, Hkv, Dv), pools (P, page_size, Hkv, D or Dv); float32 sums, lse in natural logarithms.

Tiles, folded heads and the loop over keys are those of `prefill`. What makes the cache as fast to read as an array:

- A KV tile lies at a multiple of its size. Where pages hold whole tiles it takes one page id, where tiles hold a few whole
  pages as many, read as scalars a tile ahead of the copies that need them; other page sizes take an id for each key.
- Whether all pages in use exist is known for each sequence before the launch. Where they do, the middle of the cache goes by
  without a mask, and elsewhere all of it is masked.
- FP8 caches are read as pairs in 16-bit words, the even and the odd columns of a head part in registers; the columns of q
  and o, and those of the chunk, follow.
- The sequences that see the most keys come first in the grid, the last tokens of each before its first.

The chunk is written to the pools, in place, by the kernel of `append` and attended as it came. XLA only rotates and
quantises.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from dispatch_core.calls import FLOAT8, AttentionCall
from dispatch_core.tiling import TileConfig
from pallas_kernels.common import softmax
from pallas_kernels.common.prefill_plan import tile_owners
from pallas_kernels.sm80.append import rotated_and_appended
from pallas_kernels.sm80.blocks import MIN_DOT, Chunk, div_mod, existing, head_chunks, iota, load_rows, place
from pallas_kernels.sm80.key_loop import Queries, Rows, Span, State, attended, key_range, nothing_seen, positively_scaled
from pallas_kernels.sm80.plan import FLOAT32_INNER, Plan, packed_plan
from pallas_kernels.sm80.words import in_pairs, operands, power_of_two

Array = jax.Array
MOST_SCALAR_PAGES = 8  # page ids that a tile reads as scalars
FP8_WORDS = 32  # words of a product's inner length, or columns, whose decoded pairs fit the registers; 64 spills on 8.0


@dataclass(frozen=True)
class _Cache:
    """The static side of a launch: that of a packed prefill, and of the pools.

    Attributes:
      plan: tiles over the packed chunks.
      num_pages, page_size: of the pools.
      pack: FP8 elements in a word of the pools; 1 where a word is an element.
    """

    plan: Plan
    num_pages: int
    page_size: int
    pack: int

    @property
    def k_words(self) -> tuple[Chunk, ...]:
        """The blocks of a row of the pool of keys."""
        call = self.plan.call
        widest = FLOAT32_INNER if call.dtype == "float32" else FP8_WORDS if self._decodes_in_registers else None
        return head_chunks(call.head_dim // self.pack, widest)

    @property
    def v_words(self) -> tuple[Chunk, ...]:
        """The blocks of a row of the pool of values; see `Plan.v_chunks`."""
        tile = self.plan.tile
        tall = tile.block_q if tile.block_q >= MIN_DOT * tile.num_warps else None
        return head_chunks(self.plan.call.v_dim // self.pack, FP8_WORDS if self._decodes_in_registers else tall)

    @property
    def _decodes_in_registers(self) -> bool:
        """Whether FP8 operands stay where they are decoded: only the matrix units of 9.0 and 10.x read shared memory."""
        call = self.plan.call
        return call.cache_dtype == FLOAT8 and not 90 <= call.device.arch < 120

    def strided(self, words: tuple[Chunk, ...]) -> tuple[Chunk, ...]:
        """Those blocks as columns of a row of elements: the even ones of a block, then the odd ones."""
        return tuple(c._replace(stride=self.pack, phase=phase) for c in words for phase in range(self.pack))

    def parted(self, words: tuple[Chunk, ...], dim: int) -> tuple[Chunk, ...]:
        """Those blocks as columns of a row whose even elements come before its odd ones."""
        return tuple(c._replace(start=c.start + phase * (dim // self.pack)) for c in words for phase in range(self.pack))

    @property
    def ids_per_tile(self) -> int:
        """How many page ids a KV tile takes as scalars; 0 where it takes one for each key."""
        block_kv = self.plan.tile.block_kv
        if self.page_size % block_kv == 0:
            return 1
        several = block_kv // self.page_size
        return several if several * self.page_size == block_kv and several <= MOST_SCALAR_PAGES else 0


class _Request(NamedTuple):
    """What a program works on, int32 scalars; the rows of an array by name.

    Attributes:
      index: of the sequence.
      row: first row of its chunk.
      q_len: rows of the chunk.
      token: first token of the tile.
      cached: keys in the cache.
      keys: of the chunk; 0 for rows of no sequence.
      is_whole: whether every page exists that a row reads.
    """

    index: Array
    row: Array
    q_len: Array
    token: Array
    cached: Array
    keys: Array
    is_whole: Array


def _are_whole(plan: Plan, page_table: Array, cache_lengths: Array, num_pages: int, page_size: int) -> Array:
    """For each sequence, whether every page exists that holds a key of the cache which some row sees."""
    first = jnp.arange(page_table.shape[1], dtype=jnp.int32)[None] * page_size
    length = cache_lengths[:, None]
    in_use = first < length
    if plan.left is not None:
        in_use &= first + page_size > length - plan.left
    return ~jnp.any(in_use & ((page_table < 0) | (page_table >= num_pages)), axis=1)


def _requests(plan: Plan, cu_seqlens: Array, cache_lengths: Array, is_whole: Array) -> Array:
    """The request of every query tile, int32 (7, tiles), those that see the most keys first.

    The rows before the first sequence and after the last one are requests without keys, so that every row is written.
    """
    edge = jnp.zeros((1,), jnp.int32)
    row = jnp.concatenate([edge, cu_seqlens.astype(jnp.int32)])
    q_len = jnp.concatenate([row[1:], edge + plan.q_rows]) - row
    cached = jnp.concatenate([edge, cache_lengths, edge])
    keys = jnp.concatenate([edge, q_len[1:-1], edge])
    whole = jnp.concatenate([edge, is_whole.astype(jnp.int32), edge])
    owner, token, is_idle = tile_owners(plan, q_len, cached + keys)
    index = jnp.clip(owner - 1, 0, plan.call.batch - 1)
    live = (jnp.where(is_idle, 0, x) for x in (q_len[owner], token, cached[owner], keys[owner]))
    return jnp.stack([index, row[owner], *live, whole[owner]])


@dataclass(frozen=True)
class _Pages:
    """Keys of the cache of one sequence and KV head."""

    refs: dict[str, Any]
    p: _Cache
    request: _Request
    kv_head: Array
    dtype: Any

    def ahead(self, first: Array) -> Any:
        """The page ids of the tile: a tuple of scalars, or one for each key; -1 past the cached keys."""
        count, block_kv = self.p.ids_per_tile, self.p.plan.tile.block_kv

        def page_of(key: Array) -> Array:
            column, _ = div_mod(key, self.p.page_size)
            return plt.load(self.refs["page_table"].at[self.request.index, column], mask=key < self.request.cached, other=-1)

        if count == 0:
            return page_of(first + iota(block_kv))
        return tuple(page_of(first + i * self.p.page_size) for i in range(count))

    def _page(self, ids: Any) -> Array:
        """The page of each key, or the page of all."""
        if not isinstance(ids, tuple):
            return ids
        page, key = ids[0], iota(self.p.plan.tile.block_kv)
        for i, other in enumerate(ids[1:], 1):
            page = jnp.where(key < i * self.p.page_size, page, other)
        return page

    def exists(self, key: Array, ahead: Any) -> Array:
        """Cached keys that some row of the tile sees, and whose page exists."""
        page, left = self._page(ahead), self.p.plan.left
        exists = (key < self.request.cached) & (page >= 0) & (page < self.p.num_pages)
        return exists if left is None else exists & (key >= self.request.cached + self.request.token - left)

    def _slot(self, first: Array) -> Array:
        """Where in its page each key of a tile is."""
        key, size = iota(self.p.plan.tile.block_kv), self.p.page_size
        if self.p.ids_per_tile == 1:
            return lax.rem(first, jnp.int32(size)) + key
        return lax.rem(key if self.p.ids_per_tile else first + key, jnp.int32(size))

    def load(self, name: str, first: Array, ahead: Any, exists: Array | None) -> list[Array]:
        """Operands of products."""
        ref, words = (self.refs[f"{name}_pages"], self.p.k_words if name == "k" else self.p.v_words)
        page, slot = self._page(ahead), self._slot(first)

        def loaded(chunk: Chunk) -> Array:
            where = place(slot, self.kv_head, chunk)
            pages = lax.broadcast_in_dim(page, where[0].shape, (0,)) if page.ndim else page
            mask = existing(exists, slot.shape[0], chunk)
            return plt.load(ref.at[pages, *where], mask=mask, other=None if mask is None else jnp.zeros((), ref.dtype))

        arch = self.p.plan.call.device.arch
        return [operand for chunk in words for operand in operands(loaded(chunk), self.dtype, arch)]


def _cache_queries(refs: dict[str, Any], p: _Cache, request: _Request, kv_head: Array, q: list[Array]) -> Queries:
    """The queries that meet keys of the cache.

    FP8 keys are exact in float16. A bfloat16 query may be out of its range, so each row gives up a power of two first.
    """
    call = p.plan.call
    factor: Any = float(call.softmax_scale)
    if "k_scale" in refs:
        factor = factor * plt.load(refs["k_scale"].at[request.index, kv_head])
    if call.cache_dtype != FLOAT8 or call.dtype != "bfloat16":
        return positively_scaled(q, factor)
    wide = [part.astype(jnp.float32) for part in q]
    power, inverse = power_of_two(functools.reduce(jnp.maximum, (jnp.max(jnp.abs(part), axis=1) for part in wide)))
    queries = positively_scaled([(part * inverse[:, None]).astype(jnp.float16) for part in wide], factor)
    return queries._replace(factor=power * queries.factor)


def _kernel(refs: dict[str, Any], out: dict[str, Any], *, p: _Cache) -> None:
    plan, call, block_q = p.plan, p.plan.call, p.plan.tile.block_q
    tile, rest = div_mod(pl.program_id(0), plan.lanes * plan.bundles)
    kv_head, bundle = div_mod(rest, plan.bundles)
    request = _Request(*(plt.load(refs["requests"].at[jnp.int32(i), tile]) for i in range(len(_Request._fields))))

    row_token, member = div_mod(iota(block_q), plan.fold)
    token = request.token + row_token
    q_head = kv_head * call.group_size + bundle * plan.fold
    q_head = q_head if plan.fold == 1 else q_head + member
    live = (row_token < plan.tokens) & (token < request.q_len)
    rows = request.row + token
    columns = {"k": p.parted(p.k_words, call.head_dim), "v": p.parted(p.v_words, call.v_dim)}

    def queries() -> list[Array]:
        return [load_rows(refs["q"], rows, q_head, chunk, live) for chunk in p.strided(p.k_words)]

    q = _cache_queries(refs, p, request, kv_head, queries())
    keys = key_range(plan, Span(request.cached, request.cached, None), token, request.token, request.q_len, is_aligned=True)
    keys = keys._replace(full_to=jnp.where(request.is_whole != 0, keys.full_to, keys.full_from))
    state = attended(plan, nothing_seen(block_q, columns["v"]), q, keys, _Pages(refs, p, request, kv_head, q.blocks[0].dtype))

    new_q = positively_scaled(queries(), float(call.softmax_scale)) if call.cache_dtype == FLOAT8 else q
    state = _rescaled(state, q.raw_scale(call.softcap), new_q.raw_scale(call.softcap))
    if "v_scale" in refs:
        v_scale = plt.load(refs["v_scale"].at[request.index, kv_head])
        state = state._replace(sums=tuple(part * v_scale for part in state.sums))
    keys = key_range(plan, Span(0, request.keys, plan.right), token, request.token, request.q_len)
    chunk_rows = Rows(refs, columns, request.row, request.keys, kv_head, plan.tile.block_kv)
    top, total, sums = attended(plan, state, new_q, keys, chunk_rows)

    top = top * new_q.raw_scale(call.softcap)
    weight, lse = softmax.finished_rows(top, total, plt.load(refs["sinks"].at[q_head]) if "sinks" in refs else None)
    for part, chunk in zip(sums, p.strided(p.v_words), strict=True):
        o = jnp.where((total == 0)[:, None], 0.0, part * weight[:, None]).astype(out["o"].dtype)
        plt.store(out["o"].at[place(rows, q_head, chunk)], o, mask=existing(live, block_q, chunk))
    if "lse" in out:
        plt.store(out["lse"].at[rows, q_head], lse, mask=live)


def _rescaled(state: State, scale: Array | float, new_scale: Array | float) -> State:
    """The state with its maxima in raw scores of another scale."""
    if isinstance(scale, float) and scale == new_scale:
        return state
    return state._replace(top=state.top * (scale / new_scale))


def _evens_first(x: Array) -> Array:
    """Rows (..., D) with their even elements before the odd ones."""
    return jnp.swapaxes(x.reshape(*x.shape[:-1], -1, 2), -1, -2).reshape(x.shape)


def paged_prefill(
    call: AttentionCall,
    tile: TileConfig,
    *,
    interpret: bool = False,
    q: Array,
    k: Array,
    v: Array,
    k_pages: Array,
    v_pages: Array,
    page_table: Array,
    cu_seqlens_q: Array,
    cache_lengths: Array,
    inv_freq: Array | None,
    k_scale: Array | None,
    v_scale: Array | None,
    sinks: Array | None,
) -> tuple[Array, Array | None, Array, Array]:
    """Attention of packed chunks over what the cache holds of their sequences and over themselves; they are appended.

    Args:
      call: the facts.
      tile: block_q rows of tokens times heads of a group, block_kv keys; powers of two, 16 or more.
      interpret: run on the host.
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
      o (T, Hq, Dv) in the call's output type, lse float32 (T, Hq) or None, and both pools; rows of no sequence are 0 and
      -inf (or the sink).
    """
    q, k, k_pages, v_pages = rotated_and_appended(
        call,
        q,
        k,
        v,
        k_pages,
        v_pages,
        page_table,
        cu_seqlens_q,
        cache_lengths,
        inv_freq,
        k_scale,
        v_scale,
        interpret=interpret,
    )  # fmt: skip
    num_pages, page_size = k_pages.shape[:2]
    plan = packed_plan(call, tile, len(q), len(k), interpret)
    plan = replace(plan, lanes_per_pass=plan.lanes)
    is_paired = k_pages.dtype == FLOAT8 and call.head_dim % 2 == call.v_dim % 2 == 0
    pools = (in_pairs(k_pages), in_pairs(v_pages)) if is_paired else (k_pages, v_pages)
    if is_paired:
        k, v = _evens_first(k), _evens_first(v)
    arrays = {"q": q, "k": k, "v": v, "k_pages": pools[0], "v_pages": pools[1], "page_table": page_table}
    is_whole = _are_whole(plan, page_table, cache_lengths, num_pages, page_size)
    arrays |= {"requests": _requests(plan, cu_seqlens_q, cache_lengths, is_whole)}
    arrays |= {name: x for name, x in (("k_scale", k_scale), ("v_scale", v_scale), ("sinks", sinks)) if x is not None}
    out_shape = {"o": jax.ShapeDtypeStruct((*q.shape[:2], call.v_dim), jnp.dtype(call.o_dtype))}
    if call.return_lse:
        out_shape["lse"] = jax.ShapeDtypeStruct(q.shape[:2], jnp.float32)
    out = pl.pallas_call(
        functools.partial(_kernel, p=_Cache(plan, num_pages, page_size, 2 if is_paired else 1)),
        out_shape=out_shape,
        grid=(plan.items,),
        compiler_params=plt.CompilerParams(num_warps=tile.num_warps, num_stages=tile.num_stages),
        interpret=interpret,
        name="gqa_prefill_paged",
    )(arrays)
    return out["o"], out.get("lse"), k_pages, v_pages
