"""Decode and paged decode compiled for GPUs that are not there: registers, instructions, shared memory, aliasing."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_ops
from dispatch_core import AttentionCall, Paging, RopeFacts, TileConfig, Window
from dispatch_core.calls import FLOAT8
from dispatch_core.tiling import POLICIES, fitting_tile, shape_of
from jax_ops.tools.step import Step
from pallas_kernels.sm80.decode import decode
from pallas_kernels.sm80.paged import paged_decode
from tests import aot

BATCH, KV_HEADS, KEYS = 8, 8, 8192
TARGETS = ("a100", "h200")
OTHER_TARGETS = ("a10", "l4", "b200", "sm120")


def case(
    target: aot.Target, *, dtype: str = "bfloat16", group: int = 4, tokens: int = 1, dims: tuple[int, int] = (128, 128),
    page: int | None = None, pages: int | None = None, new: bool = False, family: str = "sm80_decode",
    launches: tuple[Any, Any] = (decode, paged_decode), **facts: Any,
) -> tuple[AttentionCall, aot.Case]:  # fmt: skip
    """A decode call and its launch with the policy's tile; new tokens come with donated pools."""
    call = AttentionCall(
        target.device, dtype, BATCH, KV_HEADS * group, KV_HEADS, dims[0], tokens, KEYS, head_dim_v=dims[1], is_causal=True,
        return_lse=True, paging=None if page is None else Paging(page, KEYS // page), **facts,
    )  # fmt: skip
    tile = fitting_tile(call, family)
    assert isinstance(tile, TileConfig), tile

    def array(*shape: int, dtype: str = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    k_name, v_name = ("k", "v") if page is None else ("k_pages", "v_pages")
    place = (BATCH, KEYS) if page is None else (pages or BATCH * KEYS // page, page)
    cache = {
        name: array(*place, KV_HEADS, dim, dtype=call.cache_dtype) for name, dim in zip((k_name, v_name), dims, strict=True)
    }
    scale = array(BATCH, KV_HEADS, dtype="float32") if call.cache_dtype == FLOAT8 else None
    rest: dict[str, Any] = {
        "q": array(BATCH, tokens, KV_HEADS * group, dims[0]),
        "kv_lengths": array(BATCH, dtype="int32"),
        "k_scale": scale,
        "v_scale": scale,
        "sinks": array(KV_HEADS * group, dtype="float32") if call.has_sinks else None,
    }
    if page is not None:
        rest["page_table"] = array(BATCH, KEYS // page, dtype="int32")
        rest["inv_freq"] = array(call.rope.rotary_dim // 2, dtype="float32") if call.rope else None
        for name, dim in zip(("k_new", "v_new"), dims, strict=True):
            rest[name] = array(BATCH, tokens, KV_HEADS, dim) if new else None
    launch = launches[page is not None]
    return call, aot.Case(lambda cache, rest: launch(call, tile, **cache, **rest), (cache, rest), donate=(0,) if new else ())


SETTINGS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "dim_64_page_64": {"dtype": "float16", "group": 8, "dims": (64, 64), "page": 64},
    "dim_256": {"dims": (256, 256), "group": 2},
    "dims_192_128": {"dims": (192, 128), "group": 16},
    "dim_96_page_16_rules": {
        "dims": (96, 96),
        "tokens": 3,
        "page": 16,
        "softcap": 30.0,
        "window": Window(1000),
        "has_sinks": True,
    },
    "group_96": {"group": 96, "dtype": "float16"},
    "tokens_16": {"tokens": 16, "group": 8, "page": 64},
    "float32": {"dtype": "float32"},
    "float32_dim_64_page_1": {"dtype": "float32", "dims": (64, 64), "page": 1},
    "fp8": {"kv_dtype": FLOAT8},
    "fp8_page_64": {"kv_dtype": FLOAT8, "page": 64, "dtype": "float16", "group": 8},
    "fp8_of_float32": {"kv_dtype": FLOAT8, "dtype": "float32"},
    "new_tokens": {"page": 64, "new": True, "tokens": 4, "rope": RopeFacts(128, 8192)},
    "fp8_new_token": {"page": 16, "new": True, "kv_dtype": FLOAT8},
    "fp8_pool_past_2_to_31": {"kv_dtype": FLOAT8, "page": 16, "pages": 140_000},
}
FEW = ("bf16", "float32", "fp8_page_64")


STEP = Step(pools=2)


def few_cases(target: aot.Target) -> dict[str, aot.Case]:
    return {name: case(target, **SETTINGS[name])[1] for name in FEW}


def other_cases(target: aot.Target) -> dict[str, aot.Case]:
    return {name: case(target, **setting)[1] for name, setting in SETTINGS.items() if name not in FEW}


def op_cases(target: aot.Target) -> dict[str, aot.Case]:
    pools, rest = jax.eval_shape(STEP.arrays)
    arrays = pools | rest | {"kv_lengths": jax.ShapeDtypeStruct((STEP.batch,), jnp.int32)}
    return {
        "step": aot.Case(STEP.chain(4, device=target.device), (pools, rest), donate=(0,)),
        "call": aot.Case(lambda arrays: jax_ops.gqa_decode_paged(**arrays, device=target.device), (arrays,)),
    }


def report(target: str, name: str) -> aot.Report:
    cases = "few_cases" if name in FEW else "other_cases" if name in SETTINGS else "op_cases"
    return aot.compile_cases(target, f"{__name__}:{cases}")[name].ok()


def attention(target: str, name: str) -> aot.Kernel:
    [kernel] = [k for k in report(target, name).kernels if "merge" not in k.name]
    return kernel


# Bytes a thread stores plus those it loads, on jax 0.12.0.1; 0 on 0.11.2.
SPILLED_BYTES = {("a100", "float32_dim_64_page_1"): 8}
ALL = [aot.on(t, name, is_on_both=name in FEW) for t in TARGETS for name in SETTINGS] + [
    aot.on(t, name) for t in OTHER_TARGETS for name in FEW
]


@pytest.mark.parametrize("target, name", ALL)
def test_nothing_spills_but_what_was_measured_and_the_tile_has_the_memory_it_claims(target: str, name: str) -> None:
    call, _ = case(aot.TARGETS[target], **SETTINGS[name])
    tile = fitting_tile(call, "sm80_decode")
    assert isinstance(tile, TileConfig)
    assert all(k.spill_bytes <= SPILLED_BYTES.get((target, name), 0) for k in report(target, name).kernels)
    kernel = attention(target, name)
    assert kernel.shared_bytes <= POLICIES["sm80_decode"].shared_bytes(tile, shape_of(call))
    assert kernel.shared_bytes <= call.device.shared_memory_per_block


@pytest.mark.parametrize("target, name", ALL)
def test_loads_are_asynchronous_and_products_use_the_matrix_units(target: str, name: str) -> None:
    kernel = attention(target, name)
    assert kernel.count("cp.async.cg.shared.global") > 0, "16-byte asynchronous copies"
    products = kernel.count("mma.sync") + kernel.count("wgmma.mma_async")
    if SETTINGS[name].get("dtype") == "float32":
        assert products == 0, "float32 products are float32, not TF32"
    elif target != "b200":
        assert products > 0


@pytest.mark.parametrize("target, name", [aot.on(t, n, is_on_both=n in FEW) for t in TARGETS for n in ("fp8", "fp8_page_64")])
def test_fp8_is_converted_by_the_hardware_where_it_can(target: str, name: str) -> None:
    assert (attention(target, name).count("cvt.rn.f16x2.e4m3x2") > 0) == (target == "h200")


@pytest.mark.parametrize("target", [aot.on(t, is_on_both=False) for t in TARGETS])
@pytest.mark.parametrize("name", ["new_tokens", "fp8_new_token"])
def test_new_tokens_are_written_in_place(target: str, name: str) -> None:
    _, compiled = case(aot.TARGETS[target], **SETTINGS[name])
    pools = sum(x.size * x.dtype.itemsize for x in compiled.args[0].values())
    made = report(target, name)
    assert made.alias_bytes == pools
    assert made.temp_bytes < pools / 8
    assert "scatter" not in made.hlo


@pytest.mark.parametrize("target", ["h200"])
def test_steps_of_many_layers_are_one_program_that_neither_copies_the_pool_nor_asks_the_host(target: str) -> None:
    made = report(target, "step")
    pages = STEP.pools * STEP.layers * STEP.pages_per_layer
    assert f"bf16[{pages},64,8,128]" in made.hlo
    assert not re.search(rf"= bf16\[{pages},[^ ]* copy[^ ]*\(", made.hlo)
    assert made.temp_bytes < 2**25
    assert not re.search(r" (infeed|outfeed|send|recv)(-done)?\(|[Hh]ost|S\(5\)", made.hlo)
    assert len({k.name for k in made.kernels}) == 2, "the attention, which appends, and the merge"


@pytest.mark.parametrize("target", ["h200"])
def test_a_call_launches_the_attention_and_the_merge_and_nothing_else(target: str) -> None:
    made = report(target, "call")
    assert len(re.findall(r" custom-call\(", made.hlo)) == len(made.kernels) == 2
    assert " fusion(" not in made.hlo


@pytest.mark.parametrize("target", [aot.on(t, is_on_both=False) for t in TARGETS])
def test_fp8_pool_is_read_in_words_and_not_copied(target: str) -> None:
    made = report(target, "fp8_pool_past_2_to_31")
    assert made.temp_bytes < 2**28
    assert "u16[140000,16,8,64]" in made.hlo
