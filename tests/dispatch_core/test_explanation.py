from __future__ import annotations

import json
from dataclasses import replace

import pytest

from dispatch_core import (
    ANYTHING,
    APPEND_PAGED_KEYS,
    CATALOGUE,
    DECODE_EXTENDED_KEYS,
    DECODE_KEYS,
    PACKED_PREFILL_KEYS,
    PAGED_PREFILL_KEYS,
    Build,
    Kernel,
    Window,
    explain,
    select_split_plan,
    select_tile_config,
)
from dispatch_core.costs import append_roofline, roofline
from tests.dispatch_core.facts import A100, H200, V100, decode, packed, prefill_paged


def test_a_chosen_kernel_comes_with_its_plan():
    call = decode()
    found = explain(DECODE_KEYS, call)
    build = CATALOGUE["gqa_decode_bs1_kernel"].builds[0]
    assert (found.key, found.build) == ("gqa_decode_bs1_kernel", "sm90")
    assert found.tile == select_tile_config(call, build)
    assert found.splits == select_split_plan(call, build)
    assert found.roofline == roofline(call)
    assert found.reason == "specialised (batch-1 decode)"


def test_candidates_that_serve_say_to_whom_they_yield():
    others = dict(explain(DECODE_EXTENDED_KEYS, decode()).others)
    assert others["gqa_decode_kernel"] == ("general, yields to gqa_decode_bs1_kernel",)
    assert others["gqa_decode_multi_token_kernel"] == ("needs 2 to 16 query tokens a sequence, the call has 1",)


def test_a_general_kernel_says_why_it_serves():
    found = explain(PACKED_PREFILL_KEYS, packed(A100))
    assert found.reason == "general (dense), and no specialised kernel serves the call"
    assert dict(found.others)["gqa_prefill_square_fwd_kernel"] == ("sm90 build needs arch 90, A100-80 has 80",)


def test_it_prints_as_an_aligned_table():
    lines = str(explain(DECODE_KEYS, replace(decode(), batch=64))).splitlines()
    assert [line.split()[0] for line in lines[:-2]] == ["call", "kernel", "build", "because", "tile", "splits", "roofline"]
    assert len({len(line) - len(line.split(maxsplit=1)[1]) for line in lines[:-2]}) == 1
    assert lines[1] == "kernel    gqa_decode_kernel"
    assert lines[-2:] == ["others", "  gqa_decode_bs1_kernel  needs batch 1, the call has 64"]


def test_a_refused_call_is_explained_and_not_raised():
    found = explain(PACKED_PREFILL_KEYS, packed(V100))
    assert (found.key, found.build, found.tile, found.splits) == (None, None, None, None)
    assert found.reason.startswith("no implementation serves this call")
    assert [key for key, _ in found.others] == list(PACKED_PREFILL_KEYS)
    text = str(found)
    assert "kernel    none" in text
    assert "candidates\n" in text
    assert "sm80 build needs arch 80 or newer, V100 has 70" in text


def test_a_tie_and_a_refused_replacement_are_explained():
    twins = {key: Kernel(key, ANYTHING, (Build("fake"),)) for key in ("a", "b")}
    tie = explain(("a", "b"), packed(), twins)
    assert tie.reason.startswith("dispatch is ambiguous: a, b")
    assert tie.others == (("a", ("serves it",)), ("b", ("serves it",)))
    found = explain(DECODE_KEYS, decode(batch=2), replaced=frozenset({"gqa_decode_bs1_kernel"}))
    assert found.reason.startswith("the kernel supplied for gqa_decode_bs1_kernel refuses this call")


def test_a_replacement_is_said_to_be_the_callers():
    kernels = {"mine": Kernel("mine", ANYTHING, (Build("fake"),))}
    found = explain(("mine",), packed(), kernels, frozenset({"mine"}))
    assert (found.reason, found.tile, found.splits) == ("supplied by the caller; specialised (anything)", None, None)
    assert "tile" not in str(found)


def test_a_named_build_is_explained():
    assert explain(PACKED_PREFILL_KEYS, packed(), build="xla").build == "xla"
    refusal = dict(explain(PACKED_PREFILL_KEYS, packed(), build="xla").others)["gqa_prefill_square_fwd_kernel"]
    assert refusal == ("has no xla build",)


def test_an_append_is_costed_as_an_append():
    call = prefill_paged()
    assert explain(APPEND_PAGED_KEYS, call).roofline == append_roofline(call)
    assert explain(PAGED_PREFILL_KEYS, call).roofline == roofline(call, appends=True)


@pytest.mark.parametrize("call", [packed(H200), packed(V100)])
def test_html_is_escaped_and_holds_every_candidate(call):
    named = replace(call, device=replace(call.device, name="<b>&"))
    html = explain(PACKED_PREFILL_KEYS, named)._repr_html_()
    assert "<b>" not in html
    assert "&lt;b&gt;&amp;" in html
    assert all(key in html for key in PACKED_PREFILL_KEYS)


def test_to_dict_is_plain_json():
    found = explain(DECODE_KEYS, decode(window=Window(64, 0)))
    read = json.loads(json.dumps(found.to_dict()))
    assert (read["key"], read["build"]) == ("gqa_decode_kernel", "sm80")
    assert read["tile"]["block_kv"] == found.tile.block_kv  # type: ignore[union-attr]
    assert read["call"]["window"] == {"left": 64, "right": None}
    assert read["others"]["gqa_decode_bs1_kernel"] == ["needs no window, the call has window (64, None)"]
    assert json.loads(json.dumps(explain(DECODE_KEYS, decode(V100)).to_dict()))["key"] is None
