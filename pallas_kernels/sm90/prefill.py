"""Prefill attention on Mosaic GPU for compute capability 9.0: dense, padded, packed and windowed, one kernel.

o[t, h] = sum_j softmax_j(scale * q[t, h] . k[j, h // G]) v[j, h // G] over the keys j that token t sees, per request; 16-bit
q (B, Sq, Hq, D), k (B, Skv, Hkv, D), v (B, Skv, Hkv, Dv), or the same packed without the leading axis; float32 sums, lse in
natural logarithms.

What makes it fast:

- One warpgroup only copies: TMA keeps a ring of K and V tiles full, and is at the next item's queries while this one ends.
- Each other warpgroup owns 64 query rows. While the tensor cores multiply P of one KV tile with V, it works out the next
  tile's P: Q K^T of the next tile is issued before, and its softmax runs under the product with V.
- The warpgroups take turns to issue their products, so that one's exponentials run under the other's products.
- Programs are persistent, one per SM. Items that read the same keys are neighbours, longest first; the heads of a group
  share the K and V tiles of an item where the group's size allows it.
- KV tiles are visited from the last to the first: the diagonal and the tail are masked first, the middle runs unmasked.

FlashAttention-3 (Shah et al., 2024) for the producer, the turns and the overlap within a warpgroup; Mosaic GPU's sample in
JAX showed that they can be said in Pallas.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dispatch_core.calls import AttentionCall
from dispatch_core.tiling import TileConfig
from pallas_kernels.common import prefill_plan, softmax
from pallas_kernels.common.prefill_plan import lanes_per_pass, packed_requests, tile_owners

Array = jax.Array
WGMMA = plgpu.Layout.WGMMA
ROWS = 64  # of a warpgroup's products
OCTET = 8  # rows of swizzled memory that belong together
REGISTERS = 65536 // 128  # of a multiprocessor, by the threads of a warpgroup
# Where top * scale would exceed this, exp2 of a rounded product minus another is no longer near 1 at the maximum itself, and
# overflows from 2**31 on. Scores that differ at all still differ by 2**5 or more: their weights are 0 and 1 either way.
STEEPEST = 2.0**29


@dataclass(frozen=True)
class Plan(prefill_plan.Plan):
    """A launch of persistent programs.

    Attributes:
      is_packed: whether requests follow one another in one array.
      has_lengths: whether a tile of V may hold rows of no one, or of another request.
    """

    is_packed: bool
    has_lengths: bool

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply, each with its own 64 rows: of one head each where the tile folds heads."""
        return self.tile.num_warpgroups

    @property
    def programs(self) -> int:
        """Programs of the grid."""
        return min(self.call.device.sm_count, self.items)

    @property
    def registers(self) -> tuple[int, int]:
        """A thread's, of a consumer and of the producer, which needs more where it zeroes rows."""
        producer = 40 if self.has_lengths else 24
        return min(240, (REGISTERS - producer) // self.consumers // 8 * 8), producer

    @property
    def takes_turns(self) -> bool:
        """Whether the consumers take turns to issue their products; from head_dim 192 on these outlast the exponentials."""
        return self.consumers > 1 and self.call.head_dim <= 128

    @property
    def stores_through_q(self) -> bool:
        """Whether o leaves through the queries' memory, for want of more."""
        return self.call.head_dim == self.call.v_dim > 192 and not self.is_packed

    @property
    def has_left_edges(self) -> bool:
        """Whether a tile may hold keys before a row's first one."""
        return self.left is not None or self.is_packed

    def row_of(self, consumer: Any) -> Any:
        """The first of a consumer's rows among the tile's tokens."""
        return 0 if self.fold > 1 else consumer * ROWS

    def head_of(self, consumer: Any) -> Any:
        """A consumer's head among the tile's."""
        return consumer if self.fold > 1 else 0


def heads_per_tile(call: AttentionCall, tile: TileConfig) -> int:
    """One for each consumer where they divide the group: fewer tokens in a tile, of which fewer are past a request's end."""
    return tile.num_warpgroups if call.group_size % tile.num_warpgroups == 0 else 1


def dense_plan(call: AttentionCall, tile: TileConfig, q_rows: int, kv_rows: int, has_lengths: bool, interpret: bool) -> Plan:
    """The plan of requests of q_rows queries and kv_rows keys each."""
    fold = heads_per_tile(call, tile)
    lanes = call.batch * call.kv_heads
    tiles = pl.cdiv(q_rows, tile.block_q // fold)
    passing = lanes_per_pass(call, lanes, kv_rows)
    return Plan(call, tile, fold, tiles, lanes, passing, q_rows, kv_rows, interpret, is_packed=False, has_lengths=has_lengths)


def packed_plan(call: AttentionCall, tile: TileConfig, q_rows: int, kv_rows: int, interpret: bool) -> Plan:
    """The plan of q_rows queries and kv_rows keys of all requests together."""
    fold = heads_per_tile(call, tile)
    tokens = tile.block_q // fold
    # Every request, and the rows before the first and after the last one, may begin within an octet and end within a tile.
    tiles = (q_rows + (call.batch + 2) * (tokens - 1 + OCTET - 1)) // tokens
    passing = lanes_per_pass(call, call.kv_heads, kv_rows)
    return Plan(call, tile, fold, tiles, call.kv_heads, passing, q_rows, kv_rows, interpret, is_packed=True, has_lengths=True)


def packed_tiles(cu_seqlens_q: Array, cu_seqlens_kv: Array, plan: Plan) -> Array:
    """What `Request` says of every query tile, int32 (7, tiles): index, row / 8, token, q_len, kv_row / 8, kv_begin, kv_end."""
    q_row, q_len, kv_row, kv_len = packed_requests(cu_seqlens_q, cu_seqlens_kv, plan.q_rows)
    before, kv_begin = q_row % OCTET, kv_row % OCTET
    owner, token, is_idle = tile_owners(plan, jnp.where(q_len > 0, before + q_len, 0), kv_len)
    index = jnp.clip(owner - 1, 0, plan.call.batch - 1)
    octet = q_row[owner] // OCTET + token // OCTET
    live = (octet, token - before[owner], *(x[owner] for x in (q_len, kv_row // OCTET, kv_begin, kv_begin + kv_len)))
    return jnp.stack([index, *(jnp.where(is_idle, 0, x) for x in live)])


class Request(NamedTuple):
    """Where an item works: int32 scalars.

    Mosaic's copies fill swizzled memory from multiples of 8 rows on. Packed requests begin anywhere, so an item's rows and
    keys are counted from the multiple of 8 before them: its first tokens may be before the request, as its first keys may.

    Attributes:
      index: of the request.
      row: of the item's first token in q and o.
      token: that token, from the request's first one.
      q_len: live tokens of the request.
      kv_row: of key 0 in k and v.
      kv_begin, kv_end: the request's keys, counted from key 0.
      tile: number of the query tile.
      q_head, kv_head: the first query head, and the KV head.
    """

    index: Array
    row: Array
    token: Array
    q_len: Array
    kv_row: Array
    kv_begin: Array
    kv_end: Array
    tile: Array
    q_head: Array
    kv_head: Array

    @property
    def shift(self) -> Array:
        """What makes a token the key at its place."""
        return self.kv_end - self.q_len


class KeyTiles(NamedTuple):
    """KV tiles an item visits, int32: from `stop` - 1 down to `first`, of which [full_from, full_to) need no mask."""

    first: Array
    stop: Array
    full_from: Array
    full_to: Array

    @property
    def count(self) -> Array:
        """How many."""
        return self.stop - self.first


def _request(refs: dict[str, Any], plan: Plan, item: Array) -> Request:
    turn, rest = _div_mod(item, plan.tiles * plan.lanes_per_pass * plan.bundles)
    tile, rest = _div_mod(rest, plan.lanes_per_pass * plan.bundles)
    lane, bundle = _div_mod(rest, plan.bundles)
    index, kv_head = _div_mod(turn * plan.lanes_per_pass + lane, plan.call.kv_heads)
    heads = (kv_head * plan.call.group_size + bundle * plan.fold, kv_head)
    if plan.is_packed:
        index, octet, token, q_len, kv_octet, kv_begin, kv_end = (refs["tiles"][i, tile] for i in range(7))
        return Request(index, octet * OCTET, token, q_len, kv_octet * OCTET, kv_begin, kv_end, tile, *heads)
    tile = plan.tiles - 1 - tile
    token, zero = tile * plan.tokens, jnp.int32(0)
    q_len = refs["q_lengths"][index] if "q_lengths" in refs else jnp.int32(plan.q_rows)
    kv_len = refs["kv_lengths"][index] if "kv_lengths" in refs else jnp.int32(plan.kv_rows)
    return Request(index, token, token, q_len, zero, zero, kv_len, tile, *heads)


def _key_tiles(plan: Plan, request: Request) -> KeyTiles:
    """At least one tile, if need be one that no row sees, so that every item takes the same path."""
    block_kv, left, right = plan.tile.block_kv, plan.left, plan.right
    low = jnp.maximum(request.token, 0) + request.shift
    high = jnp.minimum(request.token + plan.tokens, request.q_len) - 1 + request.shift

    def begin_of(position: Array) -> Array:
        return request.kv_begin if left is None else jnp.maximum(position - left, request.kv_begin)

    def end_of(position: Array) -> Array:
        return request.kv_end if right is None else jnp.clip(position + (right + 1), 0, request.kv_end)

    end = jnp.where(request.token < request.q_len, end_of(high), 0)
    first = lax.div(jnp.minimum(begin_of(low), jnp.maximum(end - 1, 0)), jnp.int32(block_kv))
    stop = jnp.maximum(lax.div(end + (block_kv - 1), jnp.int32(block_kv)), first + 1)
    full_to = jnp.clip(lax.div(end_of(low), jnp.int32(block_kv)), first, stop - 1)  # the last tile is masked in any case
    full_from = jnp.clip(lax.div(begin_of(high) + (block_kv - 1), jnp.int32(block_kv)), first, full_to)
    return KeyTiles(first, stop, full_from, full_to)


def _div_mod(x: Array, y: int) -> tuple[Array, Array]:
    return lax.div(x, jnp.int32(y)), lax.rem(x, jnp.int32(y))


def _at(plan: Plan, index: Array, rows: Any, head: Array) -> tuple[Any, ...]:
    """Where rows of a head lie: in a dense array of the request, or in a packed one."""
    return (rows, head) if plan.is_packed else (index, rows, head)


def _by_row(x: Array, like: Array) -> Array:
    return lax.broadcast_in_dim(x, like.shape, [0])


class Ring(NamedTuple):
    """The shared memory of a program, and the barriers over it: `ready` when filled, `free` when read by every warpgroup."""

    q: Any
    k: Any
    v: Any
    o: Any
    lse: Any
    q_ready: Any
    q_free: Any
    k_ready: Any
    k_free: Any
    v_ready: Any
    v_free: Any
    v_raw: Any
    turn: Any


def _produce(refs: dict[str, Any], ring: Ring, plan: Plan, turns: Array) -> None:
    """Fills the ring, item by item."""
    program, stages, block_kv = lax.axis_index("program"), plan.tile.num_stages, plan.tile.block_kv

    def item(turn: Array, filled: Array) -> Array:
        request = _request(refs, plan, program + turn * plan.programs)
        tiles = _key_tiles(plan, request)
        for warpgroup in range(plan.consumers):

            @pl.when(turn > 0)
            def _() -> None:
                plgpu.barrier_wait(ring.q_free.at[warpgroup])  # noqa: B023

            rows = pl.ds(request.row + plan.row_of(warpgroup), ROWS)
            place = _at(plan, request.index, rows, request.q_head + plan.head_of(warpgroup))
            plgpu.copy_gmem_to_smem(refs["q"].at[place], ring.q.at[warpgroup], ring.q_ready.at[warpgroup])

        def load(i: Array, filled: Array) -> Array:
            slot = lax.rem(filled, jnp.int32(stages))
            first = (tiles.stop - 1 - i) * block_kv
            place = _at(plan, request.index, pl.ds(request.kv_row + first, block_kv), request.kv_head)

            def wait_for(free: Any) -> None:
                @pl.when(filled >= stages)
                def _() -> None:
                    plgpu.barrier_wait(free.at[slot])

            wait_for(ring.k_free)
            plgpu.copy_gmem_to_smem(refs["k"].at[place], ring.k.at[slot], ring.k_ready.at[slot])
            wait_for(ring.v_free)
            if not plan.has_lengths:
                plgpu.copy_gmem_to_smem(refs["v"].at[place], ring.v.at[slot], ring.v_ready.at[slot])
                return filled + 1
            is_whole = (first >= request.kv_begin) & (first + block_kv <= request.kv_end)

            @pl.when(is_whole)
            def _() -> None:
                plgpu.copy_gmem_to_smem(refs["v"].at[place], ring.v.at[slot], ring.v_ready.at[slot])

            @pl.when(jnp.logical_not(is_whole))
            def _() -> None:
                plgpu.copy_gmem_to_smem(refs["v"].at[place], ring.v.at[slot], ring.v_raw)
                plgpu.barrier_wait(ring.v_raw)
                _keep_rows(ring.v.at[slot], request.kv_begin - first, request.kv_end - first)
                plgpu.commit_smem()
                plgpu.barrier_arrive(ring.v_ready.at[slot])

            return filled + 1

        return lax.fori_loop(0, tiles.count, load, filled)

    filled = lax.fori_loop(0, turns, item, jnp.int32(0))
    if plan.interpret:  # which asks that whoever waits on a barrier sees each of its completions
        for warpgroup in range(plan.consumers):
            plgpu.barrier_wait(ring.q_free.at[warpgroup])

        def drain(i: Array, _: None) -> None:
            plgpu.barrier_wait(ring.k_free.at[lax.rem(i, jnp.int32(stages))])
            plgpu.barrier_wait(ring.v_free.at[lax.rem(i, jnp.int32(stages))])

        lax.fori_loop(jnp.maximum(filled - stages, 0), filled, drain, None)


def _tile_width(columns: int) -> int:
    """Elements of a swizzled row: the widest swizzle that divides the columns."""
    return 64 if columns % 64 == 0 else 32


def _keep_rows(v: Any, begin: Array, end: Array) -> None:
    """Zeroes a tile's rows outside [begin, end): what lies there may be NaN, and 0 * NaN is NaN."""
    rows, columns = v.shape
    width = _tile_width(columns)
    for row in range(0, rows, ROWS):
        for column in range(0, columns, width):
            block = v.at[pl.ds(row, ROWS), pl.ds(column, width)]
            x = plgpu.layout_cast(block[...], WGMMA)
            number = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=WGMMA) + row
            block[...] = jnp.where((number >= begin) & (number < end), x, jnp.zeros_like(x))


class State(NamedTuple):
    """Online softmax of a warpgroup's rows: largest raw scores, sums of weights, weighted sums of v, and weights to come."""

    top: Array
    total: Array
    sums: Array
    p: Array


def _consume(refs: dict[str, Any], out: dict[str, Any], ring: Ring, plan: Plan, turns: Array) -> None:
    """Attends the items' rows of this warpgroup."""
    program, warpgroup = lax.axis_index("program"), lax.axis_index("wg")
    call, stages, block_kv, dtype = plan.call, plan.tile.num_stages, plan.tile.block_kv, refs["q"].dtype
    scale = 1.0 if call.softcap is not None else abs(call.softmax_scale) * softmax.LOG2_E or 1.0
    q = ring.q.at[warpgroup]

    def scored(dots: Array, limits: tuple[Array, Array] | None, first: Array) -> Array:
        if call.softcap is not None:
            bound, rate = call.softcap * softmax.LOG2_E, call.softmax_scale * 2.0 * softmax.LOG2_E / call.softcap
            dots = bound - (2.0 * bound) / (1.0 + jnp.exp2(dots * rate))
        elif call.softmax_scale <= 0:
            dots = dots * (-1.0 if call.softmax_scale < 0 else 0.0)
        if limits is None:
            return dots
        column = plgpu.broadcasted_iota(jnp.int32, dots.shape, 1, layout=WGMMA)
        seen = column < _by_row(limits[1] - first, dots)
        if plan.has_left_edges:
            seen = seen & (column >= _by_row(limits[0] - first, dots))
        return jnp.where(seen, dots, -jnp.inf)

    def weighed(scores: Array, top: Array, total: Array) -> tuple[Array, Array, Array, Array]:
        """Weights, what the sums are to be multiplied by, and the new top and total."""
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        base = softmax.finite_base(new_top)
        rate = jnp.minimum(scale, STEEPEST / jnp.abs(base))
        p = jnp.exp2(scores * _by_row(rate, scores) - _by_row(base * rate, scores))
        kept = jnp.exp2((top - base) * rate)
        return p, kept, new_top, total * kept + jnp.sum(p, axis=1)

    def item(turn: Array, used: Array) -> Array:
        request = _request(refs, plan, program + turn * plan.programs)
        tiles = _key_tiles(plan, request)
        token = request.token + plan.row_of(warpgroup)
        row = token + plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=WGMMA.reduce(1))
        position = row + request.shift
        row_begin, row_end = jnp.full_like(row, request.kv_begin), jnp.full_like(row, request.kv_end)
        if plan.left is not None:
            row_begin = jnp.maximum(row_begin, position - plan.left)
        if plan.right is not None:
            row_end = jnp.minimum(row_end, position + (plan.right + 1))

        def slot_of(i: Array | int) -> Array:
            return lax.rem(used + i, jnp.int32(stages))

        def first_key(i: Array | int) -> Array:
            return (tiles.stop - 1 - i) * block_kv

        plgpu.barrier_wait(ring.q_ready.at[warpgroup])
        plgpu.barrier_wait(ring.k_ready.at[slot_of(0)])

        def product(s: Any) -> Array:
            plgpu.wgmma(s, q, ring.k.at[slot_of(0)].transpose((1, 0)))
            return s[...]

        dots = pl.run_scoped(product, plgpu.ACC((ROWS, block_kv), jnp.float32))
        plgpu.barrier_arrive(ring.k_free.at[slot_of(0)])
        nothing = plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), WGMMA.reduce(1))
        zero = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), WGMMA.reduce(1))
        p, _, top, total = weighed(scored(dots, (row_begin, row_end), first_key(0)), nothing, zero)
        sums = plgpu.layout_cast(jnp.zeros((ROWS, call.v_dim), jnp.float32), WGMMA)

        def visit(i: Array, state: State, is_edge: bool) -> State:
            now, before = slot_of(i), slot_of(i - 1)
            # Converted here, the weights move to the registers of the last product's while the sums settle.
            p, sums = _settled(plan, state.p.astype(dtype), state.sums)
            plgpu.barrier_wait(ring.k_ready.at[now])
            if plan.takes_turns:
                plgpu.barrier_wait(ring.turn.at[warpgroup])

            def products(s_ref: Any, o_ref: Any) -> State:
                plgpu.wgmma(s_ref, q, ring.k.at[now].transpose((1, 0)))
                finish = _accumulated(plan, sums, o_ref, p, ring.v.at[before], ring.v_ready.at[before])
                if plan.takes_turns:
                    plgpu.barrier_arrive(ring.turn.at[lax.rem(warpgroup + 1, jnp.int32(plan.consumers))])
                [dots] = _settled(plan, s_ref[...] if plan.interpret else plgpu.wgmma_accumulator_load(s_ref, wait_n=1))
                plgpu.barrier_arrive(ring.k_free.at[now])
                scores = scored(dots, (row_begin, row_end) if is_edge else None, first_key(i))
                p_next, kept, top, total = weighed(scores, state.top, state.total)
                done = finish()
                plgpu.barrier_arrive(ring.v_free.at[before])
                return State(top, total, done * _by_row(kept, done), p_next)

            return pl.run_scoped(products, plgpu.ACC((ROWS, block_kv), jnp.float32), plgpu.ACC((ROWS, call.v_dim), jnp.float32))

        state = State(top, total, sums, p)
        masked, plain = functools.partial(visit, is_edge=True), functools.partial(visit, is_edge=False)
        ends = [tiles.stop - tiles.full_to, tiles.stop - tiles.full_from, tiles.count]
        state = lax.fori_loop(jnp.int32(1), ends[0], masked, state)
        state = lax.fori_loop(ends[0], ends[1], plain, state)
        if plan.has_left_edges:
            state = lax.fori_loop(ends[1], ends[2], masked, state)
        if not plan.stores_through_q:
            plgpu.barrier_arrive(ring.q_free.at[warpgroup])
        last = slot_of(tiles.count - 1)
        p, sums = _settled(plan, state.p.astype(dtype), state.sums)
        sums = pl.run_scoped(
            lambda o_ref: _accumulated(plan, sums, o_ref, p, ring.v.at[last], ring.v_ready.at[last])(),
            plgpu.ACC((ROWS, call.v_dim), jnp.float32),
        )
        plgpu.barrier_arrive(ring.v_free.at[last])

        q_head = request.q_head + plan.head_of(warpgroup)
        sink = refs["sinks"][q_head] if "sinks" in refs else None
        live = row < request.q_len
        top = jnp.where(live, state.top * scale, -jnp.inf)
        total = jnp.where(live, state.total, 0.0)
        weight, lse = softmax.finished_rows(top, total, sink)
        o = jnp.where(_by_row(total, sums) == 0, 0.0, sums * _by_row(weight, sums)).astype(dtype)
        _store(out, ring, plan, request, q_head, o, lse)
        if plan.stores_through_q:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(ring.q_free.at[warpgroup])
        return used + tiles.count

    if plan.takes_turns:  # the last warpgroup gives the first one its first turn, and the first one takes the last

        @pl.when(warpgroup == plan.consumers - 1)
        def _() -> None:
            plgpu.barrier_arrive(ring.turn.at[0])

    lax.fori_loop(0, turns, item, jnp.int32(0))
    if plan.takes_turns:

        @pl.when(warpgroup == 0)
        def _() -> None:
            plgpu.barrier_wait(ring.turn.at[0])

    plgpu.wait_smem_to_gmem(0)


def _settled(plan: Plan, *arrays: Array) -> tuple[Array, ...]:
    """The arrays, computed before any product that follows: what is left of them would hold it up."""
    return arrays if plan.interpret else tuple(lax.optimization_barrier(arrays))


def _accumulated(plan: Plan, sums: Array, o_ref: Any, p: Array, v: Any, v_ready: Any) -> Any:
    """Begins sums + p v, and returns what awaits it. The interpreter knows neither products of values nor set accumulators."""
    if plan.interpret:

        def multiplied() -> Array:
            plgpu.barrier_wait(v_ready)
            result = sums + jnp.dot(p, v[...], preferred_element_type=jnp.float32)
            plgpu.commit_smem()  # a product reads as TMA writes; this read does not
            return result

        return multiplied
    o_ref[...] = sums
    plgpu.barrier_wait(v_ready)
    plgpu.wgmma(o_ref, p, v)
    return lambda: _settled(plan, o_ref[...])[0]


def _store(out: dict[str, Any], ring: Ring, plan: Plan, request: Request, q_head: Array, o: Array, lse: Array) -> None:
    """Writes a warpgroup's rows: at once where all are the request's, else one by one."""
    warpgroup = lax.axis_index("wg")
    mine = plan.row_of(warpgroup)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    ring.o[warpgroup] = o
    if "lse" in out:
        ring.lse[warpgroup] = lse
    plgpu.commit_smem()
    if "lse" in out:
        index = jnp.int32(0) if plan.is_packed else request.index
        rows = pl.ds(request.tile * plan.tokens + mine, ROWS)
        plgpu.copy_smem_to_gmem(ring.lse.at[warpgroup], out["lse"].at[index, q_head, rows])

    def store_rows(first: Array | int, count: int) -> None:
        place = _at(plan, request.index, pl.ds(request.row + mine + first, count), q_head)
        plgpu.copy_smem_to_gmem(ring.o.at[warpgroup, pl.ds(first, count)], out["o"].at[place])

    if not plan.is_packed:  # rows past the array are not written
        store_rows(0, ROWS)
        return
    begin, end = (jnp.clip(x - request.token - mine, 0, ROWS) for x in (0, request.q_len))
    is_whole = end - begin == ROWS
    pl.when(is_whole)(lambda: store_rows(0, ROWS))

    @pl.when(jnp.logical_not(is_whole))
    def _() -> None:
        lax.fori_loop(begin, end, lambda row, _: store_rows(row, 1), None)


def _body(refs: dict[str, Any], out: dict[str, Any], plan: Plan, **memory: Any) -> None:
    ring = Ring(**memory | ({"o": memory["q"]} if plan.stores_through_q else {}))
    turns = lax.div(jnp.int32(plan.items - 1) - lax.axis_index("program"), jnp.int32(plan.programs)) + 1

    @pl.when(lax.axis_index("wg") == plan.consumers)
    def _() -> None:
        plgpu.set_max_registers(plan.registers[1], action="decrease")
        _produce(refs, ring, plan, turns)

    @pl.when(lax.axis_index("wg") < plan.consumers)
    def _() -> None:
        plgpu.set_max_registers(plan.registers[0], action="increase")
        _consume(refs, out, ring, plan, turns)


def _launch(plan: Plan, given: dict[str, Array], o_shape: tuple[int, ...], lse_shape: tuple[int, ...]) -> dict[str, Array]:
    call, tile, consumers = plan.call, plan.tile, plan.consumers
    dtype, stages = given["q"].dtype, tile.num_stages

    def tiled(*shape: int) -> Any:
        width = _tile_width(shape[-1])
        return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(2 * width)))

    # Rows of a packed tile may be written one by one, which swizzled memory does not allow.
    o = plgpu.SMEM((consumers, ROWS, call.v_dim), dtype) if plan.is_packed else tiled(consumers, ROWS, call.v_dim)
    memory = {
        "q": tiled(consumers, ROWS, call.head_dim),
        "k": tiled(stages, tile.block_kv, call.head_dim),
        "v": tiled(stages, tile.block_kv, call.v_dim),
        "o": None if plan.stores_through_q else o,
        "lse": plgpu.SMEM((consumers, ROWS), jnp.float32) if call.return_lse else None,
        "q_ready": plgpu.Barrier(num_barriers=consumers),
        "q_free": plgpu.Barrier(num_barriers=consumers),
        "k_ready": plgpu.Barrier(num_barriers=stages),
        "k_free": plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
        "v_ready": plgpu.Barrier(num_barriers=stages),
        "v_free": plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
        "v_raw": plgpu.Barrier() if plan.has_lengths else None,
        "turn": plgpu.Barrier(num_barriers=consumers) if plan.takes_turns else None,
    }
    out_type = {"o": jax.ShapeDtypeStruct(o_shape, dtype)}
    if call.return_lse:
        out_type["lse"] = jax.ShapeDtypeStruct(lse_shape, jnp.float32)
    names, outs = tuple(given), tuple(out_type)

    def entry(*refs: Any) -> None:
        ins, made = dict(zip(names, refs[: len(names)])), dict(zip(outs, refs[len(names) :]))
        pl.run_scoped(functools.partial(_body, ins, made, plan), collective_axes="wg", **memory)

    results = plgpu.kernel(
        entry,
        out_type=list(out_type.values()),
        grid=(plan.programs,),
        grid_names=("program",),
        num_threads=consumers + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if plan.interpret else None,
        kernel_name="gqa_prefill",
    )(*given.values())
    return dict(zip(outs, results))


def dense_prefill(
    call: AttentionCall,
    tile: TileConfig,
    *,
    interpret: bool = False,
    q: Array,
    k: Array,
    v: Array,
    q_lengths: Array | None,
    kv_lengths: Array | None,
    sinks: Array | None,
    **scales: None,
) -> tuple[Array, Array | None]:
    """Attention of q (B, Sq, Hq, D) over k (B, Skv, Hkv, D) and v (B, Skv, Hkv, Dv); lengths int32 (B,) or None.

    Returns:
      o (B, Sq, Hq, Dv), and lse (B, Sq, Hq) float32 or None; rows past a length are 0 and -inf (or the sink).
    """
    given = {"q": q, "k": k, "v": v, "q_lengths": q_lengths, "kv_lengths": kv_lengths, "sinks": sinks}
    given = {name: x for name, x in given.items() if x is not None}
    plan = dense_plan(call, tile, q.shape[1], k.shape[1], "q_lengths" in given or "kv_lengths" in given, interpret)
    made = _launch(plan, given, (*q.shape[:3], v.shape[-1]), (q.shape[0], q.shape[2], plan.tiles * plan.tokens))
    lse = jnp.swapaxes(made["lse"][:, :, : q.shape[1]], 1, 2) if call.return_lse else None
    return made["o"], lse


def packed_prefill(
    call: AttentionCall,
    tile: TileConfig,
    *,
    interpret: bool = False,
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_kv: Array,
    sinks: Array | None,
    **scales: None,
) -> tuple[Array, Array | None]:
    """Attention of packed requests: q (Tq, Hq, D), k (Tkv, Hkv, D), v (Tkv, Hkv, Dv), cu_seqlens int32 (B + 1,).

    Returns:
      o (Tq, Hq, Dv), and lse (Tq, Hq) float32 or None; rows of no request are 0 and -inf (or the sink).
    """
    plan = packed_plan(call, tile, q.shape[0], k.shape[0], interpret)
    tiles = packed_tiles(cu_seqlens_q, cu_seqlens_kv, plan)
    given = {"q": q, "k": k, "v": v, "tiles": tiles} | ({} if sinks is None else {"sinks": sinks})
    made = _launch(plan, given, (*q.shape[:2], v.shape[-1]), (1, q.shape[1], plan.tiles * plan.tokens))
    if not call.return_lse:
        return made["o"], None
    _, octet, token, q_len, *_ = tiles
    number = jnp.arange(plan.tokens, dtype=jnp.int32)[None, :]
    within = token[:, None] + number
    is_live = (within >= 0) & (within < q_len[:, None])
    row = jnp.where(is_live, octet[:, None] * OCTET + number, q.shape[0]).reshape(-1)
    lse = jnp.zeros(q.shape[:2], jnp.float32).at[row].set(made["lse"][0].T, mode="drop")
    return made["o"], lse
