"""Keys that lie in pages, gathered a tile at a time."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.xla.attention import Tile
from pallas_kernels.xla.layout import dequantised, even_blocks, folded, folded_tokens


class PageList(NamedTuple):
    """Pages in the order of the keys that they hold: key j is the (j % page_size)-th token of the (j // page_size)-th page.

    Attributes:
      k_pages, v_pages: the pools (P, page_size, Hkv, D or Dv).
      pages: page ids (B, n), -1 for none; n is a multiple of `per_tile`.
      k_scale, v_scale: scales of what the pages hold, float32 (B, n, Hkv), or None.
      per_tile: pages of a tile.
    """

    k_pages: jax.Array
    v_pages: jax.Array
    pages: jax.Array
    k_scale: jax.Array | None
    v_scale: jax.Array | None
    per_tile: int

    @property
    def tile_size(self) -> int:
        """Keys of a tile."""
        return self.per_tile * self.k_pages.shape[1]

    def read(self, j: jax.Array, problem: jax.Array | None = None) -> Tile:
        """The j-th tile of every problem, or of one, which is a KV head where there is a single list."""
        page_size, kv_heads = self.k_pages.shape[1:3]
        heads = kv_heads if problem is None else 1
        pages = self._of_tile(self.pages, j)
        where = (jnp.maximum(pages, 0), slice(None), slice(None) if problem is None else problem)

        def part(pool: jax.Array, scale: jax.Array | None) -> jax.Array:
            x = pool.at[where].get(mode="promise_in_bounds").reshape(pages.shape[0], self.tile_size, heads, pool.shape[3])
            if scale is not None:
                scale = self._of_tile(scale if problem is None else scale[..., problem, None], j)
                scale = jnp.repeat(scale, page_size, axis=1)
            return folded(dequantised(x, scale), heads)

        number = j * self.tile_size + jnp.arange(self.tile_size, dtype=jnp.int32)[None]
        number = jnp.where(jnp.repeat(pages, page_size, axis=1) >= 0, number, -1)
        return Tile(part(self.k_pages, self.k_scale), part(self.v_pages, self.v_scale), folded_tokens(number, heads, heads))

    def _of_tile(self, x: jax.Array, j: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(x, j * self.per_tile, self.per_tile, axis=1)


def page_list(
    pools: tuple[jax.Array, jax.Array],
    pages: jax.Array,
    in_use: jax.Array,
    scales: Sequence[jax.Array | None],
    largest_tile: int,
) -> PageList:
    """The pages (B, n) that are in use and exist, with scales (B, n, Hkv); any other id is never dereferenced."""
    pool_size, page_size = pools[0].shape[:2]
    pages = jnp.where(in_use & (pages >= 0) & (pages < pool_size), pages, -1)
    count, per_tile = even_blocks(pages.shape[1], max(largest_tile // page_size, 1))
    missing = ((0, 0), (0, count * per_tile - pages.shape[1]))
    k_scale, v_scale = (None if scale is None else jnp.pad(scale, (*missing, (0, 0))) for scale in scales)
    return PageList(*pools, jnp.pad(pages, missing, constant_values=-1), k_scale, v_scale, per_tile)
