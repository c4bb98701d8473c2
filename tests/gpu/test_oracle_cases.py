"""Every op on the GPU, as the catalogue dispatches it there, against the float64 oracle; poison bit for bit.

Compiling takes the time: run them in several processes (`make gpu-test` does).
"""

from dataclasses import replace

import numpy as np
import pytest

import jax_ops
from jax_ops import explain
from tests.calling import call, keywords
from tests.edge_cases import edge_cases
from tests.inputs import FEATURES, OPS, Case, feature_cases, poisoned, random_case
from tests.tolerance import assert_same_bits, check_case

pytestmark = pytest.mark.gpu

GPU_OPS = [name for name in OPS if name != "merge_attention"]
SEEDS = 24
# What the sm90 kernels of prefill take; the cases drawn from everything seldom meet them.
MOSAIC_OPS = ("gqa_prefill", "gqa_prefill_packed", "gqa_prefill_paged")
BY_NAME = ("gqa_decode", "gqa_decode_paged")  # whose sm90 kernel answers to its name alone
MOSAIC_HEADS = ((128, 128), (64, 64), (192, 128), (256, 256), (96, 96), (32, 32))


def mosaic_case(op: str, seed: int) -> Case:
    head_dim, head_dim_v = MOSAIC_HEADS[seed % (6 if op == "gqa_prefill" else 3)]
    pages = {"page_size": (16, 64, 8, 256, 32, 128)[(seed // 2) % 6]} if op == "gqa_prefill_paged" else {}
    dtype = ("bfloat16", "float16")[seed // 6 % 2]
    return random_case(op, seed, head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype, **pages)


def decode_case(op: str, seed: int) -> Case:
    """One that the sm90 kernels of decode take, most often: with an odd capacity or many rows it is any build's."""
    rng = np.random.default_rng(seed)
    kv_lens = tuple(8 * int(n) for n in rng.integers(1, 400, size=rng.integers(1, 9)))
    head_dim = (128, 64)[seed % 2]
    features = tuple(name for name in FEATURES[op] if name not in ("v_dim", "fp8_cache") and rng.random() < 0.4)
    pages = {"page_size": (16, 64, 8, 256, 32, 128)[seed % 6]} if op == "gqa_decode_paged" else {}
    sizes = {"kv_heads": (1, 2, 8)[seed % 3], "group": (4, 8, 2)[seed // 3 % 3], "head_dim": head_dim, "head_dim_v": head_dim}
    case = random_case(op, seed, features, dtype=("bfloat16", "float16")[seed // 2 % 2], kv_lens=kv_lens, **sizes, **pages)
    is_taken = explain(getattr(jax_ops, op), **case.arrays, **keywords(case), build="sm90", device="H200").key is not None
    return replace(case, hints={**case.hints, "build": "sm90"} if is_taken else case.hints)


def cases() -> dict[str, Case]:
    found = {}
    for op in GPU_OPS:
        found |= {f"{op}-{seed}": random_case(op, seed) for seed in range(SEEDS)}
        found |= {f"{op}-{name}": case for name, case in feature_cases(op) if "+" not in name}
        found |= {f"{op}-{name}": case for name, case in edge_cases(op).items()}
    for op in MOSAIC_OPS:
        found |= {f"{op}-mosaic-{seed}": mosaic_case(op, seed) for seed in range(SEEDS)}
        found |= {f"{op}-mosaic-{name}": case for name, case in feature_cases(op, head_dim=64) if "+" not in name}
        found |= {f"{op}-mosaic-{name}": case for name, case in edge_cases(op, head_dim=64).items()}
    for op in BY_NAME:
        found |= {f"{op}-mosaic-{seed}": decode_case(op, seed) for seed in range(SEEDS)}
    return found


CASES = cases()


def run(case: Case) -> list[np.ndarray]:
    return [np.asarray(result) for result in call(case)]


@pytest.mark.parametrize("name", sorted(CASES))
def test_equals_the_oracle_and_ignores_poison(name):
    clean = run(CASES[name])
    check_case(CASES[name], *clean)
    attended = 0 if CASES[name].op == "append_paged" else 2
    for a, b in zip(clean[:attended], run(poisoned(CASES[name]))[:attended], strict=True):
        assert_same_bits(a, b)
