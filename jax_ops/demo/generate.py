"""Greedy generation for a batch of prompts of any lengths: one packed prefill, then one token per sequence and step."""

from collections.abc import Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from jax_ops import PagedKVCache
from jax_ops.demo import model
from jax_ops.demo.errors import DemoError
from jax_ops.demo.model import Config, Params

PACKED_MULTIPLE = 64  # packed prompts are padded to a multiple of this, so that similar batches share one compilation


class Generation:
    """A batch of prompts, and what follows them.

    Attributes:
      config: of the model.
      max_tokens: how many tokens follow each prompt.
      tokens: int32 (T,), the packed prompts, padded.
      cu_seqlens: int32 (B + 1,), where each prompt begins and ends.
      cache: of all sequences, with pages allotted for prompts and continuations.

    Example:
      >>> for tokens in Generation(params, config, prompts, max_tokens=64):  # doctest: +SKIP
      ...     print(tokens)  # the next token of each prompt
    """

    def __init__(
        self, params: Params, config: Config, prompts: Sequence[Sequence[int]], max_tokens: int, page_size: int = 64
    ) -> None:
        """Packs the prompts and allots their pages; a batch that the model cannot take is a DemoError."""
        _check(config, prompts, max_tokens)
        lengths = [len(prompt) for prompt in prompts]
        padding = -sum(lengths) % PACKED_MULTIPLE
        self.config = config
        self.max_tokens = max_tokens
        self.tokens = jnp.asarray(np.concatenate([*prompts, [0] * padding]), jnp.int32)
        self.cu_seqlens = jnp.asarray(np.cumsum([0, *lengths]), jnp.int32)
        self.cache = _allot(config, [length + max_tokens for length in lengths], page_size, params.embedding.dtype)
        self._params = params

    def __iter__(self) -> Iterator[np.ndarray]:
        """Yields the next token of every sequence, int32 (B,), `max_tokens` times; once per object.

        The step after is on its way to the device while the caller looks at a token.
        """
        tokens, self.cache = _prefill(self._params, self.tokens, self.cu_seqlens, self.cache, config=self.config)
        for _ in range(1, self.max_tokens):
            following, self.cache = _decode(self._params, tokens, self.cache, config=self.config)
            yield np.asarray(tokens)
            tokens = following
        yield np.asarray(tokens)

    @property
    def batch(self) -> int:
        """How many prompts."""
        return len(self.cu_seqlens) - 1

    @property
    def prompt_tokens(self) -> int:
        """How many tokens all prompts have."""
        return int(self.cu_seqlens[-1])

    def pages(self) -> tuple[int, int]:
        """How many pages of a layer hold tokens, and how many there are."""
        num_pages, page_size = self.cache.k_pages.shape[:2]
        return int(np.sum(-(-np.asarray(self.cache.lengths) // page_size))), num_pages // self.config.num_layers


@partial(jax.jit, static_argnames="config", donate_argnames="cache")
def _prefill(
    params: Params, tokens: jax.Array, cu_seqlens: jax.Array, cache: PagedKVCache, *, config: Config
) -> tuple[jax.Array, PagedKVCache]:
    logits, cache = model.prefill(params, tokens, cu_seqlens, cache, config=config)
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), cache


@partial(jax.jit, static_argnames="config", donate_argnames="cache")
def _decode(params: Params, tokens: jax.Array, cache: PagedKVCache, *, config: Config) -> tuple[jax.Array, PagedKVCache]:
    logits, cache = model.decode(params, tokens, cache, config=config)
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), cache


def _allot(config: Config, capacities: Sequence[int], page_size: int, dtype: DTypeLike) -> PagedKVCache:
    """An empty cache with pages for so many tokens of each sequence, over the layers' shared pool."""
    counts = [-(-capacity // page_size) for capacity in capacities]
    page_table = np.zeros((len(counts), max(counts)), np.int32)
    for row, (first, count) in enumerate(zip(np.cumsum([0, *counts]), counts)):
        page_table[row, :count] = np.arange(first, first + count)
    pool = (config.num_layers * sum(counts), page_size, config.kv_heads, config.head_dim)
    return PagedKVCache(
        k_pages=jnp.zeros(pool, dtype),
        v_pages=jnp.zeros(pool, dtype),
        page_table=jnp.asarray(page_table),
        lengths=jnp.zeros(len(counts), jnp.int32),
    )


def _check(config: Config, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
    if max_tokens < 1:
        raise DemoError(f"demo: max_tokens is {max_tokens}; need 1 or more.")
    if not prompts:
        raise DemoError("demo: prompts is empty; need at least one.")
    for number, prompt in enumerate(prompts, start=1):
        if not 1 <= len(prompt) <= config.context_length - max_tokens:
            raise DemoError(
                f"demo: prompt {number} has {len(prompt)} tokens, to be followed by {max_tokens}; need at least 1, and at most "
                f"{config.context_length} together, the model's context."
            )
