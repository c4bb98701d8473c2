"""Paged prefill and append compiled for GPUs that are not there: registers, instructions, shared memory, pools in place."""

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
from pallas_kernels.sm80.append import append
from pallas_kernels.sm80.paged_prefill import paged_prefill
from tests import aot

HERE = "tests.pallas_kernels.sm80.test_paged_prefill_compile"
BATCH, KV_HEADS, CHUNK, CAPACITY = 4, 8, 512, 8192
TARGETS = ("a100", "h200")
NAMES = ("page_table", "cu_seqlens_q", "cache_lengths", "inv_freq", "k_scale", "v_scale", "sinks")


def array(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def facts(
    target: aot.Target, *, dtype: str = "bfloat16", group: int = 4, dims: tuple[int, int] = (128, 128), page: int = 64, **facts: Any
) -> AttentionCall:
    return AttentionCall(
        target.device, dtype, BATCH, KV_HEADS * group, KV_HEADS, dims[0], CHUNK, CAPACITY, head_dim_v=dims[1],
        return_lse=True, paging=Paging(page, CAPACITY // page), **{"is_causal": True} | facts,
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


SETTINGS: dict[str, dict[str, Any]] = {
    "page_64": {},
    "page_16": {"page": 16},
    "page_1_full": {"page": 1, "is_causal": False},
    "float16_dim_64": {"dtype": "float16", "dims": (64, 64), "group": 8},
    "dim_256_page_16": {"dims": (256, 256), "group": 2, "page": 16},
    "dims_192_128": {"dims": (192, 128), "group": 16},
    "dim_96_rules": {"dims": (96, 96), "page": 16, "softcap": 30.0, "window": Window(1000, 8), "has_sinks": True, "is_causal": False},
    "group_3_rope": {"group": 3, "rope": RopeFacts(128, 8192)},
    "float32": {"dtype": "float32"},
    "fp8_page_64": {"kv_dtype": FLOAT8},
    "fp8_page_16": {"kv_dtype": FLOAT8, "page": 16},
    "fp8_float16_dim_64_rules": {"kv_dtype": FLOAT8, "dtype": "float16", "dims": (64, 64), "window": Window(1000), "softcap": 30.0},
    "fp8_dim_256": {"kv_dtype": FLOAT8, "dims": (256, 256), "group": 2},
    "fp8_of_float32": {"kv_dtype": FLOAT8, "dtype": "float32"},
    "fp8_past_2_to_31": {"kv_dtype": FLOAT8, "page": 16, "pages": 140_000},
    "past_2_to_31": {"page": 16, "pages": 140_000},
}


def every_case(target: aot.Target) -> dict[str, aot.Case]:
    return {name: case(target, **setting) for name, setting in SETTINGS.items()}
