"""Paged prefill and append compiled for GPUs that are not there: registers, instructions, shared memory, pools in place."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import jax_ops
from dispatch_core import AttentionCall, Paging, RopeFacts, TileConfig, Window
from dispatch_core.calls import FLOAT8
from dispatch_core.tiling import POLICIES, fitting_tile, shape_of
from pallas_kernels.sm80.paged_prefill import paged_prefill
from tests import aot

HERE = "tests.pallas_kernels.sm80.test_paged_prefill_compile"
BATCH, KV_HEADS, CHUNK, CAPACITY = 4, 8, 512, 8192
TARGETS = ("a100", "h200")
OTHER_TARGETS = ("a10", "l4", "b200", "sm120")


def array(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def facts(
    target: aot.Target,
    *,
    dtype: str = "bfloat16",
    group: int = 4,
    dims: tuple[int, int] = (128, 128),
    page: int = 64,
    **more: Any,
) -> AttentionCall:
    return AttentionCall(
        target.device, dtype, BATCH, KV_HEADS * group, KV_HEADS, dims[0], CHUNK, CAPACITY, head_dim_v=dims[1],
        return_lse=True, paging=Paging(page, CAPACITY // page), **{"is_causal": True} | more,
    )  # fmt: skip


def pools_of(call: AttentionCall, pages: int | None) -> dict[str, jax.ShapeDtypeStruct]:
    assert call.paging is not None
    place = (pages or BATCH * CAPACITY // call.paging.page_size, call.paging.page_size, call.kv_heads)
    return {
        "k_pages": array(*place, call.head_dim, dtype=call.cache_dtype),
        "v_pages": array(*place, call.v_dim, dtype=call.cache_dtype),
    }


def case(target: aot.Target, *, pages: int | None = None, **setting: Any) -> aot.Case:
    """A paged prefill with the policy's tile and donated pools."""
    call = facts(target, **setting)
    tile = fitting_tile(call, "sm80_prefill")
    assert isinstance(tile, TileConfig), tile
    assert call.paging is not None
    tokens, scale = BATCH * CHUNK, array(BATCH, KV_HEADS, dtype="float32") if call.cache_dtype == FLOAT8 else None
    rest = {
        "q": array(tokens, call.q_heads, call.head_dim, dtype=call.dtype),
        "k": array(tokens, KV_HEADS, call.head_dim, dtype=call.dtype),
        "v": array(tokens, KV_HEADS, call.v_dim, dtype=call.dtype),
        "page_table": array(BATCH, call.paging.max_pages, dtype="int32"),
        "cu_seqlens_q": array(BATCH + 1, dtype="int32"),
        "cache_lengths": array(BATCH, dtype="int32"),
        "inv_freq": array(call.rope.rotary_dim // 2, dtype="float32") if call.rope else None,
        "k_scale": scale,
        "v_scale": scale,
        "sinks": array(call.q_heads, dtype="float32") if call.has_sinks else None,
    }
    return aot.Case(lambda pools, rest: paged_prefill(call, tile, **pools, **rest), (pools_of(call, pages), rest), donate=(0,))


RULES: dict[str, Any] = {"softcap": 30.0, "window": Window(1000), "has_sinks": True, "is_causal": False}
FP8: dict[str, Any] = {"kv_dtype": FLOAT8}
SETTINGS: dict[str, dict[str, Any]] = {
    "page_64": {},
    "page_1": {"page": 1},
    "float16_dim_64": {"dtype": "float16", "dims": (64, 64), "group": 8},
    "dim_256": {"dims": (256, 256), "group": 2},
    "dims_192_128": {"dims": (192, 128), "group": 16},
    "dim_96_rules": {"dims": (96, 96), "page": 16, **RULES},
    "group_3_rope": {"group": 3, "rope": RopeFacts(128, 8192)},
    "float32": {"dtype": "float32"},
    "fp8": FP8,
    "fp8_float16_dim_64_rules": {"dtype": "float16", "dims": (64, 64), **FP8, **RULES},
    "fp8_dim_256": {"dims": (256, 256), "group": 2, **FP8},
    "fp8_of_float32": {"dtype": "float32", **FP8},
    "fp8_past_2_to_31": {"page": 16, "pages": 140_000, **FP8},
    "past_2_to_31": {"page": 16, "pages": 140_000},
}
FEW = ("page_64", "fp8")
# Bytes stored plus loaded over a whole kernel, mostly where its four loops meet; any other setting has none.
_BF16_128 = ("page_64", "page_1", "group_3_rope", "past_2_to_31")
SPILLS: dict[str, dict[str, int]] = {
    "a100": dict.fromkeys((*_BF16_128, "float16_dim_64", "dim_96_rules"), 128) | {"fp8_dim_256": 320},
    "a10": {"fp8": 128},
    "l4": {"fp8": 128},
    "h200": dict.fromkeys(_BF16_128, 1024) | {"dim_96_rules": 256, "fp8_of_float32": 256},
    "b200": {"page_64": 4096},
    "sm120": {},
}


def few_cases(target: aot.Target) -> dict[str, aot.Case]:
    return {name: case(target, **SETTINGS[name]) for name in FEW}


def other_cases(target: aot.Target) -> dict[str, aot.Case]:
    return {name: case(target, **setting) for name, setting in SETTINGS.items() if name not in FEW}


IN_PLACE = ("append", "layers")
LAYERS, PAGES, PAGE = 3, 512, 64


def in_place_cases(target: aot.Target) -> dict[str, aot.Case]:
    """The public ops on donated pools: an append, and a scan over layers that share one pool."""
    pools = {name: array(LAYERS * PAGES, PAGE, KV_HEADS, 128) for name in ("k_pages", "v_pages")}
    rows = {name: array(LAYERS, 64, KV_HEADS * group, 128) for name, group in (("q", 4), ("k", 1), ("v", 1))}
    table, bounds, lengths = array(2, 8, dtype="int32"), array(3, dtype="int32"), array(2, dtype="int32")
    device = target.device

    def appended(pools: Any, rows: Any, table: Any, bounds: Any, lengths: Any) -> Any:
        k, v = rows["k"][0], rows["v"][0]
        return jax_ops.append_paged(k, v, **pools, page_table=table, lengths=lengths, cu_seqlens=bounds, device=device)

    def layers(pools: Any, rows: Any, table: Any, bounds: Any, lengths: Any) -> Any:
        def layer(pools: Any, xs: Any) -> Any:
            index, rows = xs
            o, k_pages, v_pages = jax_ops.gqa_prefill_paged(
                **rows, **pools, page_table=table + index * PAGES, cu_seqlens_q=bounds, cache_lengths=lengths, device=device
            )
            return {"k_pages": k_pages, "v_pages": v_pages}, o

        return lax.scan(layer, pools, (jnp.arange(LAYERS, dtype=jnp.int32), rows))

    heads = PartitionSpec(None, None, "x", None)
    specs = (heads, heads, PartitionSpec(), PartitionSpec(), PartitionSpec()) if target.gpus > 1 else None
    args = (pools, rows, table, bounds, lengths)
    return {
        "append": aot.Case(appended, args, specs=specs, donate=(0,)),
        "layers": aot.Case(layers, args, specs=specs, donate=(0,)),
    }


def report(target: str, name: str) -> aot.Report:
    cases = "in_place_cases" if name in IN_PLACE else "few_cases" if name in FEW else "other_cases"
    return aot.compile_cases(target, f"{HERE}:{cases}")[name].ok()


def attention(target: str, name: str) -> aot.Kernel:
    [kernel] = [k for k in report(target, name).kernels if "append" not in k.name]
    return kernel


ALL = [aot.on(t, name, is_on_both=name in FEW) for t in TARGETS for name in SETTINGS] + [
    aot.on(t, name) for t in OTHER_TARGETS for name in FEW
]


@pytest.mark.parametrize(("target", "name"), ALL)
def test_little_spills_and_the_tile_has_the_memory_it_claims(target: str, name: str) -> None:
    call = facts(aot.TARGETS[target], **{k: v for k, v in SETTINGS[name].items() if k != "pages"})
    tile = fitting_tile(call, "sm80_prefill")
    assert isinstance(tile, TileConfig)
    for kernel in report(target, name).kernels:
        allowed = 0 if "append" in kernel.name else SPILLS[target].get(name, 0)
        assert kernel.spill_bytes <= allowed, kernel.name
    kernel = attention(target, name)
    if target != "b200":  # whose products also stage what they read from tensor memory
        assert kernel.shared_bytes <= POLICIES["sm80_prefill"].shared_bytes(tile, shape_of(call))
    assert kernel.shared_bytes <= call.device.shared_memory_per_block


@pytest.mark.parametrize(("target", "name"), ALL)
def test_loads_are_asynchronous_and_products_use_the_matrix_units(target: str, name: str) -> None:
    kernel = attention(target, name)
    assert kernel.count("cp.async.cg.shared.global") + kernel.count("cp.async.ca.shared.global") > 0
    instruction = {"h200": "wgmma.mma_async", "b200": "tcgen05.mma"}.get(target, "mma.sync")
    if SETTINGS[name].get("dtype") == "float32":
        assert kernel.count("mma.sync") == kernel.count("wgmma.mma_async") == 0, "float32 products are float32, not TF32"
    else:
        assert kernel.count(instruction) > 0


@pytest.mark.parametrize("target", [aot.on(t) for t in TARGETS])
def test_fp8_is_converted_by_the_hardware_where_it_can(target: str) -> None:
    assert (attention(target, "fp8").count("cvt.rn.f16x2.e4m3x2") > 0) == (target == "h200")


@pytest.mark.parametrize(
    "target, name",
    [aot.on(t, n, is_on_both=n in FEW) for t in TARGETS for n in ("page_64", "fp8", "past_2_to_31", "fp8_past_2_to_31")],
)
def test_pools_are_written_in_place(target: str, name: str) -> None:
    pools = case(aot.TARGETS[target], **SETTINGS[name]).args[0]
    made = report(target, name)
    assert made.alias_bytes == sum(x.size * x.dtype.itemsize for x in pools.values())
    assert made.temp_bytes < 2**25
    assert copies_of(pools["k_pages"].shape[0], made) == []


@pytest.mark.parametrize("target", [aot.on(t) for t in (*TARGETS, "h200x2")])
@pytest.mark.parametrize("name", IN_PLACE)
def test_donated_pools_are_not_copied_by_the_ops_nor_by_a_scan(target: str, name: str) -> None:
    made = report(target, name)
    assert made.alias_bytes == 2 * LAYERS * PAGES * PAGE * KV_HEADS * 128 * 2 // aot.TARGETS[target].gpus
    assert made.temp_bytes < 2**24
    assert copies_of(LAYERS * PAGES, made) == []
    assert not re.search(r"all-gather|all-to-all|collective-permute|all-reduce", made.hlo)


def copies_of(pages: int, made: aot.Report) -> list[str]:
    """The copies of whole pools in a program."""
    return re.findall(rf"= \w+\[{pages},[^ ]* copy[^ ]*\(", made.hlo)
