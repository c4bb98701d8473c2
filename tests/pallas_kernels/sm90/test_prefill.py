"""Dense, packed and paged prefill in Mosaic's GPU interpreter, with race detection, against the oracle.

The interpreter runs the kernel's barriers, copies and warpgroups; a case takes seconds, so few of them meet many features.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

from dispatch_core import DEVICES, AttentionCall, Device, Paging, TileConfig, Window
from pallas_kernels.common.prefill_plan import packed_requests
from pallas_kernels.sm90.prefill import (
    OCTET,
    Plan,
    Request,
    _runs,
    dense_prefill,
    packed_plan,
    packed_prefill,
    packed_tiles,
    paged_prefill,
)
from tests.inputs import Case, poisoned, random_case
from tests.pallas_kernels.sm80 import test_paged_prefill as paged
from tests.pallas_kernels.sm80 import test_prefill as plain
from tests.tolerance import assert_same_bits, check_case

# Poison in keys that no row sees: their scores are masked after the product.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")

TWO, THREE = TileConfig(128, 64, num_warpgroups=2, num_stages=2), TileConfig(192, 64, num_warpgroups=3, num_stages=3)


@pytest.fixture(autouse=True)
def _fresh_interpreter():
    """After a failure, the interpreter serves no other kernel until it is told to."""
    yield
    interpret_pallas_call.reset_gpu_interpret_mode_state()


def call_and_arrays(case: Case, device: Device) -> tuple[Callable[..., Any], AttentionCall, dict[str, Any]]:
    """The launch function of a case's op, and what it takes."""
    if case.op == "gqa_prefill_paged":
        return paged_prefill, *paged.facts(case, device)
    return dense_prefill if case.op == "gqa_prefill" else packed_prefill, *plain.facts(case, device)


def run(case: Case, tile: TileConfig, programs: int) -> tuple[np.ndarray, ...]:
    """A case on as many multiprocessors as programs; no two warpgroups may touch one place at once."""
    launch, call, arrays = call_and_arrays(case, replace(DEVICES["H200"], sm_count=programs))
    results = tuple(np.asarray(x) for x in launch(call, tile, interpret=True, **arrays))
    assert not interpret_pallas_call.get_races().races_found
    return results


def check(case: Case, tile: TileConfig = TWO, programs: int = 3) -> None:
    """A case meets the oracle, and gives the same bits whatever lies where nothing may read."""
    results = run(case, tile, programs)
    check_case(case, *results)
    for result, twin in zip(results[:2], run(poisoned(case), tile, programs)[:2], strict=True):
        assert_same_bits(result, twin)


def shape(q: tuple[int, ...], kv: tuple[int, ...], kv_heads: int = 1, group: int = 1, head_dim: int = 64, **more: Any) -> Any:
    return {
        "q_lens": q,
        "kv_lens": kv,
        "kv_heads": kv_heads,
        "group": group,
        "head_dim": head_dim,
        "head_dim_v": head_dim,
    } | more


CASES: dict[str, tuple[str, tuple[str, ...], dict[str, Any], TileConfig, int]] = {
    "one_tile": ("gqa_prefill", (), shape((5,), (7,)), TWO, 2),
    "ring_wraps_over_items": ("gqa_prefill", (), shape((150, 150), (333, 333), group=3), TWO, 2),
    "group_4_full": ("gqa_prefill", ("full",), shape((70,), (200,), group=4, dtype="float16"), TWO, 1),
    "three_warpgroups": ("gqa_prefill", (), shape((200,), (200,), group=3), THREE, 1),
    "more_rows_than_keys": ("gqa_prefill", ("sinks",), shape((190,), (70,), head_dim=32), TWO, 2),
    "wide_heads": ("gqa_prefill", (), shape((150,), (180,), head_dim=256), TWO, 1),
    "no_keys": ("gqa_prefill", ("sinks",), shape((9,), (0,)), TWO, 1),
    "lengths": ("gqa_prefill", ("q_lengths", "kv_lengths", "softcap"), shape((90, 5, 0), (150, 0, 9), group=8), TWO, 2),
    "window": ("gqa_prefill", ("window_both",), shape((130,), (300,), head_dim=96), TWO, 3),
    "packed": ("gqa_prefill_packed", ("sinks",), shape((5, 0, 77, 130), (5, 3, 201, 130), group=2), TWO, 3),
    "pages_of_16": ("gqa_prefill_paged", (), shape((70, 5, 0), (150, 0, 40), group=2, page_size=16), TWO, 2),
    "pages_of_64": ("gqa_prefill_paged", ("sinks", "tail"), shape((9, 90), (64, 131), group=3, page_size=64), TWO, 2),
    "pages_of_256": (
        "gqa_prefill_paged",
        ("rope", "softcap", "inactive"),
        shape((40, 3), (300, 257), group=4, page_size=256, dtype="float16"),
        TWO,
        2,
    ),
    "pages_missing": (
        "gqa_prefill_paged",
        ("holes", "overflow", "window_left"),
        shape((30, 20, 33), (100, 200, 60), page_size=32),
        TWO,
        2,
    ),
    "packed_window": ("gqa_prefill_packed", ("window_left", "softcap", "tail"), shape((70, 9), (70, 140), group=16), TWO, 4),
}


ON_BOTH_JAXES = ("ring_wraps_over_items", "lengths", "packed", "pages_of_16")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in ON_BOTH_JAXES else pytest.mark.newest_jax) for n in CASES])
def test_against_the_oracle(name: str) -> None:
    op, features, pinned, tile, programs = CASES[name]
    check(random_case(op, 0, features, **{"dtype": "bfloat16"} | pinned), tile, programs)


@pytest.mark.parametrize("op", ["gqa_prefill", "gqa_prefill_packed"])
def test_no_tokens(op: str) -> None:
    case = random_case(op, 0, (), **shape((0, 0), (9, 3)), dtype="bfloat16")
    launch, call, arrays = call_and_arrays(case, DEVICES["H200"])
    check_case(case, *(np.asarray(x) for x in launch(call, TWO, interpret=True, **arrays)))


@pytest.mark.parametrize("tile", [TileConfig(128, 64), TileConfig(128, 80, num_warpgroups=2)])
def test_a_tile_that_the_kernel_cannot_take_is_refused(tile: TileConfig) -> None:
    launch, call, arrays = call_and_arrays(random_case("gqa_prefill", 0, (), dtype="bfloat16", head_dim=64), DEVICES["H200"])
    with pytest.raises(
        ValueError, match=r"^sm90 prefill: TileConfig\(.*\); need block_q of 64 for each warpgroup and block_kv"
    ):
        launch(call, tile, interpret=True, **arrays)


@pytest.mark.newest_jax
def test_values_that_differ_in_head_size() -> None:
    check(random_case("gqa_prefill", 1, (), **shape((70,), (130,), head_dim=192) | {"head_dim_v": 128, "dtype": "float16"}))


@pytest.mark.newest_jax
@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_scales_that_are_not_positive(scale: float) -> None:
    case = random_case("gqa_prefill", 2, (), **shape((20,), (90,)), dtype="float16")
    check_case(case := replace(case, options={**case.options, "scale": scale}), *run(case, TWO, 1))


# ---- which tiles an item visits, without the interpreter


LENGTHS = ((1, 1), (70, 70), (5, 300), (300, 5), (130, 0), (0, 9), (64, 128))
BOUNDS = ((None, None), (None, 0), (0, 0), (5, 0), (100, 30), (0, None), (None, 90))


def runs_of(plan: Plan) -> Callable[..., list[tuple[Any, ...]]]:
    """The runs of a request as a function of its lengths, without the fields that are no arrays."""

    @jax.jit
    def runs(token: Any, q_len: Any, kv_begin: Any, kv_end: Any, cached: Any) -> list[tuple[Any, ...]]:
        zero = jnp.int32(0)
        request = Request(zero, zero, token, q_len, zero, kv_begin, kv_end, cached, zero + 1, zero, zero, zero)
        return [tuple(x for x in run if isinstance(x, jax.Array)) for run in _runs(plan, request)]

    return runs


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("left, right", BOUNDS)
def test_runs_hold_every_visible_key_and_leave_unmasked_what_all_rows_see(
    left: int | None, right: int | None, page_size: int
) -> None:
    call = AttentionCall(
        DEVICES["H200"], "float16", 2, 2, 1, 64, 512, 512, window=Window(left, right), is_uniform=False,
        paging=Paging(page_size, 32) if page_size else None,
    )  # fmt: skip
    plan = packed_plan(call, TWO, 512, 512, True, page_size)
    runs, block = runs_of(plan), TWO.block_kv
    for q_len, kv_len in LENGTHS:
        for token in range(-5 if q_len else 0, max(q_len, 1), plan.tokens):
            for kv_begin, cached in ((0, 0), (3, 77), (7, 128)):
                found = runs(*(jnp.int32(x) for x in (token, q_len, kv_begin, kv_begin + kv_len, cached)))
                assert len(found) == (2 if page_size else 1)
                rows = np.arange(max(token, 0), min(token + plan.tokens, q_len))
                for is_cached, values in zip((False, True), found, strict=False):
                    *_, first, stop, full_from, full_to = (int(x) for x in values)
                    begin, end = (0, cached) if is_cached else (kv_begin, kv_begin + kv_len)
                    position = rows[:, None] + (cached if is_cached else kv_begin + kv_len - q_len)
                    key = np.arange(512)[None, :]
                    visible = (key >= begin) & (key < end) & (rows[:, None] >= 0)
                    if left is not None:
                        visible &= key >= position - left
                    if right is not None and not is_cached:
                        visible &= key <= position + right
                    assert 0 <= first <= full_from <= full_to <= stop
                    assert not visible[:, : first * block].any() and not visible[:, stop * block :].any()
                    assert visible[:, full_from * block : full_to * block].all()
                    seen = visible.any(0).nonzero()[0]
                    needed = 0 if not len(seen) else seen[-1] // block - seen[0] // block + 1
                    assert stop - first <= needed + 1
                    if not is_cached:
                        assert stop - first >= 1 and full_to < stop


def test_packed_tiles_cover_every_row_once() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        lengths = rng.integers(0, 200, 5) * rng.integers(0, 2, 5)
        start, tail = (int(x) for x in rng.integers(0, 20, 2))
        cu = jnp.asarray(start + np.concatenate([[0], np.cumsum(lengths)]), jnp.int32)
        total = int(cu[-1]) + tail
        if total == 0:
            continue
        call = AttentionCall(DEVICES["H200"], "float16", 5, 2, 1, 64, 200, 200, is_causal=True, is_uniform=False)
        plan = packed_plan(call, TWO, total, total, True)
        tiles, live_tiles = (np.asarray(x) for x in packed_tiles(plan, packed_requests(cu, cu, total)))
        _, octet, token, q_len, kv_octet, kv_begin, kv_end, *_ = tiles
        written = np.zeros(total, int)
        for tile in range(plan.tiles):
            for i in range(plan.tokens):
                if 0 <= token[tile] + i < q_len[tile]:
                    written[octet[tile] * OCTET + i] += 1
        assert (written == 1).all()
        live = q_len > 0
        assert live[: live_tiles[0]].all() and not live[live_tiles[0] :].any(), "idle tiles come last"
        assert (kv_begin[live] < OCTET).all() and (kv_begin <= kv_end).all() and (kv_octet >= 0).all()
