"""Attention of many rows, and its derivative: one problem and one block of its rows at a time, so that scores stay small."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.xla.attention import Run, Tile, attend, dot, scores, tile_range, visibility
from pallas_kernels.xla.layout import even_blocks, finite, padded_to
from pallas_kernels.xla.spans import Span


class Keys(NamedTuple):
    """Keys of N problems: the span of them that each row (N, M) sees; `read(n, j)` is problem n's j-th tile, with N = 1."""

    seen: Span
    tile_size: int
    read: Callable[[jax.Array, jax.Array], Tile]


def array_keys(seen: Span, k: jax.Array, v: jax.Array, largest_tile: int) -> Keys:
    """Keys held in arrays (N, S, D) and (N, S, Dv)."""
    k, v, tile_size = _in_tiles(k, v, largest_tile)
    return Keys(seen, tile_size, lambda n, j: _tile(k, v, n, j, tile_size))


def _in_tiles(k: jax.Array, v: jax.Array, largest: int) -> tuple[jax.Array, jax.Array, int]:
    """K and V padded to whole tiles, and the size of one."""
    count, size = even_blocks(k.shape[1], largest)
    return padded_to(k, count * size), padded_to(v, count * size), size


def _tile(k: jax.Array, v: jax.Array, n: jax.Array, j: jax.Array, size: int) -> Tile:
    first = j * size
    number = first + jnp.arange(size, dtype=jnp.int32)
    return Tile(_rows_of(k, n, first, size), _rows_of(v, n, first, size), number[None])


def _rows_of(x: jax.Array, n: jax.Array, first: jax.Array, size: int) -> jax.Array:
    """Rows [first, first + size) of problem n, as (1, size, D)."""
    return lax.dynamic_slice(x, (n, first, jnp.zeros_like(n)), (1, size, x.shape[2]))


def _in_blocks(x: Any, largest: int) -> tuple[jax.Array, Any]:
    """Arrays (N, M, ...) cut into blocks (N * count, 1, size, ...), and the problem that each block belongs to."""
    problems, rows = jax.tree.leaves(x)[0].shape[:2]
    count, size = even_blocks(rows, largest)
    cut = jax.tree.map(lambda a: padded_to(a, count * size).reshape(problems * count, 1, size, *a.shape[2:]), x)
    return jnp.repeat(jnp.arange(problems, dtype=jnp.int32), count), cut


def _rejoined(blocks: jax.Array, problems: int, rows: int) -> jax.Array:
    """The inverse of `_in_blocks`."""
    return blocks.reshape(problems, -1, *blocks.shape[3:])[:, :rows]


def attend_in_blocks(
    q: jax.Array, keys: list[Keys], sink: jax.Array | None, softcap: float | None, v_dim: int, block_rows: int, o_dtype: str
) -> tuple[jax.Array, jax.Array]:
    """`attend` over problems (N, M, D) of any number of rows; o in o_dtype.

    A padded row sees no key: its span is empty.
    """
    n, blocks = _in_blocks((q, sink, [run.seen for run in keys]), block_rows)

    def attend_block(block: tuple[jax.Array, Any]) -> tuple[jax.Array, jax.Array]:
        n, (q, sink, spans) = block

        def run(of: Keys, seen: Span) -> Run:
            return Run(seen, of.tile_size, lambda j: of.read(n, j))

        o, lse = attend(q, [run(of, seen) for of, seen in zip(keys, spans, strict=True)], sink, softcap, v_dim)
        return o.astype(o_dtype), lse

    o, lse = lax.map(attend_block, (n, blocks))
    return _rejoined(o, *q.shape[:2]), _rejoined(lse, *q.shape[:2])


class Result(NamedTuple):
    """What rows (N, M) gave, and its cotangents: o and do (N, M, Dv), lse and dlse (N, M), float32."""

    o: jax.Array
    lse: jax.Array
    do: jax.Array
    dlse: jax.Array


def attend_vjp(
    q: jax.Array, k: jax.Array, v: jax.Array, sink: jax.Array | None, seen: Span, result: Result,
    softcap: float | None, block_rows: int, largest_tile: int,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:  # fmt: skip
    """Cotangents of q, k, v and sink of `attend` over arrays of keys.

    With p = e^(s - lse), the weights of a row sum to 1 - e^(sink - lse), and

        dv = p^T do    ds = p (do v^T - (do . o - dlse))    dq = ds k    dk = ds^T q    dsink = -e^(sink - lse) (do . o - dlse)

    (Dao et al. 2022; the term in dlse follows from d lse / d s = p). A softcap multiplies ds by its slope 1 - (s / c)^2.
    The products run over finite operands, for 0 times NaN is NaN: what is not finite in k or v is in the scores or in o of
    the rows that see it already, and a row with such a q or do is given an lse of NaN, so that it spoils the keys that it
    sees and no other.
    """
    is_live = seen.start < seen.stop
    slack = jnp.where(is_live, jnp.sum(result.do * result.o, axis=-1), 0) - result.dlse
    is_sound = jnp.isfinite(q).all(-1) & jnp.isfinite(result.do).all(-1)
    lse = jnp.where(is_sound, result.lse, jnp.nan)
    n, blocks = _in_blocks((finite(q), finite(result.do), lse, slack, seen), block_rows)

    padded_k, padded_v, tile_size = _in_tiles(k, v, largest_tile)

    def block_vjp(dkv: tuple[jax.Array, jax.Array], block: tuple[jax.Array, Any]) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        n, (q, do, lse, slack, seen) = block

        def step(j: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            dq, dk, dv = state
            tile = _tile(padded_k, padded_v, n, j, tile_size)
            visible = visibility(seen, tile.number)
            s = scores(q, tile.k, softcap)
            p = jnp.where(visible, jnp.exp(s - lse[..., None]), 0)
            ds = p * (dot("nmd,nkd->nmk", do, tile.v) - slack[..., None])
            if softcap is not None:
                ds = ds * (1 - (s / softcap) ** 2)
            ds = jnp.where(visible, ds, 0)
            dk = _accumulated(dk, n, j * tile_size, dot("nmk,nmd->nkd", ds, q))
            dv = _accumulated(dv, n, j * tile_size, dot("nmk,nmd->nkd", p, do))
            return dq + dot("nmk,nkd->nmd", ds, finite(tile.k)), dk, dv

        dq, *dkv = lax.fori_loop(*tile_range(seen, tile_size), step, (jnp.zeros_like(q), *dkv))
        return tuple(dkv), dq

    (dk, dv), dq = lax.scan(block_vjp, (jnp.zeros_like(padded_k), jnp.zeros_like(padded_v)), (n, blocks))
    dsink = None if sink is None else -slack * jnp.where(sink == -jnp.inf, 0, jnp.exp(sink - result.lse))
    return _rejoined(dq, *q.shape[:2]), dk[:, : k.shape[1]], dv[:, : k.shape[1]], dsink


def _accumulated(x: jax.Array, n: jax.Array, first: jax.Array, update: jax.Array) -> jax.Array:
    """X (N, S, D) with an update (1, size, D) added to problem n's rows from `first` on."""
    return lax.dynamic_update_slice(x, _rows_of(x, n, first, update.shape[1]) + update, (n, first, jnp.zeros_like(n)))
