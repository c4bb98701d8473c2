"""Elementwise functions in the instructions the machine has for them, and their plain twins for the interpreter.

Triton writes neither a fused multiply-add nor a flushing `ex2` of its own accord: an exponential would be four or five
instructions instead of two, a tanh some twenty instead of six.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plt

from pallas_kernels.common.softmax import LOG2_E

_EXP2 = "{ .reg .f32 t; fma.rn.ftz.f32 t, $1, $2, $3; ex2.approx.ftz.f32 $0, t; }"
_STEEPEST = "{ .reg .f32 t; abs.ftz.f32 t, $1; rcp.approx.ftz.f32 t, t; mul.rn.ftz.f32 t, t, $3; min.ftz.f32 $0, t, $2; }"
_SOFTCAP = (
    "{ .reg .f32 t; mul.rn.ftz.f32 t, $1, $2; ex2.approx.ftz.f32 t, t; add.rn.ftz.f32 t, t, 0f3F800000;"
    " rcp.approx.ftz.f32 t, t; fma.rn.ftz.f32 $0, t, $4, $3; }"
)


def _float32(assembly: str, *args: jax.Array | float) -> jax.Array:
    """Assembly over float32 arguments, broadcast to the first one's shape."""
    blocks = [jnp.broadcast_to(jnp.asarray(x, jnp.float32), jnp.shape(args[0])) for x in args]
    [result] = plt.elementwise_inline_asm(
        assembly,
        args=blocks,
        constraints=",".join(["=f"] + ["f"] * len(blocks)),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(blocks[0].shape, jnp.float32)],
    )
    return result


def exp2_scaled(x: jax.Array, scale: jax.Array | float, base: jax.Array | float, *, interpret: bool) -> jax.Array:
    """exp2(x * scale - base); results below 2**-126 are 0."""
    return jnp.exp2(x * scale - base) if interpret else _float32(_EXP2, x, scale, -base)


def steepest_rate(top: jax.Array, scale: jax.Array | float, *, interpret: bool) -> jax.Array:
    """The factor for the scores of rows whose largest is `top`: scale, or less where top * scale would exceed 2**29.

    There, exp2 of (a rounded product) - (another) is no longer near 1 at the maximum itself, and overflows from 2**31 on.
    Scores that differ at all still differ by 2**5 or more: their weights are 0 and 1 either way.
    """
    if interpret:
        return jnp.minimum(scale, 2.0**29 / jnp.abs(top))
    return _float32(_STEEPEST, top, scale, 2.0**29)


def softcapped(dots: jax.Array, factor: jax.Array | float, cap: float, *, interpret: bool) -> jax.Array:
    """Scores cap * tanh(dots * factor / cap) in base 2 (times log2 e), within about cap * 2**-22: 1 - 2 / (1 + exp(2 x))."""
    bound, rate = cap * LOG2_E, factor * (2.0 * LOG2_E / cap)
    if interpret:
        return bound - (2.0 * bound) / (1.0 + jnp.exp2(dots * rate))
    return _float32(_SOFTCAP, dots, rate, bound, -2.0 * bound)
