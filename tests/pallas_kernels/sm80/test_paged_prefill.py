"""Paged prefill and append in Pallas' interpreter, against the oracle."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from dispatch_core import DEVICES, AttentionCall, Device, Paging, RopeFacts, TileConfig, Window
from pallas_kernels import builds
from pallas_kernels.sm80.append import append
from pallas_kernels.sm80.paged_prefill import paged_prefill
from tests.calling import call as call_op
from tests.calling import redrawn
from tests.edge_cases import edge_cases
from tests.inputs import DTYPES, Case, poisoned, random_case
from tests.interpreting import compiled, covering_sets
from tests.oracle import inverse_frequencies, per_kv_head
from tests.tolerance import assert_same_bits, check_case

OPS = ("gqa_prefill_paged", "append_paged")
TILES = (TileConfig(16, 16), TileConfig(32, 16), TileConfig(16, 32))
PAGES = (16, 8, 3, 64, 19, 1)  # one page id a tile, several, one for each key
H200, A100 = DEVICES["H200"], DEVICES["A100-80"]


def facts(case: Case, device: Device) -> tuple[AttentionCall, dict[str, Any]]:
    """The call of a case, and its arrays as the launch function wants them."""
    a, options, rope = dict(case.arrays), case.options, case.options.get("rope")
    pool, table, k = a["k_pages"], a["page_table"], a["k"]
    cu = a.get("cu_seqlens_q", a.get("cu_seqlens", np.arange(len(table) + 1, dtype=np.int32)))
    a |= {name: per_kv_head(a.get(name), len(table), k.shape[1]) for name in ("k_scale", "v_scale")}
    if rope is not None:
        a["inv_freq"] = inverse_frequencies(rope, k.shape[2])
    call = AttentionCall(
        device, str(k.dtype), len(table), a.get("q", k).shape[1], k.shape[1], k.shape[2], max(1, int(np.diff(cu).max())),
        table.shape[1] * pool.shape[1], head_dim_v=a["v"].shape[2], is_causal=options.get("is_causal", True),
        scale=options.get("scale"), softcap=options.get("softcap"), window=Window(*(options.get("window") or (None, None))),
        paging=Paging(pool.shape[1], table.shape[1]), kv_dtype=str(pool.dtype),
        rope=None if rope is None else RopeFacts(2 * len(a["inv_freq"]), 1, rope.style), has_sinks="sinks" in a,
        return_lse=True,
    )  # fmt: skip
    names = ["k", "v", "k_pages", "v_pages", "page_table", "inv_freq", "k_scale", "v_scale"]
    if case.op == "append_paged":
        names.append("lengths")
        a["cu_seqlens"] = cu
        names.append("cu_seqlens")
    else:
        names += ["q", "cu_seqlens_q", "cache_lengths", "sinks"]
    return call, {name: None if a.get(name) is None else jnp.asarray(a[name]) for name in names}


def run(case: Case, tile: TileConfig = TILES[0], device: Device = H200) -> tuple[np.ndarray, ...]:
    """A case through its launch function."""
    call, arrays = facts(case, device)
    launch = append if case.op == "append_paged" else paged_prefill
    return tuple(np.asarray(x) for x in compiled(launch, call, tile)(**arrays))


def check(case: Case, **how: Any) -> None:
    """A case meets the oracle, and gives the same bits whatever lies where nothing may read."""
    results = run(case, **how)
    check_case(case, *results)
    if case.op == "gqa_prefill_paged":
        for result, twin in zip(results[:2], run(poisoned(case), **how)[:2], strict=True):
            assert_same_bits(result, twin)


@pytest.mark.newest_jax
@pytest.mark.parametrize(("op", "index"), [(op, i) for op in OPS for i in range(len(covering_sets(op)))])
def test_every_two_features_together(op: str, index: int) -> None:
    features = tuple(sorted(covering_sets(op)[index]))
    dtype, page_size = ("bfloat16", "float32", "float16")[index % 3], PAGES[index % len(PAGES)]
    q_lens = (19, 5, 0) if op == "gqa_prefill_paged" or "packed" in features else (1, 1, 1)
    shape: dict[str, Any] = {"kv_heads": 1 + index % 2, "group": (1, 3, 4)[index % 3], "head_dim": (16, 24, 40)[index // 3 % 3]}
    case = random_case(op, index, features, dtype=dtype, page_size=page_size, q_lens=q_lens, kv_lens=(37, 0, 23), **shape)
    how = {"tile": TILES[index % len(TILES)], "device": (H200, A100)[index % 2]}
    check(case, **how)
    check(redrawn(case, 1), **how)


EDGES = {
    "gqa_prefill_paged": (
        "head_dims_192_128", "heads_96_1", "window_0_0", "window_64_0_full_200", "softcap_of_large_scores", "large_bfloat16",
        "sink_against_equal_scores", "huge_sink", "sink_of_empty_rows", "scales_half_three_eighth", "inactive_slots",
        "15_plus_3_page_16", "0_plus_33_page_16", "5_plus_2_page_1", "4_plus_1_page_256", "rotary_96_of_128_interleaved",
    ),
    "append_paged": (
        "15_plus_3_page_16", "0_plus_33_page_16", "129_plus_1_page_3", "4_plus_1_page_256", "inactive_slots",
        "rotary_32_of_128_interleaved",
    ),
}  # fmt: skip


@pytest.mark.oldest_jax
@pytest.mark.parametrize(("op", "name"), [(op, name) for op in OPS for name in EDGES[op]])
def test_edge_case(op: str, name: str) -> None:
    check(edge_cases(op)[name], tile=TILES[1])


def test_fp8_cache_of_odd_head_dims() -> None:
    lens: dict[str, Any] = {"q_lens": (20, 3), "kv_lens": (33, 5)}
    odd: dict[str, Any] = {"head_dim": 17, "head_dim_v": 9, "kv_heads": 1, "group": 2}
    check(random_case("gqa_prefill_paged", 0, ("fp8_cache",), dtype="bfloat16", page_size=16, **odd, **lens))


def test_every_e4m3_code_is_stored() -> None:
    """Values at, between and beyond the codes, of both signs, in one row each; also what rounds to even."""
    codes = np.arange(256, dtype=np.uint8).view(DTYPES["float8_e4m3fn"]).astype(np.float32)
    finite = np.sort(codes[np.isfinite(codes)])
    values = np.concatenate([finite, (finite[1:] + finite[:-1]) / 2, [1e4, -1e4, np.inf, -np.inf, 464, 470]]).astype(np.float16)
    values = np.resize(values, (32, 2, 16))
    case = random_case(
        "append_paged", 0, ("fp8_cache", "packed"), q_lens=(32,), kv_lens=(5,), kv_heads=2, head_dim=16, dtype="float16"
    )
    scales = {name: np.ones((), np.float32) for name in ("k_scale", "v_scale")}
    case = replace(case, arrays=case.arrays | scales | {"k": values, "v": values})
    check(case, device=A100)
    check(case, device=H200)


def test_only_the_new_places_change() -> None:
    case = random_case("append_paged", 3, ("packed",), dtype="float16", page_size=3, q_lens=(4, 0, 7), kv_lens=(5, 9, 0))
    pools = [case.arrays[name] for name in ("k_pages", "v_pages")]
    changed = {
        (int(p), int(slot))
        for old, new in zip(pools, run(case), strict=True)
        for p, slot in zip(*np.where((old != new).any((2, 3))))
    }
    table = case.arrays["page_table"]
    assert changed == {
        (table[b, j // 3], j % 3) for b, (n, new) in enumerate(((5, 4), (9, 0), (0, 7))) for j in range(n, n + new)
    }


def test_more_sequences_than_bounds_read_together() -> None:
    lens: dict[str, Any] = {"q_lens": (0, 1, 2) * 50, "kv_lens": (3, 0, 1) * 50}
    check(random_case("append_paged", 4, ("packed", "tail"), dtype="float16", page_size=2, kv_heads=1, head_dim=16, **lens))


def test_keys_outside_the_window_are_not_read() -> None:
    lens: dict[str, Any] = {"q_lens": (5, 5), "kv_lens": (60, 60)}
    case = random_case("gqa_prefill_paged", 0, (), page_size=16, head_dim=16, dtype="float16", **lens)
    case = replace(case, options={"window": (4, 0)})
    seen = np.zeros(case.arrays["k_pages"].shape[:2], bool)
    for row in case.arrays["page_table"]:
        seen[row[3], 56 - 48 :] = True
    poison = {
        name: np.where(seen[..., None, None], x := case.arrays[name], np.asarray(np.nan, x.dtype))
        for name in ("k_pages", "v_pages")
    }
    for clean, twin in zip(run(case)[:2], run(replace(case, arrays=case.arrays | poison))[:2], strict=True):
        assert_same_bits(clean, twin)


def test_a_chunk_is_what_its_tokens_are_one_after_the_other() -> None:
    case = random_case(
        "gqa_prefill_paged", 1, (), dtype="float32", page_size=16, q_lens=(5,), kv_lens=(37,), kv_heads=2, group=2
    )
    o, lse, *_ = run(case)
    a, steps = dict(case.arrays), []
    for t in range(5):
        one = {name: case.arrays[name][t : t + 1] for name in ("q", "k", "v")}
        one |= {"cu_seqlens_q": np.array([0, 1], np.int32), "cache_lengths": np.array([37 + t], np.int32)}
        step = run(replace(case, arrays=a | one))
        a |= {"k_pages": step[2], "v_pages": step[3]}
        steps.append(step[:2])
    np.testing.assert_allclose(o, np.concatenate([s[0] for s in steps]), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(lse, np.concatenate([s[1] for s in steps]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("op", "launch", "device"), [(OPS[0], paged_prefill, "H200"), (OPS[1], append, "A100-80")])
def test_the_public_op_runs_this_kernel(op: str, launch: Any, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape: dict[str, Any] = {"dtype": "float16", "head_dim": 16, "page_size": 16, "kv_heads": 1, "group": 2}
    features = ("rope",) if op == "gqa_prefill_paged" else ("rope", "packed")
    case = random_case(op, 0, features, q_lens=(9, 0, 3), kv_lens=(21, 4, 0), **shape)
    found, launched = builds.launch_function, []
    monkeypatch.setattr(builds, "launch_function", lambda *which: launched.append(found(*which)) or launched[-1])
    check_case(case, *(np.asarray(x) for x in call_op(case, device=device, interpret=True)))
    assert launched == [launch]
