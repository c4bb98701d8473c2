"""Decode attention on Mosaic GPU for compute capability 9.0: contiguous and paged caches of 16-bit types, one kernel.

o[b, t, h] = sum_j softmax_j(scale * q[b, t, h] . k[b, j, h // G]) v[b, j, h // G] over the keys j that token t sees; q
(B, Tq, Hq, D) holds the last Tq positions of each sequence, causal among themselves; k and v are (B, S, Hkv, D) and
(B, S, Hkv, Dv), or pages (P, page_size, Hkv, ...) behind a table; float32 sums, lse in natural logarithms.

What makes it fast:

- The G query heads of a KV head, times the query tokens, are rows of one warpgroup's products: K and V are read once.
- One warpgroup only copies: TMA keeps a ring of K and V tiles full, across the ends of sequences too. The others take its
  tiles in turn, each with a softmax of its own, so that one multiplies while another waits or exponentiates.
- The tiles that the batch really has, end to end over all sequences, are divided among the programs in equal shares: no
  program waits for a long sequence. Programs of the KV heads take the same shares side by side, and read whole rows.
- A second kernel merges what the shares of a sequence found, in order. It is launched while the first still runs
  (programmatic dependent launch), finds its parts, and waits for them alone.

Where a sequence is cut depends on the lengths of the others, and with the cuts the last bits of its result may; the same
batch gives the same bits.

FlashDecoding (Dao, Haziza, Massa, Sizov, 2023) for the splits; the shares are those of Stream-K (Osama et al., 2023).
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
from pallas_kernels.common import softmax
from pallas_kernels.sm80.append import write
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
from pallas_kernels.xla.rope import rotated
from pallas_kernels.xla.spans import last_positions

Array = jax.Array
LANES = 128  # threads of a warpgroup
STRIDED = plgpu.Layout.WG_STRIDED((LANES,), 1)
PRODUCER_REGISTERS = 40
TOGETHER = 16  # sequences, or parts, whose loads are under way at once


@dataclass(frozen=True)
class Plan:
    """A launch.

    Attributes:
      call: the facts.
      tile: block_q rows of the products, block_kv keys, num_stages tiles of K and of V in flight, num_warpgroups that multiply.
      batch, tokens: sequences, and query tokens of each.
      capacity: keys that a sequence can hold.
      page_size, num_pages: of the pools; 0 for a contiguous cache.
      has_new: whether the keys of the query tokens come beside the cache, not in it.
      interpret: whether Pallas' interpreter runs it.
    """

    call: AttentionCall
    tile: TileConfig
    batch: int
    tokens: int
    capacity: int
    page_size: int
    num_pages: int
    has_new: bool
    interpret: bool

    def __post_init__(self) -> None:
        if self.tile.block_q != ROWS or self.tile.block_kv % ROWS or self.rows > ROWS:
            raise ValueError(
                f"sm90 decode: {self.tile}; need block_q of 64, that the query rows fit, and block_kv in whole 64s."
            )
        if self.tile.num_stages % self.consumers:
            raise ValueError(
                f"sm90 decode: {self.tile}; need num_stages in whole {self.consumers}s, a slot's reader being one."
            )

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply."""
        return self.tile.num_warpgroups

    @property
    def registers(self) -> tuple[int, int]:
        """A thread's, of a consumer and of the producer."""
        return registers(self.consumers, PRODUCER_REGISTERS)

    @property
    def heads(self) -> int:
        """KV heads."""
        return self.call.kv_heads

    @property
    def rows(self) -> int:
        """Query rows of a KV head."""
        return self.tokens * self.call.group_size

    @property
    def shares(self) -> int:
        """Programs among which the tiles of a KV head are divided, where there are as many."""
        most = self.batch * pl.cdiv(self.capacity, self.tile.block_kv)
        return max(1, min(self.call.device.sm_count // self.heads, most))

    @property
    def parts(self) -> int:
        """Partial results of a KV head and a consumer: each sequence has a first one, and each share may begin within one."""
        return self.batch + self.shares

    @property
    def pieces(self) -> int:
        """Copies that a KV tile takes: one a page where it holds several."""
        return pl.cdiv(self.tile.block_kv, self.page_size) if self.page_size else 1

    @property
    def piece(self) -> int:
        """Keys of a copy."""
        return self.tile.block_kv // self.pieces

    @property
    def left(self) -> int | None:
        """Keys visible before a token's own, or None."""
        return self.call.window.left if self.call.window else None

    @property
    def merged_rows(self) -> int:
        """Query rows that a program of the merge writes."""
        return max(1, LANES // self.call.v_dim)


class Sequence(NamedTuple):
    """What a sequence asks of the cache: int32 scalars.

    Attributes:
      length: its keys there.
      position: of its first query token.
      low: the first one that any of its tokens sees.
      begin: the KV tile that holds it.
      tiles: KV tiles from there on, one at least.
    """

    length: Array
    position: Array
    low: Array
    begin: Array
    tiles: Array


def _sequence(refs: dict[str, Any], plan: Plan, index: Array) -> Sequence:
    block_kv = jnp.int32(plan.tile.block_kv)
    length = jnp.clip(refs["lengths"][index], 0, plan.capacity)
    position = length if plan.has_new else length - plan.tokens
    low = jnp.int32(0) if plan.left is None else jnp.clip(position - plan.left, 0, jnp.maximum(length - 1, 0))
    begin = lax.div(low, block_kv)
    tiles = jnp.maximum(lax.div(length + (block_kv - 1), block_kv) - begin, 1)
    return Sequence(length, position, low, begin, tiles)


def _scan[Carry](refs: dict[str, Any], plan: Plan, visit: Callable[[Carry, Array], Carry], carry: Carry) -> Carry:
    """Visits the numbers of tiles of all sequences in order; the lengths are loaded many at a time."""
    width = min(TOGETHER, plan.batch)

    def some(i: Array, carry: Carry) -> Carry:
        indices = [i * width + j for j in range(width)]
        tiles = [_sequence(refs, plan, jnp.minimum(index, plan.batch - 1)).tiles for index in indices]
        for index, count in zip(indices, tiles, strict=True):
            carry = visit(carry, jnp.where(index < plan.batch, count, 0))
        return carry

    return lax.fori_loop(0, pl.cdiv(plan.batch, width), some, carry)


def _totals(refs: dict[str, Any], plan: Plan) -> tuple[Array, Array]:
    """How many KV tiles the batch has, and the shares they are divided in: none is empty."""
    tiles = _scan(refs, plan, lambda total, count: total + count, jnp.int32(0))
    return tiles, jnp.minimum(tiles, plan.shares)


class Place(NamedTuple):
    """A sequence, and how many KV tiles come before its own."""

    index: Array
    before: Array


def _place(refs: dict[str, Any], plan: Plan, tile: Array) -> Place:
    """The place of one of the batch's tiles."""

    def visit(carry: tuple[Place, Array], count: Array) -> tuple[Place, Array]:
        place, total = carry
        total = total + count
        is_past = total <= tile
        return Place(place.index + is_past.astype(jnp.int32), jnp.where(is_past, total, place.before)), total

    zero = jnp.int32(0)
    return _scan(refs, plan, visit, (Place(zero, zero), zero))[0]


class Share(NamedTuple):
    """A program's stretch of the batch's tiles, [start, stop), in `count` sequences from the first one's place on."""

    head: Array
    number: Array
    start: Array
    stop: Array
    first: Place
    count: Array


def _share(refs: dict[str, Any], plan: Plan) -> Share:
    program, heads = lax.axis_index("program"), jnp.int32(plan.heads)
    number, (tiles, shares) = lax.div(program, heads), _totals(refs, plan)
    start, stop = (lax.div(jnp.minimum(x, shares) * tiles, shares) for x in (number, number + 1))
    first = _place(refs, plan, start)
    last = _place(refs, plan, jnp.maximum(stop - 1, start))
    return Share(lax.rem(program, heads), number, start, stop, first, jnp.where(start < stop, last.index - first.index + 1, 0))


class Stretch(NamedTuple):
    """The part of a share that is of one sequence: KV tiles [first, stop), counted from key 0, and whether it is an end."""

    index: Array
    sequence: Sequence
    first: Array
    stop: Array
    is_start: Array
    is_end: Array

    def tiles(self, plan: Plan) -> Array:
        """Tiles of the ring that it takes: the new tokens are the last one of their sequence."""
        return self.stop - self.first + (self.is_end.astype(jnp.int32) if plan.has_new else 0)


def _each_stretch[Carry](
    refs: dict[str, Any], plan: Plan, share: Share, visit: Callable[[Array, Stretch, Carry], Carry], carry: Carry
) -> Carry:
    """Visits the share's sequences: visit(number, stretch, carry) -> carry."""

    def one(i: Array, outer: tuple[Array, Carry]) -> tuple[Array, Carry]:
        before, carry = outer
        index = share.first.index + i
        sequence = _sequence(refs, plan, index)
        first = jnp.maximum(share.start - before, 0)
        stop = jnp.minimum(share.stop - before, sequence.tiles)
        ends = first == 0, stop == sequence.tiles
        stretch = Stretch(index, sequence, sequence.begin + first, sequence.begin + stop, *ends)
        return before + sequence.tiles, visit(i, stretch, carry)

    return lax.fori_loop(0, share.count, one, (share.first.before, carry))[1]


def _pages(refs: dict[str, Any], plan: Plan, stretch: Stretch, tile: Array) -> tuple[list[Array], list[Array]]:
    """The page of each piece of a KV tile, and whether it exists and holds keys that are seen."""
    first = tile * plan.tile.block_kv
    width = refs["page_table"].shape[1]
    pages, in_use = [], []
    for i in range(plan.pieces):
        key = first + i * plan.piece
        page = refs["page_table"][stretch.index, jnp.minimum(lax.div(key, jnp.int32(plan.page_size)), width - 1)]
        is_seen = (key < stretch.sequence.length) & (key + plan.piece > stretch.sequence.low)
        pages.append(page)
        in_use.append(is_seen & (page >= 0) & (page < plan.num_pages))
    return pages, in_use


class Ring(NamedTuple):
    """The shared memory of a program, and the barriers over it: `ready` when filled, `free` when read."""

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


def _produce(refs: dict[str, Any], ring: Ring, plan: Plan, share: Share) -> None:
    """Fills the ring, sequence by sequence."""
    block_kv, stages, group, head = plan.tile.block_kv, plan.tile.num_stages, plan.call.group_size, share.head

    def fill(number: Array, stretch: Stretch, filled: Array) -> Array:
        pl.when(number > 0)(functools.partial(plgpu.barrier_wait, ring.q_free))
        for token in range(plan.tokens):
            heads = refs["q"].at[stretch.index, token, pl.ds(head * group, group)]
            plgpu.copy_gmem_to_smem(heads, ring.q.at[pl.ds(token * group, group)], ring.q_ready)

        def load(filled: Array, copy: Callable[[str, Any, Any], None]) -> Array:
            slot = lax.rem(filled, jnp.int32(stages))
            for name, memory, ready, free in (
                ("k", ring.k, ring.k_ready, ring.k_free),
                ("v", ring.v, ring.v_ready, ring.v_free),
            ):
                pl.when(filled >= stages)(functools.partial(plgpu.barrier_wait, free.at[slot]))
                copy(name, memory.at[slot], ready.at[slot])
            return filled + 1

        def cached(tile: Array, filled: Array) -> Array:
            first = tile * block_kv
            if not plan.page_size:
                rows = pl.ds(first, block_kv)
                return load(filled, lambda name, *to: plgpu.copy_gmem_to_smem(refs[name].at[stretch.index, rows, head], *to))
            pages, in_use = _pages(refs, plan, stretch, tile)
            row = lax.rem(first, jnp.int32(plan.page_size)) if plan.pieces == 1 else 0

            def copy(name: str, memory: Any, ready: Any) -> None:
                for i in range(plan.pieces):
                    source = refs[name].at[pages[i], pl.ds(row, plan.piece), head]
                    target = memory if plan.pieces == 1 else memory.at[pl.ds(i * plan.piece, plan.piece)]
                    pl.when(in_use[i])(functools.partial(plgpu.copy_gmem_to_smem, source, target, ready))
                    pl.when(jnp.logical_not(in_use[i]))(functools.partial(plgpu.barrier_arrive, ready))

            return load(filled, copy)

        def new(filled: Array) -> Array:
            rows = pl.ds(0, _octets(plan.tokens))

            def copy(name: str, memory: Any, ready: Any) -> None:
                plgpu.copy_gmem_to_smem(refs[f"{name}_new"].at[stretch.index, rows, head], memory.at[rows], ready)
                for _ in range(plan.pieces - 1):
                    plgpu.barrier_arrive(ready)

            return load(filled, copy)

        filled = lax.fori_loop(stretch.first, stretch.stop, cached, filled)
        return lax.cond(stretch.is_end, new, lambda filled: filled, filled) if plan.has_new else filled

    filled = _each_stretch(refs, plan, share, fill, jnp.int32(0))
    if plan.interpret:  # which asks that whoever waits on a barrier sees each of its completions
        pl.when(share.count > 0)(functools.partial(plgpu.barrier_wait, ring.q_free))

        def drain(i: Array, _: None) -> None:
            plgpu.barrier_wait(ring.k_free.at[lax.rem(i, jnp.int32(stages))])
            plgpu.barrier_wait(ring.v_free.at[lax.rem(i, jnp.int32(stages))])

        lax.fori_loop(jnp.maximum(filled - stages, 0), filled, drain, None)


class State(NamedTuple):
    """Online softmax of the rows: raw scores that the weights are relative to, their sums by column modulo 8, and v's."""

    top: Array
    total: Array
    sums: Array


def _consume(refs: dict[str, Any], parts: dict[str, Any], ring: Ring, plan: Plan, share: Share, consumer: Array) -> None:
    """Attends the share's sequences, to the tiles in the slots of the ring that are this consumer's."""
    call, block_kv, stages, dtype = plan.call, plan.tile.block_kv, plan.tile.num_stages, refs["q"].dtype
    consumers = plan.consumers
    scale = score_scale(call)
    token = lax.div(
        plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=WGMMA.reduce(1)),
        plgpu.layout_cast(jnp.full((ROWS,), call.group_size, jnp.int32), WGMMA.reduce(1)),
    )

    def attend(number: Array, stretch: Stretch, used: Array) -> Array:
        length, position = stretch.sequence.length, stretch.sequence.position
        plgpu.barrier_wait(ring.q_ready)
        q = plgpu.load(ring.q, layout=WGMMA, optimized=False)
        plgpu.commit_smem()  # TMA writes there next
        plgpu.barrier_arrive(ring.q_free)

        def visit(slot: Array, key: Array, begin: Any, end: Array, pages: Array | None, is_plain: Array, state: State) -> State:
            """The state after a tile of the keys from `key` on, of which [begin, end) exist."""

            def masked(scores: Array) -> Array:
                column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=WGMMA)
                seen = column < by_row(jnp.minimum(position + token + 1, end) - key, scores)
                if plan.left is not None:
                    seen = seen & (column >= by_row(position + token - plan.left - key, scores))
                if pages is not None:
                    seen = seen & is_paged(column, pages, plan.piece)
                return jnp.where(seen, scores, -jnp.inf)

            plgpu.barrier_wait(ring.k_ready.at[slot])
            dots = _products(plan, q, ring.k.at[slot])
            plgpu.barrier_arrive(ring.k_free.at[slot])
            scores = lax.cond(is_plain, lambda s: s, masked, scored(call, dots))
            p, kept, top, total = weighed(scale, scores, state.top, state.total, is_edge=True)
            plgpu.barrier_wait(ring.v_ready.at[slot])

            @pl.when(jnp.logical_not(is_plain))
            def _() -> None:
                keep_rows(ring.v.at[slot], begin - key, end - key, pages, plan.piece)
                plgpu.commit_smem()

            p, sums = settled(plan.interpret, p.astype(dtype), rescaled(plan.interpret, state.sums, kept))

            def added(o_ref: Any) -> Array:
                return accumulated(plan.interpret, sums, o_ref, p, ring.v.at[slot])()

            sums = pl.run_scoped(added, plgpu.ACC((ROWS, call.v_dim), jnp.float32))
            plgpu.barrier_arrive(ring.v_free.at[slot])
            return State(top, total, sums)

        # The first tile in a slot of this consumer's.
        own = stretch.first + lax.rem(consumer + (consumers - 1) * used, jnp.int32(consumers))

        def cached(number: Array, state: State) -> State:
            tile = own + number * consumers
            slot, key = lax.rem(used + tile - stretch.first, jnp.int32(stages)), tile * block_kv
            is_plain, pages = key + block_kv <= jnp.minimum(length, position + 1), None
            if plan.left is not None:
                is_plain = is_plain & (key >= position + plan.tokens - 1 - plan.left)
            if plan.page_size:
                bits = (jnp.where(x, jnp.int32(1 << i), 0) for i, x in enumerate(_pages(refs, plan, stretch, tile)[1]))
                pages = functools.reduce(jnp.bitwise_or, bits)
                is_plain = is_plain & (pages == (1 << plan.pieces) - 1)
            return visit(slot, key, stretch.sequence.low, length, pages, is_plain, state)

        def new(state: State) -> State:
            slot = lax.rem(used + stretch.stop - stretch.first, jnp.int32(stages))
            return visit(slot, position, position, position + plan.tokens, None, jnp.bool_(False), state)

        state = State(
            plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), WGMMA.reduce(1)),
            plgpu.layout_cast(jnp.zeros((ROWS, OCTET), jnp.float32), WGMMA),
            plgpu.layout_cast(jnp.zeros((ROWS, call.v_dim), jnp.float32), WGMMA),
        )
        count = jnp.maximum(lax.div(stretch.stop - own + (consumers - 1), jnp.int32(consumers)), 0)
        state = lax.fori_loop(0, count, cached, state)
        if plan.has_new:
            is_own = lax.rem(used + stretch.stop - stretch.first, jnp.int32(consumers)) == consumer
            state = lax.cond(stretch.is_end & is_own, new, lambda state: state, state)
        _write(parts, ring, plan, share, stretch, consumer, state, scale)
        return used + stretch.tiles(plan)

    _each_stretch(refs, plan, share, attend, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


def _products(plan: Plan, q: Array, k: Any) -> Array:
    """The float32 products of q's rows and a tile's keys. The interpreter does not multiply values on the tensor cores."""
    if plan.interpret:
        dots = jnp.dot(q, k[...].T, preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # a product reads as TMA writes; this read does not
        return dots

    def multiplied(dots: Any) -> Array:
        plgpu.wgmma(dots, q, k.transpose((1, 0)))
        return dots[...]

    return pl.run_scoped(multiplied, plgpu.ACC((ROWS, plan.tile.block_kv), jnp.float32))


def _write(
    parts: dict[str, Any],
    ring: Ring,
    plan: Plan,
    share: Share,
    stretch: Stretch,
    consumer: Array,
    state: State,
    scale: float,
) -> None:
    """Writes what a consumer found in a stretch: the mean of the values, and the log-sum-exp in base 2."""
    total = jnp.sum(state.total, axis=1)
    is_empty = total == 0
    o = jnp.where(by_row(is_empty, state.sums), 0.0, state.sums * by_row(1.0 / total, state.sums))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    own_o, own_lse = ring.o.at[consumer], ring.lse.at[consumer]
    own_o[...] = o
    own_lse[...] = jnp.where(is_empty, -jnp.inf, state.top * scale + jnp.log2(total))
    plgpu.commit_smem()
    part = jnp.where(stretch.is_start, stretch.index, plan.batch + share.number) * plan.consumers + consumer
    plgpu.copy_smem_to_gmem(own_o.at[pl.ds(0, plan.rows)], parts["o"].at[part, share.head])
    plgpu.copy_smem_to_gmem(own_lse, parts["lse"].at[part, share.head])


def _attend_kernel(refs: dict[str, Any], parts: dict[str, Any], plan: Plan, **memory: Any) -> None:
    ring = Ring(**memory)
    if not plan.interpret:
        plgpu.griddepcontrol_wait()
        plgpu.griddepcontrol_launch_dependents()
    share, warpgroup = _share(refs, plan), lax.axis_index("wg")

    @pl.when(warpgroup == plan.consumers)
    def _() -> None:
        if plan.consumers > 1:
            plgpu.set_max_registers(plan.registers[1], action="decrease")
        _produce(refs, ring, plan, share)

    @pl.when(warpgroup < plan.consumers)
    def _() -> None:
        if plan.consumers > 1:
            plgpu.set_max_registers(plan.registers[0], action="increase")
        _consume(refs, parts, ring, plan, share, warpgroup)


def _merge_kernel(refs: dict[str, Any], out: dict[str, Any], plan: Plan) -> None:
    """The parts of some query rows of one KV head, in order."""
    program, width, columns = lax.axis_index("program"), plan.merged_rows, plan.call.v_dim
    blocks = jnp.int32(plan.rows // width)
    block, rest = lax.rem(program, blocks), lax.div(program, blocks)
    head, index = lax.rem(rest, jnp.int32(plan.heads)), lax.div(rest, jnp.int32(plan.heads))
    group = jnp.int32(plan.call.group_size)
    token, q_head = lax.div(block * width, group), head * group + lax.rem(block * width, group)

    def before(carry: tuple[Array, Array], count: Array) -> tuple[Array, Array]:
        number, total = carry
        return number + 1, total + jnp.where(number < index, count, 0)

    zero = jnp.int32(0)
    tiles, shares = _totals(refs, plan)
    start = _scan(refs, plan, before, (zero, zero))[1]
    stop = start + _sequence(refs, plan, index).tiles
    first, last = (lax.div((tile + 1) * shares - 1, tiles) for tile in (start, stop - 1))  # the shares that hold these tiles
    count = (last - first + 1) * plan.consumers
    if not plan.interpret:
        plgpu.griddepcontrol_wait()
    lane = plgpu.broadcasted_iota(jnp.int32, (LANES,), 0, layout=STRIDED)

    def over_columns(values: list[Array]) -> Array:
        """A value of each row, for the lanes of its columns."""
        x = plgpu.layout_cast(jnp.full((LANES,), values[0]), STRIDED)
        for row, value in enumerate(values[1:], 1):
            x = jnp.where(lane >= row * columns, jnp.full((LANES,), value), x)
        return x

    def some(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, sums = carry
        numbers = [i * TOGETHER + j for j in range(TOGETHER)]
        written = [jnp.minimum(n, count - 1) for n in numbers]  # elsewhere may be NaN, and 0 * NaN is NaN
        shares = [(lax.div(n, jnp.int32(plan.consumers)), lax.rem(n, jnp.int32(plan.consumers))) for n in written]
        parts = [jnp.where(n == 0, index, plan.batch + first + n) * plan.consumers + consumer for n, consumer in shares]
        values = [plgpu.load(refs["o"].at[part, head, block], layout=STRIDED) for part in parts]
        lses = [
            over_columns([jnp.where(n < count, refs["lse"][part, head, block * width + r], -jnp.inf) for r in range(width)])
            for n, part in zip(numbers, parts, strict=True)
        ]
        new_top = functools.reduce(jnp.maximum, lses, top)
        base = softmax.finite_base(new_top)
        kept, weights = jnp.exp2(top - base), [jnp.exp2(lse - base) for lse in lses]
        total = functools.reduce(jnp.add, weights, total * kept)
        sums = functools.reduce(jnp.add, (w * v for w, v in zip(weights, values, strict=True)), sums * kept)
        return new_top, total, sums

    nothing = (over_columns([jnp.float32(x)]) for x in (-jnp.inf, 0.0, 0.0))
    top, total, sums = lax.fori_loop(0, lax.div(count + (TOGETHER - 1), jnp.int32(TOGETHER)), some, tuple(nothing))
    sink = over_columns([refs["sinks"][q_head + r] for r in range(width)]) if "sinks" in refs else None
    factor, lse = softmax.finished_rows(top, total, sink)
    place = (index * plan.tokens + token) * (plan.heads * group // width) + lax.div(q_head, jnp.int32(width))
    out["o"].at[place][...] = (sums * factor).astype(out["o"].dtype)
    if "lse" in out:
        out["lse"].at[place][...] = lse


def _octets(rows: int) -> int:
    return pl.cdiv(rows, OCTET) * OCTET


def _kernel(
    plan: Plan, body: Callable[..., None], given: dict[str, Array], made: dict[str, Any], **launch: Any
) -> dict[str, Any]:
    """Runs body(refs by name, results by name) as a kernel; returns the results by name."""

    def entry(*refs: Any) -> None:
        body(dict(zip(given, refs[: len(given)])), dict(zip(made, refs[len(given) :])))

    results = plgpu.kernel(
        entry,
        out_type=list(made.values()),
        grid_names=("program",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if plan.interpret else None,
        **launch,
    )(*given.values())
    return dict(zip(made, results, strict=True))


def _launch(plan: Plan, arrays: dict[str, Array | None]) -> tuple[Array, Array | None]:
    """The attention and the merge: o (B, Tq, Hq, Dv), and lse (B, Tq, Hq) float32 or None."""
    call, tile = plan.call, plan.tile
    given = {name: x for name, x in arrays.items() if x is not None}
    sinks = {name: given.pop(name) for name in ("sinks",) if name in given}
    dtype = given["q"].dtype

    def tiled(*shape: int) -> Any:
        width = tile_width(shape[-1])
        return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(2 * width)))

    stages = tile.num_stages
    memory = {
        "q": plgpu.SMEM((ROWS, call.head_dim), dtype),
        "k": tiled(stages, tile.block_kv, call.head_dim),
        "v": tiled(stages, tile.block_kv, call.v_dim),
        "o": plgpu.SMEM((plan.consumers, ROWS, call.v_dim), jnp.float32),
        "lse": plgpu.SMEM((plan.consumers, ROWS), jnp.float32),
        "q_ready": plgpu.Barrier(num_arrivals=plan.tokens),
        "q_free": plgpu.Barrier(num_arrivals=plan.consumers),
        "k_ready": plgpu.Barrier(num_arrivals=plan.pieces, num_barriers=stages),
        "k_free": plgpu.Barrier(num_barriers=stages),
        "v_ready": plgpu.Barrier(num_arrivals=plan.pieces, num_barriers=stages),
        "v_free": plgpu.Barrier(num_barriers=stages),
    }

    def attend(refs: dict[str, Any], parts: dict[str, Any]) -> None:
        pl.run_scoped(functools.partial(_attend_kernel, refs, parts, plan), collective_axes="wg", **memory)

    heads, rows = (plan.parts * plan.consumers, plan.heads), plan.rows
    parts = _kernel(
        plan,
        attend,
        given,
        {
            "o": jax.ShapeDtypeStruct((*heads, rows, call.v_dim), jnp.float32),
            "lse": jax.ShapeDtypeStruct((*heads, ROWS), jnp.float32),
        },
        grid=(plan.shares * plan.heads,),
        num_threads=plan.consumers + 1,
        thread_name="wg",
        kernel_name="gqa_decode",
    )
    blocks = rows // plan.merged_rows
    merged = {"o": jax.ShapeDtypeStruct((plan.batch * plan.heads * blocks, LANES), dtype)}
    if call.return_lse:
        merged["lse"] = jax.ShapeDtypeStruct(merged["o"].shape, jnp.float32)
    made = _kernel(
        plan,
        functools.partial(_merge_kernel, plan=plan),
        {"o": parts["o"].reshape(*heads, blocks, LANES), "lse": parts["lse"], "lengths": given["lengths"], **sinks},
        merged,
        grid=(plan.batch * plan.heads * blocks,),
        kernel_name="gqa_decode_merge",
    )
    shape = (plan.batch, plan.tokens, call.q_heads)
    lse = made["lse"][:, :: call.v_dim].reshape(shape) if call.return_lse else None
    return made["o"].reshape(*shape, call.v_dim), lse


def decode(
    call: AttentionCall,
    tile: TileConfig,
    *,
    interpret: bool = False,
    q: Array,
    k: Array,
    v: Array,
    kv_lengths: Array,
    sinks: Array | None,
    **scales: None,
) -> tuple[Array, Array | None]:
    """Attention of the last Tq positions of each sequence over a contiguous cache.

    Arguments and results are those of sm80's `decode`; 16-bit types alone, and no scales.
    """
    (batch, tokens), capacity = q.shape[:2], k.shape[1]
    plan = Plan(call, tile, batch, tokens, capacity, page_size=0, num_pages=0, has_new=False, interpret=interpret)
    return _launch(plan, {"q": q, "k": k, "v": v, "lengths": kv_lengths, "sinks": sinks})


def paged_decode(
    call: AttentionCall,
    tile: TileConfig,
    *,
    interpret: bool = False,
    q: Array,
    k_pages: Array,
    v_pages: Array,
    page_table: Array,
    kv_lengths: Array,
    k_new: Array | None,
    v_new: Array | None,
    inv_freq: Array | None,
    sinks: Array | None,
    **scales: None,
) -> tuple[Array | None, ...]:
    """Attention of the last Tq positions of each sequence over its pages, after appending them if they are new.

    Arguments and results are those of sm80's `paged_decode`; 16-bit types alone, and no scales.
    """
    (batch, tokens), (num_pages, page_size) = q.shape[:2], k_pages.shape[:2]
    capacity = page_table.shape[1] * page_size
    length = jnp.clip(kv_lengths, 0, capacity)
    position = last_positions(length if k_new is None else length + tokens, tokens)
    q = rotated(q, position, inv_freq, call.rope)
    arrays = {"q": q, "page_table": page_table, "lengths": kv_lengths, "sinks": sinks}
    pools = ()
    if k_new is not None and v_new is not None:
        k_new = rotated(k_new, position, inv_freq, call.rope)
        bounds = jnp.arange(batch + 1, dtype=jnp.int32) * tokens
        k_rows, v_rows = (x.reshape(batch * tokens, *x.shape[2:]) for x in (k_new, v_new))
        pools = write(k_rows, v_rows, k_pages, v_pages, page_table, length, bounds, interpret=interpret)
        missing = [(0, 0), (0, _octets(tokens) - tokens), (0, 0), (0, 0)]
        arrays |= {"k_new": jnp.pad(k_new, missing), "v_new": jnp.pad(v_new, missing)}
        k_pages, v_pages = pools
    plan = Plan(call, tile, batch, tokens, capacity, page_size, num_pages, k_new is not None, interpret)
    return *_launch(plan, arrays | {"k": k_pages, "v": v_pages}), *pools
