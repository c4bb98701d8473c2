"""Softmax attention over runs of keys, tile by tile, in float32.

The state of a row is its running maximum m, its denominator l and its unnormalised output acc; a tile with scores s and
values v updates it by

    m' = max(m, max s)    l' = e^(m - m') l + sum e^(s - m')    acc' = e^(m - m') acc + e^(s - m') v

(Milakov and Gimelshein 2018; Dao et al. 2022). A sink is a key without a value, seen before all others. What a row does not
see never reaches it, NaN included.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dispatch_core.calls import AttentionCall
from pallas_kernels.common.softmax import finite_base
from pallas_kernels.xla.layout import finite
from pallas_kernels.xla.spans import Span


class Tile(NamedTuple):
    """Some keys of a run: k (N, K, D) and v (N, K, Dv) in float32, and the number (1 or N, K) of each; -1 is no key."""

    k: jax.Array
    v: jax.Array
    number: jax.Array


class Run(NamedTuple):
    """Keys in tiles of one size, and the span of them that each row (N, M) sees.

    `read(j)` is the j-th tile of all N problems, `read(j, problem=n)` that of problem n alone.
    """

    seen: Span
    tile_size: int
    read: Callable[..., Tile]


class State(NamedTuple):
    """The online softmax of rows (N, M): running maximum, denominator, and unnormalised output (N, M, Dv)."""

    top: jax.Array
    total: jax.Array
    acc: jax.Array


def dot(subscripts: str, *operands: jax.Array) -> jax.Array:
    """A product of float32 operands in full float32."""
    return jnp.einsum(subscripts, *operands, precision=lax.Precision.HIGHEST)


def tile_range(seen: Span, tile_size: int) -> tuple[jax.Array, jax.Array]:
    """The first tile that any row sees, and the one past the last."""
    is_live = seen.start < seen.stop
    never = jnp.iinfo(jnp.int32).max
    first = jnp.min(jnp.where(is_live, seen.start, never)) // tile_size
    stop = (jnp.max(jnp.where(is_live, seen.stop, 0)) + (tile_size - 1)) // tile_size
    return first, stop


def visibility(seen: Span, number: jax.Array) -> jax.Array:
    """Whether each row sees each key of a tile (N, M, K)."""
    number = number[:, None, :]
    return (seen.start[..., None] <= number) & (number < seen.stop[..., None])


def scores(q: jax.Array, k: jax.Array, softcap: float | None) -> jax.Array:
    """Capped scores (N, M, K) of scaled queries."""
    s = dot("nmd,nkd->nmk", q, k)
    return s if softcap is None else softcap * jnp.tanh(s / softcap)


def weighted_values(p: jax.Array, v: jax.Array, visible: jax.Array) -> jax.Array:
    """P v, where a value that is not finite reaches the rows that see it and no other (0 times NaN is NaN)."""

    def row_by_row() -> jax.Array:
        weight = visible.astype(jnp.float32)

        def seen_as(value: float, where: jax.Array) -> jax.Array:
            return jnp.where(dot("nmk,nkd->nmd", weight, where.astype(jnp.float32)) > 0, jnp.float32(value), 0)

        extra = seen_as(jnp.inf, v == jnp.inf) + seen_as(-jnp.inf, v == -jnp.inf) + seen_as(jnp.nan, jnp.isnan(v))
        return jnp.where(extra == 0, dot("nmk,nkd->nmd", p, finite(v)), extra)

    o = dot("nmk,nkd->nmd", p, v)
    return lax.cond(jnp.all(jnp.isfinite(o)), lambda: o, row_by_row)


def attend(call: AttentionCall, q: jax.Array, runs: list[Run], sink: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Attention of rows over all keys of all runs.

    Args:
      call: the facts: softcap and head size of the values.
      q: scaled queries (N, M, D), float32.
      runs: the keys.
      sink: logits (N, M) that join the denominator, or None.

    Returns:
      o (N, M, Dv) and lse (N, M), float32; 0 and -inf (or the sink) for a row that sees no key.
    """
    acc = jnp.zeros_like(q, shape=(*q.shape[:2], call.v_dim))
    nothing = acc[..., 0]
    state = State(nothing - jnp.inf, nothing, acc) if sink is None else State(nothing + sink, nothing + 1, acc)
    for run in runs:

        def step(j: jax.Array, state: State, run: Run = run) -> State:
            k, v, number = run.read(j)
            visible = visibility(run.seen, number)
            s = jnp.where(visible, scores(q, k, call.softcap), -jnp.inf)
            top = jnp.maximum(state.top, s.max(-1))
            base = finite_base(top)
            p, decay = jnp.exp(s - base[..., None]), jnp.exp(state.top - base)
            acc = decay[..., None] * state.acc + weighted_values(p, v, visible)
            return State(top, decay * state.total + p.sum(-1), acc)

        state = lax.fori_loop(*tile_range(run.seen, run.tile_size), step, state)
    o = state.acc / jnp.where(state.total == 0, 1, state.total)[..., None]
    return o, state.top + jnp.log(state.total)
