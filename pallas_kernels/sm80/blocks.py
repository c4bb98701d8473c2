"""Blocks of rows and head elements, as Triton takes them: powers of two, with masks where the array ends earlier."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

MIN_DOT = 16  # the smallest edge of a Triton dot


class Chunk(NamedTuple):
    """Part of a head: first element, elements in the block (a power of two), and how many of them exist.

    With a stride, elements are counted in strides, and those meant leave the remainder `phase`.
    """

    start: int
    width: int
    used: int
    stride: int = 1
    phase: int = 0

    @property
    def columns(self) -> jax.Array:
        """The block's elements."""
        column = self.start + iota(self.width)
        return column if self.stride == 1 else column * self.stride + self.phase


def head_chunks(dim: int, widest: int | None = None) -> tuple[Chunk, ...]:
    """A head size as power-of-two blocks no wider than `widest`, the last of them partly used where need be.

    96 is 64 + 32; 112 is 128, because 64 + 64 would be no smaller.
    """
    chunks, start = [], 0
    while start < dim:
        whole = max(MIN_DOT, pl.next_power_of_2(dim - start))
        half = whole // 2
        is_smaller_in_two = half >= MIN_DOT and half + max(MIN_DOT, pl.next_power_of_2(dim - start - half)) < whole
        width = min(half if is_smaller_in_two else whole, widest or whole)
        chunks.append(Chunk(start, width, min(width, dim - start)))
        start += width
    return tuple(chunks)


def iota(n: int) -> jax.Array:
    """0, 1, ... n - 1, int32."""
    return lax.broadcasted_iota(jnp.int32, (n,), 0)


def divided(a: jax.Array, b: int) -> jax.Array:
    """A // b for a >= 0."""
    return lax.div(a, jnp.int32(b))


def div_mod(a: jax.Array, b: int) -> tuple[jax.Array, jax.Array]:
    """A // b and a % b for a >= 0."""
    return divided(a, b), lax.rem(a, jnp.int32(b))


def place(rows: jax.Array, head: jax.Array, chunk: Chunk) -> tuple[jax.Array, ...]:
    """Indices (rows, chunk.width) of a chunk of a head (one, or one per row)."""
    shape = (rows.shape[0], chunk.width)
    head = lax.broadcast_in_dim(head, shape, (0,)) if head.ndim else head
    return lax.broadcast_in_dim(rows, shape, (0,)), head, lax.broadcast_in_dim(chunk.columns, shape, (1,))


def existing(live: jax.Array | None, rows: int, chunk: Chunk) -> jax.Array | None:
    """Which elements of a block exist: those of live rows (None: all of them) within the head; None: all."""
    shape = (rows, chunk.width)
    mask = None if live is None else lax.broadcast_in_dim(live, shape, (0,))
    if chunk.used == chunk.width:
        return mask
    within = lax.broadcast_in_dim(iota(chunk.width) < chunk.used, shape, (1,))
    return within if mask is None else mask & within


def load_rows(ref: Any, rows: jax.Array, head: jax.Array, chunk: Chunk, live: jax.Array | None) -> jax.Array:
    """A chunk of a head (one, or one per row) in the given rows; 0 where a row is not live."""
    mask = existing(live, rows.shape[0], chunk)
    return plt.load(ref.at[place(rows, head, chunk)], mask=mask, other=None if mask is None else 0)


def dot(a: jax.Array, b: jax.Array, *, b_is_transposed: bool = False) -> jax.Array:
    """The matrix product in float32 sums; float32 operands are not rounded."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dimensions = (((1,), (1 if b_is_transposed else 0,)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)
