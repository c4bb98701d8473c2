"""Decode and paged decode in Mosaic's GPU interpreter, with race detection, against the oracle."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

from dispatch_core import DEVICES, TileConfig
from pallas_kernels.sm90.decode import decode, paged_decode
from tests.inputs import Case, poisoned, random_case, unclamped
from tests.pallas_kernels.sm80 import test_decode as plain
from tests.tolerance import assert_same_bits, check_case

# Poison in keys that no row sees: their scores are masked after the product.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")

TILE = TileConfig(64, 64, num_warpgroups=2, num_stages=2)
ALONE = TileConfig(64, 64, num_stages=3)


@pytest.fixture(autouse=True)
def _fresh_interpreter():
    """After a failure, the interpreter serves no other kernel until it is told to."""
    yield
    interpret_pallas_call.reset_gpu_interpret_mode_state()


def run(case: Case, sm_count: int, tile: TileConfig = TILE) -> tuple[np.ndarray, ...]:
    """A case on so many multiprocessors; no two warpgroups may touch one place at once."""
    call, arrays = plain.facts(case, replace(DEVICES["H200"], sm_count=sm_count))
    launch = paged_decode if case.op == "gqa_decode_paged" else decode
    o, lse, *pools = (np.asarray(x) for x in launch(call, tile, interpret=True, **arrays))
    assert not interpret_pallas_call.get_races().races_found
    return (o[:, 0], lse[:, 0], *pools) if case.arrays["q"].ndim == 3 else (o, lse, *pools)


def shape(kv: tuple[int, ...], kv_heads: int = 1, group: int = 4, head_dim: int = 128, **more: Any) -> dict[str, Any]:
    return {"kv_lens": kv, "kv_heads": kv_heads, "group": group, "head_dim": head_dim, "head_dim_v": head_dim} | more


CASES: dict[str, tuple[str, tuple[str, ...], dict[str, Any], int]] = {
    "one_tile": ("gqa_decode", (), shape((8,)), 3),
    "one_sequence_in_many_shares": ("gqa_decode", (), shape((1336,), kv_heads=2, head_dim=64), 44),
    "fewer_tiles_than_shares": ("gqa_decode", ("kv_lengths", "sinks"), shape((640, 65, 0)), 22),
    "ragged": ("gqa_decode", ("kv_lengths", "sinks"), shape((200, 0, 70, 129, 136), kv_heads=2), 6),
    "more_sequences_than_are_looked_up_at_once": ("gqa_decode", ("kv_lengths",), shape((24,) * 18, head_dim=64), 5),
    "tokens": ("gqa_decode", ("tokens", "softcap", "window_left"), shape((160, 72), group=3, dtype="float16"), 2),
    "pages_of_16": ("gqa_decode_paged", ("sinks",), shape((150, 0, 40), kv_heads=2, group=8, page_size=16), 4),
    "pages_of_64": ("gqa_decode_paged", ("tokens", "window_left"), shape((130, 64), page_size=64, dtype="float16"), 2),
    "pages_of_256": ("gqa_decode_paged", ("append", "rope"), shape((300, 257), group=1, page_size=256), 3),
    "pages_missing": (
        "gqa_decode_paged",
        ("append", "tokens", "holes", "overflow", "inactive", "softcap"),
        shape((100, 200, 60, 0), group=2, head_dim=64, page_size=32),
        3,
    ),
    "window_of_appended": ("gqa_decode_paged", ("append", "window_left", "rope"), shape((200, 3), page_size=16), 2),
}
ON_BOTH_JAXES = ("ragged", "pages_missing")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in ON_BOTH_JAXES else pytest.mark.newest_jax) for n in CASES])
def test_against_the_oracle(name: str) -> None:
    op, features, pinned, sm_count = CASES[name]
    case = random_case(op, 0, features, **{"dtype": "bfloat16"} | pinned)
    results = run(case, sm_count)
    check_case(case, *results)
    for result, twin in zip(results[:2], run(poisoned(case), sm_count)[:2], strict=True):
        assert_same_bits(result, twin)


@pytest.mark.newest_jax
def test_one_warpgroup_alone() -> None:
    op, features, pinned, sm_count = CASES["ragged"]
    case = random_case(op, 0, features, **{"dtype": "bfloat16"} | pinned)
    check_case(case, *run(case, sm_count, ALONE))


@pytest.mark.newest_jax
@pytest.mark.parametrize("op, features", plain.EXTREMES)
def test_lengths_out_of_range_are_clamped(op: str, features: tuple[str, ...]) -> None:
    case = plain.extreme_lengths(op, features, kv_heads=1, group=4, head_dim=64, head_dim_v=64, dtype="bfloat16")
    for result, twin in zip(run(case, 2), run(unclamped(case), 2), strict=True):
        assert_same_bits(result, twin)
