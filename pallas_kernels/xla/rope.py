"""Rotary position embedding (Su et al. 2021) at absolute positions."""

import jax
import jax.numpy as jnp

from dispatch_core.calls import RopeFacts


def rotated(x: jax.Array, position: jax.Array, inv_freq: jax.Array | None, rope: RopeFacts | None) -> jax.Array:
    """Pairs of the leading rotary_dim dims turned by position * inv_freq, in float32 and rounded once; other dims as they are.

    Args:
      x: (..., H, D).
      position: int32 (...).
      inv_freq: float32 (rotary_dim / 2,); None: x is returned as it is.
      rope: the style says which dims pair up; given when inv_freq is.
    """
    if inv_freq is None or rope is None:
        return x
    half = rope.rotary_dim // 2
    angle = position[..., None].astype(jnp.float32) * inv_freq.reshape((1,) * position.ndim + (half,))
    cos, sin = jnp.cos(angle)[..., None, :], jnp.sin(angle)[..., None, :]
    turned, rest = x[..., : rope.rotary_dim].astype(jnp.float32), x[..., rope.rotary_dim :]
    pair_axis, shape = (-2, (2, half)) if rope.style == "half" else (-1, (half, 2))
    a, b = jnp.moveaxis(turned.reshape(*x.shape[:-1], *shape), pair_axis, 0)
    turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], pair_axis).reshape(turned.shape)
    return jnp.concatenate([turned.astype(x.dtype), rest], axis=-1)
