"""Greedy generation for a batch of prompts of any lengths: one packed prefill, then one token per sequence and step."""

from collections.abc import Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

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
      cache: of all sequences, with as many pages as they can come to need.

    Example:
      >>> for tokens in Generation(params, config, prompts, max_tokens=64):  # doctest: +SKIP
      ...     print(tokens)  # the next token of each prompt
    """

    def __init__(
        self, params: Params, config: Config, prompts: Sequence[Sequence[int]], max_tokens: int, page_size: int = 64
    ) -> None:
        """Packs the prompts and makes room for all that follows; a batch that the model cannot take is a DemoError."""
        _check(config, prompts, max_tokens)
        lengths = [len(prompt) for prompt in prompts]
        padding = -sum(lengths) % PACKED_MULTIPLE
        self.config = config
        self.max_tokens = max_tokens
        self.tokens = jnp.asarray(np.concatenate([*prompts, [0] * padding]), jnp.int32)
        self.cu_seqlens = jnp.asarray(np.cumsum([0, *lengths]), jnp.int32)
        pages = [-(-(length + max_tokens) // page_size) for length in lengths]
        self.cache = PagedKVCache.create(
            num_pages=sum(pages),
            page_size=page_size,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            batch=len(prompts),
            max_pages=max(pages),
            dtype=params.embedding.dtype,
            num_layers=config.num_layers,
        )
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
    def prompt_tokens(self) -> int:
        """How many tokens all prompts have."""
        return int(self.cu_seqlens[-1])


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
