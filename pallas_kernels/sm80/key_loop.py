"""The loop over the keys of a query tile, whatever they lie in, shared by the prefill kernels.

A run is a stretch of consecutive keys that a tile's rows attend with the same scale: the middle of it, which every row sees
whole, goes by without a mask; its edges are masked. Running maxima are raw scores; the scale and log2 e are folded into the
exponents.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common import softmax
from pallas_kernels.sm80 import instructions
from pallas_kernels.sm80.blocks import Chunk, divided, dot, iota, load_rows
from pallas_kernels.sm80.plan import Plan

Array = jax.Array


class State(NamedTuple):
    """Online softmax of a tile's rows: largest raw scores, sums of weights, and weighted sums of v by block of columns."""

    top: Array
    total: Array
    sums: tuple[Array, ...]


def nothing_seen(rows: int, columns: tuple[Chunk, ...]) -> State:
    """The state of rows before their first key."""
    return State(
        jnp.full((rows,), -jnp.inf, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        tuple(jnp.zeros((rows, chunk.width), jnp.float32) for chunk in columns),
    )


class KeyRange(NamedTuple):
    """The keys a program visits, int32: `count` KV tiles from key `begin` on, of which [full_from, full_to) need no mask.

    Row r sees the keys of [row_begin[r], row_end[r]); row_begin is None without a left bound, row_end one scalar without a
    right one.
    """

    begin: Array
    count: Array
    full_from: Array
    full_to: Array
    row_begin: Array | None
    row_end: Array

    def visible(self, key: Array, exists: Array) -> Array:
        """Which of the keys each row sees, (rows, keys) or (1, keys); those of a right-bounded row always exist."""
        seen = key[None, :] < self.row_end[:, None] if self.row_end.ndim else exists[None, :]
        return seen if self.row_begin is None else seen & (key[None, :] >= self.row_begin[:, None])


class Span(NamedTuple):
    """Where a tile's rows stand among the keys of a run, int32.

    Attributes:
      shift: number of the key at the request's first token; the cache's length for keys of the cache.
      length: keys of the run.
      right: how many keys after its own a row sees; None: all there are.
    """

    shift: Array | int
    length: Array
    right: int | None


def key_range(plan: Plan, span: Span, token: Array, first: Array, q_len: Array, is_aligned: bool = False) -> KeyRange:
    """The keys of a tile.

    Args:
      plan: says the tile, and how far left a row sees.
      span: where the tokens stand among the keys.
      token: of each row.
      first: the tile's first token.
      q_len: tokens of the request.
      is_aligned: whether KV tiles begin at multiples of their size.
    """
    block_kv, left = plan.tile.block_kv, plan.left
    low = first + span.shift
    high = jnp.minimum(first + plan.tokens, q_len) - 1 + span.shift

    def end_of(position: Array) -> Array:
        return span.length if span.right is None else jnp.minimum(span.length, position + (span.right + 1))

    def tiles_in(keys: Array) -> Array:
        return divided(jnp.maximum(keys, 0), block_kv)

    begin = jnp.int32(0) if left is None else jnp.maximum(low - left, 0)
    if is_aligned and left is not None:
        begin = divided(begin, block_kv) * block_kv
    end = jnp.where(first < q_len, end_of(high), 0)
    count = tiles_in(end - begin + (block_kv - 1))
    full_from = jnp.int32(0) if left is None else jnp.minimum(tiles_in(high - left - begin + (block_kv - 1)), count)
    full_to = jnp.clip(tiles_in(end_of(low) - begin), full_from, count)
    position = token + span.shift
    return KeyRange(begin, count, full_from, full_to, None if left is None else position - left, end_of(position))


class Source(Protocol):
    """Where the keys of a run lie."""

    def ahead(self, first: Array) -> Any:
        """What must be known of the tile whose first key this is before its rows can be loaded; arrays."""
        ...

    def exists(self, key: Array, ahead: Any) -> Array:
        """Which of a tile's keys there are."""
        ...

    def load(self, name: str, first: Array, ahead: Any, exists: Array | None) -> list[Array]:
        """The blocks of "k" or "v" of a tile; rows that do not exist are 0."""
        ...


@dataclass(frozen=True)
class Rows:
    """Keys in consecutive rows of arrays (rows, Hkv, D): `first_row` on, `length` of them."""

    refs: dict[str, Any]
    columns: dict[str, tuple[Chunk, ...]]
    first_row: Array
    length: Array
    kv_head: Array
    block_kv: int

    def ahead(self, first: Array) -> Any:
        """Nothing."""
        del first
        return ()

    def exists(self, key: Array, ahead: Any) -> Array:
        """Keys before the length."""
        del ahead
        return key < self.length

    def load(self, name: str, first: Array, ahead: Any, exists: Array | None) -> list[Array]:
        """Rows as they lie."""
        del ahead
        rows = self.first_row + first + iota(self.block_kv)
        return [load_rows(self.refs[name], rows, self.kv_head, c, exists) for c in self.columns[name]]


class Queries(NamedTuple):
    """The query blocks and the positive factor, one or one per row, on their dots that together scale the scores."""

    blocks: list[Array]
    factor: Array | float

    def raw_scale(self, softcap: float | None) -> Array | float:
        """What makes raw scores base 2."""
        return self.factor * softmax.LOG2_E if softcap is None else 1.0


def positively_scaled(blocks: list[Array], factor: Array | float) -> Queries:
    """Queries of the given factor, whose sign, or its being 0, goes into the blocks: maxima are scaled by it too."""
    if isinstance(factor, float):
        sign = (factor > 0) - (factor < 0)
        return Queries(blocks if sign == 1 else [part * sign for part in blocks], abs(factor) or 1.0)
    sign = jnp.sign(factor)
    return Queries([part * sign.astype(part.dtype) for part in blocks], jnp.where(sign == 0, 1.0, jnp.abs(factor)))


def attended(plan: Plan, state: State, q: Queries, keys: KeyRange, source: Source) -> State:
    """The state after a run."""
    softcap, block_kv = plan.call.softcap, plan.tile.block_kv
    scale = q.raw_scale(softcap)
    factor = q.factor[:, None] if jnp.ndim(q.factor) else q.factor  # type: ignore[index]

    def scores_of(first: Array, ahead: Any, exists: Array | None) -> Array:
        k = source.load("k", first, ahead, exists)
        dots = functools.reduce(jnp.add, (dot(a, b, b_is_transposed=True) for a, b in zip(q.blocks, k, strict=True)))
        return dots if softcap is None else instructions.softcapped(dots, factor, softcap, interpret=plan.interpret)

    def visit(tile: Array, following: Array, carry: tuple[State, Any], is_edge: bool) -> tuple[State, Any]:
        (top, total, sums), ahead = carry
        first = keys.begin + tile * block_kv
        key = first + iota(block_kv)
        exists = source.exists(key, ahead) if is_edge else None
        scores = scores_of(first, ahead, exists)
        if exists is not None:
            scores = jnp.where(keys.visible(key, exists), scores, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        base = softmax.finite_base(new_top)
        rate = instructions.steepest_rate(base, scale, interpret=plan.interpret)
        p = instructions.exp2_scaled(scores, rate[:, None], (base * rate)[:, None], interpret=plan.interpret)
        kept = instructions.exp2_scaled(top - base, rate, 0.0, interpret=plan.interpret)
        total = total * kept + jnp.sum(p, axis=1)
        v = source.load("v", first, ahead, exists)
        sums = tuple(part * kept[:, None] + dot(p.astype(b.dtype), b) for part, b in zip(sums, v, strict=True))
        return State(new_top, total, sums), source.ahead(keys.begin + following * block_kv)

    full = keys.full_to - keys.full_from

    def edge(index: Array) -> Array:
        return jnp.where(index < keys.full_from, index, index + full)

    def visit_full(index: Array, carry: Any) -> Any:
        return visit(index, index + 1, carry, is_edge=False)

    def visit_edge(index: Array, carry: Any) -> Any:
        return visit(edge(index), edge(index + 1), carry, is_edge=True)

    def looped(begin: Array, end: Array, body: Any, first: Array, state: State) -> State:
        return lax.fori_loop(begin, end, body, (state, source.ahead(keys.begin + first * block_kv)))[0]

    state = looped(keys.full_from, keys.full_to, visit_full, keys.full_from, state)
    return looped(jnp.int32(0), keys.count - full, visit_edge, edge(jnp.int32(0)), state)
