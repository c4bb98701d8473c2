"""Every op on the GPU, as the catalogue dispatches it there, against the float64 oracle; poison bit for bit.

All cases are started at once on a thread pool, since compiling them is what takes the time; each test waits for its own.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

import numpy as np
import pytest

from tests.calling import call
from tests.edge_cases import edge_cases
from tests.inputs import OPS, Case, feature_cases, poisoned, random_case
from tests.tolerance import assert_same_bits, check_case

pytestmark = pytest.mark.gpu

GPU_OPS = [name for name in OPS if name != "merge_attention"]
SEEDS = 24


def run(case: Case):
    return [np.asarray(result) for result in call(case)]


def cases() -> dict[str, Case]:
    found = {}
    for op in GPU_OPS:
        found |= {f"{op}-{seed}": random_case(op, seed) for seed in range(SEEDS)}
        found |= {f"{op}-{name}": case for name, case in feature_cases(op) if "+" not in name}
        found |= {f"{op}-{name}": case for name, case in edge_cases(op).items()}
    return found


CASES = cases()


@cache
def started() -> dict[str, tuple[Future, Future]]:
    pool = ThreadPoolExecutor(16)
    return {name: (pool.submit(run, case), pool.submit(run, poisoned(case))) for name, case in CASES.items()}


@pytest.mark.parametrize("name", sorted(CASES))
def test_equals_the_oracle_and_ignores_poison(name):
    clean, poison = (future.result(timeout=300) for future in started()[name])
    check_case(CASES[name], *clean)
    attended = 0 if CASES[name].op == "append_paged" else 2
    for a, b in zip(clean[:attended], poison[:attended], strict=True):
        assert_same_bits(a, b)
