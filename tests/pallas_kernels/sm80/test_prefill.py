"""Dense and packed prefill in Pallas' interpreter, against the oracle."""

import functools
import itertools
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dispatch_core import DEVICES, AttentionCall, Device, TileConfig, Window
from pallas_kernels.sm80 import prefill as module
from pallas_kernels.sm80.blocks import Chunk, head_chunks
from pallas_kernels.sm80.prefill import dense_prefill, heads_per_tile, launch_plan, packed_prefill
from tests.calling import redrawn
from tests.edge_cases import edge_cases
from tests.inputs import FEATURES, Case, poisoned, random_case
from tests.oracle import per_kv_head, visible_keys
from tests.tolerance import assert_same_bits, check_case

OPS = ("gqa_prefill", "gqa_prefill_packed")
TILES = (TileConfig(16, 16), TileConfig(32, 16), TileConfig(16, 32), TileConfig(64, 16))
H200, A100 = DEVICES["H200"], DEVICES["A100-80"]
SHAPES, DRAWS = 14, 3
FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@functools.cache
def compiled(launch: Callable[..., Any], call: AttentionCall, tile: TileConfig) -> Callable[..., tuple[Any, ...]]:
    """The interpreted kernel as a function of its arrays; cases that differ in values alone share it."""
    return jax.jit(functools.partial(launch, call, tile, interpret=True), compiler_options=FAST_COMPILE)


def facts(case: Case, device: Device) -> tuple[AttentionCall, dict[str, Any]]:
    """The call of a case, and its arrays as the launch function wants them."""
    a, options = dict(case.arrays), case.options
    q, k, v = (a[name] for name in "qkv")
    if case.op == "gqa_prefill":
        (batch, q_rows), kv_rows, names = q.shape[:2], k.shape[1], ["q_lengths", "kv_lengths"]
    else:
        batch, names = len(a["cu_seqlens_q"]) - 1, ["cu_seqlens_q", "cu_seqlens_kv"]
        q_rows, kv_rows = (max(1, int(np.diff(a[name]).max())) for name in names)
    a |= {name: per_kv_head(a.get(name), batch, k.shape[-2]) for name in ("q_scale", "k_scale", "v_scale")}
    call = AttentionCall(
        device, str(case.dtype), batch, q.shape[-2], k.shape[-2], q.shape[-1], q_rows, kv_rows, head_dim_v=v.shape[-1],
        is_causal=options.get("is_causal", True), scale=options.get("scale"), softcap=options.get("softcap"),
        window=Window(*(options.get("window") or (None, None))), is_uniform=False, out_dtype=str(case.out_dtype),
        has_sinks="sinks" in a, return_lse=True,
    )  # fmt: skip
    names += ["q", "k", "v", "q_scale", "k_scale", "v_scale", "sinks"]
    return call, {name: None if a.get(name) is None else jnp.asarray(a[name]) for name in names}


def run(case: Case, tile: TileConfig = TILES[0], device: Device = H200) -> tuple[np.ndarray, np.ndarray]:
    """A case through its launch function: o and lse."""
    call, arrays = facts(case, device)
    o, lse = compiled(dense_prefill if case.op == "gqa_prefill" else packed_prefill, call, tile)(**arrays)
    return np.asarray(o), np.asarray(lse)


def check(case: Case, **how: Any) -> None:
    """A case meets the oracle, and gives the same bits whatever lies where nothing may read."""
    results = run(case, **how)
    check_case(case, *results)
    for result, twin in zip(results, run(poisoned(case), **how)):
        assert_same_bits(result, twin)


def features_of(op: str, index: int) -> tuple[str, ...]:
    """About half of an op's features."""
    rng = np.random.default_rng([zlib.crc32(op.encode()), 1, index])
    return tuple(name for name in FEATURES[op] if rng.random() < 0.5)


@pytest.mark.parametrize("op", OPS)
def test_random_shapes_pair_nearly_every_feature_with_every_other(op: str) -> None:
    met = {pair for index in range(SHAPES) for pair in itertools.combinations(features_of(op, index), 2)}
    assert len(met) > 0.95 * len(list(itertools.combinations(FEATURES[op], 2)))


@pytest.mark.parametrize(("op", "index"), [(op, index) for op in OPS for index in range(SHAPES)])
def test_random_shapes(op: str, index: int) -> None:
    dtype = ("bfloat16", "float16", "float32")[index % 3]
    case = random_case(op, index, features_of(op, index), dtype=dtype)
    how = {"tile": TILES[index % len(TILES)], "device": (H200, A100)[index % 2]}
    check(case, **how)
    for draw in range(1, DRAWS):
        check(redrawn(case, draw), **how)


EDGES = {
    "gqa_prefill": (
        "17x5", "113x203", "0x9", "9x0", "three_lengths_full", "head_dim_72", "head_dim_88", "head_dim_224",
        "head_dims_192_128", "heads_10_2", "heads_96_1", "window_0_0", "window_1_0", "window_-1_3", "window_64_0_full_200",
        "softcap_of_large_scores", "large_float16", "large_bfloat16", "sink_against_equal_scores", "huge_sink",
        "sink_of_empty_rows", "sink_of_minus_infinity", "not_finite_in_valid_keys", "scales_half_three_eighth",
    ),
    "gqa_prefill_packed": (
        "1x17", "17x5", "239x1", "65x129_full", "three_lengths", "no_keys_in_some", "documents_5_0_27",
        "padded_past_the_last_offset", "head_dim_96", "heads_14_2", "window_2_None", "sink_of_empty_rows",
        "not_finite_in_valid_keys", "scales_half_three_eighth",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("op", "name"), [(op, name) for op in OPS for name in EDGES[op] if name in edge_cases(op)])
def test_edge_cases(op: str, name: str) -> None:
    check(edge_cases(op)[name], tile=TILES[1])
