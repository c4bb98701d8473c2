"""Keys that lie in pages: the pool's pages in the order of a table, gathered a tile at a time."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dispatch_core.tiling import TileConfig
from pallas_kernels.xla.attention import Tile
from pallas_kernels.xla.layout import dequantised, even_blocks, folded, folded_rows


class PageRun(NamedTuple):
    """The pages that hold a run of keys, in order: which, and the scales of what they hold.

    Attributes:
      k_pages, v_pages: the pools.
      page: page ids (B, n), -1 for none; key j is the (j % page_size)-th token of the (j // page_size)-th page.
      k_scale, v_scale: float32 (B, n, Hkv), or None.
      per_tile: pages of a tile; n is a multiple of it.
    """

    k_pages: jax.Array
    v_pages: jax.Array
    page: jax.Array
    k_scale: jax.Array | None
    v_scale: jax.Array | None
    per_tile: int

    @property
    def tile_size(self) -> int:
        """Keys of a tile."""
        return self.per_tile * self.k_pages.shape[1]

    def read(self, j: jax.Array, head: jax.Array | None = None) -> Tile:
        """The j-th tile of every KV head, or of one."""
        page_size, kv_heads = self.k_pages.shape[1:3]
        heads = kv_heads if head is None else 1

        def of_tile(x: jax.Array) -> jax.Array:
            return lax.dynamic_slice_in_dim(x, j * self.per_tile, self.per_tile, axis=1)

        page = of_tile(self.page)
        where = (jnp.maximum(page, 0), slice(None), slice(None) if head is None else head)

        def part(pages: jax.Array, scale: jax.Array | None) -> jax.Array:
            x = pages.at[where].get(mode="promise_in_bounds").reshape(page.shape[0], self.tile_size, heads, pages.shape[3])
            if scale is not None:
                scale = of_tile(scale if head is None else scale[..., head, None])
                scale = jnp.repeat(scale, page_size, axis=1)
            return folded(dequantised(x, scale), heads)

        number = j * self.tile_size + jnp.arange(self.tile_size, dtype=jnp.int32)[None]
        number = jnp.where(jnp.repeat(page, page_size, axis=1) >= 0, number, -1)
        return Tile(part(self.k_pages, self.k_scale), part(self.v_pages, self.v_scale), folded_rows(number, heads, heads))


def page_run(
    tile: TileConfig,
    pools: tuple[jax.Array, jax.Array],
    page: jax.Array,
    in_use: jax.Array,
    scales: tuple[jax.Array | None, jax.Array | None],
) -> PageRun:
    """A run over the pages (B, n) in use that exist."""
    pool_size, page_size = pools[0].shape[:2]
    page = jnp.where(in_use & (page >= 0) & (page < pool_size), page, -1)
    count, per_tile = even_blocks(page.shape[1], max(tile.block_kv // page_size, 1))
    missing = ((0, 0), (0, count * per_tile - page.shape[1]))
    k_scale, v_scale = (None if scale is None else jnp.pad(scale, (*missing, (0, 0))) for scale in scales)
    return PageRun(*pools, jnp.pad(page, missing, constant_values=-1), k_scale, v_scale, per_tile)
