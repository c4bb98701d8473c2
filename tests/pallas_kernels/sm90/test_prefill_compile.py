"""Prefill compiled for the H200 that is not there: registers, instructions, shared memory."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from dispatch_core import AttentionCall, Paging, TileConfig, Window
from dispatch_core.tiling import POLICIES, fitting_tile, shape_of
from pallas_kernels.sm90.prefill import dense_prefill, packed_prefill, paged_prefill
from tests import aot

pytestmark = pytest.mark.oldest_jax

SETTINGS: dict[str, dict[str, Any]] = {
    "causal": {},
    "full_float16_lse_sinks": {"is_causal": False, "dtype": "float16", "return_lse": True, "has_sinks": True},
    "dim_64_group_3": {"dims": (64, 64), "group": 3},
    "dim_64_packed": {"dims": (64, 64), "packed": True, "return_lse": True},
    "dim_32": {"dims": (32, 32)},
    "rows_of_no_octet": {"rows": 4091},
    "dim_96_softcap": {"dims": (96, 96), "softcap": 30.0},
    "dims_192_128": {"dims": (192, 128)},
    "dim_256": {"dims": (256, 256), "group": 2},
    "window": {"window": Window(1023)},
    "lengths": {"lengths": True, "return_lse": True},
    "packed": {"packed": True, "return_lse": True},
    "page_64": {"packed": True, "page": 64},
    "page_16_window": {"packed": True, "page": 16, "window": Window(1023)},
}
# Bytes stored plus loaded over a whole kernel, all of them outside the loops over the keys.
SPILLED_BYTES = 320


def call_of(target: aot.Target, setting: dict[str, Any]) -> AttentionCall:
    facts = {"dtype": "bfloat16", "dims": (128, 128), "group": 4, "is_causal": True} | setting
    is_ragged = facts.pop("packed", False) | facts.pop("lengths", False)
    page, rows = facts.pop("page", None), facts.pop("rows", 4096)
    (head_dim, v_dim), group, dtype = (facts.pop(name) for name in ("dims", "group", "dtype"))
    return AttentionCall(
        target.device, dtype, 2, 8 * group, 8, head_dim, rows, rows, head_dim_v=v_dim, is_uniform=not is_ragged,
        paging=page and Paging(page, 4096 // page), **facts,
    )  # fmt: skip


def tile_of(call: AttentionCall) -> TileConfig:
    tile = fitting_tile(call, "sm90_prefill")
    assert isinstance(tile, TileConfig), tile
    return tile


def case(target: aot.Target, setting: dict[str, Any]) -> aot.Case:
    call = call_of(target, setting)
    is_packed = setting.get("packed", False)
    lead = (2 * call.max_seqlen_q,) if is_packed else (2, call.max_seqlen_q)
    array = lambda *shape, dtype=call.dtype: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))  # noqa: E731
    arrays = {
        "q": array(*lead, call.q_heads, call.head_dim),
        "k": array(*lead, 8, call.head_dim),
        "v": array(*lead, 8, call.v_dim),
    }
    absent: dict[str, None] = {}
    if call.paging is not None:
        arrays |= dict.fromkeys(
            ("k_pages", "v_pages"), array(8192 // call.paging.page_size, call.paging.page_size, 8, call.head_dim)
        )
        arrays |= {"page_table": array(2, call.paging.max_pages, dtype="int32"), "cu_seqlens_q": array(3, dtype="int32")}
        arrays |= {"cache_lengths": array(2, dtype="int32")}
        absent["inv_freq"] = None
    elif is_packed:
        arrays |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), array(3, dtype="int32"))
    elif "lengths" in setting:
        arrays |= dict.fromkeys(("q_lengths", "kv_lengths"), array(2, dtype="int32"))
    else:
        absent |= dict.fromkeys(("q_lengths", "kv_lengths"))
    if call.has_sinks:
        arrays["sinks"] = array(call.q_heads, dtype="float32")
    else:
        absent["sinks"] = None
    launch = paged_prefill if call.paging else packed_prefill if is_packed else dense_prefill
    launch = functools.partial(launch, call, tile_of(call), **absent)
    return aot.Case(lambda given: launch(**given), (arrays,))


def every_case(target: aot.Target) -> dict[str, aot.Case]:
    return {name: case(target, setting) for name, setting in SETTINGS.items()}


def kernel_of(name: str) -> aot.Kernel:
    kernels = aot.compile_cases("h200", f"{__name__}:every_case")[name].ok().kernels
    [kernel] = [k for k in kernels if "append" not in k.name]
    return kernel


@pytest.mark.parametrize("name", SETTINGS)
def test_products_are_never_serialised_and_little_spills(name: str) -> None:
    kernel = kernel_of(name)
    assert kernel.losses == []
    assert kernel.spill_bytes <= SPILLED_BYTES
    assert kernel.arch == "sm_90a"


@pytest.mark.parametrize("name", SETTINGS)
def test_the_tile_has_the_memory_it_claims(name: str) -> None:
    call = call_of(aot.TARGETS["h200"], SETTINGS[name])
    claimed = POLICIES["sm90_prefill"].shared_bytes(tile_of(call), shape_of(call))
    assert claimed - 4096 <= kernel_of(name).shared_bytes <= claimed


@pytest.mark.parametrize("name", SETTINGS)
def test_it_is_made_of_asynchronous_products_and_bulk_copies(name: str) -> None:
    kernel, call = kernel_of(name), call_of(aot.TARGETS["h200"], SETTINGS[name])
    element = {"bfloat16": "bf16", "float16": "f16"}[call.dtype]
    keys = tile_of(call).block_kv
    products = f"wgmma.mma_async.sync.aligned.m64n{{}}k16.f32.{element}.{element}"
    assert kernel.count(products.format(keys)) > 0, "queries and keys"
    assert kernel.count(products.format(call.v_dim)) > 0, "weights and values"
    assert kernel.count("cp.async.bulk.tensor") > 0
    assert kernel.count("setmaxnreg.inc.sync.aligned.u32") == kernel.count("setmaxnreg.dec.sync.aligned.u32") == 1
    assert kernel.count("st.global") == 0, "results leave through TMA"
