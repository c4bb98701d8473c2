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


def exp2_scaled(x: jax.Array, scale: jax.Array | float, base: jax.Array, *, interpret: bool) -> jax.Array:
    """exp2(x * scale - base); results below 2**-126 are 0."""
    return jnp.exp2(x * scale - base) if interpret else _float32(_EXP2, x, scale, -base)


def softcapped(dots: jax.Array, factor: jax.Array | float, cap: float, *, interpret: bool) -> jax.Array:
    """Scores cap * tanh(dots * factor / cap) in base 2 (times log2 e), within about cap * 2**-22: 1 - 2 / (1 + exp(2 x))."""
    bound, rate = cap * LOG2_E, factor * (2.0 * LOG2_E / cap)
    if interpret:
        return bound - (2.0 * bound) / (1.0 + jnp.exp2(dots * rate))
    return _float32(_SOFTCAP, dots, rate, bound, -2.0 * bound)
