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
from pallas_kernels.sm80.blocks import Chunk, head_chunks
from pallas_kernels.sm80.key_loop import KeyRange, Span, key_range
from pallas_kernels.sm80.plan import heads_per_tile, launch_plan, packed_plan
from pallas_kernels.sm80.prefill import dense_prefill, packed_prefill
from tests.calling import redrawn
from tests.edge_cases import edge_cases
from tests.inputs import FEATURES, Case, poisoned, random_case
from tests.oracle import per_kv_head, visible_keys
from tests.tolerance import assert_same_bits, check_case

OPS = ("gqa_prefill", "gqa_prefill_packed")
TILES = (TileConfig(16, 16), TileConfig(32, 16), TileConfig(16, 32), TileConfig(64, 16))
H200, A100 = DEVICES["H200"], DEVICES["A100-80"]
SHAPES, DRAWS = 8, 3
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
        q_rows, kv_rows = max(1, len(q)), max(1, len(k))
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
    assert len(met) > 0.85 * len(list(itertools.combinations(FEATURES[op], 2)))


@pytest.mark.newest_jax
@pytest.mark.parametrize("op, index", [(op, index) for op in OPS for index in range(SHAPES)])
def test_random_shapes(op: str, index: int) -> None:
    dtype = ("bfloat16", "float16", "float32")[index % 3]
    case = random_case(op, index, features_of(op, index), dtype=dtype)
    how = {"tile": TILES[index % len(TILES)], "device": (H200, A100)[index % 2]}
    check(case, **how)
    for draw in range(1, DRAWS):
        check(redrawn(case, draw), **how)


EDGES = {
    "gqa_prefill": (
        "17x5", "113x203", "9x0", "three_lengths", "head_dim_72", "head_dim_88", "head_dims_192_128", "heads_10_2",
        "heads_96_1", "window_0_0", "window_-1_3", "window_64_0_full_200",
        "softcap_of_large_scores", "large_float16", "large_bfloat16", "sink_against_equal_scores", "huge_sink",
        "sink_of_empty_rows", "sink_of_minus_infinity", "not_finite_in_valid_keys", "scales_half_three_eighth",
    ),
    "gqa_prefill_packed": (
        "1x17", "239x1", "65x129_full", "no_keys_in_some", "documents_5_0_27",
        "padded_past_the_last_offset", "head_dim_96", "heads_14_2", "window_2_None", "sink_of_empty_rows",
        "not_finite_in_valid_keys", "scales_half_three_eighth",
    ),
}  # fmt: skip


named_cases = functools.cache(edge_cases)


@pytest.mark.oldest_jax
@pytest.mark.parametrize("op, name", [(op, name) for op in OPS for name in EDGES[op]])
def test_edge_cases(op: str, name: str) -> None:
    check(named_cases(op)[name], tile=TILES[1])


@pytest.mark.parametrize("tile", [TileConfig(16, 64), TileConfig(64, 64), TileConfig(128, 32, 8)])
def test_tiles_larger_than_the_call(tile: TileConfig) -> None:
    check(random_case("gqa_prefill", 3, ("window_both", "kv_lengths"), dtype="float16", group=3, head_dim=24), tile=tile)


def test_keys_outside_the_visited_tiles_are_never_read() -> None:
    """NaN left of the window's first tile and right of the diagonal's last one."""
    case = random_case("gqa_prefill", 0, ("window_left",), q_lens=(16,), kv_lens=(96,), kv_heads=1, group=1, head_dim=16)
    case = replace(case, options={**case.options, "window": (15, 0)}, arrays={n: case.arrays[n] for n in "qkv"})
    want = run(case)
    arrays = {name: x.copy() for name, x in case.arrays.items()}
    for name in "kv":
        arrays[name][:, :65] = np.nan
    for got, expected in zip(run(replace(case, arrays=arrays)), want):
        assert_same_bits(got, expected)


def test_rows_before_the_first_offset_are_empty_rows() -> None:
    case = random_case("gqa_prefill_packed", 1, ("sinks",), q_lens=(9, 20), kv_lens=(9, 20), dtype="float32")
    bounds = {name: case.arrays[name] + np.int32(0) for name in ("cu_seqlens_q", "cu_seqlens_kv")}
    bounds["cu_seqlens_q"][0] = 4
    o, lse = run(replace(case, arrays=case.arrays | bounds))
    assert not o[:4].any()
    np.testing.assert_allclose(lse[:4], np.broadcast_to(case.arrays["sinks"], lse[:4].shape), rtol=1e-6)


LENGTHS = ((1, 1), (7, 7), (40, 40), (5, 37), (37, 5), (16, 0), (0, 9), (33, 64))
BOUNDS = ((None, None), (None, 0), (0, 0), (5, 0), (20, 3), (0, None), (None, 9), (100, 100))


@pytest.mark.parametrize("tile", [TileConfig(16, 16), TileConfig(64, 16), TileConfig(16, 32)])
@pytest.mark.parametrize("left, right", BOUNDS)
def test_key_range_holds_every_visible_key_and_masks_every_other(left: int | None, right: int | None, tile: TileConfig) -> None:
    call = AttentionCall(H200, "float16", 1, 2, 1, 16, 256, 256, window=Window(left, right), is_uniform=False)
    plan = packed_plan(call, tile, 256, 256)

    @jax.jit
    def keys_of(q_len: jax.Array, kv_len: jax.Array, token: jax.Array) -> KeyRange:
        span = Span(kv_len - q_len, kv_len, right)
        return key_range(plan, span, token + jnp.arange(tile.block_q, dtype=jnp.int32) // plan.fold, token, q_len)

    for q_len, kv_len in LENGTHS:
        visible = visible_keys(q_len, kv_len, False, (left, right))
        for token in range(0, q_len, plan.tokens):
            keys = keys_of(*(jnp.int32(x) for x in (q_len, kv_len, token)))
            begin, count, full_from, full_to = (int(x) for x in keys[:4])
            mine = visible[token : token + plan.tokens]
            assert 0 <= full_from <= full_to <= count
            assert not mine[:, :begin].any() and not mine[:, begin + count * tile.block_kv :].any()
            assert mine[:, begin + full_from * tile.block_kv : begin + full_to * tile.block_kv].all()
            assert begin + full_to * tile.block_kv <= kv_len or full_from == full_to
            key = np.arange(begin, begin + count * tile.block_kv)
            seen = np.broadcast_to(
                keys.visible(jnp.asarray(key, jnp.int32), jnp.asarray(key < kv_len)), (tile.block_q, len(key))
            )
            rows = np.arange(len(mine)) * plan.fold
            np.testing.assert_array_equal(seen[rows], np.pad(mine, ((0, 0), (0, tile.block_kv)))[:, key.clip(0, kv_len)])
            visited = mine.any(0).nonzero()[0]
            assert count * tile.block_kv < (np.ptp(visited) + 1 if len(visited) else 0) + tile.block_kv + plan.tokens


def prefill_call(**changes: Any) -> AttentionCall:
    return replace(AttentionCall(H200, "bfloat16", 2, 32, 8, 128, 4096, 4096, is_causal=True), **changes)


@pytest.mark.parametrize(
    "changes, fold",
    [
        ({}, 4),  # causal: fewer tokens in a tile, less of the diagonal
        ({"is_causal": False}, 4),
        ({"q_heads": 8}, 1),
        ({"q_heads": 56}, 7),  # 18 tokens of 7 heads fill 126 of 128 rows
        ({"q_heads": 96, "kv_heads": 1}, 32),  # 96 heads of 1 token would leave a quarter of the rows empty
        ({"max_seqlen_q": 20}, 4),  # one tile of 80 rows for the group
        ({"max_seqlen_q": 1}, 4),
        ({"window": Window(1023)}, 4),
    ],
)
def test_heads_per_tile(changes: dict[str, Any], fold: int) -> None:
    assert heads_per_tile(prefill_call(**changes), 128) == fold


def test_launch_plan_counts_what_the_programs_ask_for() -> None:
    plan = launch_plan(prefill_call(batch=1, is_causal=False), TileConfig(128, 64, 8, num_stages=3))
    assert (plan.grid, plan.fold) == (8 * 128, 4)
    row = 128 * 2
    assert plan.bytes_read == {"q": 4096 * 32 * row, "k": 8 * 128 * 4096 * row, "v": 8 * 128 * 4096 * row}


def test_launch_plan_reads_k_and_v_once_per_kv_head_while_the_group_fits_a_tile() -> None:
    tile = TileConfig(128, 64, 8, num_stages=3)
    plans = [launch_plan(prefill_call(max_seqlen_q=16, q_heads=8 * group), tile) for group in (1, 2, 4, 8)]
    assert {(plan.grid, plan.bytes_read["k"], plan.bytes_read["v"]) for plan in plans} == {
        (16, 16 * 4096 * 256, 16 * 4096 * 256)
    }


def test_a_window_reads_a_window() -> None:
    tile = TileConfig(128, 64, 8, num_stages=3)
    keys = launch_plan(prefill_call(window=Window(1023)), tile).bytes_read["k"] / (2 * 8 * 256)
    assert keys <= 128 * (1024 + 31)


@pytest.mark.parametrize(
    "dim, chunks",
    [
        (8, [Chunk(0, 16, 8)]),
        (24, [Chunk(0, 32, 24)]),
        (72, [Chunk(0, 64, 64), Chunk(64, 16, 8)]),
        (96, [Chunk(0, 64, 64), Chunk(64, 32, 32)]),
        (112, [Chunk(0, 128, 112)]),
        (192, [Chunk(0, 128, 128), Chunk(128, 64, 64)]),
        (256, [Chunk(0, 256, 256)]),
    ],
)
def test_head_chunks(dim: int, chunks: list[Chunk]) -> None:
    assert list(head_chunks(dim)) == chunks


@pytest.mark.parametrize("widest", [32, 64, 128])
def test_head_chunks_cover_a_head_once(widest: int) -> None:
    for dim in range(1, 520):
        chunks = head_chunks(dim, widest)
        assert sum(chunk.used for chunk in chunks) == dim
        assert all(a.start + a.width == b.start for a, b in itertools.pairwise(chunks))
        assert all(16 <= chunk.width <= widest and chunk.width & (chunk.width - 1) == 0 for chunk in chunks)
