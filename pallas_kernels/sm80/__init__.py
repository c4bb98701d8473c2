"""Pallas-Triton builds, for compute capability 8.0 and everything newer.

JAX marks its Triton backend deprecated and says so at every lowering, in a warning attributed to jax itself: the filter
below silences that one message and no other. Everything that touches the backend stays in this package.
"""

import re
import warnings

DEPRECATION = (
    "The Pallas Triton backend is deprecated and will be removed in a future JAX version. To keep using Pallas on GPU, please"
    " migrate to the Mosaic GPU backend. To keep using Triton, switch to the official Triton bindings and jax_triton."
)

warnings.filterwarnings("ignore", message=re.escape(DEPRECATION) + "$")
