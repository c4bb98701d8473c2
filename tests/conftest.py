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
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes may share a GPU

    import jax

    jax.config.update("jax_num_cpu_devices", CPU_DEVICES)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True, scope="module")
def _no_program_outlives_its_module():
    """A program for the CPU holds memory maps, of which Linux allows a process 65,530; past them XLA aborts."""
    yield
    if jax := sys.modules.get("jax"):
        jax.clear_caches()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config) -> None:
    """A passing run of all GPU tests is recorded; one of some of them (-k, a path) is not."""
    is_whole = not config.option.keyword and config.args in (config.getini("testpaths"), ["tests/gpu"])
    if selects_gpu(config.option.markexpr) and exitstatus == 0 and is_whole and not config.option.collectonly:
        from tests.gpu_record import write_record

        write_record({outcome: len(reports) for outcome, reports in terminalreporter.stats.items()})


def selects_gpu(markexpr: str) -> bool:
    return bool(re.search(r"\bgpu\b", re.sub(r"\bnot\s+gpu\b", "", markexpr)))
