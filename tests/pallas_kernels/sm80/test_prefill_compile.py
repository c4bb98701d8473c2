"""Dense and packed prefill compiled for GPUs that are not there: registers, instructions, shared memory."""

import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from dispatch_core import AttentionCall, TileConfig, Window
from dispatch_core.calls import FLOAT8
from dispatch_core.tiling import POLICIES, fitting_tile, shape_of
from pallas_kernels.sm80.plan import has_asynchronous_products, shared_memory_bytes
from pallas_kernels.sm80.prefill import dense_prefill, packed_prefill
from tests import aot

BATCH, KV_HEADS = 2, 8
TARGETS = ("a100", "h200")
OTHER_TARGETS = ("a10", "l4", "b200", "sm120")


def array(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def facts(
    target: aot.Target, *, dtype: str = "bfloat16", group: int = 4, dims: tuple[int, int] = (128, 128), q_rows: int = 2048,
    kv_rows: int = 2048, is_ragged: bool = False, **facts: Any
) -> AttentionCall:  # fmt: skip
    return AttentionCall(
        target.device, dtype, BATCH, KV_HEADS * group, KV_HEADS, dims[0], q_rows, kv_rows, head_dim_v=dims[1],
        is_uniform=not is_ragged, **{"is_causal": True} | facts,
    )  # fmt: skip


def case(target: aot.Target, *, is_packed: bool = False, **setting: Any) -> aot.Case:
    """A prefill with the policy's tile."""
    call = facts(target, **setting)
    tile = fitting_tile(call, "sm80_prefill")
    assert isinstance(tile, TileConfig), tile
    scale = array(BATCH, KV_HEADS, dtype="float32") if call.is_fp8 else None
    rest = dict.fromkeys(("q_scale", "k_scale", "v_scale"), scale)
    rest["sinks"] = array(call.q_heads, dtype="float32") if call.has_sinks else None
    lengths = ("cu_seqlens_q", "cu_seqlens_kv") if is_packed else ("q_lengths", "kv_lengths")
    rest |= dict.fromkeys(lengths, array(BATCH + is_packed, dtype="int32") if is_packed or not call.is_uniform else None)
    sizes = {"q": (call.max_seqlen_q, call.q_heads, call.head_dim)}
    sizes |= {"k": (call.max_seqlen_kv, KV_HEADS, call.head_dim), "v": (call.max_seqlen_kv, KV_HEADS, call.v_dim)}
    for name, (rows, heads, dim) in sizes.items():
        lead = (BATCH * rows,) if is_packed else (BATCH, rows)
        rest[name] = array(*lead, heads, dim, dtype=call.dtype)
    launch = packed_prefill if is_packed else dense_prefill
    return aot.Case(lambda arrays: launch(call, tile, **arrays), (rest,))


SETTINGS: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"is_causal": False, "return_lse": True},
    "float16_dim_64": {"dtype": "float16", "dims": (64, 64)},
    "dim_96_rules": {"dims": (96, 96), "softcap": 30.0, "window": Window(1000, 8), "has_sinks": True, "is_causal": False},
    "dims_192_128": {"dims": (192, 128)},
    "dim_256": {"dims": (256, 256), "group": 2},
    "packed_group_7": {"group": 7, "is_packed": True, "is_ragged": True, "return_lse": True},
    "padded_window": {"is_ragged": True, "window": Window(1023)},
    "short_queries": {"q_rows": 6},
    "fp8": {"dtype": FLOAT8, "is_causal": False},
    "float32": {"dtype": "float32"},
    "float32_dim_64": {"dtype": "float32", "dims": (64, 64), "window": Window(100)},
    "past_2_to_31": {"kv_rows": 1_100_000, "window": Window(1023)},
}
FEW = ("causal", "float16_dim_64", "dim_256", "float32")
# Bytes stored and loaded a thread. On the H200, 128 rows of head_dim 128 on four warps use every register and a few more; that
# two such programs share an SM is worth it: causal 2x4096 482 TFLOP/s, where the best tile that never spills has 455. The B200
# takes the H200's tile and has not been measured.
FULL = {"causal": 56, "full": 128, "packed_group_7": 288, "padded_window": 176, "fp8": 56, "past_2_to_31": 548}
SPILLS = {("h200", name): spilled for name, spilled in FULL.items()} | {("a100", "float32_dim_64"): 8, ("b200", "causal"): 888}


def other_cases(target: aot.Target) -> dict[str, aot.Case]:
    return {name: case(target, **setting) for name, setting in SETTINGS.items() if name not in FEW}


def few_cases(target: aot.Target) -> dict[str, aot.Case]:
    return {name: case(target, **SETTINGS[name]) for name in FEW}


def kernel_of(target: str, name: str) -> aot.Kernel:
    cases = "few_cases" if name in FEW else "other_cases"
    return aot.compile_cases(target, f"tests.pallas_kernels.sm80.test_prefill_compile:{cases}")[name].kernel


ALL = [aot.on(t, name, is_on_both=name in FEW) for t in TARGETS for name in SETTINGS] + [
    aot.on(t, name) for t in OTHER_TARGETS for name in FEW
]


@pytest.mark.parametrize("target, name", ALL)
def test_nothing_spills_but_what_was_measured(target: str, name: str) -> None:
    assert kernel_of(target, name).spill_bytes <= SPILLS.get((target, name), 0)


@pytest.mark.parametrize("target, name", ALL)
def test_shared_memory_is_what_the_formula_says_and_the_policy_allows(target: str, name: str) -> None:
    call = facts(aot.TARGETS[target], **{k: x for k, x in SETTINGS[name].items() if k != "is_packed"})
    tile = fitting_tile(call, "sm80_prefill")
    assert isinstance(tile, TileConfig)
    shared, formula = kernel_of(target, name).shared_bytes, shared_memory_bytes(call, tile)
    assert shared <= call.device.shared_memory_per_block
    if target == "b200":
        assert shared <= formula + 3072  # barriers and staging of tensor memory
    else:
        assert formula <= shared <= formula + 512  # reductions between warps in float32
        assert shared <= POLICIES["sm80_prefill"].shared_bytes(tile, shape_of(call)) + 512


@pytest.mark.parametrize("target, name", ALL)
def test_loads_are_asynchronous_and_products_use_the_matrix_units(target: str, name: str) -> None:
    kernel = kernel_of(target, name)
    assert kernel.count("cp.async.cg.shared.global") > 0, "16-byte asynchronous copies"
    units = {"mma.sync": kernel.count("mma.sync")}
    units |= {unit: kernel.count(unit) for unit in ("wgmma.mma_async", "tcgen05.mma")}
    used = {unit for unit, count in units.items() if count}
    if SETTINGS[name].get("dtype") == "float32":
        assert not used, "float32 products are float32, not TF32"
    elif name != "short_queries":  # 32 rows are too few for wgmma
        assert used == {{"h200": "wgmma.mma_async", "b200": "tcgen05.mma"}.get(target, "mma.sync")}
        assert has_asynchronous_products(aot.TARGETS[target].device.arch, 64) == (target in ("h200", "b200"))


@pytest.mark.parametrize("target", [aot.on(t) for t in TARGETS])
def test_an_exponential_is_a_multiply_add_and_one_flushing_ex2(target: str) -> None:
    kernel = kernel_of(target, "causal")
    assert kernel.count("ex2.approx.ftz.f32") > 32
    assert kernel.count("ex2.approx.f32") == 0
    assert kernel.count("fma.rn.ftz.f32") == kernel.count("ex2.approx.ftz.f32")


@pytest.mark.parametrize("target", [aot.on(t, is_on_both=False) for t in TARGETS])
def test_offsets_are_64_bit_where_an_array_is_past_2_to_31_elements(target: str) -> None:
    narrow, wide = (kernel_of(target, name) for name in ("padded_window", "past_2_to_31"))
    assert wide.count("mul.wide.u32") > 16 + narrow.count("mul.wide.u32")


LOWERED = """
import warnings
from pallas_kernels import sm80
from tests import aot
from tests.pallas_kernels.sm80 import test_prefill_compile as cases
{before}
target = aot.TARGETS["a100"]
aot._Compiler(target).compile("short", cases.case(target, q_rows=4, kv_rows=64))
"""


@pytest.mark.parametrize(
    "before, is_silent", [("", True), ("warnings.filters = [f for f in warnings.filters if f[0] == 'error']", False)]
)
def test_lowering_does_not_warn_of_the_backend(before: str, is_silent: bool) -> None:
    strict = "error:The Pallas Triton backend is deprecated:DeprecationWarning"
    command = [sys.executable, "-W", strict, "-c", LOWERED.format(before=before)]
    done = subprocess.run(command, cwd=aot.ROOT, env=aot._worker_environment(), capture_output=True, text=True, timeout=300)
    assert (done.returncode == 0) == is_silent, done.stderr
    assert ("DeprecationWarning: The Pallas Triton backend" in done.stderr) != is_silent
