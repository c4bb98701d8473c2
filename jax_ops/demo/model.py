"""A Llama decoder over a paged KV cache: prefill of packed prompts and decode of one token per sequence.

All layers share one pool of pages, (layers * pages, page_size, kv_heads, head_dim), in the carry of the scan over layers;
layer i finds its own at `page_table + i * pages`. In that form XLA updates the pool in place, where stacked pools as scan
inputs would be copied every step.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_ops import PagedKVCache, Rope, gqa_decode_paged, gqa_prefill_paged


@dataclass(frozen=True)
class Config:
    """Sizes and constants of a Llama.

    Attributes:
      num_layers, vocab_size, hidden_size, mlp_size: sizes.
      q_heads, kv_heads, head_dim: of attention; q_heads is a multiple of kv_heads.
      context_length: positions the model was trained for.
      rope_theta: base of the rotary frequencies.
      norm_eps: added to the mean square in RMSNorm.
    """

    num_layers: int
    vocab_size: int
    hidden_size: int
    mlp_size: int
    q_heads: int
    kv_heads: int
    head_dim: int
    context_length: int
    rope_theta: float
    norm_eps: float

    @property
    def rope(self) -> Rope:
        """The rotary embedding that the attention ops fuse."""
        return Rope(theta=self.rope_theta, max_position=self.context_length)


class Layers(NamedTuple):
    """Weights of all layers, stacked along a leading axis; matrices are (layers, inputs, outputs), for `x @ w`."""

    attention_norm: jax.Array
    q: jax.Array
    k: jax.Array
    v: jax.Array
    o: jax.Array
    mlp_norm: jax.Array
    gate: jax.Array
    up: jax.Array
    down: jax.Array


class Params(NamedTuple):
    """Weights of the model: embedding (vocab_size, hidden_size), which is the output projection too, layers, final norm."""

    embedding: jax.Array
    layers: Layers
    norm: jax.Array


def prefill(
    params: Params, tokens: jax.Array, cu_seqlens: jax.Array, cache: PagedKVCache, *, config: Config
) -> tuple[jax.Array, PagedKVCache]:
    """Reads packed prompts into the cache.

    Args:
      params: the weights.
      tokens: int32 (T,), the prompts one after another; rows past cu_seqlens[-1] are padding.
      cu_seqlens: int32 (B + 1,), where each prompt begins and ends. A prompt of no tokens has no last row: its logits are
        another's, to be ignored.
      cache: over the pool of all layers, with pages for `cache.lengths` and the prompts. Donate it to stay in place.
      config: static.

    Returns:
      float32 logits (B, vocab_size) after the last token of each prompt, and the cache.
    """
    attend = partial(gqa_prefill_paged, cu_seqlens_q=cu_seqlens, cache_lengths=cache.lengths, rope=config.rope)
    x, cache = _decoder(params, tokens, cache, attend, config)
    return _logits(params, x[cu_seqlens[1:] - 1], config), replace(cache, lengths=cache.lengths + jnp.diff(cu_seqlens))


def decode(params: Params, tokens: jax.Array, cache: PagedKVCache, *, config: Config) -> tuple[jax.Array, PagedKVCache]:
    """Appends one token to every sequence.

    Args:
      params: the weights.
      tokens: int32 (B,).
      cache: as in `prefill`, with room for a token in each sequence.
      config: static.

    Returns:
      float32 logits (B, vocab_size) after these tokens, and the cache.
    """

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, *pool: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        return gqa_decode_paged(q, *pool, cache.lengths, k_new=k, v_new=v, rope=config.rope)

    x, cache = _decoder(params, tokens, cache, attend, config)
    return _logits(params, x, config), replace(cache, lengths=cache.lengths + 1)


Attend = Callable[..., tuple[jax.Array, jax.Array, jax.Array]]
"""attend(q, k, v, k_pages, v_pages, page_table) -> (o, k_pages, v_pages)"""


def _decoder(
    params: Params, tokens: jax.Array, cache: PagedKVCache, attend: Attend, config: Config
) -> tuple[jax.Array, PagedKVCache]:
    """Runs all layers on tokens (T,): the last hidden states (T, hidden_size), and the cache with the new pages."""
    pages_per_layer = cache.k_pages.shape[0] // config.num_layers

    def layer(carry: tuple[jax.Array, ...], inputs: tuple[Layers, jax.Array]) -> tuple[tuple[jax.Array, ...], None]:
        x, k_pages, v_pages = carry
        w, index = inputs
        h = _rms_norm(x, w.attention_norm, config.norm_eps)
        q, k, v = ((h @ m).reshape(len(tokens), -1, config.head_dim) for m in (w.q, w.k, w.v))
        o, k_pages, v_pages = attend(q, k, v, k_pages, v_pages, cache.page_table + index * pages_per_layer)
        x = x + o.reshape(len(tokens), -1) @ w.o
        h = _rms_norm(x, w.mlp_norm, config.norm_eps)
        x = x + (jax.nn.silu(h @ w.gate) * (h @ w.up)) @ w.down
        return (x, k_pages, v_pages), None

    carry = (params.embedding[tokens], cache.k_pages, cache.v_pages)
    indices = jnp.arange(config.num_layers, dtype=jnp.int32)
    (x, k_pages, v_pages), _ = jax.lax.scan(layer, carry, (params.layers, indices))
    return x, replace(cache, k_pages=k_pages, v_pages=v_pages)


def _logits(params: Params, x: jax.Array, config: Config) -> jax.Array:
    h = _rms_norm(x, params.norm, config.norm_eps)
    return jnp.einsum("be,ve->bv", h, params.embedding, preferred_element_type=jnp.float32)


def _rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return x32.astype(x.dtype) * weight[None]
