"""The online softmax shared by the kernels: running maxima in base 2, and the exact end of a row."""

import math

import jax
import jax.numpy as jnp

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)


def finite_base(top: jax.Array) -> jax.Array:
    """Running maxima to subtract: 0 where a row has seen no score above -inf, so that -inf minus -inf never arises."""
    return jnp.where(top == -jnp.inf, 0.0, top)


def finished_rows(top: jax.Array, total: jax.Array, sink: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """What a row's accumulator is multiplied by, and its log-sum-exp.

    Args:
      top: running maxima of the scores, in base 2; -inf for a row that saw nothing.
      total: sums of exp2(score - top); 0 for such a row.
      sink: natural logits that join the denominator, or None.

    Returns:
      The factor (0 for an empty row) and the natural log-sum-exp (the sink, or -inf, for an empty row).
    """
    if sink is None:
        return jnp.where(total == 0, 0.0, 1.0 / total), finite_base(top) * LN_2 + jnp.log(total)
    sink = sink * LOG2_E
    base = finite_base(jnp.maximum(top, sink))
    kept = jnp.exp2(top - base)
    everything = total * kept + jnp.exp2(sink - base)
    return jnp.where(total == 0, 0.0, kept / everything), base * LN_2 + jnp.log(everything)
