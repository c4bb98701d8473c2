"""Device time of a jitted function, measured as the record's method asks.

On a GPU the sum of its kernels' durations from CUPTI, so that neither dispatch nor gaps count; elsewhere the host's clock
around finished runs. Before the clock starts the same load has run a while, since a card at its power limit slows down.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

WARM_SECONDS = {"compute": 0.25, "memory": 0.03}
MIN_RUNS = 20


def device_seconds(run: Callable[[], Any], *, warm_seconds: float, min_runs: int = MIN_RUNS, seconds: float = 0.1) -> float:
    """Median device time of one `run()`.

    Args:
      run: launches the work once and returns its arrays.
      warm_seconds: how long the load runs first.
      min_runs: timed runs at least.
      seconds: timed runs fill about this long.
    """
    estimate = _warm(run, warm_seconds)
    runs = max(min_runs, min(400, int(seconds / estimate)))
    if jax.default_backend() == "gpu":
        return statistics.median(_kernel_seconds(run, runs))
    return statistics.median(_host_seconds(run) for _ in range(runs))


def elapsed_seconds(run: Callable[[], Any], *, warm_seconds: float, runs: int) -> float:
    """Median time by the host's clock until the results of a `run()` are there, after the load ran for warm_seconds."""
    _warm(run, warm_seconds)
    return statistics.median(_host_seconds(run) for _ in range(runs))


def _warm(run: Callable[[], Any], seconds: float) -> float:
    """Runs for a while and returns the time of one run by the host's clock."""
    jax.block_until_ready(run())
    start, runs = time.perf_counter(), 0
    while runs == 0 or time.perf_counter() - start < seconds:
        jax.block_until_ready([run() for _ in range(4)])
        runs += 4
    return (time.perf_counter() - start) / runs


def _host_seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def _kernel_seconds(run: Callable[[], Any], runs: int) -> list[float]:
    from jax.experimental.mosaic.gpu import profiler

    _, milliseconds = profiler.measure(run, iterations=runs)()
    if milliseconds is None:
        raise RuntimeError("timing: CUPTI saw no kernel; need a run that launches one. Is another profiler attached?")
    return [ms / 1e3 for ms in milliseconds]
