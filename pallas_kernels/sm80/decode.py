"""Decode attention on Pallas-Triton: split-KV over contiguous and paged caches, one kernel.

o[b, t, h] = sum_j softmax_j(scale * q[b, t, h] . k[b, j, h // G]) v[b, j, h // G] over the keys j that token t sees; q
(B, Tq, Hq, D) holds the last Tq positions of each sequence, causal among themselves; k and v are (B, S, Hkv, D) and
(B, S, Hkv, Dv), or pages (P, page_size, Hkv, ...) behind a table; float32 sums, lse in natural logarithms.

What makes it fast:

- M-fold: the G query heads of a KV head, times the query tokens, are the rows of one tile, so K and V are read once
  whatever G is. The matrix product is nearly free; the loads are everything.
- The tiles a sequence really has, live and inside the window, are divided over the splits in the kernel, equal to within
  one tile: a short sequence in a large cache still has every split at work, and none reads what nobody sees.
- K and V arrive num_stages - 1 tiles ahead through asynchronous copies; page ids are read one tile ahead of the copies
  that need them, one id per tile where no tile crosses a page.
- Programs of neighbouring KV heads are neighbours in the grid: together they read whole rows of the cache.
- FP8 caches are read as pairs in 16-bit words: copies and matrix loads move what 16-bit ones move, the even and the odd
  columns of a head part in registers, and a pool of 4 GiB has 2**31 addressable words.

A split writes its normalised float32 partial and log-sum-exp, and a second kernel merges the splits of a row in a fixed
order; one split writes the result itself. New tokens that a call brings along are the last split's last tile, attended
as they came, and that split also writes them to their pages.

FlashDecoding (Dao, Haziza, Massa, Sizov, 2023) for the splits; the rest is this library's own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from dispatch_core.calls import FLOAT8, AttentionCall
from dispatch_core.splitting import tiles_of_split
from dispatch_core.tiling import TileConfig
from pallas_kernels.common import softmax
from pallas_kernels.common.decode_plan import LaunchPlan, Problem, launch_plan
from pallas_kernels.sm80.blocks import MIN_DOT, Chunk, head_chunks
from pallas_kernels.sm80.words import in_pairs, operands, out_of_pairs, power_of_two

__all__ = ["Inputs", "LaunchPlan", "attend", "decode", "launch_plan"]

Array = jax.Array
MERGE_ELEMENTS = 8192  # float32 partials the merge holds at once: 64 registers a thread
MERGE_WARPS = 4
_POOLS = 1  # where Inputs has k, and v after it


class Inputs(NamedTuple):
    """Operands of the kernel; absent ones are None.

    Attributes:
      q: (B, Tq, Hq, D).
      k, v: (B, S, Hkv, D) and (B, S, Hkv, Dv), or pools (P, page_size, Hkv, ...).
      lengths: int32 (B,): keys in the cache, with the query tokens unless they are k_new and v_new; clamped to what it holds.
      page_table: int32 (B, max_pages).
      k_new, v_new: (B, Tq, Hkv, D) and (B, Tq, Hkv, Dv), keys and values of the query tokens.
      k_stored, v_stored: the same as the pools hold them.
      k_scale, v_scale: float32 (B, Hkv).
      sinks: float32 (Hq,).
    """

    q: Any
    k: Any
    v: Any
    lengths: Any
    page_table: Any = None
    k_new: Any = None
    v_new: Any = None
    k_stored: Any = None
    v_stored: Any = None
    k_scale: Any = None
    v_scale: Any = None
    sinks: Any = None


class _Where(NamedTuple):
    """A program's place: sequence, KV head, split, and its query rows (index, which exist, token, query head)."""

    b: Array
    head: Array
    split: Array
    row: Array
    exists: Array
    token: Array
    q_head: Array


class _State(NamedTuple):
    """Online softmax: sums of values by block of columns, running maxima in base 2, sums of exponentials."""

    acc: tuple[Array, ...]
    top: Array
    total: Array


class _Columns(NamedTuple):
    """A block of the columns of a head: those of a chunk, counted in strides, that leave the remainder `phase`."""

    chunk: Chunk
    stride: int = 1
    phase: int = 0

    def block(self, live: Array) -> tuple[Array, Array]:
        """Column index and mask, (rows, width), of the rows that are live."""
        shape = (live.shape[0], self.chunk.width)
        strides = lax.broadcast_in_dim(self.chunk.start + _iota(self.chunk.width), shape, (1,))
        mask = _down(live, shape)
        if self.chunk.used < self.chunk.width:
            mask &= strides < self.chunk.start + self.chunk.used
        return strides * self.stride + self.phase, mask


def _columns_of(dim: int, stride: int) -> tuple[_Columns, ...]:
    return tuple(_Columns(chunk, stride, phase) for chunk in head_chunks(dim // stride) for phase in range(stride))


def _iota(n: int) -> Array:
    return lax.broadcasted_iota(jnp.int32, (n,), 0)


def _down(x: Array, shape: tuple[int, ...]) -> Array:
    """One value per row, over a block of that shape."""
    return lax.broadcast_in_dim(x, shape, (0,))


def _load(ref: Any, place: tuple[Array, ...], live: Array, columns: _Columns) -> Array:
    """A block of rows, each at its place (indices of the leading axes, shared or one per row); 0 where not live."""
    column, mask = columns.block(live)
    place = tuple(_down(x, column.shape) if x.ndim else x for x in place)
    return plt.load(ref.at[*place, column], mask=mask, other=np.zeros((), ref.dtype))


def _store(ref: Any, place: tuple[Array, ...], live: Array, columns: _Columns, value: Array) -> None:
    column, mask = columns.block(live)
    place = tuple(_down(x, column.shape) if x.ndim else x for x in place)
    plt.store(ref.at[*place, column], value.astype(ref.dtype), mask=mask)


def _dot(a: Array, b: Array, contract: int) -> Array:
    """The float32 product of a (M, K) and b, whose axis `contract` is K; all of float32 where the operands are float32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, (((1,), (contract,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)


def _dots(blocks: tuple[Array, ...], others: tuple[Array, ...]) -> Array:
    """Scores from the column blocks of q and those of k."""
    return functools.reduce(jnp.add, (_dot(x, y, 1) for x, y in zip(blocks, others, strict=True)))


def _cache_query(refs: Inputs, p: Problem, w: _Where, q: tuple[Array, ...]) -> tuple[tuple[Array, ...], Any]:
    """The blocks of q that meet the cache's keys, and the factor on their products.

    FP8 keys are exact in float16. A bfloat16 query may be out of its range, so each row gives up a power of two first.
    """
    factor = p.call.softmax_scale if refs.k_scale is None else p.call.softmax_scale * refs.k_scale[w.b, w.head]
    if p.call.cache_dtype != FLOAT8 or p.call.dtype != "bfloat16":
        return q, factor
    whole = (_load(refs.q, (w.b, w.token, w.q_head), w.exists, c) for c in _columns_of(p.call.head_dim, 1))
    largest = functools.reduce(jnp.maximum, (jnp.max(jnp.abs(x.astype(jnp.float32)), axis=1) for x in whole))
    power, inverse = power_of_two(largest)
    scaled = tuple((x.astype(jnp.float32) * _down(inverse, x.shape)).astype(jnp.float16) for x in q)
    return scaled, _down(power * factor, (p.tile.block_q, p.tile.block_kv))


def _absorb(state: _State, scores: Array, values: tuple[Array, ...]) -> _State:
    """The state with one more tile: scores in base 2, -inf where masked."""
    top = jnp.maximum(state.top, jnp.max(scores, axis=1))
    base = softmax.finite_base(top)
    weights = jnp.exp2(scores - _down(base, scores.shape))
    kept = jnp.exp2(state.top - base)
    acc = tuple(a * _down(kept, a.shape) + _dot(weights.astype(v.dtype), v, 0) for a, v in zip(state.acc, values, strict=True))
    return _State(acc, top, state.total * kept + jnp.sum(weights, axis=1))


def _where(p: Problem) -> _Where:
    program = pl.program_id(0)
    row_block, program = lax.rem(program, p.row_blocks), lax.div(program, p.row_blocks)
    head, program = lax.rem(program, p.kv_heads), lax.div(program, p.kv_heads)
    split, b = lax.rem(program, p.tile.num_splits), lax.div(program, p.tile.num_splits)
    row = row_block * p.tile.block_q + _iota(p.tile.block_q)
    return _Where(b, head, split, row, row < p.rows, lax.div(row, p.group), head * p.group + lax.rem(row, p.group))


def _split_kernel(refs: Inputs, *outs: Any, p: Problem) -> None:
    """One split of the keys of one sequence and KV head, for one block of query rows."""
    call, block_kv, w = p.call, p.tile.block_kv, _where(p)
    k_columns, v_columns = _columns_of(call.head_dim, p.pack), _columns_of(call.v_dim, p.pack)
    q = tuple(_load(refs.q, (w.b, w.token, w.q_head), w.exists, c) for c in k_columns)
    capacity = p.page_size if refs.page_table is None else p.page_size * refs.page_table.shape[1]
    length = jnp.clip(refs.lengths[w.b], 0, capacity)
    first = length if refs.k_new is not None else length - p.tokens  # position of query token 0
    left = None if call.window is None else call.window.left
    low = jnp.int32(0) if left is None else jnp.maximum(first - left, 0)

    def scored(dots: Array, factor: Any, key: Array, exists: Array) -> Array:
        """Capped scores in base 2; -inf at the keys, given by position, that a row does not see."""
        if call.softcap is None:
            s = dots * (factor * softmax.LOG2_E)
        else:
            s = jnp.tanh(dots * (factor / call.softcap)) * (call.softcap * softmax.LOG2_E)
        key, query = lax.broadcast_in_dim(key, s.shape, (1,)), _down(first + w.token, s.shape)
        visible = lax.broadcast_in_dim(exists, s.shape, (1,)) & (key <= query)
        if left is not None:
            visible &= key >= query - left
        return jnp.where(visible, s, -jnp.inf)

    q_cache, factor = _cache_query(refs, p, w, q)

    def step(tile: Array, carry: tuple[_State, Any]) -> tuple[_State, Any]:
        state, page = carry
        key = tile * block_kv + _iota(block_kv)
        exists = (key >= low) & (key < length)
        if refs.page_table is None:
            place = (w.b, key, w.head)
        else:
            exists &= (page >= 0) & (page < p.num_pages)
            place = (page, _in_page(p, tile), w.head)
            page = _pages(refs, p, w.b, length, tile + 1)
        keys, values = (
            tuple(
                operand
                for chunk in head_chunks(dim // p.pack)
                for operand in operands(_load(ref, place, exists, _Columns(chunk)), q_cache[0].dtype, call.arch)
            )
            for ref, dim in ((refs.k, call.head_dim), (refs.v, call.v_dim))
        )
        return _absorb(state, scored(_dots(q_cache, keys), factor, key, exists), values), page

    begin, end = lax.div(low, block_kv), lax.div(length + (block_kv - 1), block_kv)
    split: Any = w.split
    tiles: Any = jnp.maximum(end - begin, 0)
    start, stop = (begin + tile for tile in tiles_of_split(split, p.tile.num_splits, tiles))
    state = _State(
        tuple(jnp.zeros((p.tile.block_q, c.chunk.width), jnp.float32) for c in v_columns),
        jnp.full((p.tile.block_q,), -jnp.inf, jnp.float32),
        jnp.zeros((p.tile.block_q,), jnp.float32),
    )
    page = None if refs.page_table is None else _pages(refs, p, w.b, length, start)
    state, _ = lax.fori_loop(start, stop, step, (state, page))
    if refs.v_scale is not None:
        v_scale = refs.v_scale[w.b, w.head]
        state = state._replace(acc=tuple(a * v_scale for a in state.acc))

    def with_new(state: _State) -> _State:
        token = _iota(max(MIN_DOT, pl.next_power_of_2(p.tokens)))
        place, exists = (w.b, token, w.head), token < p.tokens
        keys = tuple(_load(refs.k_new, place, exists, c) for c in k_columns)
        values = tuple(_load(refs.v_new, place, exists, c) for c in v_columns)
        return _absorb(state, scored(_dots(q, keys), call.softmax_scale, first + token, exists), values)

    if refs.k_new is not None:
        is_last = w.split == p.tile.num_splits - 1
        state = lax.cond(is_last, with_new, lambda state: state, state)
        outs, pools = outs[:-2], outs[-2:]
        for pages, rows, dim in zip(pools, (refs.k_stored, refs.v_stored), (call.head_dim, call.v_dim), strict=True):
            _append(pages, rows, refs.page_table, p, w._replace(exists=is_last & (w.row < p.tokens)), length, dim)
    _write(state, w, refs.sinks, outs, p)


def _pages(refs: Inputs, p: Problem, b: Array, length: Array, tile: Array) -> Array:
    """Page ids of a tile: one, or one per key where the tile may cross pages; -1 for what lies past the length."""
    key = tile * p.tile.block_kv
    key = key if p.tile_in_page else key + _iota(p.tile.block_kv)
    return plt.load(refs.page_table.at[b, lax.div(key, p.page_size)], mask=key < length, other=-1)


def _in_page(p: Problem, tile: Array) -> Array:
    """Where in its page each key of a tile is."""
    key, keys = tile * p.tile.block_kv, _iota(p.tile.block_kv)
    return lax.rem(key, p.page_size) + keys if p.tile_in_page else lax.rem(key + keys, p.page_size)


def _append(pages: Any, rows: Any, table: Any, p: Problem, w: _Where, length: Array, dim: int) -> None:
    """Puts the new tokens, one in each of the rows, in their pages; drops those that have none."""
    key = length + w.row
    column = lax.div(key, p.page_size)
    page = plt.load(table.at[w.b, column], mask=w.exists & (column < table.shape[1]), other=-1)
    exists = (page >= 0) & (page < p.num_pages)
    page = jnp.where(exists, page, p.num_pages)  # the interpreter stores what was there where masked, and -1 is a page to it
    for columns in (_Columns(chunk) for chunk in head_chunks(dim // p.pack)):
        value = _load(rows, (w.b, w.row, w.head), exists, columns)
        _store(pages, (page, lax.rem(key, p.page_size), w.head), exists, columns, value)


def _write(state: _State, w: _Where, sinks: Any, outs: Sequence[Any], p: Problem) -> None:
    """The finished rows where one split has seen everything, else this split's partial; o is left unwritten if it is empty."""
    if p.tile.num_splits == 1:
        sink = None if sinks is None else plt.load(sinks.at[w.q_head], mask=w.exists, other=-jnp.inf)
        factor, lse = softmax.finished_rows(state.top, state.total, sink)
        place, live = (w.b, w.token, w.q_head), w.exists
    else:
        factor = jnp.where(state.total == 0, 0.0, 1.0 / state.total)
        lse = jnp.where(state.total == 0, -jnp.inf, state.top + jnp.log2(state.total))
        place, live = (w.b, w.head, w.row, w.split), w.exists & (lse != -jnp.inf)
    for columns, acc in zip(_columns_of(p.call.v_dim, p.pack), state.acc, strict=True):
        _store(outs[0], place, live, columns, acc * _down(factor, acc.shape))
    if len(outs) > 1:
        plt.store(outs[1].at[place], lse, mask=w.exists)


def _merge_kernel(o_parts: Any, lse_parts: Any, sinks: Any, *outs: Any, p: Problem) -> None:
    """The splits of one query row, summed in order."""
    program = pl.program_id(0)
    row, program = lax.rem(program, p.rows), lax.div(program, p.rows)
    head, b = lax.rem(program, p.kv_heads), lax.div(program, p.kv_heads)
    q_head, token = head * p.group + lax.rem(row, p.group), lax.div(row, p.group)

    def lse_of(first: int, count: int) -> tuple[Array, Array]:
        split = first + _iota(count)
        return split, plt.load(lse_parts.at[b, head, row, split], mask=split < p.tile.num_splits, other=-jnp.inf)

    width = pl.next_power_of_2(p.tile.num_splits)
    _, every_lse = lse_of(0, width)
    base = softmax.finite_base(jnp.max(every_lse, axis=0))
    total = jnp.sum(jnp.exp2(every_lse - base), axis=0)
    factor, lse = softmax.finished_rows(base, total, None if sinks is None else sinks[q_head])
    for chunk in head_chunks(p.call.v_dim):
        o, count = jnp.zeros((chunk.width,), jnp.float32), min(width, MERGE_ELEMENTS // chunk.width)
        for first in range(0, p.tile.num_splits, count):
            split, part_lse = lse_of(first, count)
            part = _load(o_parts, (b, head, row, split), part_lse != -jnp.inf, _Columns(chunk))
            o += jnp.sum(part * _down(jnp.exp2(part_lse - base), part.shape), axis=0)
        column = chunk.start + _iota(chunk.width)
        plt.store(
            outs[0].at[b, token, q_head, column],
            (o * factor).astype(outs[0].dtype),
            mask=column < chunk.start + chunk.used,
        )
    if len(outs) > 1:
        outs[1][b, token, q_head] = lse


def attend(call: AttentionCall, tile: TileConfig, inputs: Inputs, *, interpret: bool) -> tuple[Array | None, ...]:
    """Launches the attention, and the merge where there are splits.

    Args:
      call: the facts.
      tile: block_q rows of query tokens times heads of a group (a power of two, 16 or more), block_kv keys (likewise).
      inputs: the operands.
      interpret: run on the host.

    Returns:
      o (B, Tq, Hq, Dv), lse float32 (B, Tq, Hq) if the call asks for it, and with new keys both pools, updated in place.
    """
    batch, tokens, q_heads, _ = inputs.q.shape
    kv_heads, splits = inputs.k.shape[2], tile.num_splits
    num_pages, page_size = inputs.k.shape[:2]
    if inputs.k.dtype == FLOAT8 and call.head_dim % 2 == call.v_dim % 2 == 0:
        words = (inputs.k, inputs.v, inputs.k_stored, inputs.v_stored)
        k, v, k_stored, v_stored = (None if x is None else in_pairs(x) for x in words)
        inputs = inputs._replace(k=k, v=v, k_stored=k_stored, v_stored=v_stored)
    pack = 2 if inputs.k.dtype == jnp.uint16 else 1
    p = Problem(call, tile, batch, tokens, kv_heads, q_heads // kv_heads, page_size, num_pages, pack)
    results = [jax.ShapeDtypeStruct((batch, tokens, q_heads, call.v_dim), jnp.dtype(call.o_dtype))]
    if call.return_lse:
        results.append(jax.ShapeDtypeStruct((batch, tokens, q_heads), jnp.float32))
    parts = (batch, kv_heads, p.rows, splits)
    partials = [jax.ShapeDtypeStruct((*parts, call.v_dim), jnp.float32), jax.ShapeDtypeStruct(parts, jnp.float32)]
    written = results if splits == 1 else partials
    pools = [] if inputs.k_new is None else [jax.typeof(inputs.k), jax.typeof(inputs.v)]
    outs = pl.pallas_call(
        functools.partial(_split_kernel, p=p),
        grid=(p.programs,),
        out_shape=[*written, *pools],
        input_output_aliases={_POOLS + i: len(written) + i for i in range(len(pools))},
        compiler_params=plt.CompilerParams(num_warps=tile.num_warps, num_stages=tile.num_stages),
        interpret=interpret,
        name="gqa_decode",
    )(inputs)
    outs, pools = outs[: len(written)], outs[len(written) :]
    if splits > 1:
        outs = pl.pallas_call(
            functools.partial(_merge_kernel, p=p),
            grid=(batch * kv_heads * p.rows,),
            out_shape=results,
            compiler_params=plt.CompilerParams(num_warps=MERGE_WARPS, num_stages=1),
            interpret=interpret,
            name="gqa_decode_merge",
        )(*outs, inputs.sinks)
    pools = [x if p.pack == 1 else out_of_pairs(x) for x in pools]
    return outs[0], outs[1] if call.return_lse else None, *pools


def decode(
    call: AttentionCall,
    tile: TileConfig,
    *,
    interpret: bool = False,
    q: Array,
    k: Array,
    v: Array,
    kv_lengths: Array,
    k_scale: Array | None,
    v_scale: Array | None,
    sinks: Array | None,
) -> tuple[Array | None, ...]:
    """Attention of the last Tq positions of each sequence over a contiguous cache.

    Args:
      call: the facts.
      tile: as for `attend`.
      interpret: run on the host.
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
    inputs = Inputs(q, k, v, kv_lengths, k_scale=k_scale, v_scale=v_scale, sinks=sinks)
    return attend(call, tile, inputs, interpret=interpret)
