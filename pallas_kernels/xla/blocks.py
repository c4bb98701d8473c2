"""Attention of many rows, and its derivative: one problem and one block of its rows at a time, so that scores stay small."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dispatch_core.calls import AttentionCall
from dispatch_core.tiling import TileConfig
from pallas_kernels.xla.attention import Run, Tile, attend, dot, scores, tile_range, visibility
from pallas_kernels.xla.layout import even_blocks, finite, padded_to
from pallas_kernels.xla.spans import Span


class Problems(NamedTuple):
    """Float32 operands: scaled q (N, M, D), k (N, S, D), v (N, S, Dv), and a sink for each row (N, M) or None."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    sink: jax.Array | None


class Result(NamedTuple):
    """What rows gave, and its cotangents: o and do (N, M, Dv), lse and dlse (N, M), float32."""

    o: jax.Array
    lse: jax.Array
    do: jax.Array
    dlse: jax.Array


def array_run(seen: Span, k: jax.Array, v: jax.Array, largest_tile: int) -> Run:
    """A run of keys held in arrays (N, S, D) and (N, S, Dv)."""
    k, v, size = _in_tiles(k, v, largest_tile)
    return Run(seen, size, lambda j, problem: _tile(k, v, problem, j, size))


def attend_in_blocks(
    call: AttentionCall, tile: TileConfig, q: jax.Array, runs: list[Run], sink: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """`attend` for any number of rows; o in the call's output type."""
    problem, blocks = _in_blocks((q, sink, [run.seen for run in runs]), tile.block_q)

    def attend_block(block: tuple[jax.Array, Any]) -> tuple[jax.Array, jax.Array]:
        n, (q, sink, spans) = block
        seen_here = [Run(seen, run.tile_size, partial(run.read, problem=n)) for run, seen in zip(runs, spans)]
        o, lse = attend(call, q, seen_here, sink)
        return o.astype(call.o_dtype), lse

    o, lse = lax.map(attend_block, (problem, blocks))
    return _rejoined(o, *q.shape[:2]), _rejoined(lse, *q.shape[:2])


def attend_vjp(call: AttentionCall, tile: TileConfig, of: Problems, seen: Span, result: Result) -> Problems:
    """Cotangents of the operands of attention over one run of keys held in arrays.

    With p = e^(s - lse) and the slack of a row t = do . o - dlse,

        dv = p^T do    ds = p (do v^T - t)    dq = ds k    dk = ds^T q    dsink = -e^(sink - lse) t

    (Dao et al. 2022; dlse enters because d lse / d s = p). A softcap c multiplies ds by its slope 1 - (s / c)^2. The products
    run over finite operands, for 0 times NaN is NaN: what is not finite in k or v is in the scores or in o of the rows that
    see it already, and a row with such a q or do gets an lse of NaN, so that it spoils the keys that it sees and no other.
    """
    k, v, size = _in_tiles(of.k, of.v, tile.block_kv)
    slack = jnp.where(seen.start < seen.stop, jnp.sum(result.do * result.o, axis=-1), 0) - result.dlse
    is_sound = jnp.isfinite(of.q).all(-1) & jnp.isfinite(result.do).all(-1)
    lse = jnp.where(is_sound, result.lse, jnp.nan)
    problem, blocks = _in_blocks((finite(of.q), finite(result.do), lse, slack, seen), tile.block_q)

    def block_vjp(dkv: tuple[jax.Array, ...], block: tuple[jax.Array, Any]) -> tuple[tuple[jax.Array, ...], jax.Array]:
        n, (q, do, lse, slack, seen) = block

        def step(j: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            dq, dk, dv = state
            tile = _tile(k, v, n, j, size)
            visible = visibility(seen, tile.number)
            s = scores(q, tile.k, call.softcap)
            p = jnp.where(visible, jnp.exp(s - lse[..., None]), 0)
            ds = p * (dot("nmd,nkd->nmk", do, tile.v) - slack[..., None])
            if call.softcap is not None:
                ds = ds * (1 - (s / call.softcap) ** 2)
            ds = jnp.where(visible, ds, 0)
            dk = _accumulated(dk, n, j, dot("nmk,nmd->nkd", ds, q))
            dv = _accumulated(dv, n, j, dot("nmk,nmd->nkd", p, do))
            return dq + dot("nmk,nkd->nmd", ds, finite(tile.k)), dk, dv

        dq, dk, dv = lax.fori_loop(*tile_range(seen, size), step, (jnp.zeros_like(q), *dkv))
        return (dk, dv), dq

    (dk, dv), dq = lax.scan(block_vjp, (jnp.zeros_like(k), jnp.zeros_like(v)), (problem, blocks))
    dsink = None if of.sink is None else -slack * jnp.where(of.sink == -jnp.inf, 0, jnp.exp(of.sink - result.lse))
    keys = of.k.shape[1]
    return Problems(_rejoined(dq, *of.q.shape[:2]), dk[:, :keys], dv[:, :keys], dsink)


def _in_blocks(x: Any, largest: int) -> tuple[jax.Array, Any]:
    """Arrays (N, M, ...) cut into blocks (N * count, 1, size, ...), and the problem that each block belongs to.

    A row that is padding sees no key, since its span is zeros.
    """
    problems, rows = jax.tree.leaves(x)[0].shape[:2]
    count, size = even_blocks(rows, largest)
    cut = jax.tree.map(lambda a: padded_to(a, count * size).reshape(problems * count, 1, size, *a.shape[2:]), x)
    return jnp.repeat(jnp.arange(problems, dtype=jnp.int32), count), cut


def _rejoined(blocks: jax.Array, problems: int, rows: int) -> jax.Array:
    """The inverse of `_in_blocks`."""
    return blocks.reshape(problems, -1, *blocks.shape[3:])[:, :rows]


def _in_tiles(k: jax.Array, v: jax.Array, largest: int) -> tuple[jax.Array, jax.Array, int]:
    """K and V padded to whole tiles, and the size of one."""
    count, size = even_blocks(k.shape[1], largest)
    return padded_to(k, count * size), padded_to(v, count * size), size


def _tile(k: jax.Array, v: jax.Array, n: jax.Array, j: jax.Array, size: int) -> Tile:
    number = j * size + jnp.arange(size, dtype=jnp.int32)
    return Tile(_rows_of(k, n, j, size), _rows_of(v, n, j, size), number[None])


def _rows_of(x: jax.Array, n: jax.Array, j: jax.Array, size: int) -> jax.Array:
    """The j-th `size` rows of problem n, as (1, size, D)."""
    return lax.dynamic_slice(x, (n, j * size, jnp.zeros_like(n)), (1, size, x.shape[2]))


def _accumulated(x: jax.Array, n: jax.Array, j: jax.Array, update: jax.Array) -> jax.Array:
    """X with an update (1, size, D) added to the j-th rows of problem n."""
    size = update.shape[1]
    return lax.dynamic_update_slice(x, _rows_of(x, n, j, size) + update, (n, j * size, jnp.zeros_like(n)))
