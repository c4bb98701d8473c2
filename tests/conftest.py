"""How jax runs under the tests: on the CPU unless the run selects `gpu`, with eight devices, and strict."""

import os
import re
import sys

import pytest

CPU_DEVICES = 8


def pytest_configure(config: pytest.Config) -> None:
    if "jax" in sys.modules:
        raise pytest.UsageError("jax was imported before tests/conftest.py chose its platform; import it in test modules.")
    if not selects_gpu(config.option.markexpr):
        os.environ["JAX_PLATFORMS"] = "cpu"
        # The CUDA plugin is installed for tests/aot.py; without a driver its version check would only complain.
        os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"

    import jax

    jax.config.update("jax_num_cpu_devices", CPU_DEVICES)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")


def selects_gpu(markexpr: str) -> bool:
    return bool(re.search(r"\bgpu\b", re.sub(r"\bnot\s+gpu\b", "", markexpr)))
