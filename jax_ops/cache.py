"""A paged KV cache as a value: pools, page table and lengths, and page allocation as pure functions of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dispatch_core import FLOAT8
from jax_ops import checks
from jax_ops.paged import append_paged
from jax_ops.rope import Rope


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["k_pages", "v_pages", "page_table", "lengths"],
    meta_fields=["num_layers"],
)
@dataclass(frozen=True, eq=False)
class PagedKVCache:
    """Keys and values of a fixed batch of sequences, in pages that are handed out and taken back.

    Every method returns a new cache and works under jit, vmap and scan; nothing retraces when sequences come, grow and go.
    A page is in use if and only if a row of the table names it, so there is no further state: a page that several rows name (a
    shared prefix) is free once none of them does. Entries without a page are -1.

        lengths   page_table, page_size 4
        5         7  2 -1      5 tokens in pages 7 and 2, room for 3 more
        0        -1 -1 -1      an inactive slot: the ops see no key in it
        9         0  5  3

    A pool that runs out leaves -1 where pages are missing, first rows first; `fits` tells beforehand. Tokens without room
    are not stored and not counted, so a length never exceeds what was written.

    Layers share one pool: layer i lives in pages i * num_pages to (i + 1) * num_pages, at `layer_table(i)`. In the carry of a
    `lax.scan` over layers that form is updated in place, where stacked pools as scan inputs would be copied. Donate the cache
    to the caller's jit (`jax.jit(step, donate_argnames="cache")`), or each call copies the pools once.

    Attributes:
      k_pages: (num_layers * num_pages, page_size, kv_heads, head_dim).
      v_pages: (num_layers * num_pages, page_size, kv_heads, head_dim_v).
      page_table: int32 (batch, max_pages), page ids in [0, num_pages), or -1.
      lengths: int32 (batch,), tokens stored of each sequence.
      num_layers: layers that share the pool; static.

    Example:
      >>> import jax.numpy as jnp
      >>> cache = PagedKVCache.create(num_pages=4, page_size=2, kv_heads=1, head_dim=8, batch=2, max_pages=3)
      >>> cache = cache.allocate(jnp.array([3, 2]))
      >>> cache = cache.append(jnp.ones((5, 1, 8)), jnp.ones((5, 1, 8)), cu_seqlens=jnp.array([0, 3, 5]))
      >>> cache.page_table.tolist(), cache.lengths.tolist(), int(cache.num_free_pages)
      ([[0, 1, -1], [2, -1, -1]], [3, 2], 1)
      >>> gqa_decode_paged(jnp.ones((2, 4, 8)), cache.k_pages, cache.v_pages, cache.page_table, cache.lengths).shape
      (2, 4, 8)
    """

    k_pages: Any
    v_pages: Any
    page_table: Any
    lengths: Any
    num_layers: int = 1

    @classmethod
    def create(
        cls,
        *,
        num_pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        batch: int,
        max_pages: int,
        dtype: Any = jnp.float32,
        head_dim_v: int | None = None,
        num_layers: int = 1,
    ) -> PagedKVCache:
        """An empty cache: pools of zeros, no page in use.

        Args:
          num_pages: pages of one layer, for all sequences together.
          page_size: tokens per page, any number from 1.
          kv_heads: KV heads.
          head_dim: of keys.
          batch: sequences, active or not.
          max_pages: pages that one sequence may hold.
          dtype: float16, bfloat16, float32, or float8_e4m3fn.
          head_dim_v: of values; None: head_dim.
          num_layers: layers that share the pool.

        Returns:
          The cache; its pools take 2 * num_layers * num_pages * page_size * kv_heads * head_dim elements.

        Raises:
          ValueError, TypeError: a size that is not a positive int, or an element type, by name.
        """
        op = "PagedKVCache.create"
        sizes = {"num_pages": num_pages, "page_size": page_size, "kv_heads": kv_heads, "head_dim": head_dim}
        sizes |= {"batch": batch, "max_pages": max_pages, "num_layers": num_layers}
        sizes["head_dim_v"] = head_dim if head_dim_v is None else head_dim_v
        checks.check_static(op, sizes)
        for name, size in sizes.items():
            if checks.static_length(op, name, size) is None:
                raise checks.wrong_type(op, name, "is None", "a Python int")
        if num_layers * num_pages >= 2**31:
            raise checks.fail(op, "num_pages", f"is {num_pages} for {num_layers} layers", "fewer than 2**31 pages in all")
        accepted = (*checks.ACCEPTED_TYPES, FLOAT8)
        if str(jnp.dtype(dtype)) not in accepted:
            raise checks.wrong_type(op, "dtype", f"is {jnp.dtype(dtype)}", f"one of {', '.join(accepted)}")
        pool = (num_layers * num_pages, page_size, kv_heads)
        return cls(
            k_pages=jnp.zeros((*pool, head_dim), dtype),
            v_pages=jnp.zeros((*pool, sizes["head_dim_v"]), dtype),
            page_table=jnp.full((batch, max_pages), -1, jnp.int32),
            lengths=jnp.zeros(batch, jnp.int32),
            num_layers=int(num_layers),
        )

    @property
    def num_pages(self) -> int:
        """Pages of one layer."""
        return self.k_pages.shape[0] // self.num_layers

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.k_pages.shape[1]

    @property
    def batch(self) -> int:
        """Sequences, active or not."""
        return self.page_table.shape[0]

    @property
    def capacity(self) -> int:
        """Tokens one sequence can hold: max_pages * page_size."""
        return self.page_table.shape[1] * self.page_size

    @property
    def num_free_pages(self) -> jax.Array:
        """Pages that no row names; an int32 scalar."""
        return _num_free(self.page_table, self.num_pages)

    @property
    def room(self) -> jax.Array:
        """Tokens that the pages of each sequence hold, int32 (batch,); `room - lengths` can be appended as it is."""
        return _room(self.page_table, self.num_pages, self.page_size)

    def fits(self, tokens: Any, *, fresh: bool = False) -> jax.Array:
        """Whether `extend(tokens)` finds every page it needs.

        Args:
          tokens: as in `extend`.
          fresh: whether `allocate(tokens)` does instead, which gives back the pages of those rows first.

        Returns:
          A bool scalar.
        """
        tokens = self._tokens("fits", tokens)
        cache = self.free(tokens > 0) if checks.static_bool("PagedKVCache.fits", "fresh", fresh) else self
        missing = jnp.sum(cache._missing(tokens), dtype=jnp.int32)
        return jnp.all(tokens <= self.capacity - cache.lengths) & (missing <= cache.num_free_pages)

    def allocate(self, tokens: Any) -> PagedKVCache:
        """Starts sequences: each row with tokens > 0 gives back its pages and gets pages for that many tokens, and length 0.

        Args:
          tokens: int32 (batch,), or one int for every row; rows of 0 or less keep what they have.

        Returns:
          The cache. Rows for which the pool or the table has too few pages get those there are; see `fits(fresh=True)`.

        Raises:
          ValueError, TypeError: the shape and kind of tokens.
        """
        tokens = self._tokens("allocate", tokens)
        return self.free(tokens > 0).extend(tokens)

    def extend(self, tokens: Any) -> PagedKVCache:
        """Gives each sequence room for `tokens` more than its length; pages it holds already are used first.

        Args:
          tokens: int32 (batch,), or one int for every row; 0 or less asks for nothing.

        Returns:
          The cache. Rows for which the pool or the table has too few pages get those there are; see `fits`.

        Raises:
          ValueError, TypeError: the shape and kind of tokens.
        """
        missing = self._missing(self._tokens("extend", tokens))
        return replace(self, page_table=_with_pages(self.page_table, missing, self.num_pages))

    def free(self, rows: Any) -> PagedKVCache:
        """Ends sequences: the rows give back their pages and become inactive, of length 0.

        Args:
          rows: bool (batch,).

        Returns:
          The cache. What the pages hold stays there until they are written again, and no op reads it.

        Raises:
          ValueError, TypeError: the shape and element type of rows.
        """
        op = "PagedKVCache.free"
        rows = rows if checks.is_array(rows) else jnp.asarray(rows)
        if rows.shape != (self.batch,):
            raise checks.fail(op, "rows", f"has shape {tuple(rows.shape)}", f"({self.batch},), one entry a sequence")
        if rows.dtype != bool:
            raise checks.wrong_type(op, "rows", f"has element type {rows.dtype}", "bool: True for rows to free")
        return replace(
            self,
            page_table=jnp.where(rows[:, None], -1, self.page_table),
            lengths=jnp.where(rows, 0, self.lengths),
        )

    def append(
        self,
        k: Any,
        v: Any,
        cu_seqlens: Any = None,
        rope: Rope | None = None,
        layer: Any = 0,
        *,
        advance: bool = True,
        **options: Any,
    ) -> PagedKVCache:
        """Writes new tokens behind those of each sequence, and counts them; `append_paged` over this cache.

        Args:
          k: (T, kv_heads, head_dim): one token a sequence (T = batch), or packed with cu_seqlens.
          v: (T, kv_heads, head_dim_v) of k's type.
          cu_seqlens: int32 (batch + 1,): bounds of the sequences' new tokens.
          rope: rotates k at its absolute positions before it is stored.
          layer: whose pages to write, an int or a traced one.
          advance: count the tokens. Over several layers pass False, and call `advance` once after the last.
          **options: k_scale, v_scale, build, kernel_map, device, interpret of `append_paged`.

        Returns:
          The cache. Tokens without room are dropped and not counted; inactive rows thus stay inactive.

        Raises:
          ValueError, TypeError, NoImplementationError, ReplacementRefusedError: as `append_paged`.
        """
        counted = checks.static_bool("PagedKVCache.append", "advance", advance)
        table = self.layer_table(layer)
        k_pages, v_pages = append_paged(
            k, v, self.k_pages, self.v_pages, table, self.lengths, cu_seqlens=cu_seqlens, rope=rope, **options
        )
        cache = replace(self, k_pages=k_pages, v_pages=v_pages)
        if not counted:
            return cache
        if cu_seqlens is None:
            return cache.advance(1)
        bounds = jnp.clip(jnp.asarray(cu_seqlens), 0, k.shape[0]).astype(jnp.int32)
        return cache.advance(jnp.diff(jax.lax.cummax(bounds)))

    def advance(self, tokens: Any) -> PagedKVCache:
        """Counts tokens that an op (`gqa_decode_paged` with k_new, `gqa_prefill_paged`) has written.

        Args:
          tokens: int32 (batch,), or one int for every row; 0 or less counts nothing.

        Returns:
          The cache, with lengths + tokens, but no more than its pages have room for: what went past them was not stored.

        Raises:
          ValueError, TypeError: the shape and kind of tokens.
        """
        tokens = self._tokens("advance", tokens)
        lengths = self.lengths + jnp.minimum(tokens, jnp.maximum(self.room - self.lengths, 0))
        return replace(self, lengths=lengths)

    def layer_table(self, layer: Any) -> jax.Array:
        """The page table of one layer in the shared pool, int32 (batch, max_pages): ids + layer * num_pages, unused ones -1.

        Args:
          layer: an int in [0, num_layers), or a traced one (past the end its ids are no pages: reads see nothing, writes are
            dropped).

        Raises:
          ValueError, TypeError: a layer out of range, or of another kind.
        """
        op = "PagedKVCache.layer_table"
        if type(layer) is int or isinstance(layer, np.integer):
            if not 0 <= layer < self.num_layers:
                raise checks.fail(op, "layer", f"is {layer}", f"an int from 0 to {self.num_layers - 1}")
        elif np.shape(layer) or not np.issubdtype(getattr(layer, "dtype", bool), np.integer):
            raise checks.wrong_type(op, "layer", f"is {layer!r}", "an int, or an integer scalar")
        first = jnp.asarray(layer, jnp.int32) * self.num_pages
        return jnp.where(_is_page(self.page_table, self.num_pages), self.page_table + first, -1)

    def _tokens(self, method: str, tokens: Any) -> jax.Array:
        """Token counts as int32 (batch,) in [0, capacity + 1]."""
        op = f"PagedKVCache.{method}"
        tokens = tokens if checks.is_array(tokens) else np.asarray(tokens)
        if tokens.shape not in ((), (self.batch,)):
            raise checks.fail(op, "tokens", f"has shape {tuple(tokens.shape)}", f"({self.batch},), or one int for every row")
        if not np.issubdtype(tokens.dtype, np.integer):
            raise checks.wrong_type(op, "tokens", f"has element type {tokens.dtype}", "an integer type (int32)")
        counts = jnp.clip(tokens, 0, self.capacity + 1).astype(jnp.int32)
        return jnp.broadcast_to(counts, (self.batch,))

    def _missing(self, tokens: jax.Array) -> jax.Array:
        return _missing(self.page_table, self.lengths, tokens, self.num_pages, self.page_size)


def _is_page(table: jax.Array, num_pages: int) -> jax.Array:
    return (table >= 0) & (table < num_pages)


def _in_use(table: jax.Array, num_pages: int) -> jax.Array:
    """Which pages of a layer a row names, bool (num_pages,)."""
    named = jnp.where(_is_page(table, num_pages), table, num_pages)
    return jnp.zeros(num_pages, bool).at[named].set(True, mode="drop")


@partial(jax.jit, static_argnums=1)
def _num_free(table: jax.Array, num_pages: int) -> jax.Array:
    return num_pages - jnp.sum(_in_use(table, num_pages), dtype=jnp.int32)


@partial(jax.jit, static_argnums=(1, 2))
def _room(table: jax.Array, num_pages: int, page_size: int) -> jax.Array:
    leading = jnp.cumprod(_is_page(table, num_pages).astype(jnp.int32), axis=1)
    return jnp.sum(leading, axis=1, dtype=jnp.int32) * page_size


@partial(jax.jit, static_argnums=(3, 4))
def _missing(table: jax.Array, lengths: jax.Array, tokens: jax.Array, num_pages: int, page_size: int) -> jax.Array:
    """Which entries need a page before so many tokens can be appended, bool (batch, max_pages).

    Only entries past the length: one within it whose page is missing stands for tokens that were not stored.
    """
    first = jnp.arange(table.shape[1], dtype=jnp.int32)[None] * page_size
    wanted = (first >= lengths[:, None]) & (first < (lengths + tokens)[:, None])
    return wanted & ~_is_page(table, num_pages)


@partial(jax.jit, static_argnums=2)
def _with_pages(table: jax.Array, missing: jax.Array, num_pages: int) -> jax.Array:
    """The table with the n-th missing entry given the n-th free page, or -1 when there is none."""
    (free,) = jnp.nonzero(~_in_use(table, num_pages), size=min(num_pages, missing.size), fill_value=-1)
    nth = jnp.cumsum(missing.reshape(-1), dtype=jnp.int32).reshape(missing.shape) - 1
    pages = free.astype(jnp.int32).at[nth].get(mode="fill", fill_value=-1)
    return jnp.where(missing, pages, table)
