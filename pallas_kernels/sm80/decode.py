"""Decode attention on Pallas-Triton: split-KV over contiguous and paged caches, 1 to 16 query tokens, one kernel.

o[b, t, h] = sum_j softmax_j(scale * q[b, t, h] . k[b, j, h // G]) v[b, j, h // G] over the keys j that token t sees; q
(B, Tq, Hq, D) holds the last Tq positions of each sequence, causal among themselves; k and v are (B, S, Hkv, D) and
(B, S, Hkv, Dv), or pages (P, page_size, Hkv, ...) behind a table; float32 sums, lse in natural logarithms.

What makes it fast:

- M-fold: the G query heads of a KV head, times the query tokens, are the rows of one tile, so K and V are read once
  whatever G is. The matrix product is nearly free; the loads are everything.
- The tiles a sequence really has, live and inside the window, are divided over the splits in the kernel, equal to within
  one tile: a short sequence in a large cache still has every split at work, and none reads what nobody sees.
- Loads run num_stages tiles ahead through asynchronous copies; page ids are read one tile ahead of the copies that need
  them, once per tile where no tile crosses a page.
- Programs of neighbouring KV heads are neighbours in the grid: together they read whole rows of the cache.

A split writes its normalised float32 partial and log-sum-exp, and a second kernel merges the splits of a row in a fixed
order; one split writes the result itself. New tokens that a paged call brings are the last split's last tile, attended as
they came, whether or not the cache has room for them.

FlashDecoding (Dao, Haziza, Massa, Sizov, 2023) for the splits; the rest is this library's own.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from dispatch_core.calls import ELEMENT_BYTES, FLOAT8, AttentionCall
from dispatch_core.splitting import tiles_of_split
from dispatch_core.tiling import TileConfig
from pallas_kernels.common import softmax
from pallas_kernels.common.fp8 import decode_e4m3_bits
from pallas_kernels.sm80 import instructions
from pallas_kernels.sm80.prefill import Chunk, head_chunks

MERGE_ELEMENTS = 8192  # float32 partials the merge holds at once: 64 registers a thread
Array = jax.Array


class LaunchPlan(NamedTuple):
    """What a call launches.

    Attributes:
      grid: programs of the attention kernel.
      merge_grid: programs of the merge; 0 where one split writes the result itself.
      tile: the tile.
      bytes_read: bytes the attention kernel reads of each operand, at full length.
    """

    grid: int
    merge_grid: int
    tile: TileConfig
    bytes_read: dict[str, int]


@dataclass(frozen=True)
class _Problem:
    """Sizes of one launch, all static."""

    batch: int
    tokens: int
    kv_heads: int
    group: int
    head_dim: int
    v_dim: int
    page_size: int | None
    num_pages: int
    block_rows: int
    block_kv: int
    splits: int
    pack: int  # FP8 elements read as one

    @property
    def rows(self) -> int:
        """Query rows of one KV head: tokens times the heads of the group."""
        return self.tokens * self.group

    @property
    def row_blocks(self) -> int:
        return pl.cdiv(self.rows, self.block_rows)

    @property
    def programs(self) -> int:
        return self.batch * self.splits * self.kv_heads * self.row_blocks

    @property
    def tile_is_in_a_page(self) -> bool:
        return self.page_size is not None and self.page_size % self.block_kv == 0


def launch_plan(call: AttentionCall, tile: TileConfig) -> LaunchPlan:
    """Grid, tile and bytes read per operand of a call's launch."""
    problem = _Problem(
        call.batch, call.max_seqlen_q, call.kv_heads, call.group_size, call.head_dim, call.v_dim,
        None if call.paging is None else call.paging.page_size, 0, tile.block_q, tile.block_kv, tile.num_splits, 1,
    )  # fmt: skip
    keys = call.batch * call.max_seqlen_kv * call.kv_heads * problem.row_blocks * ELEMENT_BYTES[call.cache_dtype]
    rows = call.batch * call.kv_heads * problem.rows
    bytes_read = {
        "q": rows * tile.num_splits * call.head_dim * ELEMENT_BYTES[call.dtype],
        "k": keys * call.head_dim,
        "v": keys * call.v_dim,
    }
    if call.paging is not None:
        bytes_read["page_table"] = 4 * problem.kv_heads * problem.row_blocks * call.batch * call.paging.max_pages
    return LaunchPlan(problem.programs, rows if tile.num_splits > 1 else 0, tile, bytes_read)


class _Inputs(NamedTuple):
    """The kernel's operands; absent ones are None."""

    q: Any
    k: Any
    v: Any
    lengths: Any
    page_table: Any = None
    k_new: Any = None
    v_new: Any = None
    k_scale: Any = None
    v_scale: Any = None
    sinks: Any = None


class _Rows(NamedTuple):
    """The query rows of a program: which exist, and their place in q and o."""

    index: Array
    exists: Array
    token: Array
    q_head: Array


class _State(NamedTuple):
    """Online softmax: value sums by chunk of the head, running maxima in base 2, sums of exponentials."""

    acc: tuple[Array, ...]
    top: Array
    total: Array


def _iota(n: int) -> Array:
    return lax.broadcasted_iota(jnp.int32, (n,), 0)


def _column(x: Array, shape: tuple[int, int]) -> Array:
    return lax.broadcast_in_dim(x, shape, (0,))


class _Columns(NamedTuple):
    """A block of head columns: every `stride`-th one from `phase` on of a chunk counted in strides."""

    chunk: Chunk
    stride: int = 1
    phase: int = 0

    def block(self, live: Array) -> tuple[Array, Array]:
        """Column index and mask, (rows, width), of the rows that are live."""
        shape = (live.shape[0], self.chunk.width)
        packed = lax.broadcast_in_dim(self.chunk.start + _iota(self.chunk.width), shape, (1,))
        mask = _column(live, shape)
        if self.chunk.used < self.chunk.width:
            mask &= packed < self.chunk.start + self.chunk.used
        return packed * self.stride + self.phase, mask


def _columns(dim: int, stride: int) -> tuple[_Columns, ...]:
    return tuple(_Columns(chunk, stride, phase) for chunk in head_chunks(dim // stride) for phase in range(stride))


def _load(ref: Any, place: tuple[Array, ...], live: Array, columns: _Columns) -> Array:
    """A (rows, columns) block at one index, or one index per row, and leading axis; 0 where a row is not live."""
    column, mask = columns.block(live)
    place = tuple(_column(x, column.shape) if x.ndim else x for x in place)
    return plt.load(ref.at[*place, column], mask=mask, other=np.zeros((), ref.dtype))


def _store(ref: Any, place: tuple[Array, ...], live: Array, columns: _Columns, value: Array) -> None:
    column, mask = columns.block(live)
    place = tuple(_column(x, column.shape) if x.ndim else x for x in place)
    plt.store(ref.at[*place, column], value.astype(ref.dtype), mask=mask)


def _dot(a: Array, b: Array, contract_b: int) -> Array:
    """The float32 product of a (M, K) with b over b's given axis; full float32 for float32 operands."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, (((1,), (contract_b,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)


def _operands(x: Array, dtype: Any, arch: int) -> tuple[Array, ...]:
    """Cache elements as operands of a product: one block, or the even and the odd columns of an FP8 one held in pairs."""
    if x.dtype == jnp.uint16:
        halves = (x & 0xFF).astype(jnp.uint8), lax.shift_right_logical(x, jnp.uint16(8)).astype(jnp.uint8)
        return tuple(_from_e4m3(h, arch).astype(dtype) for h in halves)
    return (x,)


def _from_e4m3(bits, arch):
    if arch >= 89:
        return lax.bitcast_convert_type(bits, jnp.float8_e4m3fn).astype(jnp.float16)
    return decode_e4m3_bits(bits)


def _powers_of_two(largest: Array) -> tuple[Array, Array]:
    """For each magnitude, the power of two at or under it, and its inverse; both are normal float32 numbers."""
    exponent = jnp.clip(lax.bitcast_convert_type(largest, jnp.int32) & 0x7F800000, 1 << 23, 253 << 23)
    inverse = lax.bitcast_convert_type((254 << 23) - exponent, jnp.float32)
    return lax.bitcast_convert_type(exponent, jnp.float32), inverse


def _absorb(state: _State, scores: Array, values: tuple[Array, ...]) -> _State:
    """The state with one more tile: scores in base 2, -inf where masked."""
    top = jnp.maximum(state.top, jnp.max(scores, axis=1))
    base = softmax.finite_base(top)
    p = jnp.exp2(scores - _column(base, scores.shape))
    kept = jnp.exp2(state.top - base)
    acc = tuple(a * _column(kept, a.shape) + _dot(p.astype(v.dtype), v, 0) for a, v in zip(state.acc, values, strict=True))
    return _State(acc, top, state.total * kept + jnp.sum(p, axis=1))


def _split_kernel(refs: _Inputs, *outs: Any, p: _Problem, call: AttentionCall, interpret: bool) -> None:
    """One split of one block of query rows of one KV head of one sequence."""
    program = pl.program_id(0)
    row_block, program = lax.rem(program, p.row_blocks), lax.div(program, p.row_blocks)
    head, program = lax.rem(program, p.kv_heads), lax.div(program, p.kv_heads)
    split, b = lax.rem(program, p.splits), lax.div(program, p.splits)
    row = row_block * p.block_rows + _iota(p.block_rows)
    rows = _Rows(row, row < p.rows, lax.div(row, p.group), head * p.group + lax.rem(row, p.group))
    k_columns, v_columns = _columns(p.head_dim, p.pack), _columns(p.v_dim, p.pack)
    q = tuple(_load(refs.q, (b, rows.token, rows.q_head), rows.exists, c) for c in k_columns)

    length = refs.lengths[b]
    first = length if refs.k_new is not None else length - p.tokens  # position of query token 0
    left = None if call.window is None else call.window.left
    low = jnp.int32(0) if left is None else jnp.maximum(first - left, 0)

    def scores(s: Array, factor: Any, key: Array, exists: Array) -> Array:
        """Products as capped scores in base 2, -inf at the keys (at positions `key`) that a row does not see."""
        s = s * (factor * softmax.LOG2_E) if call.softcap is None else instructions.softcapped(s, factor, call.softcap, interpret=interpret)
        key, query = lax.broadcast_in_dim(key, s.shape, (1,)), _column(first + rows.token, s.shape)
        visible = lax.broadcast_in_dim(exists, s.shape, (1,)) & (key <= query)
        if left is not None:
            visible &= key >= query - left
        return jnp.where(visible, s, -jnp.inf)

    factor = call.softmax_scale if refs.k_scale is None else call.softmax_scale * refs.k_scale[b, head]
    q_cache = q
    if call.cache_dtype == FLOAT8 and call.dtype == "bfloat16":  # e4m3 is exact in float16, whose range q may exceed
        whole = (_load(refs.q, (b, rows.token, rows.q_head), rows.exists, c) for c in _columns(p.head_dim, 1))
        largest = functools.reduce(jnp.maximum, (jnp.max(jnp.abs(x.astype(jnp.float32)), axis=1) for x in whole))
        power, inverse = _powers_of_two(largest)
        q_cache = tuple((x.astype(jnp.float32) * _column(inverse, x.shape)).astype(jnp.float16) for x in q)
        factor = _column(power * factor, (p.block_rows, p.block_kv))
    operands = functools.partial(_operands, dtype=q_cache[0].dtype, arch=call.arch)

    begin, end = lax.div(low, p.block_kv), lax.div(length + (p.block_kv - 1), p.block_kv)
    start, stop = (begin + tile for tile in tiles_of_split(split, p.splits, jnp.maximum(end - begin, 0)))
    pages_of = functools.partial(_pages, refs, p, b, length)

    def step(tile: Array, carry: tuple[_State, Any]) -> tuple[_State, Any]:
        state, page = carry
        key = tile * p.block_kv + _iota(p.block_kv)
        exists = (key >= low) & (key < length)
        if p.page_size is None:
            place, following = (b, key), page
        else:
            exists &= (page >= 0) & (page < p.num_pages)
            place, following = (page, _in_page(p, tile)), pages_of(tile + 1)
        keys, values = (
            tuple(x for chunk in head_chunks(dim // p.pack) for x in operands(_load(ref, (*place, head), exists, _Columns(chunk))))
            for ref, dim in ((refs.k, p.head_dim), (refs.v, p.v_dim))
        )
        s = functools.reduce(jnp.add, (_dot(x, y, 1) for x, y in zip(q_cache, keys, strict=True)))
        return _absorb(state, scores(s, factor, key, exists), values), following

    state = _State(
        tuple(jnp.zeros((p.block_rows, c.chunk.width), jnp.float32) for c in v_columns),
        jnp.full((p.block_rows,), -jnp.inf, jnp.float32),
        jnp.zeros((p.block_rows,), jnp.float32),
    )
    state, _ = lax.fori_loop(start, stop, step, (state, jnp.int32(0) if p.page_size is None else pages_of(start)))
    if refs.v_scale is not None:
        scale = refs.v_scale[b, head]
        state = state._replace(acc=tuple(a * scale for a in state.acc))
    if refs.k_new is not None:

        def with_new(state: _State) -> _State:
            token = _iota(max(MIN_DOT, pl.next_power_of_2(p.tokens)))
            exists = token < p.tokens
            keys = tuple(_load(refs.k_new, (b, token, head), exists, c) for c in k_columns)
            values = tuple(_load(refs.v_new, (b, token, head), exists, c) for c in v_columns)
            s = functools.reduce(jnp.add, (_dot(x, y, 1) for x, y in zip(q, keys, strict=True)))
            return _absorb(state, scores(s, call.softmax_scale, first + token, exists), values)

        state = with_new(state) if p.splits == 1 else lax.cond(split == p.splits - 1, with_new, lambda state: state, state)
    _write(state, rows, refs, outs, p, (b, head, split))


def _pages(refs: _Inputs, p: _Problem, b: Array, length: Array, tile: Array) -> Array:
    """Page ids of a tile: one, or one per key where the tile may span pages; -1 past the length."""
    assert p.page_size is not None
    key = tile * p.block_kv if p.tile_is_in_a_page else tile * p.block_kv + _iota(p.block_kv)
    return plt.load(refs.page_table.at[b, lax.div(key, p.page_size)], mask=key < length, other=-1)


def _in_page(p: _Problem, tile: Array) -> Array:
    """Place of each key of a tile inside its page."""
    if p.tile_is_in_a_page:
        return lax.rem(tile * p.block_kv, p.page_size) + _iota(p.block_kv)
    return lax.rem(tile * p.block_kv + _iota(p.block_kv), p.page_size)


def _write(
    state: _State, rows: _Rows, refs: _Inputs, outs: tuple[Any, ...], p: _Problem, where: tuple[Array, Array, Array]
) -> None:
    """The finished rows where one split has seen everything, else this split's partial."""
    b, head, split = where
    if p.splits == 1:
        sink = None if refs.sinks is None else plt.load(refs.sinks.at[rows.q_head], mask=rows.exists, other=-jnp.inf)
        factor, lse = softmax.finished_rows(state.top, state.total, sink)
        place, lse_place, live = (b, rows.token, rows.q_head), (b, rows.token, rows.q_head), rows.exists
    else:
        factor, _ = softmax.finished_rows(state.top, state.total, None)
        lse = state.top + jnp.log2(state.total)
        lse = jnp.where(state.total == 0, -jnp.inf, lse)
        place, lse_place = (b, head, rows.index, split), (b, head, rows.index, split)
        live = rows.exists & (lse != -jnp.inf)
    for columns, acc in zip(_columns(p.v_dim, p.pack), state.acc, strict=True):
        _store(outs[0], place, live, columns, acc * _column(factor, acc.shape))
    if len(outs) > 1:
        plt.store(outs[1].at[lse_place], lse, mask=rows.exists)


def _merge_kernel(o_parts: Any, lse_parts: Any, sinks: Any, *outs: Any, p: _Problem) -> None:
    """The splits of one query row, summed in order."""
    program = pl.program_id(0)
    row, program = lax.rem(program, p.rows), lax.div(program, p.rows)
    head, b = lax.rem(program, p.kv_heads), lax.div(program, p.kv_heads)
    q_head, token = head * p.group + lax.rem(row, p.group), lax.div(row, p.group)
    width = pl.next_power_of_2(p.splits)
    lse = plt.load(lse_parts.at[b, head, row, _iota(width)], mask=_iota(width) < p.splits, other=-jnp.inf)
    top = jnp.max(lse, axis=0)
    base = softmax.finite_base(top)
    total = jnp.sum(jnp.exp2(lse - base), axis=0)
    factor, lse = softmax.finished_rows(base, total, None if sinks is None else sinks[q_head])
    for chunk in head_chunks(p.v_dim):
        count = min(width, MERGE_ELEMENTS // chunk.width)
        o = jnp.zeros((chunk.width,), jnp.float32)
        for first in range(0, p.splits, count):
            split = first + _iota(count)
            part_lse = plt.load(lse_parts.at[b, head, row, split], mask=split < p.splits, other=-jnp.inf)
            part = _load(o_parts, (b, head, row, split), part_lse != -jnp.inf, _Columns(chunk))
            o += jnp.sum(part * _column(jnp.exp2(part_lse - base), part.shape), axis=0)
        column = chunk.start + _iota(chunk.width)
        o = (o * factor).astype(outs[0].dtype)
        plt.store(outs[0].at[b, token, q_head, column], o, mask=column < chunk.start + chunk.used)
    if len(outs) > 1:
        outs[1][b, token, q_head] = lse


def _pairs(x: Array) -> Array:
    """FP8 elements in pairs, as uint16: the even one in the low byte. No copy."""
    return lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, 2), jnp.uint16)


def _attend(call: AttentionCall, tile: TileConfig, inputs: _Inputs, interpret: bool) -> tuple[Array, Array | None]:
    batch, tokens, q_heads, head_dim = inputs.q.shape
    kv_heads, v_dim = inputs.v.shape[2:]
    paged = inputs.page_table is not None
    pack = 2 if inputs.k.dtype == FLOAT8 and head_dim % 2 == v_dim % 2 == 0 else 1
    if pack == 2:
        inputs = inputs._replace(k=_pairs(inputs.k), v=_pairs(inputs.v))
    p = _Problem(
        batch, tokens, kv_heads, q_heads // kv_heads, head_dim, v_dim, inputs.k.shape[1] if paged else None, len(inputs.k),
        tile.block_q, tile.block_kv, tile.num_splits, pack,
    )  # fmt: skip
    params = plt.CompilerParams(num_warps=tile.num_warps, num_stages=tile.num_stages)
    results = [jax.ShapeDtypeStruct((batch, tokens, q_heads, v_dim), jnp.dtype(call.o_dtype))]
    if call.return_lse:
        results.append(jax.ShapeDtypeStruct((batch, tokens, q_heads), jnp.float32))
    split_shape = (batch, kv_heads, p.rows, p.splits)
    partials = [jax.ShapeDtypeStruct((*split_shape, v_dim), jnp.float32), jax.ShapeDtypeStruct(split_shape, jnp.float32)]
    outs = pl.pallas_call(
        functools.partial(_split_kernel, p=p, call=call, interpret=interpret),
        grid=(p.programs,),
        out_shape=results if p.splits == 1 else partials,
        compiler_params=params,
        interpret=interpret,
        name="gqa_decode",
    )(inputs)
    if p.splits > 1:
        outs = pl.pallas_call(
            functools.partial(_merge_kernel, p=p),
            grid=(batch * kv_heads * p.rows,),
            out_shape=results,
            compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
            interpret=interpret,
            name="gqa_decode_merge",
        )(*outs, inputs.sinks)
    return outs[0], outs[1] if call.return_lse else None


def decode(
    call: AttentionCall, tile: TileConfig, *, interpret: bool = False,
    q: Array, k: Array, v: Array, kv_lengths: Array, k_scale: Array | None, v_scale: Array | None, sinks: Array | None,
) -> tuple[Array, Array | None]:  # fmt: skip
    """Attention of q (B, Tq, Hq, D) over contiguous k (B, S, Hkv, D) and v (B, S, Hkv, Dv).

    Args:
      call: the facts.
      tile: block_q rows of query tokens times group heads (a power of two, 16 or more), block_kv keys, splits.
      interpret: run on the host.
      q: queries, the last Tq positions of each sequence.
      k: keys.
      v: values.
      kv_lengths: int32 (B,), live keys, the query tokens included, in [0, S].
      k_scale: float32 (B, Hkv) factors of an FP8 k, or None.
      v_scale: the same for v.
      sinks: float32 (Hq,) logits, or None.

    Returns:
      o (B, Tq, Hq, Dv), and lse float32 (B, Tq, Hq) or None.
    """
    inputs = _Inputs(q, k, v, kv_lengths, k_scale=k_scale, v_scale=v_scale, sinks=sinks)
    return _attend(call, tile, inputs, interpret)


def paged_decode(
    call: AttentionCall, tile: TileConfig, *, interpret: bool = False,
    q: Array, k_pages: Array, v_pages: Array, page_table: Array, kv_lengths: Array, k_new: Array | None, v_new: Array | None,
    inv_freq: Array | None, k_scale: Array | None, v_scale: Array | None, sinks: Array | None,
) -> tuple[Array, Array | None] | tuple[Array, Array | None, Array, Array]:  # fmt: skip
    """Attention of q over the pages of each sequence, and over new tokens, which are appended to the pages."""
    inputs = _Inputs(q, k_pages, v_pages, kv_lengths, page_table, k_new, v_new, k_scale, v_scale, sinks)
    return _attend(call, tile, inputs, interpret)
