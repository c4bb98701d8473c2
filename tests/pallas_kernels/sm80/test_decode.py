"""Decode and paged decode in Pallas' interpreter, against the oracle."""

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dispatch_core import DEVICES, AttentionCall, Device, Paging, RopeFacts, TileConfig, Window
from dispatch_core.calls import FLOAT8
from pallas_kernels.sm80.decode import decode, launch_plan
from pallas_kernels.sm80.paged import paged_decode
from tests.edge_cases import edge_cases
from tests.inputs import Case, poisoned, random_case, unclamped
from tests.interpreting import compiled, covering_sets
from tests.oracle import inverse_frequencies, per_kv_head
from tests.tolerance import assert_same_bits, check_case

OPS = ("gqa_decode", "gqa_decode_paged")
TILE = TileConfig(16, 16, num_splits=2)
H200, A100 = DEVICES["H200"], DEVICES["A100-80"]


def facts(case: Case, device: Device) -> tuple[AttentionCall, dict[str, Any]]:
    """The call of a case, and its arrays as the launch function wants them."""
    a, rope = dict(case.arrays), case.options.get("rope")
    if a["q"].ndim == 3:
        a |= {name: a[name][:, None] for name in ("q", "k_new", "v_new") if name in a}
    batch, tokens, q_heads, head_dim = a["q"].shape
    paged = case.op == "gqa_decode_paged"
    k, v = (a[name] for name in (("k_pages", "v_pages") if paged else ("k", "v")))
    paging = Paging(k.shape[1], a["page_table"].shape[1]) if paged else None
    capacity = paging.capacity if paging else k.shape[1]
    a["kv_lengths"] = a.get("kv_lengths", np.full(batch, capacity, np.int32))
    a |= {name: per_kv_head(a.get(name), batch, k.shape[2]) for name in ("k_scale", "v_scale")}
    if rope is not None:
        a["inv_freq"] = inverse_frequencies(rope, head_dim)
    call = AttentionCall(
        device, str(case.dtype), batch, q_heads, k.shape[2], head_dim, tokens, capacity,
        head_dim_v=v.shape[3], is_causal=True, scale=case.options.get("scale"), softcap=case.options.get("softcap"),
        window=Window(*(case.options.get("window") or (None, None))), paging=paging, kv_dtype=str(k.dtype),
        rope=None if rope is None else RopeFacts(2 * len(a["inv_freq"]), 1, rope.style),
        has_sinks="sinks" in a, return_lse=True,
    )  # fmt: skip
    names = ["q", "kv_lengths", "k_scale", "v_scale", "sinks"]
    names += ["k_pages", "v_pages", "page_table", "k_new", "v_new", "inv_freq"] if paged else ["k", "v"]
    return call, {name: None if a.get(name) is None else jnp.asarray(a[name]) for name in names}


def run(case: Case, tile: TileConfig = TILE, device: Device = H200) -> tuple[Any, ...]:
    """A case through its launch function: results in the order and the shapes of the op."""
    call, arrays = facts(case, device)
    o, lse, *pools = compiled(paged_decode if case.op == "gqa_decode_paged" else decode, call, tile)(**arrays)
    return (o[:, 0], lse[:, 0], *pools) if case.arrays["q"].ndim == 3 else (o, lse, *pools)


def check(case: Case, **how: Any) -> None:
    """A case meets the oracle, and gives the same bits whatever lies where nothing may read."""
    results = run(case, **how)
    check_case(case, *results)
    for result, twin in zip(results[:2], run(poisoned(case), **how)[:2], strict=True):
        assert_same_bits(np.asarray(result), np.asarray(twin))


TILES = (TileConfig(16, 16, num_splits=2), TileConfig(32, 16, num_splits=1), TileConfig(16, 32, num_splits=5))


@pytest.mark.newest_jax
@pytest.mark.parametrize("op, index", [(op, i) for op in OPS for i in range(len(covering_sets(op)))])
def test_every_two_features_together(op: str, index: int) -> None:
    features = tuple(sorted(covering_sets(op)[index]))
    case = random_case(op, 100 + index, features, dtype=("bfloat16", "float32", "float16")[index % 3])
    check(case, tile=TILES[index % len(TILES)], device=(H200, A100)[index % 2])


EDGES = {
    "gqa_decode": (
        "kv_0", "kv_130_of_256", "more_queries_than_keys", "head_dim_72", "head_dim_96", "head_dims_192_128", "heads_9_3",
        "heads_14_2", "heads_96_1", "window_0_0", "window_-1_3", "window_128_of_400", "softcap_of_large_scores",
        "large_float16", "large_bfloat16", "sink_against_equal_scores", "huge_sink", "sink_of_empty_rows",
        "sink_of_minus_infinity", "not_finite_in_valid_keys", "scales_half_three_eighth",
    ),
    "gqa_decode_paged": (
        "page_1", "page_3", "page_19", "page_64", "page_256", "15_plus_3_page_16", "16_plus_1_page_16", "5_plus_2_page_1",
        "4_plus_1_page_256", "rotary_64_of_128_half", "rotary_96_of_128_interleaved", "inactive_slots",
        "inactive_slots_without_append", "window_2_None", "scales_half_three_eighth",
    ),
}  # fmt: skip


@pytest.mark.oldest_jax
@pytest.mark.parametrize("op, name", [(op, name) for op in OPS for name in EDGES[op]])
def test_edge_case(op: str, name: str) -> None:
    check(edge_cases(op)[name])


def test_fp8_cache_of_odd_head_dims() -> None:
    check(random_case("gqa_decode", 0, ("fp8_cache", "kv_lengths"), dtype="bfloat16", head_dim=17, head_dim_v=9))


def extreme_lengths(op: str, features: tuple[str, ...], **pinned: Any) -> Case:
    """Sequences of no key, of as many as the cache holds, and of 21; pages of 16."""
    case = random_case(op, 3, features, kv_lens=(0, 48, 21), page_size=16, **pinned)
    a = case.arrays
    capacity = a["k"].shape[1] if op == "gqa_decode" else a["page_table"].shape[1] * 16
    return replace(case, arrays=a | {"kv_lengths": np.asarray([0, capacity, 21], np.int32)})


EXTREMES = (("gqa_decode", ("kv_lengths",)), ("gqa_decode_paged", ()), ("gqa_decode_paged", ("append", "rope")))


@pytest.mark.parametrize("op, features", EXTREMES)
def test_lengths_out_of_range_are_clamped(op: str, features: tuple[str, ...]) -> None:
    case = extreme_lengths(op, features, head_dim=16, dtype="float16")
    for result, twin in zip(run(case), run(unclamped(case)), strict=True):
        assert_same_bits(np.asarray(result), np.asarray(twin))


@pytest.mark.parametrize("op", OPS)
def test_keys_outside_the_window_are_not_read(op: str) -> None:
    case = random_case(op, 0, (), batch=2, kv_lens=(40, 40), page_size=16, head_dim=16, dtype="float16")
    case = replace(case, options={"window": (4, 0)})
    if op == "gqa_decode":
        seen = np.broadcast_to(np.arange(40) >= 35, case.arrays["k"].shape[:2])
        names = ("k", "v")
    else:
        seen = np.zeros(case.arrays["k_pages"].shape[:2], bool)
        for row in case.arrays["page_table"]:
            seen[row[2], 35 - 32 :] = True
        names = ("k_pages", "v_pages")
    poison = {name: np.where(seen[..., None, None], x := case.arrays[name], np.asarray(np.nan, x.dtype)) for name in names}
    for clean, twin in zip(run(case)[:2], run(replace(case, arrays=case.arrays | poison))[:2], strict=True):
        assert_same_bits(np.asarray(clean), np.asarray(twin))


def test_rows_of_zeros_and_of_the_largest_numbers_meet_fp8_keys() -> None:
    case = random_case("gqa_decode", 1, ("fp8_cache", "tokens"), dtype="bfloat16", batch=2, head_dim=16, kv_heads=1, group=2)
    q = case.arrays["q"].copy()
    q[0, 0], q[1, 0] = 0, q[1, 0] * np.asarray(1e30, q.dtype)
    q[1, 1] *= np.asarray(1e-30, q.dtype)
    o, lse = run(replace(case, arrays=case.arrays | {"q": q}))
    assert np.isfinite(np.asarray(o, np.float32)).all()
    assert np.isfinite(np.asarray(lse)).all()
    v = case.arrays["v"][0].astype(np.float32) * per_kv_head(case.arrays["v_scale"], 2, 1)[0, :, None]
    visible = v.shape[0] - q.shape[1] + 1
    np.testing.assert_allclose(np.asarray(o[0, 0], np.float32), v[:visible].mean(0).repeat(2, 0), rtol=0.01, atol=0.02)


def plan_call(group: int = 4, **changes: Any) -> AttentionCall:
    call = AttentionCall(H200, "bfloat16", 2, 2 * group, 2, 128, 1, 8192, is_causal=True)
    return replace(call, **changes)


def test_key_and_value_bytes_do_not_change_with_the_group() -> None:
    plans = [launch_plan(plan_call(group), TileConfig(128, 64, num_splits=4)) for group in (1, 2, 3, 5, 8, 12, 96)]
    one_copy = 2 * 8192 * 2 * 128 * 2
    assert {(p.bytes_read["k"], p.bytes_read["v"]) for p in plans} == {(one_copy, one_copy)}
    assert [p.bytes_read["q"] for p in plans[:2]] == [2 * 2 * 1 * 4 * 128 * 2, 2 * 2 * 2 * 4 * 128 * 2]


def test_plan_states_grids_and_narrow_caches() -> None:
    tile = TileConfig(16, 64, num_splits=4)
    plan = launch_plan(plan_call(), tile)
    assert (plan.grid, plan.merge_grid, plan.tile) == (2 * 4 * 2, 2 * 8, tile)
    assert launch_plan(plan_call(), replace(tile, num_splits=1)).merge_grid == 0
    paged = plan_call(kv_dtype=FLOAT8, head_dim_v=64, max_seqlen_q=16, paging=Paging(16, 512))
    read = launch_plan(paged, tile).bytes_read  # 64 query rows of a KV head: four blocks, each of which reads the keys
    assert read["k"] == 4 * 2 * 8192 * 2 * 128
    assert read["v"] == read["k"] // 2
    assert read["page_table"] == 4 * 2 * 2 * 512 * 4


def test_what_a_program_does_is_what_the_plan_says() -> None:
    case = random_case("gqa_decode", 3, (), dtype="float32", group=5, kv_heads=2)
    call, arrays = facts(case, H200)
    jaxpr = jax.make_jaxpr(functools.partial(decode, call, TILE, interpret=True))(**arrays)
    grids = [eqn.params["grid_mapping"].grid for eqn in pallas_calls(jaxpr.jaxpr)]
    plan = launch_plan(call, TILE)
    assert grids == [(plan.grid,), (plan.merge_grid,)]


def pallas_calls(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            yield eqn
        elif "jaxpr" in eqn.params:
            yield from pallas_calls(eqn.params["jaxpr"].jaxpr)
