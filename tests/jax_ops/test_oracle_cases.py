"""Every op through its XLA build against the float64 oracle.

Compiling a case costs a few tenths of a second and running it next to nothing, so `make test` compiles few programs and runs
each of them on many calls:

- each feature alone, and as many random shapes as it takes for every two features to meet, both, either alone and neither;
  each shape as many times, with other values, pages and live lengths, as make a hundred random calls an op;
- the named edge cases, less those that differ from another one by a size alone;
- each of these also poisoned (what no one may read is NaN, infinity or no page: bit for bit the same result) and unclamped
  (lengths and offsets out of range: bit for bit the clamped result).

These programs are compiled without LLVM's optimisation, at half the cost. `make test-slow` adds what is left out: the other
edge cases, every pair of features alone, and nine hundred random shapes an op, compiled as users' calls are.
"""

from __future__ import annotations

import math
import re

import jax
import pytest

from tests.calling import call, quick_compilation, redrawn
from tests.edge_cases import edge_cases
from tests.inputs import FEATURES, Case, feature_cases, poisoned, random_case, unclamped
from tests.interpreting import covering_sets
from tests.tolerance import assert_same_bits, check_case

OPS = tuple(op for op in FEATURES if op != "merge_attention")  # that one: test_merge.py
RESULTS = dict.fromkeys(OPS, ("o", "lse")) | {"append_paged": ()}
CALLS = 100
SLOW_SEEDS = range(100, 1000)


@pytest.fixture
def _quickly_compiled():
    with quick_compilation():
        yield


@pytest.fixture(autouse=True)
def _no_program_outlives_its_test():
    """Thousands of them would pass the number of memory maps that Linux allows a process."""
    yield
    jax.clear_caches()


def check(case: Case) -> None:
    """The case, its poisoned twin and its unclamped twin."""
    results = call(case)
    check_case(case, *results)
    twin = poisoned(case)
    poisoned_results = call(twin)
    for name, got, want in zip(RESULTS[case.op], poisoned_results, results, strict=False):
        assert_same_bits(got, want, f"poisoned {name}")
    if len(results) > len(RESULTS[case.op]):
        check_case(twin, *poisoned_results)  # the pools, poison included
    if case.op == "gqa_prefill_packed":  # out of range, bounds are those of no dense batch
        results, clamped_results = (call(twin, is_uniform=False) for twin in (case, unclamped(case)))
    else:
        clamped_results = call(unclamped(case))
    for got, want in zip(clamped_results, results, strict=True):
        assert_same_bits(got, want, "unclamped")


RANDOM_SHAPES = [(op, seed, features) for op in OPS for seed, features in enumerate(covering_sets(op))]


@pytest.mark.newest_jax
@pytest.mark.usefixtures("_quickly_compiled")
@pytest.mark.parametrize("op, seed, features", [pytest.param(*shape, id=f"{shape[0]}-{shape[1]}") for shape in RANDOM_SHAPES])
def test_random_shapes(op, seed, features):
    case = random_case(op, seed, tuple(name for name in FEATURES[op] if name in features))
    check(case)
    for draw in range(1, math.ceil(CALLS / len(covering_sets(op)))):
        check(redrawn(case, draw))


def _feature_cases(are_alone: bool) -> list:
    named = [(op, name, case) for op in OPS for name, case in feature_cases(op) if (len(case.features) < 2) == are_alone]
    return [pytest.param(case, id=f"{op}-{name}") for op, name, case in named]


@pytest.mark.newest_jax
@pytest.mark.usefixtures("_quickly_compiled")
@pytest.mark.parametrize("case", _feature_cases(are_alone=True))
def test_each_feature_alone(case):
    check(case)


LIKE_ANOTHER = re.compile(
    r"\d+x\d+_full|head_dim_(80|88|112|160|192|224)|heads_(9_3|10_2|12_2|14_2|24_2)|window_(49_-1|64_0|None_0|-1_-1)|rotary_(64|128)_.*"
)
UNLIKE_ANY = ("8x3_full", "17x5_full", "113x203_full")


def _edge_cases(are_slow: bool) -> list:
    named = [(op, name, case) for op in OPS for name, case in edge_cases(op).items()]
    is_slow = lambda name: bool(LIKE_ANOTHER.fullmatch(name)) and name not in UNLIKE_ANY  # noqa: E731
    return [pytest.param(case, id=f"{op}-{name}") for op, name, case in named if is_slow(name) == are_slow]


@pytest.mark.newest_jax
@pytest.mark.usefixtures("_quickly_compiled")
@pytest.mark.parametrize("case", _edge_cases(are_slow=False))
def test_edge_cases(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", _edge_cases(are_slow=True))
def test_more_edge_cases(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", _feature_cases(are_alone=False))
def test_each_pair_of_features(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SLOW_SEEDS)
@pytest.mark.parametrize("op", OPS)
def test_many_random_shapes(op, seed):
    check(random_case(op, seed))
