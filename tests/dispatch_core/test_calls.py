from __future__ import annotations

import itertools
import re
from dataclasses import fields, replace
from typing import Any

import pytest

from dispatch_core import AttentionCall, Paging, RopeFacts, Window
from dispatch_core.costs import visible_pairs
from tests.dispatch_core.facts import CPU, H200, MIG_SLICE, decode, decode_paged, packed, prefill_paged

A_TEXT: Any = "1"
TYPES = "one of float16, bfloat16, float32, float8_e4m3fn"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"device": "H200"}, "device is 'H200'; need a Device. Look one up with device_named(name)."),
        ({"dtype": "float64"}, f"dtype is 'float64'; need {TYPES}."),
        ({"dtype": None}, f"dtype is None; need {TYPES}."),
        ({"kv_dtype": "int8"}, f"kv_dtype is 'int8'; need {TYPES}."),
        ({"out_dtype": "float64"}, f"out_dtype is 'float64'; need {TYPES}."),
        ({"batch": 0}, "batch is 0; need a positive int."),
        ({"batch": True}, "batch is True; need a positive int."),
        ({"q_heads": -8}, "q_heads is -8; need a positive int."),
        ({"kv_heads": 0}, "kv_heads is 0; need a positive int."),
        ({"head_dim": 0}, "head_dim is 0; need a positive int."),
        ({"head_dim": 64.0}, "head_dim is 64.0; need a positive int."),
        ({"head_dim_v": 0}, "head_dim_v is 0; need a positive int."),
        ({"max_seqlen_q": 0}, "max_seqlen_q is 0; need a positive int."),
        ({"max_seqlen_kv": None}, "max_seqlen_kv is None; need a positive int."),
        ({"q_heads": 12}, "q_heads is 12; need a multiple of kv_heads, which is 8."),
        ({"backend": "flash"}, "backend is 'flash'; need one of auto, dense, varlen, sliding_window, fp8."),
        ({"scale": float("nan")}, "scale is nan; need a finite number, or None for head_dim ** -0.5."),
        ({"softcap": -1.0}, "softcap is -1.0; need a finite number of 0 or more (0 and None: no cap)."),
        ({"softcap": float("inf")}, "softcap is inf; need a finite number of 0 or more (0 and None: no cap)."),
        ({"rope": RopeFacts(256, 64)}, "rope.rotary_dim is 256; need at most head_dim, which is 128."),
    ],
)
def test_a_wrong_fact_is_refused_by_name_value_and_rule(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=f"^{re.escape('AttentionCall: ' + message)}$"):
        replace(packed(), **changes)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Window(-2, 0), "window.left is -2; need an int of 0 or more, or None (or -1) for unbounded."),
        (lambda: Window(0, A_TEXT), "window.right is '1'; need an int of 0 or more, or None (or -1) for unbounded."),
        (lambda: Window(True, 0), "window.left is True; need an int of 0 or more, or None (or -1) for unbounded."),
        (lambda: Paging(0, 8), "paging.page_size is 0; need a positive int."),
        (lambda: Paging(64, 0), "paging.max_pages is 0; need a positive int."),
        (lambda: RopeFacts(63, 4096), "rope.rotary_dim is 63; need a positive even int."),
        (lambda: RopeFacts(0, 4096), "rope.rotary_dim is 0; need a positive even int."),
        (lambda: RopeFacts(64, 0), "rope.max_position is 0; need a positive int."),
        (lambda: RopeFacts(64, 4096, "neox"), "rope.style is 'neox'; need one of half, interleaved."),
    ],
)
def test_a_wrong_part_is_refused_by_name_value_and_rule(make, message: str):
    with pytest.raises(ValueError, match=f"^{re.escape('AttentionCall: ' + message)}$"):
        make()


SYNONYMS = {
    "softcap 0": ({"softcap": 0.0}, {}),
    "the default scale": ({"scale": 128**-0.5}, {}),
    "v as wide as k": ({"head_dim_v": 128}, {}),
    "a cache of q's type": ({"kv_dtype": "float16"}, {}),
    "the default output": ({"out_dtype": "float16"}, {}),
    "FP8's default output": (
        {"dtype": "float8_e4m3fn", "out_dtype": "bfloat16"},
        {"dtype": "float8_e4m3fn"},
    ),
    "bounds of -1": ({"window": Window(-1, -1)}, {}),
    "no bounds": ({"window": Window()}, {}),
    "a left bound past every key": ({"window": Window(511, None)}, {}),
    "a right bound under a causal mask": ({"window": Window(None, 0)}, {}),
    "a right bound past every key": ({"is_causal": False, "window": Window(None, 511)}, {"is_causal": False}),
    "one idle bound of two": ({"window": Window(3, 0)}, {"window": Window(3, None)}),
    "-1 beside a bound": ({"is_causal": False, "window": Window(-1, 2)}, {"is_causal": False, "window": Window(None, 2)}),
}


@pytest.mark.parametrize("spelling, canonical", SYNONYMS.values(), ids=SYNONYMS.keys())
def test_synonyms_become_one_record(spelling: dict[str, Any], canonical: dict[str, Any]):
    assert packed(**spelling) == packed(**canonical)
    assert hash(packed(**spelling)) == hash(packed(**canonical))
    assert str(packed(**spelling)) == str(packed(**canonical))


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("q_len, kv_len", [(1, 5), (3, 5), (5, 5), (5, 3)])
def test_a_window_is_dropped_exactly_when_it_hides_no_key(q_len: int, kv_len: int, is_causal: bool):
    lengths = list(itertools.product(range(1, q_len + 1), range(1, kv_len + 1)))
    for left, right in itertools.product((None, *range(8)), repeat=2):
        window = Window(left, right)
        call = packed(max_seqlen_q=q_len, max_seqlen_kv=kv_len, is_causal=is_causal, window=window)
        hides_none = all(visible_pairs(q, kv, is_causal, window) == visible_pairs(q, kv, is_causal) for q, kv in lengths)
        assert (call.window is None) == hides_none, window


def test_a_record_is_rebuilt_with_replace():
    call = packed(softcap=30.0, window=Window(100, 0), head_dim_v=64, out_dtype="float32", scale=1.0)
    assert replace(call, batch=call.batch) == call
    assert replace(call, softcap=None, window=None, head_dim_v=None, out_dtype=None, scale=None) == packed()
    assert all(field.init for field in fields(AttentionCall))


def test_derived_facts():
    call = packed(head_dim_v=64)
    assert (call.arch, call.group_size, call.v_dim, call.is_fp8) == (90, 4, 64, False)
    assert (call.cache_dtype, call.o_dtype, call.softmax_scale) == ("float16", "float16", 128**-0.5)
    assert packed(scale=0.5).softmax_scale == 0.5
    assert packed(CPU).arch == 0
    fp8 = packed(dtype="float8_e4m3fn")
    assert (fp8.is_fp8, fp8.cache_dtype, fp8.o_dtype) == (True, "float8_e4m3fn", "bfloat16")
    cached = decode(kv_dtype="float8_e4m3fn", out_dtype="float32")
    assert (cached.is_fp8, cached.cache_dtype, cached.o_dtype) == (False, "float8_e4m3fn", "float32")
    assert Paging(64, 8).capacity == 512


@pytest.mark.parametrize(
    "call, text",
    [
        (
            packed(backend="auto", is_causal=False),
            "H200, arch=90, dtype=float16, batch=4, q_heads=32, kv_heads=8, head_dim=128, max_seqlen_q=512, max_seqlen_kv=512",
        ),
        (
            decode_paged(MIG_SLICE, is_causal=False, softcap=30.0, has_sinks=True, return_lse=True, window=Window(100, None)),
            (
                "a MIG slice, arch=90, dtype=float16, batch=1, q_heads=32, kv_heads=4, head_dim=128, max_seqlen_q=1,"
                " max_seqlen_kv=8192, softcap=30.0, window=(100, None), paging=32 pages of 256, has_sinks=True, return_lse=True"
            ),
        ),
        (
            prefill_paged(CPU, rope=RopeFacts(64, 4096, "interleaved"), scale=1.0, head_dim_v=64, out_dtype="float32"),
            (
                "CPU, arch=0, dtype=float16, batch=2, q_heads=32, kv_heads=8, head_dim=128, max_seqlen_q=512,"
                " max_seqlen_kv=2048, head_dim_v=64, is_causal=True, scale=1.0, is_uniform=False, paging=8 pages of 256,"
                " out_dtype=float32, rope=RopeFacts(rotary_dim=64, max_position=4096, style='interleaved')"
            ),
        ),
    ],
)
def test_a_call_prints_only_what_was_stated(call: AttentionCall, text: str):
    assert str(call) == f"AttentionCall({text})"


def test_the_device_is_part_of_the_record():
    assert packed(H200) != packed(MIG_SLICE)
