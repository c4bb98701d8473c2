"""The Mosaic prefill kernel on the GPU: the oracle's cases, the benchmark's workloads, and the same bits every time."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from dispatch_core import Paging, TileConfig, Window, fitting_tile
from dispatch_core.calls import AttentionCall
from jax_ops.devices import device_from_jax
from jax_ops.tools.workloads import WORKLOADS
from pallas_kernels.sm90.prefill import dense_prefill, packed_prefill, paged_prefill
from tests.inputs import poisoned, random_case
from tests.pallas_kernels.sm90.test_prefill import CASES, call_and_arrays
from tests.tolerance import assert_same_bits, check_case

pytestmark = pytest.mark.gpu

PREFILLS = [w for w in WORKLOADS if "prefill" in w.op and w.dtype in ("bfloat16", "float16")]
LIMIT = {"bfloat16": 3.5e-3, "float16": 5e-4}


@pytest.fixture(autouse=True)
def _hopper():
    if device_from_jax(jax.devices()[0]).arch != 90:
        pytest.skip("needs compute capability 9.0")


def run_case(case, tile):
    launch, call, arrays = call_and_arrays(case, device_from_jax(jax.devices()[0]))
    return [np.asarray(x) for x in jax.jit(lambda arrays: launch(call, tile, **arrays))(arrays)]


@pytest.mark.parametrize("name", CASES)
def test_equals_the_oracle_and_ignores_poison(name):
    op, features, pinned, tile, _ = CASES[name]
    case = random_case(op, 0, features, **{"dtype": "bfloat16"} | pinned)
    results = run_case(case, tile)
    check_case(case, *results)
    for result, twin in zip(results[:2], run_case(poisoned(case), tile)[:2], strict=True):
        assert_same_bits(result, twin)


LAUNCHES = {"prefill": dense_prefill, "prefill_packed": packed_prefill, "prefill_paged": paged_prefill}
ABSENT = {
    "prefill": ("q_lengths", "kv_lengths", "sinks"),
    "prefill_packed": ("sinks",),
    "prefill_paged": ("inv_freq", "sinks"),
}


def launch_of(work):
    """A workload's call by this kernel, with the policy's tile."""
    paging = Paging(work.page_size, -(-work.kv_len // work.page_size)) if work.page_size else None
    call = AttentionCall(
        device_from_jax(jax.devices()[0]), work.dtype, work.batch, work.q_heads, work.kv_heads, work.head_dim, work.q_len,
        work.kv_len, is_causal=work.is_causal, window=work.window and Window(*work.window), paging=paging,
        is_uniform=work.op == "prefill",
    )  # fmt: skip
    tile = fitting_tile(call, "sm90_prefill")
    assert isinstance(tile, TileConfig)
    return lambda arrays: LAUNCHES[work.op](call, tile, **arrays, **dict.fromkeys(ABSENT[work.op]))[0]


@pytest.mark.parametrize("work", PREFILLS, ids=lambda w: w.name)
def test_a_workload_has_the_error_of_16_bit_products(work):
    if work.flops > 1.5e12:
        work = replace(work, q_len=work.q_len // 4, kv_len=work.kv_len // 4, lengths=tuple(n // 4 for n in work.lengths))
    arrays = work.arrays(3)
    got = np.asarray(jax.jit(launch_of(work))(arrays), np.float32)
    wide = {n: a.astype(np.float32) if a.dtype != np.int32 else a for n, a in arrays.items()}
    want = np.asarray(work.call(wide, build="xla"))
    assert np.isfinite(got).all()
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < LIMIT[work.dtype]


@pytest.mark.parametrize("name", ["causal 4x512", "packed causal, 8 uneven"])
def test_twenty_runs_give_the_same_bits(name):
    work = next(w for w in WORKLOADS if w.name == name)
    arrays, run = work.arrays(5), jax.jit(launch_of(work))
    first = np.asarray(run(arrays)).view(np.uint16)
    for _ in range(19):
        assert (np.asarray(run(arrays)).view(np.uint16) == first).all()
