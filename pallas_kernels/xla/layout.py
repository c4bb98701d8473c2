"""Arrays as attention problems: one per (sequence, KV head), whose rows are the query tokens times the heads of the group."""

import jax
import jax.numpy as jnp


def folded(x: jax.Array, kv_heads: int) -> jax.Array:
    """(B, S, kv_heads * G, ...) as (B * kv_heads, S * G, ...): token-major rows per KV head."""
    batch, tokens, heads, *rest = x.shape
    x = jnp.moveaxis(x.reshape(batch, tokens, kv_heads, heads // kv_heads, *rest), 2, 1)
    return x.reshape(batch * kv_heads, tokens * (heads // kv_heads), *rest)


def unfolded(x: jax.Array, batch: int, tokens: int) -> jax.Array:
    """The inverse of `folded`: (B * Hkv, S * G, ...) as (B, S, Hkv * G, ...)."""
    problems, rows, *rest = x.shape
    kv_heads, group = problems // batch, rows // tokens
    x = jnp.moveaxis(x.reshape(batch, kv_heads, tokens, group, *rest), 1, 2)
    return x.reshape(batch, tokens, kv_heads * group, *rest)


def folded_tokens(x: jax.Array, q_heads: int, kv_heads: int) -> jax.Array:
    """What the heads of a token share (B, S), for every row (B * Hkv, S * G)."""
    return folded(jnp.broadcast_to(x[..., None], (*x.shape, q_heads)), kv_heads)


def folded_heads(x: jax.Array, batch: int, tokens: int, kv_heads: int) -> jax.Array:
    """What the tokens of a head share (Hq,), for every row (B * Hkv, S * G)."""
    return folded(jnp.broadcast_to(x[None, None], (batch, tokens, *x.shape)), kv_heads)


def even_blocks(length: int, largest: int) -> tuple[int, int]:
    """The fewest blocks of at most `largest` that cover a length, and their size when they are as even as can be."""
    count = -(-length // largest)
    return count, -(-length // count)


def padded_to(x: jax.Array, length: int) -> jax.Array:
    """X with zeros appended along axis 1 up to a length."""
    widths = [(0, 0)] * x.ndim
    widths[1] = (0, length - x.shape[1])
    return jnp.pad(x, widths)


def dequantised(x: jax.Array, scale: jax.Array | None) -> jax.Array:
    """X (B, S, H, D) in float32, times its scale (B, S or 1, Hkv) where it has one."""
    x = x.astype(jnp.float32)
    return x if scale is None else x * jnp.repeat(scale, x.shape[2] // scale.shape[2], axis=2)[..., None]


def finite(x: jax.Array) -> jax.Array:
    """X with zeros for what is not finite."""
    return jnp.where(jnp.isfinite(x), x, 0)


def common_zero(*arrays: jax.Array | None) -> jax.Array:
    """A float32 zero that varies over every manual mesh axis over which any of the arrays does.

    Inside shard_map the carry of a loop must vary from the start as it will after a step; adding this to it sees to that.
    """
    zeros = [jnp.zeros_like(x, jnp.float32, shape=()) for x in arrays if x is not None]
    return jnp.sum(jnp.stack(zeros))
