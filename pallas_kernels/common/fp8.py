"""float8_e4m3fn from its bits, for targets that cannot convert it."""

import jax
import jax.numpy as jnp
from jax import lax


def decode_e4m3_bits(bits: jax.Array) -> jax.Array:
    """The float16 values of float8_e4m3fn bit patterns; every one is exactly representable.

    e4m3 has its exponent and mantissa where float16 has them once shifted left by 7, with a bias of 7 where float16 has 15:
    one exact product with 2 ** 8 makes up the difference, subnormals included. Only NaN (all ones below the sign) has no
    counterpart there.

    Args:
      bits: uint8.
    """
    wide = bits.astype(jnp.uint16)
    magnitude = lax.bitcast_convert_type((wide & 0x7F) << 7, jnp.float16) * jnp.float16(256)
    magnitude = jnp.where((wide & 0x7F) == 0x7F, jnp.float16(jnp.nan), magnitude)
    return jnp.where(wide >= 0x80, -magnitude, magnitude)
