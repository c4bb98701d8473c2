"""The compile chain of tests/aot.py, on one Triton and one Mosaic kernel, and on cases that must fail."""

import os
import sys

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.sharding import AxisType, PartitionSpec

from tests import aot

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the CUDA plugin has wheels for Linux only")

HERE = "tests.test_aot"
SIDE = 64
SQUARE = jax.ShapeDtypeStruct((SIDE, SIDE), jnp.bfloat16)
WIDE = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
# Kernel entry for each Triton target, and an instruction of its matrix units.
TRITON = {
    "a100": ("sm_80", "mma.sync"),
    "a10": ("sm_86", "mma.sync"),
    "l4": ("sm_89", "mma.sync"),
    "h200": ("sm_90a", "wgmma.mma_async"),
    "b200": ("sm_100a", "tcgen05.mma"),
    "sm120": ("sm_120a", "mma.sync"),
}


def triton_product(x, y):
    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32).astype(o_ref.dtype)

    params = plt.CompilerParams(num_warps=4)
    out = jax.ShapeDtypeStruct((x.shape[0], y.shape[1]), x.dtype)
    return pl.pallas_call(kernel, out_shape=out, compiler_params=params, name="triton_product")(x, y)


def triton_centred(x):
    """Holds 256 elements in each thread of its one warp, where a thread has 255 registers."""

    def kernel(x_ref, o_ref):
        x = x_ref[...]
        o_ref[...] = x - jnp.max(x)

    return pl.pallas_call(kernel, out_shape=x, compiler_params=plt.CompilerParams(num_warps=1), name="triton_centred")(x)


def mosaic_product(x, y):
    def kernel(x_ref, y_ref, o_ref, x_smem, y_smem, o_smem, barrier):
        plgpu.copy_gmem_to_smem(x_ref, x_smem, barrier)
        plgpu.copy_gmem_to_smem(y_ref, y_smem, barrier)
        plgpu.barrier_wait(barrier)

        def multiply(acc):
            plgpu.wgmma(acc, x_smem, y_smem)
            plgpu.wgmma_wait(0)
            return acc[...]

        o_smem[...] = pl.run_scoped(multiply, plgpu.ACC((SIDE, SIDE), jnp.float32)).astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_smem, o_ref)
        plgpu.wait_smem_to_gmem(0)

    tiled = plgpu.SMEM((SIDE, SIDE), jnp.bfloat16, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))
    return plgpu.kernel(
        kernel,
        out_type=SQUARE,
        scratch_types=[tiled, tiled, tiled, plgpu.Barrier(num_arrivals=2)],
        kernel_name="mosaic_product",
    )(x, y)


def raises(x):
    raise ValueError("this case raises")


def aborts(x):
    os.abort()


PRODUCTS = {
    "triton": aot.Case(triton_product, (SQUARE, SQUARE)),
    "beside_xla": aot.Case(lambda x, y: jnp.exp(triton_product(x, y)) @ y, (SQUARE, SQUARE)),
}
SPILLING = {"centred": aot.Case(triton_centred, (jax.ShapeDtypeStruct((64, 128), jnp.float32),))}
FAILURES_FIRST = {
    "raises": aot.Case(raises, (SQUARE,)),
    "aborts": aot.Case(aborts, (SQUARE,)),
    "mosaic": aot.Case(mosaic_product, (SQUARE, SQUARE)),
    "mosaic_again": aot.Case(mosaic_product, (SQUARE, SQUARE)),
}


ROWS, COLUMNS = PartitionSpec("x", None), PartitionSpec(None, "x")
SQUARE_F32 = jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32)
DONATED = aot.Case(lambda x, y: x.at[0].set(y[0]), (SQUARE_F32, SQUARE_F32), donate=(0,))
EXPLICIT = aot.Case(
    lambda x, y: jax.shard_map(triton_product, in_specs=(ROWS, PartitionSpec()), out_specs=ROWS, check_vma=False)(x, y),
    (WIDE, WIDE),
    specs=(ROWS, PartitionSpec()),
    axis_type=AxisType.Explicit,
)


def two_gpu_cases(target: aot.Target) -> dict[str, aot.Case]:
    rows = jax.ShapeDtypeStruct((target.device.sm_count, SIDE), jnp.float32)
    return {
        "sharded": aot.Case(jnp.matmul, (rows, SQUARE_F32), specs=(COLUMNS, ROWS)),
        "donated": DONATED,
        "explicit": EXPLICIT,
    }


@pytest.mark.parametrize("target", TRITON)
def test_triton_kernel_on_every_target_it_fits(target):
    kernel = aot.compile_cases(target, f"{HERE}:PRODUCTS")["triton"].kernel
    arch, instruction = TRITON[target]
    assert (kernel.name, kernel.arch) == ("triton_product", arch)
    assert kernel.count(instruction) > 0
    assert 16 <= kernel.registers <= 255
    assert kernel.spill_bytes == kernel.stack_bytes == 0
    assert kernel.shared_bytes >= SQUARE.size * 2
    assert kernel.threads == 128


def test_instructions_of_the_wrong_target_are_not_found():
    a100 = aot.compile_cases("a100", f"{HERE}:PRODUCTS")["triton"].kernel
    assert a100.count("wgmma.mma_async") == 0
    assert a100.count("mma") == a100.count("mma.sync") > 0


def test_spills_are_seen():
    kernel = aot.compile_cases("a100", f"{HERE}:SPILLING")["centred"].kernel
    assert kernel.spill_bytes > 0
    assert kernel.threads == 32


def test_only_pallas_kernels_are_reported():
    report = aot.compile_cases("a100", f"{HERE}:PRODUCTS")["beside_xla"].ok()
    assert [kernel.name for kernel in report.kernels] == ["triton_product"]
    assert "fusion" in report.hlo
    assert report.temp_bytes >= SQUARE.size * 2


def test_mosaic_kernel_on_hopper():
    kernel = aot.compile_cases("h200", f"{HERE}:FAILURES_FIRST")["mosaic"].kernel
    assert kernel.name.startswith("mosaic_product")
    assert kernel.arch == "sm_90a"
    assert kernel.count("wgmma.mma_async") > 0
    assert 0 < kernel.registers <= 255
    assert kernel.spill_bytes == 0
    assert kernel.losses == []
    assert kernel.shared_bytes == 3 * SQUARE.size * 2 + 8  # three tiles and a barrier
    assert kernel.threads == 128


def test_a_kernel_met_before_is_reported_again():
    reports = aot.compile_cases("h200", f"{HERE}:FAILURES_FIRST")
    first, again = reports["mosaic"].kernel, reports["mosaic_again"].kernel
    assert (again.ptx, again.registers, again.shared_bytes) == (first.ptx, first.registers, first.shared_bytes)


@pytest.mark.parametrize("target", ["a100", "h200"])
def test_failures_are_reported_and_the_next_case_goes_on(target):
    reports = aot.compile_cases(target, f"{HERE}:FAILURES_FIRST")
    assert list(reports) == list(FAILURES_FIRST)
    assert "ValueError: this case raises" in (reports["raises"].error or "")
    assert "the compiler ended with status -6" in (reports["aborts"].error or "")
    with pytest.raises(AssertionError, match="raises does not compile: .*\n.*"):
        reports["raises"].ok()


def test_mosaic_kernel_that_the_a100_cannot_run():
    reports = aot.compile_cases("a100", f"{HERE}:FAILURES_FIRST")
    assert reports["mosaic"].error is not None
    assert reports["mosaic"].kernels == ()
    with pytest.raises(AssertionError, match="mosaic does not compile"):
        _ = reports["mosaic"].kernel


def test_two_gpus():
    reports = aot.compile_cases("h200x2", f"{HERE}:two_gpu_cases")
    assert "all-reduce" in reports["sharded"].ok().hlo
    assert f"f32[{aot.TARGETS['h200x2'].device.sm_count},{SIDE // 2}]" in reports["sharded"].hlo
    assert reports["explicit"].kernel.name == "triton_product"
    assert "all-" not in reports["explicit"].hlo
    assert f"bf16[{WIDE.shape[0] // 2},{WIDE.shape[1]}]" in reports["explicit"].hlo


def test_aliases_are_counted():
    reports = aot.compile_cases("h200x2", f"{HERE}:two_gpu_cases")
    assert reports["donated"].ok().alias_bytes == SQUARE_F32.size * 4
    assert reports["sharded"].alias_bytes == 0


def test_one_kernel_is_asked_for_and_there_is_none():
    report = aot.compile_cases("h200x2", f"{HERE}:two_gpu_cases")["donated"]
    with pytest.raises(AssertionError, match=r"donated has the kernels \[\], not one"):
        _ = report.kernel


def test_unknown_target():
    with pytest.raises(ValueError, match="aot: target is 'h100'; need one of a100, a10, l4, h200"):
        aot.compile_cases("h100", f"{HERE}:PRODUCTS")


def test_unreadable_list():
    with pytest.raises(RuntimeError, match="aot: tests.test_aot:NOTHING for a100 gave no cases"):
        aot.compile_cases("a100", f"{HERE}:NOTHING")
