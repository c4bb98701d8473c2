"""A Llama decoder over a paged KV cache: prefill of packed prompts and decode of one token per sequence.

All layers share one pool of pages, (layers * pages, page_size, kv_heads, head_dim), in the carry of the scan over layers;
layer i finds its own pages through `cache.layer_table(i)`. In that form XLA updates the pool in place, where stacked pools as
scan inputs would be copied every step.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

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

    attention_norm: Array
    q: Array
    k: Array
    v: Array
    o: Array
    mlp_norm: Array
    gate: Array
    up: Array
    down: Array


class Params(NamedTuple):
    """Weights of the model: embedding (vocab_size, hidden_size), which is the output projection too, layers, final norm."""

    embedding: Array
    layers: Layers
    norm: Array


def prefill(
    params: Params, tokens: Array, cu_seqlens: Array, cache: PagedKVCache, *, config: Config
) -> tuple[Array, PagedKVCache]:
    """Reads packed prompts into the cache.

    Args:
      params: the weights.
      tokens: int32 (T,), the prompts one after another; rows past cu_seqlens[-1] are padding.
      cu_seqlens: int32 (B + 1,), where each prompt begins and ends. A prompt of no tokens has no last row: its logits are
        another's, to be ignored.
      cache: of `num_layers` layers; the prompts get pages of it. Donate it to stay in place.
      config: static.

    Returns:
      float32 logits (B, vocab_size) after the last token of each prompt, and the cache.
    """
    new_tokens = jnp.diff(cu_seqlens)
    cache = cache.extend(new_tokens)

    def attend(q: Array, k: Array, v: Array, k_pages: Array, v_pages: Array, page_table: Array) -> tuple[Array, Array, Array]:
        return gqa_prefill_paged(q, k, v, k_pages, v_pages, page_table, cu_seqlens, cache.lengths, rope=config.rope)

    x, cache = _decoder(params, tokens, cache, attend, config)
    return _logits(params, x[cu_seqlens[1:] - 1], config), cache.advance(new_tokens)


def decode(params: Params, tokens: Array, cache: PagedKVCache, *, config: Config) -> tuple[Array, PagedKVCache]:
    """Appends one token to every sequence.

    Args:
      params: the weights.
      tokens: int32 (B,).
      cache: as in `prefill`; a sequence whose last page is full gets another.
      config: static.

    Returns:
      float32 logits (B, vocab_size) after these tokens, and the cache.
    """
    cache = cache.extend(1)

    def attend(q: Array, k: Array, v: Array, k_pages: Array, v_pages: Array, page_table: Array) -> tuple[Array, Array, Array]:
        return gqa_decode_paged(q, k_pages, v_pages, page_table, cache.lengths, k_new=k, v_new=v, rope=config.rope)

    x, cache = _decoder(params, tokens, cache, attend, config)
    return _logits(params, x, config), cache.advance(1)


Attend = Callable[[Array, Array, Array, Array, Array, Array], tuple[Array, Array, Array]]
"""attend(q, k, v, k_pages, v_pages, page_table) -> (o, k_pages, v_pages)"""


def _decoder(params: Params, tokens: Array, cache: PagedKVCache, attend: Attend, config: Config) -> tuple[Array, PagedKVCache]:
    """Runs all layers on tokens (T,): the last hidden states (T, hidden_size), and the cache with the new pages."""

    def layer(carry: tuple[Array, ...], inputs: tuple[Layers, Array]) -> tuple[tuple[Array, ...], None]:
        x, k_pages, v_pages = carry
        w, index = inputs
        h = _rms_norm(x, w.attention_norm, config.norm_eps)
        q, k, v = ((h @ m).reshape(len(tokens), -1, config.head_dim) for m in (w.q, w.k, w.v))
        o, k_pages, v_pages = attend(q, k, v, k_pages, v_pages, cache.layer_table(index))
        x = x + o.reshape(len(tokens), -1) @ w.o
        h = _rms_norm(x, w.mlp_norm, config.norm_eps)
        x = x + (jax.nn.silu(h @ w.gate) * (h @ w.up)) @ w.down
        return (x, k_pages, v_pages), None

    carry = (params.embedding[tokens], cache.k_pages, cache.v_pages)
    indices = jnp.arange(config.num_layers, dtype=jnp.int32)
    (x, k_pages, v_pages), _ = jax.lax.scan(layer, carry, (params.layers, indices))
    return x, replace(cache, k_pages=k_pages, v_pages=v_pages)


def _logits(params: Params, x: Array, config: Config) -> Array:
    h = _rms_norm(x, params.norm, config.norm_eps)
    return jnp.einsum("be,ve->bv", h, params.embedding, preferred_element_type=jnp.float32)


def _rms_norm(x: Array, weight: Array, eps: float) -> Array:
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return x32.astype(x.dtype) * weight[None]
