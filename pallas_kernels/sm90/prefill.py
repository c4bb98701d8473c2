"""Prefill attention on Mosaic GPU for compute capability 9.0: dense, padded, packed, windowed and over pages, one kernel.

o[t, h] = sum_j softmax_j(scale * q[t, h] . k[j, h // G]) v[j, h // G] over the keys j that token t sees, per request; 16-bit
q (B, Sq, Hq, D), k (B, Skv, Hkv, D), v (B, Skv, Hkv, Dv), or the same packed without the leading axis, there with the keys
of each request's pages before its own; float32 sums, lse in natural logarithms.

What makes it fast:

- One warpgroup only copies: TMA keeps a ring of K and V tiles full, and is at the next item's queries while this one ends.
- Each other warpgroup owns 64 query rows. While the tensor cores multiply P of one KV tile with V, it works out the next
  tile's P: Q K^T of the next tile is issued before, and its softmax runs under the product with V.
- The warpgroups take turns to issue their products, so that one's exponentials run under the other's products.
- Sums are rescaled only where a maximum has moved far, and row sums reduced across threads once.
- Programs are persistent, one per SM. Items that read the same keys are neighbours, longest first; turns run through the
  programs there and back, so that all end together; the heads of a group share the K and V tiles of an item.
- KV tiles are visited from the last to the first: the diagonal and the tail are masked first, the middle runs unmasked.
- A tile of the cache is as many copies as it has pages; page ids are looked up, and holes marked, before the launch.

FlashAttention-3 (Shah et al., 2024) for the producer, the turns and the overlap within a warpgroup, FlashAttention-4 for
maxima that may lag; Mosaic GPU's sample in JAX showed that these can be said in Pallas.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
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
from pallas_kernels.common.prefill_plan import Requests, packed_requests
from pallas_kernels.sm80.append import rotated_and_appended
from pallas_kernels.sm90.blocks import (
    OCTET,
    ROWS,
    WGMMA,
    accumulated,
    by_row,
    is_paged,
    keep_rows,
    registers,
    rescaled,
    score_scale,
    scored,
    settled,
    tile_width,
    weighed,
)

Array = jax.Array


@dataclass(frozen=True)
class Plan(prefill_plan.Plan):
    """A launch of persistent programs.

    Attributes:
      is_packed: whether requests follow one another in one array.
      has_lengths: whether a tile of V may hold rows of no one, or of another request.
      page_size: of the cache that comes before a request's own keys; 0: there is none.
    """

    is_packed: bool
    has_lengths: bool
    page_size: int = 0

    def __post_init__(self) -> None:
        tile = self.tile
        if tile.block_q != ROWS * tile.num_warpgroups or tile.block_kv % ROWS:
            raise ValueError(f"sm90 prefill: {tile}; need block_q of 64 for each warpgroup and block_kv in whole 64s.")

    @property
    def pieces(self) -> int:
        """Copies that a KV tile takes: one a page where it holds several."""
        return pl.cdiv(self.tile.block_kv, self.page_size) if self.page_size else 1

    @property
    def cache_tiles(self) -> int:
        """KV tiles of a sequence's pages."""
        assert self.call.paging is not None
        return pl.cdiv(self.call.paging.capacity, self.tile.block_kv)

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
        return registers(self.consumers, 32 if self.has_lengths else 24)

    @property
    def takes_turns(self) -> bool:
        """Whether the consumers take turns to issue their products; from head_dim 192 on these outlast the exponentials."""
        return self.consumers > 1 and self.call.head_dim <= 128

    @property
    def holds_q(self) -> bool:
        """Whether queries are held in registers, where no mask needs these: shared memory is read less."""
        sees_all = self.left is None and self.right is None and not self.has_lengths
        return sees_all and self.consumers == 2 and self.call.head_dim <= 128 and not self.interpret

    @property
    def stores_through_q(self) -> bool:
        """Whether o leaves through the queries' memory, for want of more."""
        return self.call.head_dim == self.call.v_dim > 192 and not self.is_packed

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
    return Plan(call, tile, fold, tiles, lanes, lanes, q_rows, kv_rows, interpret, is_packed=False, has_lengths=has_lengths)


def packed_plan(call: AttentionCall, tile: TileConfig, q_rows: int, kv_rows: int, interpret: bool, page_size: int = 0) -> Plan:
    """The plan of q_rows queries and kv_rows keys of all requests together, before which a cache may come."""
    fold = heads_per_tile(call, tile)
    tokens = tile.block_q // fold
    tiles = (q_rows + (call.batch + 2) * _most_added(tokens)) // tokens
    heads, sizes = call.kv_heads, (q_rows, kv_rows, interpret)
    return Plan(call, tile, fold, tiles, heads, heads, *sizes, is_packed=True, has_lengths=True, page_size=page_size)


def _most_added(tokens: int) -> int:
    """Rows that a request's tiles have more than the request, at most: it begins within an octet and ends within a tile."""
    return OCTET - 1 + tokens - 1


def packed_tiles(
    plan: Plan, requests: Requests, cached: Array | None = None, is_whole: Array | None = None
) -> tuple[Array, Array]:
    """What `Request` says of every query tile: those that see the most keys first, those of no request last.

    Args:
      plan: how many tiles there are.
      requests: of the packed batch.
      cached: int32 (batch,), keys of each request's pages, or None.
      is_whole: bool (batch,), whether all of these pages exist.

    Returns:
      index, row / 8, token, q_len, kv_row / 8, kv_begin, kv_end, cached, is_whole; int32 (9, tiles). How many tiles are of
      a request; int32 (1,).
    """
    q_row, q_len, kv_row, kv_len = requests
    edge, nothing = jnp.zeros((1,), jnp.int32), jnp.zeros_like(q_row)
    cached = nothing if cached is None else jnp.concatenate([edge, cached, edge])
    whole = nothing if is_whole is None else jnp.concatenate([edge, is_whole.astype(jnp.int32), edge])
    before, kv_begin = q_row % OCTET, kv_row % OCTET
    first = (q_row + jnp.arange(len(q_row), dtype=jnp.int32) * _most_added(plan.tokens)) // plan.tokens  # tile of a request
    tile = jnp.arange(plan.tiles, dtype=jnp.int32)
    owner = jnp.sum(first[None, :] <= tile[:, None], axis=1, dtype=jnp.int32) - 1
    start = (tile - first[owner]) * plan.tokens
    is_idle = start >= jnp.where(q_len > 0, before + q_len, 0)[owner]
    index = jnp.clip(owner - 1, 0, plan.call.batch - 1)
    octet, token = q_row[owner] // OCTET + start // OCTET, start - before[owner]
    rest = (q_len, kv_row // OCTET, kv_begin, kv_begin + kv_len, cached, whole)
    live = (octet, token, *(x[owner] for x in rest))
    table = jnp.stack([index, *(jnp.where(is_idle, 0, x) for x in live)])
    work = jnp.where(is_idle, -1, _visible_keys(plan, token, q_len[owner], kv_len[owner], cached[owner]))
    return table[:, jnp.argsort(-work)], jnp.sum(~is_idle, dtype=jnp.int32)[None]


def _visible_keys(plan: Plan, token: Array, q_len: Array, kv_len: Array, cached: Array) -> Array:
    """How many keys lie between the first and the last one that a tile's tokens see."""
    first = jnp.maximum(token, 0) + kv_len - q_len
    last = jnp.minimum(token + plan.tokens, q_len) - 1 + kv_len - q_len
    end = kv_len if plan.right is None else jnp.clip(last + plan.right + 1, 0, kv_len)
    begin = 0 if plan.left is None else jnp.maximum(cached + first - plan.left, 0)
    return jnp.maximum(cached + end - begin, 0)


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
      kv_begin, kv_end: the request's own keys, counted from key 0.
      cached: keys of its pages.
      is_whole: whether all of these exist.
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
    cached: Array
    is_whole: Array
    tile: Array
    q_head: Array
    kv_head: Array


def _items(refs: dict[str, Any], plan: Plan) -> Array:
    """How many items there are, idle ones at the end not counted."""
    return refs["live_tiles"][0] * (plan.lanes * plan.bundles) if plan.is_packed else jnp.int32(plan.items)


def _item(plan: Plan, turn: Array) -> Array:
    """This program's item of a turn. Turns run through the programs there and back, so that each gets the same work."""
    program, last = lax.axis_index("program"), plan.programs - 1
    return turn * plan.programs + jnp.where(lax.rem(turn, jnp.int32(2)) == 0, program, last - program)


def _request(refs: dict[str, Any], plan: Plan, item: Array) -> Request:
    tile, rest = _div_mod(item, plan.lanes * plan.bundles)
    lane, bundle = _div_mod(rest, plan.bundles)
    index, kv_head = _div_mod(lane, plan.call.kv_heads)
    heads = (kv_head * plan.call.group_size + bundle * plan.fold, kv_head)
    if plan.is_packed:
        index, octet, token, q_len, kv_octet, begin, end, cached, is_whole = (refs["tiles"][i, tile] for i in range(9))
        return Request(index, octet * OCTET, token, q_len, kv_octet * OCTET, begin, end, cached, is_whole, tile, *heads)
    tile = plan.tiles - 1 - tile
    token, zero = tile * plan.tokens, jnp.int32(0)
    q_len = refs["q_lengths"][index] if "q_lengths" in refs else jnp.int32(plan.q_rows)
    kv_len = refs["kv_lengths"][index] if "kv_lengths" in refs else jnp.int32(plan.kv_rows)
    return Request(index, token, token, q_len, zero, zero, kv_len, zero, zero, tile, *heads)


class Run(NamedTuple):
    """A stretch of keys that an item attends: those of its pages, or its own.

    KV tiles are visited from `stop` - 1 down to `first`, of which [full_from, full_to) need no mask.

    Attributes:
      is_cached: whether they are those of its pages.
      shift: number of the key at the request's first token.
      begin, end: the keys, counted from the run's key 0.
      right: how many keys after its own a row sees; None: all there are.
      has_left_edges: whether a tile may hold keys before a row's first one.
    """

    is_cached: bool
    shift: Array
    begin: Array
    end: Array
    right: int | None
    has_left_edges: bool
    first: Array
    stop: Array
    full_from: Array
    full_to: Array

    @property
    def count(self) -> Array:
        """How many KV tiles."""
        return self.stop - self.first


def _runs(plan: Plan, request: Request) -> list[Run]:
    """The runs in the order of their visit.

    Of a request's own keys there is at least one tile, if need be one that no row sees, so that every item takes the same
    path; the first tile to be visited is always masked.
    """
    has_left_edges = plan.left is not None or plan.is_packed
    own = _run(
        plan, request, False, request.kv_end - request.q_len, request.kv_begin, request.kv_end, plan.right, has_left_edges
    )
    stop = jnp.maximum(own.stop, own.first + 1)
    full_to = jnp.clip(own.full_to, own.first, stop - 1)
    own = own._replace(stop=stop, full_from=jnp.minimum(own.full_from, full_to), full_to=full_to)
    if not plan.page_size:
        return [own]
    zero = jnp.zeros_like(request.cached)
    cache = _run(plan, request, True, request.cached, zero, request.cached, None, plan.left is not None)
    is_whole = request.is_whole != 0
    full = (jnp.where(is_whole, x, cache.first) for x in (cache.full_from, cache.full_to))
    return [own, cache._replace(**dict(zip(("full_from", "full_to"), full)))]


def _run(
    plan: Plan, request: Request, is_cached: bool, shift: Array, begin: Array, end: Array, right: int | None, has_left: bool
) -> Run:
    block_kv, left = jnp.int32(plan.tile.block_kv), plan.left
    low = jnp.maximum(request.token, 0) + shift
    high = jnp.minimum(request.token + plan.tokens, request.q_len) - 1 + shift

    def begin_of(position: Array) -> Array:
        return begin if left is None else jnp.maximum(position - left, begin)

    def end_of(position: Array) -> Array:
        return end if right is None else jnp.clip(position + (right + 1), 0, end)

    seen_to = jnp.where(request.token < request.q_len, end_of(high), 0)
    first = lax.div(jnp.minimum(begin_of(low), jnp.maximum(seen_to - 1, 0)), block_kv)
    stop = jnp.where(begin_of(low) < seen_to, lax.div(seen_to + (block_kv - 1), block_kv), first)
    full_to = jnp.clip(lax.div(end_of(low), block_kv), first, stop)
    full_from = jnp.clip(lax.div(begin_of(high) + (block_kv - 1), block_kv), first, full_to)
    return Run(is_cached, shift, begin, end, right, has_left, first, stop, full_from, full_to)


def _div_mod(x: Array, y: int) -> tuple[Array, Array]:
    return lax.div(x, jnp.int32(y)), lax.rem(x, jnp.int32(y))


def _at(plan: Plan, index: Array, rows: Any, head: Array) -> tuple[Any, ...]:
    """Where rows of a head lie: in a dense array of the request, or in a packed one."""
    return (rows, head) if plan.is_packed else (index, rows, head)


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
    stages, block_kv = plan.tile.num_stages, plan.tile.block_kv
    piece = block_kv // plan.pieces

    def places_of(request: Request, run: Run, tile: Array) -> Callable[[str, int], Any]:
        """Where the pieces of a KV tile lie. The page ids are read at once, so that their latencies overlap."""
        if not run.is_cached:
            first = request.kv_row + tile * block_kv
            return lambda name, i: refs[name].at[_at(plan, request.index, pl.ds(first + i * piece, piece), request.kv_head)]
        pages = [refs["page_ids"][request.index, tile * plan.pieces + i] for i in range(plan.pieces)]
        rows = pl.ds(lax.rem(tile, jnp.int32(pl.cdiv(plan.page_size, block_kv))) * block_kv, piece)
        return lambda name, i: refs[f"{name}_pages"].at[pages[i], rows, request.kv_head]

    def item(turn: Array, filled: Array) -> Array:
        request = _request(refs, plan, _item(plan, turn))
        for warpgroup in range(plan.consumers):
            pl.when(turn > 0)(functools.partial(plgpu.barrier_wait, ring.q_free.at[warpgroup]))
            rows = pl.ds(request.row + plan.row_of(warpgroup), ROWS)
            place = _at(plan, request.index, rows, request.q_head + plan.head_of(warpgroup))
            plgpu.copy_gmem_to_smem(refs["q"].at[place], ring.q.at[warpgroup], ring.q_ready.at[warpgroup])

        def load(i: Array, filled: Array, run: Run) -> Array:
            slot, tile = lax.rem(filled, jnp.int32(stages)), run.stop - 1 - i
            place_of = places_of(request, run, tile)

            def copy(name: str, memory: Any, ready: Any) -> None:
                for i in range(plan.pieces):
                    target = memory.at[slot] if plan.pieces == 1 else memory.at[slot, pl.ds(i * piece, piece)]
                    plgpu.copy_gmem_to_smem(place_of(name, i), target, ready)

            pl.when(filled >= stages)(lambda: plgpu.barrier_wait(ring.k_free.at[slot]))
            copy("k", ring.k, ring.k_ready.at[slot])
            pl.when(filled >= stages)(lambda: plgpu.barrier_wait(ring.v_free.at[slot]))
            if not plan.has_lengths:
                copy("v", ring.v, ring.v_ready.at[slot])
                return filled + 1
            begin, end = run.begin - tile * block_kv, run.end - tile * block_kv
            pages = refs["page_bits"][request.index, tile] if run.is_cached else None
            is_whole = (begin <= 0) & (end >= block_kv)
            if pages is not None:
                is_whole = is_whole & (pages == _all_pages(plan))
            pl.when(is_whole)(lambda: copy("v", ring.v, ring.v_ready.at[slot]))

            @pl.when(jnp.logical_not(is_whole))
            def _() -> None:
                copy("v", ring.v, ring.v_raw)
                plgpu.barrier_wait(ring.v_raw)
                keep_rows(ring.v.at[slot], begin, end, pages, piece)
                plgpu.commit_smem()
                for _ in range(plan.pieces):
                    plgpu.barrier_arrive(ring.v_ready.at[slot])

            return filled + 1

        for run in _runs(plan, request):
            filled = lax.fori_loop(0, run.count, functools.partial(load, run=run), filled)
        return filled

    filled = lax.fori_loop(0, turns, item, jnp.int32(0))
    if plan.interpret:  # which asks that whoever waits on a barrier sees each of its completions
        for warpgroup in range(plan.consumers):
            plgpu.barrier_wait(ring.q_free.at[warpgroup])

        def drain(i: Array, _: None) -> None:
            plgpu.barrier_wait(ring.k_free.at[lax.rem(i, jnp.int32(stages))])
            plgpu.barrier_wait(ring.v_free.at[lax.rem(i, jnp.int32(stages))])

        lax.fori_loop(jnp.maximum(filled - stages, 0), filled, drain, None)


def _all_pages(plan: Plan) -> int:
    """Bits of a KV tile whose pages all exist."""
    return (1 << plan.pieces) - 1


class State(NamedTuple):
    """Online softmax of a warpgroup's rows.

    Attributes:
      top: raw scores that the weights are relative to, at most `LAG` below the largest ones.
      total: sums of the weights over the columns that are equal modulo 8.
      sums: weighted sums of v.
      p: weights of the tile whose values are still to be added.
    """

    top: Array
    total: Array
    sums: Array
    p: Array


def _consume(refs: dict[str, Any], out: dict[str, Any], ring: Ring, plan: Plan, turns: Array) -> None:
    """Attends the items' rows of this warpgroup."""
    warpgroup = lax.axis_index("wg")
    call, stages, block_kv, dtype = plan.call, plan.tile.num_stages, plan.tile.block_kv, refs["q"].dtype
    scale = score_scale(call)

    def masked(scores: Array, request: Request, run: Run, tile: Array, row: Array) -> Array:
        """The scores of the keys that a row sees; `row` is the token of each."""
        position, first = row + run.shift, tile * block_kv
        column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=WGMMA)
        end = jnp.full_like(row, run.end)
        if run.right is not None:
            end = jnp.minimum(end, position + (run.right + 1))
        seen = column < by_row(end - first, scores)
        if run.has_left_edges:
            begin = jnp.full_like(row, run.begin)
            if plan.left is not None:
                begin = jnp.maximum(begin, position - plan.left)
            seen = seen & (column >= by_row(begin - first, scores))
        if run.is_cached:
            seen = seen & is_paged(column, refs["page_bits"][request.index, tile], block_kv // plan.pieces)
        return jnp.where(seen, scores, -jnp.inf)

    def take_turn() -> None:
        if plan.takes_turns:
            plgpu.barrier_wait(ring.turn.at[warpgroup])

    def pass_turn() -> None:
        if plan.takes_turns:
            plgpu.barrier_arrive(ring.turn.at[lax.rem(warpgroup + 1, jnp.int32(plan.consumers))])

    def item(turn: Array, used: Array) -> Array:
        request = _request(refs, plan, _item(plan, turn))
        runs = _runs(plan, request)
        row = request.token + plan.row_of(warpgroup) + plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=WGMMA.reduce(1))

        def slot_of(i: Array | int) -> Array:
            return lax.rem(used + i, jnp.int32(stages))

        plgpu.barrier_wait(ring.q_ready.at[warpgroup])
        q = plgpu.layout_cast(ring.q[warpgroup], WGMMA) if plan.holds_q else ring.q.at[warpgroup]
        plgpu.barrier_wait(ring.k_ready.at[slot_of(0)])

        def product(s: Any) -> Array:
            plgpu.wgmma(s, q, ring.k.at[slot_of(0)].transpose((1, 0)))
            return s[...]

        dots = pl.run_scoped(product, plgpu.ACC((ROWS, block_kv), jnp.float32))
        plgpu.barrier_arrive(ring.k_free.at[slot_of(0)])
        nothing = plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), WGMMA.reduce(1))
        zero = plgpu.layout_cast(jnp.zeros((ROWS, OCTET), jnp.float32), WGMMA)
        p, _, top, total = weighed(
            scale, masked(scored(call, dots), request, runs[0], runs[0].stop - 1, row), nothing, zero, True
        )
        plgpu.barrier_wait(ring.v_ready.at[slot_of(0)])
        sums = plgpu.layout_cast(jnp.zeros((ROWS, call.v_dim), jnp.float32), WGMMA)

        def visit(i: Array, state: State, run: Run, visited: Array | int, is_edge: bool) -> State:
            """The state after the i-th tile of a run, before which others have been visited."""
            now, before = slot_of(visited + i), slot_of(visited + i - 1)
            plgpu.barrier_wait(ring.k_ready.at[now])
            take_turn()

            def products(s_ref: Any, o_ref: Any) -> State:
                plgpu.wgmma(s_ref, q, ring.k.at[now].transpose((1, 0)))
                finish = accumulated(plan.interpret, state.sums, o_ref, state.p, ring.v.at[before])
                pass_turn()
                [dots] = settled(
                    plan.interpret, s_ref[...] if plan.interpret else plgpu.wgmma_accumulator_load(s_ref, wait_n=1)
                )
                plgpu.barrier_arrive(ring.k_free.at[now])
                scores = scored(call, dots)
                if is_edge:
                    scores = masked(scores, request, run, run.stop - 1 - i, row)
                p, kept, top, total = weighed(scale, scores, state.top, state.total, is_edge)
                # This wait is also what keeps the exponentials under the product with V: ptxas would put them after the
                # wait for it, but moves no instruction over the loop in which a barrier is polled.
                plgpu.barrier_wait(ring.v_ready.at[now])
                done = finish()
                plgpu.barrier_arrive(ring.v_free.at[before])
                p, sums = settled(plan.interpret, p.astype(dtype), rescaled(plan.interpret, done, kept))
                return State(top, total, sums, p)

            return pl.run_scoped(products, plgpu.ACC((ROWS, block_kv), jnp.float32), plgpu.ACC((ROWS, call.v_dim), jnp.float32))

        state, begin, visited = State(top, total, sums, p.astype(dtype)), jnp.int32(1), jnp.int32(0)
        for run in runs:
            edge, plain = (functools.partial(visit, run=run, visited=visited, is_edge=is_edge) for is_edge in (True, False))
            full_to, full_from = run.stop - run.full_to, run.stop - run.full_from
            state = lax.fori_loop(begin, full_to, edge, state)
            state = lax.fori_loop(full_to, full_from, plain, state)
            if run.has_left_edges:
                state = lax.fori_loop(full_from, run.count, edge, state)
            begin, visited = jnp.int32(0), visited + run.count
        if not plan.stores_through_q:
            plgpu.barrier_arrive(ring.q_free.at[warpgroup])
        last = slot_of(visited - 1)

        def last_product(o_ref: Any) -> Array:
            take_turn()
            finish = accumulated(plan.interpret, state.sums, o_ref, state.p, ring.v.at[last])
            pass_turn()
            return finish()

        sums = pl.run_scoped(last_product, plgpu.ACC((ROWS, call.v_dim), jnp.float32))
        plgpu.barrier_arrive(ring.v_free.at[last])

        q_head = request.q_head + plan.head_of(warpgroup)
        sink = refs["sinks"][q_head] if "sinks" in refs else None
        live = row < request.q_len
        top = jnp.where(live, state.top * scale, -jnp.inf)
        total = jnp.where(live, jnp.sum(state.total, axis=1), 0.0)
        weight, lse = softmax.finished_rows(top, total, sink)
        o = jnp.where(by_row(total, sums) == 0, 0.0, sums * by_row(weight, sums)).astype(dtype)
        _store(out, ring, plan, request, q_head, o, lse)
        if plan.stores_through_q:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(ring.q_free.at[warpgroup])
        return used + visited

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
    items = _items(refs, plan)
    whole = lax.div(items, jnp.int32(plan.programs))
    turns = whole + (_item(plan, whole) < items).astype(jnp.int32)

    @pl.when(lax.axis_index("wg") == plan.consumers)
    def _() -> None:
        plgpu.set_max_registers(plan.registers[1], action="decrease")
        _produce(refs, ring, plan, turns)

    @pl.when(lax.axis_index("wg") < plan.consumers)
    def _() -> None:
        plgpu.set_max_registers(plan.registers[0], action="increase")
        _consume(refs, out, ring, plan, turns)


def _in_octets(x: Array) -> Array:
    """Rows up to a multiple of 8, which copies into swizzled memory ask of an array, and up to 8 where there are none."""
    rows = x.shape[-3]
    missing = pl.cdiv(max(rows, 1), OCTET) * OCTET - rows
    return jnp.pad(x, [*[(0, 0)] * (x.ndim - 3), (0, missing), (0, 0), (0, 0)]) if missing else x


def _launch(plan: Plan, given: dict[str, Array], lse_shape: tuple[int, ...]) -> dict[str, Array]:
    call, tile, consumers = plan.call, plan.tile, plan.consumers
    dtype, stages = given["q"].dtype, tile.num_stages
    if given["q"].size == 0:
        shape = (*given["q"].shape[:-1], call.v_dim)
        return {"o": jnp.zeros(shape, dtype), "lse": jnp.zeros(lse_shape, jnp.float32)}
    given = given | {name: _in_octets(given[name]) for name in ("q", "k", "v")}

    def tiled(*shape: int) -> Any:
        width = tile_width(shape[-1])
        return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(2 * width)))

    # Rows of a packed tile may be written one by one, which swizzled memory does not allow; TMA asks that each begin at a
    # multiple of 128 bytes.
    assert not plan.is_packed or call.v_dim % 64 == 0
    o = plgpu.SMEM((consumers, ROWS, call.v_dim), dtype) if plan.is_packed else tiled(consumers, ROWS, call.v_dim)
    memory = {
        "q": tiled(consumers, ROWS, call.head_dim),
        "k": tiled(stages, tile.block_kv, call.head_dim),
        "v": tiled(stages, tile.block_kv, call.v_dim),
        "o": None if plan.stores_through_q else o,
        "lse": plgpu.SMEM((consumers, ROWS), jnp.float32) if call.return_lse else None,
        "q_ready": plgpu.Barrier(num_barriers=consumers),
        "q_free": plgpu.Barrier(num_barriers=consumers),
        "k_ready": plgpu.Barrier(num_arrivals=plan.pieces, num_barriers=stages),
        "k_free": plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
        "v_ready": plgpu.Barrier(num_arrivals=plan.pieces, num_barriers=stages),
        "v_free": plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
        "v_raw": plgpu.Barrier(num_arrivals=plan.pieces) if plan.has_lengths else None,
        "turn": plgpu.Barrier(num_barriers=consumers) if plan.takes_turns else None,
    }
    out_type = {"o": jax.ShapeDtypeStruct((*given["q"].shape[:-1], call.v_dim), dtype)}
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
    made = dict(zip(outs, results))
    return made | {"o": made["o"][..., : plan.q_rows, :, :]}


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
    made = _launch(plan, given, (q.shape[0], q.shape[2], plan.tiles * plan.tokens))
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
    tiles, live = packed_tiles(plan, packed_requests(cu_seqlens_q, cu_seqlens_kv, plan.q_rows))
    return _packed(plan, {"q": q, "k": k, "v": v, "tiles": tiles, "live_tiles": live, "sinks": sinks})


def _packed(plan: Plan, arrays: dict[str, Array | None]) -> tuple[Array, Array | None]:
    """The results of a packed launch, whose lse comes in tiles."""
    given = {name: x for name, x in arrays.items() if x is not None}
    q, tiles = given["q"], given["tiles"]
    made = _launch(plan, given, (1, q.shape[1], plan.tiles * plan.tokens))
    if not plan.call.return_lse:
        return made["o"], None
    _, octet, token, q_len, *_ = tiles
    number = jnp.arange(plan.tokens, dtype=jnp.int32)[None, :]
    within = token[:, None] + number
    is_live = (within >= 0) & (within < q_len[:, None])
    row = jnp.where(is_live, octet[:, None] * OCTET + number, q.shape[0]).reshape(-1)
    lse = jnp.zeros(q.shape[:2], jnp.float32).at[row].set(made["lse"][0].T, mode="drop")
    return made["o"], lse


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
    sinks: Array | None,
    **scales: None,
) -> tuple[Array, Array | None, Array, Array]:
    """Attention of packed chunks over what the cache holds of their sequences and over themselves; they are appended.

    Arguments and results are those of sm80's `paged_prefill`. Pages are of 8 rows or more, and a KV tile is a whole number
    of pages or a page one of tiles.
    """
    q, k, k_pages, v_pages = rotated_and_appended(
        call, q, k, v, k_pages, v_pages, page_table, cu_seqlens_q, cache_lengths, inv_freq, None, None, interpret=interpret
    )
    plan = packed_plan(call, tile, q.shape[0], k.shape[0], interpret, k_pages.shape[1])
    ids, bits, is_whole = _pages(plan, page_table, cache_lengths, k_pages.shape[0])
    tiles, live = packed_tiles(plan, packed_requests(cu_seqlens_q, cu_seqlens_q, plan.q_rows), cache_lengths, is_whole)
    arrays = {"q": q, "k": k, "v": v, "k_pages": k_pages, "v_pages": v_pages, "page_ids": ids, "page_bits": bits}
    o, lse = _packed(plan, arrays | {"tiles": tiles, "live_tiles": live, "sinks": sinks})
    return o, lse, k_pages, v_pages


def _pages(plan: Plan, page_table: Array, cache_lengths: Array, num_pages: int) -> tuple[Array, Array, Array]:
    """The pages of every KV tile of the cache.

    Returns:
      The id of each piece of each tile, int32 (B, tiles * pieces), 0 for a piece that is past the cached keys or whose page
      does not exist; a bit for each piece that is neither, int32 (B, tiles); whether no page is missing, bool (B,).
    """
    batch, width = page_table.shape
    piece = plan.tile.block_kv // plan.pieces
    first = jnp.arange(plan.cache_tiles * plan.pieces, dtype=jnp.int32) * piece
    column = jnp.minimum(first // plan.page_size, width - 1)
    page = jnp.take(page_table, column, axis=1)
    in_use = first[None, :] < cache_lengths[:, None]
    if plan.left is not None:
        in_use = in_use & (first[None, :] + piece > cache_lengths[:, None] - plan.left)
    exists = (page >= 0) & (page < num_pages) & (first[None, :] < cache_lengths[:, None])
    bit = 1 << jnp.arange(plan.pieces, dtype=jnp.int32)
    bits = jnp.sum(jnp.where(exists.reshape(batch, -1, plan.pieces), bit[None, None, :], 0), axis=2, dtype=jnp.int32)
    return jnp.where(exists, page, 0), bits, ~jnp.any(in_use & ~exists, axis=1)
