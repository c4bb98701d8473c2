"""FP8 caches as words that Triton can copy: how they are paired, taken apart and scaled for a product."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dispatch_core.calls import FLOAT8
from pallas_kernels.common.fp8 import decode_e4m3_bits

Array = jax.Array


def in_pairs(x: Array) -> Array:
    """FP8 elements as 16-bit words of two, the even one in the low byte; a view."""
    return lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, 2), jnp.uint16)


def out_of_pairs(x: Array) -> Array:
    """The inverse of `in_pairs`."""
    return lax.bitcast_convert_type(x, FLOAT8).reshape(*x.shape[:-1], -1)


def operands(words: Array, dtype: Any, arch: int) -> tuple[Array, ...]:
    """Words of the cache as operands of a product: one block of columns for each element of a word."""
    if words.dtype == jnp.uint16:
        parts = (words & 0xFF).astype(jnp.uint8), lax.shift_right_logical(words, jnp.uint16(8)).astype(jnp.uint8)
    elif words.dtype == FLOAT8:
        parts = (lax.bitcast_convert_type(words, jnp.uint8),)
    else:
        return (words,)
    if arch < 89:
        return tuple(decode_e4m3_bits(x).astype(dtype) for x in parts)
    return tuple(lax.bitcast_convert_type(x, FLOAT8).astype(jnp.float16).astype(dtype) for x in parts)


def power_of_two(magnitude: Array) -> tuple[Array, Array]:
    """The power of two at or under each float32 magnitude, and its inverse: both normal numbers."""
    exponent = jnp.clip(lax.bitcast_convert_type(magnitude, jnp.int32) & 0x7F800000, 1 << 23, 253 << 23)
    inverse = lax.bitcast_convert_type((254 << 23) - exponent, jnp.float32)
    return lax.bitcast_convert_type(exponent, jnp.float32), inverse
