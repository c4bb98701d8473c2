"""Which keys a query sees: always one contiguous span, so a mask is two int32 numbers per row."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dispatch_core.calls import AttentionCall
from pallas_kernels.xla.layout import folded_tokens


class Span(NamedTuple):
    """The keys from `start` up to, not including, `stop`, int32; none where stop <= start."""

    start: jax.Array
    stop: jax.Array

    def where(self, live: jax.Array) -> Span:
        """This span where `live`, an empty one elsewhere."""
        return Span(jnp.where(live, self.start, 0), jnp.where(live, self.stop, 0))

    def within(self, first: jax.Array | int, length: jax.Array | int) -> Span:
        """The part of this span in [first, first + length), counted from `first`."""
        return Span(jnp.clip(self.start - first, 0, length), jnp.clip(self.stop - first, 0, length))

    def shifted(self, by: jax.Array) -> Span:
        """This span with its keys renumbered."""
        return Span(self.start + by, self.stop + by)

    def per_row(self, call: AttentionCall) -> Span:
        """Spans of tokens (B, S) as those of their rows (B * Hkv, S * G)."""
        return Span(*(folded_tokens(x, call.q_heads, call.kv_heads) for x in self))


def seen_from(call: AttentionCall, position: jax.Array, kv_length: jax.Array, is_causal: bool) -> Span:
    """What a query at a position among its sequence's keys sees under the causal rule and the window of a call."""
    left, right = (None, None) if call.window is None else (call.window.left, call.window.right)
    right = 0 if is_causal else right
    start = jnp.zeros_like(position) if left is None else jnp.maximum(position - left, 0)
    stop = jnp.broadcast_to(kv_length, position.shape)
    return Span(start, stop if right is None else jnp.minimum(stop, position + right + 1))


def last_positions(lengths: jax.Array, tokens: int) -> jax.Array:
    """The last positions (B, tokens) of sequences of those lengths (B,); negative where a sequence is shorter."""
    return lengths[:, None] + jnp.arange(-tokens, 0, dtype=jnp.int32)[None]


class Segments(NamedTuple):
    """Where each token of a packed array belongs: its sequence, its offset in it, and whether it belongs to any."""

    sequence: jax.Array
    offset: jax.Array
    live: jax.Array


def segments(cu_seqlens: jax.Array, tokens: int) -> Segments:
    """The segments that cumulative lengths (B + 1,) cut an axis of that many tokens into."""
    token = jnp.arange(tokens, dtype=jnp.int32)
    starts_passed = jnp.searchsorted(cu_seqlens, token, side="right", method="compare_all").astype(jnp.int32)
    sequence = jnp.clip(starts_passed - 1, 0, cu_seqlens.shape[0] - 2)
    live = (token >= cu_seqlens[0]) & (token < cu_seqlens[-1])
    return Segments(sequence, token - cu_seqlens[sequence], live)


def dense_spans(
    call: AttentionCall, q: jax.Array, k: jax.Array, q_lengths: jax.Array | None, kv_lengths: jax.Array | None
) -> Span:
    """Spans (B, Sq) of a padded batch: queries and keys end together."""
    batch, q_size, kv_size = q.shape[0], q.shape[1], k.shape[1]
    q_length = jnp.full((batch, 1), q_size, jnp.int32) if q_lengths is None else q_lengths[:, None]
    kv_length = jnp.full((batch, 1), kv_size, jnp.int32) if kv_lengths is None else kv_lengths[:, None]
    index = jnp.arange(q_size, dtype=jnp.int32)[None]
    return seen_from(call, index + (kv_length - q_length), kv_length, call.is_causal).where(index < q_length)


def packed_spans(call: AttentionCall, tokens: int, cu_seqlens_q: jax.Array, cu_seqlens_kv: jax.Array) -> Span:
    """Spans (Tq,) of packed queries over packed keys: those of their own sequence, with which they end together."""
    sequence, offset, live = segments(cu_seqlens_q, tokens)
    q_length, kv_length = jnp.diff(cu_seqlens_q)[sequence], jnp.diff(cu_seqlens_kv)[sequence]
    seen = seen_from(call, offset + (kv_length - q_length), kv_length, call.is_causal)
    return seen.shifted(cu_seqlens_kv[sequence]).where(live)
