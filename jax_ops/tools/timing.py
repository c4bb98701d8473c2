"""Device time of a jitted function, measured as the record's method asks.

On a GPU the span of a call: from the start of its first kernel to the end of its last, read from the profiler's trace. So
the gaps between the kernels of a call count, kernels that overlap count once, and dispatch does not count. Elsewhere the
host's clock around finished runs. Before the clock starts the same load has run a while, since a card at its power limit
slows down.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

WARM_SECONDS = {"compute": 0.25, "memory": 0.03}
MIN_RUNS = 20


def device_seconds(
    run: Callable[[], Any], *, warm_seconds: float, calls: int = 1, min_runs: int = MIN_RUNS, seconds: float = 0.1
) -> float:
    """Median device time of one call.

    Args:
      run: makes the calls and returns their arrays.
      warm_seconds: how long the load runs first.
      calls: calls of one program, one after the other, that a `run()` makes.
      min_runs: timed runs at least.
      seconds: timed runs fill about this long.
    """
    estimate = _warm(run, warm_seconds)
    runs = max(min_runs, min(400, int(seconds / estimate)))
    if jax.default_backend() == "gpu":
        return statistics.median(spans(kernels(run, runs), runs * calls))
    return statistics.median(_host_seconds(run) for _ in range(runs)) / calls


def elapsed_seconds(run: Callable[[], Any], *, warm_seconds: float, runs: int) -> float:
    """Median time by the host's clock until the results of a `run()` are there, after the load ran for warm_seconds."""
    _warm(run, warm_seconds)
    return statistics.median(_host_seconds(run) for _ in range(runs))


def busy_seconds(run: Callable[[], Any], *, runs: int) -> float:
    """Mean time of a `run()` in which the GPU did anything; elsewhere the median by the host's clock."""
    if jax.default_backend() == "gpu":
        return busy(kernels(run, runs)) / runs
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


Interval = tuple[float, float]


def kernels(run: Callable[[], Any], runs: int) -> list[Interval]:
    """Start and end in seconds of all that the GPU's streams did during the runs, in the order of the starts."""
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(runs):
                jax.block_until_ready(run())
        (trace,) = Path(folder).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(trace)).planes
        streams = [line for plane in planes if plane.name.startswith("/device:GPU:") for line in plane.lines]
        events = [event for line in streams if line.name.startswith("Stream") for event in line.events]
        return sorted((event.start_ns / 1e9, (event.start_ns + event.duration_ns) / 1e9) for event in events)


def spans(intervals: list[Interval], calls: int) -> list[float]:
    """Seconds from the first start to the last end of each of `calls` calls, which did the same in turn.

    Raises:
      RuntimeError: the intervals are not the same number for each call, or none.
    """
    each, left = divmod(len(intervals), calls)
    if each == 0 or left:
        raise RuntimeError(
            f"timing: the profiler saw {len(intervals)} kernels in {calls} calls; need the same number, one or more, in each. "
            f"Is another profiler attached, or does another thread use the GPU?"
        )
    of_call = [intervals[first : first + each] for first in range(0, len(intervals), each)]
    return [max(end for _, end in part) - part[0][0] for part in of_call]


def busy(intervals: list[Interval]) -> float:
    """Seconds in which at least one interval ran, the intervals in the order of their starts."""
    total, until = 0.0, float("-inf")
    for start, end in intervals:
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
