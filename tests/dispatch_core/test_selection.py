"""The recorded dispatch, row by row, and the rule over fakes."""

from __future__ import annotations

import itertools
import re
import statistics
import time
from dataclasses import replace
from typing import Any

import pytest

from dispatch_core import (
    ANYTHING,
    CATALOGUE,
    DECODE_EXTENDED_KEYS,
    DECODE_KEYS,
    DENSE_PREFILL_EXTENDED_KEYS,
    DENSE_PREFILL_KEYS,
    DEVICES,
    PACKED_PREFILL_EXTENDED_KEYS,
    PACKED_PREFILL_KEYS,
    PAGED_DECODE_EXTENDED_KEYS,
    PAGED_DECODE_KEYS,
    PAGED_PREFILL_EXTENDED_KEYS,
    PAGED_PREFILL_KEYS,
    AmbiguousDispatchError,
    AttentionCall,
    Build,
    Condition,
    Kernel,
    NoImplementationError,
    Paging,
    Region,
    ReplacementRefusedError,
    Window,
    candidates,
    choose,
    select_kernel_key,
)
from tests.dispatch_core.facts import (
    A100,
    CPU,
    H200,
    LEFT_128,
    MIG_SLICE,
    ROPE,
    V100,
    decode,
    decode_paged,
    packed,
    prefill_paged,
)

SQUARE = "gqa_prefill_square_fwd_kernel"
CAUSAL = "gqa_prefill_causal_fwd_kernel"
GENERAL = "gqa_prefill_fwd_kernel"
VARLEN = "gqa_prefill_varlen_fwd_kernel"
WINDOW = "gqa_sliding_window_varlen_fwd_kernel"
FP8_SQUARE = "gqa_prefill_fp8_tensor_core_fwd_kernel"
FP8 = "float8_e4m3fn"

PACKED_ROWS: dict[str, tuple[AttentionCall, str | None, str, str | None]] = {
    # row: (call, build asked for, key, build it lands on where the record says)
    "square-causal": (packed(), None, SQUARE, None),
    "square-causal-bf16": (packed(dtype="bfloat16"), None, SQUARE, None),
    "causal-q-lt-kv": (packed(batch=2, max_seqlen_kv=4096), None, CAUSAL, None),
    "causal-dim64": (packed(head_dim=64), None, GENERAL, None),
    "noncausal-dim128": (packed(is_causal=False), None, GENERAL, None),
    "small-causal-work": (packed(batch=1, q_heads=8, max_seqlen_q=128, max_seqlen_kv=128), None, CAUSAL, None),
    "auto-uniform-square": (packed(backend="auto"), None, SQUARE, None),
    "auto-uniform-dense": (packed(backend="auto", head_dim=64), None, GENERAL, None),
    "auto-ragged": (packed(backend="auto", is_uniform=False), None, VARLEN, None),
    "explicit-varlen": (packed(backend="varlen"), None, VARLEN, None),
    "sliding-window": (packed(backend="auto", window=LEFT_128), None, WINDOW, None),
    "fp8-square-noncausal": (packed(backend="auto", is_causal=False, dtype=FP8), None, FP8_SQUARE, None),
    "arch-80": (packed(A100), None, GENERAL, "sm80"),
    "cpu": (packed(CPU), None, GENERAL, "xla"),
    "h200-xla": (packed(), "xla", GENERAL, "xla"),
    "v100-xla": (packed(V100), "xla", GENERAL, "xla"),
    "window-a100": (packed(A100, backend="auto", window=LEFT_128), None, WINDOW, "sm80"),
    "window-cpu": (packed(CPU, backend="auto", window=LEFT_128), None, WINDOW, "xla"),
}


@pytest.mark.parametrize("keys", [PACKED_PREFILL_KEYS, PACKED_PREFILL_EXTENDED_KEYS], ids=["recorded", "extended"])
@pytest.mark.parametrize("call, asked, key, build", PACKED_ROWS.values(), ids=PACKED_ROWS.keys())
def test_packed_prefill_rows(call: AttentionCall, asked: str | None, key: str, build: str | None, keys: tuple[str, ...]):
    choice = choose(keys, call, build=asked)
    assert choice.key == select_kernel_key(keys, call, build=asked) == key
    assert build in (None, choice.build.name)


PACKED_REFUSED = {
    "dense and ragged": (packed(is_uniform=False), GENERAL, "needs sequences of one length, the call has ragged ones"),
    "varlen and FP8": (
        packed(backend="varlen", dtype=FP8),
        VARLEN,
        "needs 16-bit or float32 inputs, the call has float8_e4m3fn",
    ),
    "FP8 not causal and ragged": (
        packed(backend="auto", dtype=FP8, is_causal=False, is_uniform=False),
        FP8_SQUARE,
        "needs sequences of one length, the call has ragged ones",
    ),
    "FP8 causal": (packed(backend="auto", dtype=FP8), FP8_SQUARE, "needs no causal mask, the call has one"),
    "backend sliding_window without a window": (
        packed(backend="sliding_window"),
        WINDOW,
        "needs a window that hides keys, the call has none",
    ),
    "V100": (packed(V100), GENERAL, "sm80 build needs arch 80 or newer, V100 has 70"),
    "V100, a window": (packed(V100, backend="auto", window=LEFT_128), WINDOW, "sm80 build needs arch 80 or newer, V100 has 70"),
    "V100, FP8": (
        packed(V100, backend="auto", dtype=FP8, is_causal=False),
        FP8_SQUARE,
        "sm80 build needs arch 80 or newer, V100 has 70",
    ),
}


@pytest.mark.parametrize("call, key, reason", PACKED_REFUSED.values(), ids=PACKED_REFUSED.keys())
def test_packed_prefill_refusals(call: AttentionCall, key: str, reason: str):
    with pytest.raises(NoImplementationError, match=r"^no implementation serves this call") as refused:
        select_kernel_key(PACKED_PREFILL_KEYS, call)
    message = str(refused.value)
    assert all(candidate in message for candidate in PACKED_PREFILL_KEYS)
    assert str(call) in message
    (line,) = (line for line in message.splitlines() if line.strip().startswith(key))
    assert reason in line


def test_the_dense_op_lands_on_square():
    assert select_kernel_key(DENSE_PREFILL_KEYS, packed()) == SQUARE
    assert select_kernel_key(DENSE_PREFILL_EXTENDED_KEYS, packed(backend="auto")) == SQUARE


SLOT_ROWS = [
    (DECODE_KEYS, decode(), "gqa_decode_bs1_kernel"),
    (DECODE_KEYS, decode(dtype="bfloat16"), "gqa_decode_kernel"),
    (DECODE_KEYS, decode(batch=4), "gqa_decode_kernel"),
    (DECODE_KEYS, decode(head_dim=64), "gqa_decode_kernel"),
    (DECODE_KEYS, decode(softcap=2.0), "gqa_decode_kernel"),
    (PAGED_DECODE_KEYS, decode_paged(), "gqa_decode_paged_bs1_kernel"),
    (PAGED_DECODE_KEYS, decode_paged(dtype="bfloat16"), "gqa_decode_paged_kernel"),
    (PAGED_DECODE_KEYS, decode_paged(batch=2), "gqa_decode_paged_kernel"),
    (PAGED_DECODE_KEYS, decode_paged(page_size=192, max_seqlen_kv=8064), "gqa_decode_paged_kernel"),
    (PAGED_PREFILL_KEYS, prefill_paged(), "gqa_prefill_paged_with_kv_cache_fwd_kernel"),
    (PAGED_PREFILL_KEYS, prefill_paged(rope=ROPE), "gqa_prefill_paged_with_kv_cache_rope_fwd_kernel"),
    (PAGED_PREFILL_KEYS, prefill_paged(kv_dtype=FP8), "gqa_prefill_paged_with_fp8_kv_cache_fwd_kernel"),
]


@pytest.mark.parametrize("keys, call, key", SLOT_ROWS)
def test_decode_and_paged_rows(keys: tuple[str, ...], call: AttentionCall, key: str):
    assert select_kernel_key(keys, call) == key
    wider = {
        DECODE_KEYS: DECODE_EXTENDED_KEYS,
        PAGED_DECODE_KEYS: PAGED_DECODE_EXTENDED_KEYS,
        PAGED_PREFILL_KEYS: PAGED_PREFILL_EXTENDED_KEYS,
    }
    assert select_kernel_key(wider[keys], call) == key


EXTENDED_ROWS = [
    (PACKED_PREFILL_EXTENDED_KEYS, packed(backend="auto", dtype=FP8), "gqa_prefill_fp8_fwd_kernel"),
    (PACKED_PREFILL_EXTENDED_KEYS, packed(backend="fp8", dtype=FP8, is_uniform=False), "gqa_prefill_fp8_fwd_kernel"),
    (
        PACKED_PREFILL_EXTENDED_KEYS,
        packed(backend="auto", dtype=FP8, head_dim=96, is_causal=False),
        "gqa_prefill_fp8_fwd_kernel",
    ),
    (DENSE_PREFILL_EXTENDED_KEYS, packed(backend="auto", is_uniform=False), VARLEN),
    (DENSE_PREFILL_EXTENDED_KEYS, packed(backend="auto", window=LEFT_128), WINDOW),
    (DECODE_EXTENDED_KEYS, decode(kv_dtype=FP8), "gqa_decode_fp8_kv_cache_kernel"),
    (DECODE_EXTENDED_KEYS, decode(kv_dtype=FP8, max_seqlen_q=16), "gqa_decode_fp8_kv_cache_kernel"),
    (DECODE_EXTENDED_KEYS, decode(max_seqlen_q=2), "gqa_decode_multi_token_kernel"),
    (PAGED_DECODE_EXTENDED_KEYS, decode_paged(kv_dtype=FP8), "gqa_decode_paged_fp8_kv_cache_kernel"),
    (PAGED_DECODE_EXTENDED_KEYS, decode_paged(max_seqlen_q=16), "gqa_decode_paged_multi_token_kernel"),
    (
        PAGED_PREFILL_EXTENDED_KEYS,
        prefill_paged(rope=ROPE, kv_dtype=FP8),
        "gqa_prefill_paged_with_fp8_kv_cache_rope_fwd_kernel",
    ),
]


@pytest.mark.parametrize("keys, call, key", EXTENDED_ROWS)
def test_what_the_wider_tuples_add(keys: tuple[str, ...], call: AttentionCall, key: str):
    assert select_kernel_key(keys, call) == key


@pytest.mark.parametrize("device", ["H100", "H200", "GH200"])
def test_the_square_rule_is_stated_over_the_sm_count(device: str):
    assert select_kernel_key(PACKED_PREFILL_KEYS, packed(DEVICES[device])) == SQUARE
    assert select_kernel_key(PACKED_PREFILL_KEYS, packed(DEVICES[device], batch=2)) == CAUSAL
    assert select_kernel_key(PACKED_PREFILL_KEYS, packed(MIG_SLICE, batch=1)) == SQUARE


@pytest.mark.parametrize(
    "arch, lands_on", [(80, GENERAL), (86, GENERAL), (90, SQUARE), (100, GENERAL), (103, GENERAL), (121, GENERAL)]
)
def test_an_unknown_architecture_is_served_by_what_its_capability_allows(arch: int, lands_on: str):
    assert select_kernel_key(PACKED_PREFILL_KEYS, packed(replace(H200, name="unheard of", arch=arch))) == lands_on


def test_names_decide_nothing():
    renamed = replace(H200, name="V100")
    assert select_kernel_key(PACKED_PREFILL_KEYS, packed(renamed)) == SQUARE


# The rule over fakes.

NEVER = Region("never", (Condition("a batch of 0", lambda call: False, lambda call: call.batch),))


def fake(key: str, *, claims: bool, general: bool = False) -> Kernel:
    return Kernel(key, ANYTHING if claims else NEVER, (Build("fake"),), general)


def outcome(kernels: list[Kernel], replaced: set[str]) -> str:
    """The key, or the error's class and text."""
    installed = {kernel.key: kernel for kernel in kernels}
    answers = set()
    for keys in itertools.permutations(installed):
        try:
            answers.add(select_kernel_key(keys, packed(), installed, frozenset(replaced)))
        except ValueError as error:
            answers.add(f"{type(error).__name__}: {error.args[0].splitlines()[0]}")
    if all("ambiguous" in answer for answer in answers):
        return "AmbiguousDispatchError"
    (answer,) = answers
    return answer


NOBODY = "no implementation serves this call."
STOOD_IN = (
    "the kernel supplied for b refuses this call; the shipped a would serve it and must not stand in."
    " Drop the replacement or widen its region."
)
OUTCOMES: list[tuple[str, list[Kernel], set[str], str]] = [
    ("one shipped", [fake("a", claims=True), fake("b", claims=False)], set(), "a"),
    ("one shipped, general", [fake("a", claims=False), fake("b", claims=True, general=True)], set(), "b"),
    ("general yields", [fake("a", claims=True), fake("b", claims=True, general=True)], set(), "a"),
    ("one, a replacement", [fake("a", claims=True), fake("b", claims=False)], {"a"}, "a"),
    ("one, a replacement; another refused", [fake("a", claims=True), fake("b", claims=False)], {"a", "b"}, "a"),
    (
        "a general replacement yields to a shipped one",
        [fake("a", claims=True), fake("b", claims=True, general=True)],
        {"b"},
        "a",
    ),
    (
        "one shipped, a replacement refused",
        [fake("a", claims=True), fake("b", claims=False)],
        {"b"},
        f"ReplacementRefusedError: {STOOD_IN}",
    ),
    (
        "one shipped, general, two replacements refused",
        [fake("a", claims=True, general=True), fake("b", claims=False), fake("c", claims=False, general=True)],
        {"b"},
        f"ReplacementRefusedError: {STOOD_IN}",
    ),
    ("none", [fake("a", claims=False), fake("b", claims=False)], set(), f"NoImplementationError: {NOBODY}"),
    (
        "none, a replacement refused",
        [fake("a", claims=False), fake("b", claims=False)],
        {"a"},
        "ReplacementRefusedError: the kernel supplied for a refuses this call, and no implementation serves this call.",
    ),
    ("two specialised", [fake("a", claims=True), fake("b", claims=True)], set(), "AmbiguousDispatchError"),
    (
        "two general",
        [fake("a", claims=True, general=True), fake("b", claims=True, general=True)],
        set(),
        "AmbiguousDispatchError",
    ),
    ("two, both replacements", [fake("a", claims=True), fake("b", claims=True)], {"a", "b"}, "AmbiguousDispatchError"),
    (
        "two, and a replacement refused",
        [fake("a", claims=True), fake("b", claims=True), fake("c", claims=False)],
        {"c"},
        "AmbiguousDispatchError",
    ),
    (
        "a replacement answers with its own generality",
        [fake("a", claims=True, general=True), fake("b", claims=True)],
        {"a"},
        "b",
    ),
]


@pytest.mark.parametrize("kernels, replaced, expected", [row[1:] for row in OUTCOMES], ids=[row[0] for row in OUTCOMES])
def test_the_outcomes(kernels: list[Kernel], replaced: set[str], expected: str):
    assert outcome(kernels, replaced) == expected


def test_a_tie_names_the_tied_keys_and_the_call():
    installed = {key: fake(key, claims=True) for key in ("a", "b")} | {"c": fake("c", claims=False)}
    with pytest.raises(AmbiguousDispatchError) as tied:
        select_kernel_key(("a", "b", "c"), packed(), installed)
    assert str(tied.value) == f"dispatch is ambiguous: a, b all serve this call with the same standing.\n  call: {packed()}"


def test_a_refused_replacement_names_itself_its_reasons_and_the_shipped_key():
    installed = {"a": fake("a", claims=True), "bb": fake("bb", claims=False), "c": fake("c", claims=False)}
    with pytest.raises(ReplacementRefusedError, match=r"^the kernel supplied for bb, c refuses this call") as refused:
        select_kernel_key(tuple(installed), packed(), installed, frozenset({"bb", "c"}))
    assert str(refused.value).splitlines()[1:] == [
        "  bb  needs a batch of 0, the call has 4",
        "  c   needs a batch of 0, the call has 4",
        f"  call: {packed()}",
    ]
    assert "the shipped a would serve it" in str(refused.value)


def test_no_implementation_and_a_refused_replacement_says_both():
    installed = {"a": fake("a", claims=False)}
    with pytest.raises(ReplacementRefusedError, match=r"^the kernel supplied for a .*no implementation serves this call"):
        select_kernel_key(("a",), packed(), installed, frozenset({"a"}))


def test_keys_that_are_not_installed_are_skipped():
    assert select_kernel_key(("z", "a"), packed(), {"a": fake("a", claims=True)}) == "a"
    with pytest.raises(NoImplementationError, match="nothing is installed under the keys asked for"):
        select_kernel_key(("z",), packed(), {})


def test_replacing_causal_with_one_that_never_applies_is_an_error():
    call = packed(batch=2, max_seqlen_kv=4096)
    kernels = {**CATALOGUE, CAUSAL: fake(CAUSAL, claims=False)}
    with pytest.raises(ReplacementRefusedError, match=r"^the kernel supplied for"):
        select_kernel_key(PACKED_PREFILL_KEYS, call, kernels, frozenset({CAUSAL}))


def test_a_general_replacement_serves_where_the_specialised_replacement_declines():
    call = packed(batch=2, max_seqlen_kv=4096)
    kernels = {**CATALOGUE, CAUSAL: fake(CAUSAL, claims=False), GENERAL: fake(GENERAL, claims=True, general=True)}
    assert select_kernel_key(PACKED_PREFILL_KEYS, call, kernels, frozenset({CAUSAL, GENERAL})) == GENERAL


def test_the_shipped_object_passed_as_a_replacement_is_one():
    call = packed(head_dim=64)
    with pytest.raises(ReplacementRefusedError, match=f"^the kernel supplied for {CAUSAL} .*the shipped {GENERAL}"):
        select_kernel_key(PACKED_PREFILL_KEYS, call, CATALOGUE, frozenset({CAUSAL}))


def test_a_kernel_a_slot_declares_itself_is_no_replacement():
    kernels = {**CATALOGUE, "mine": fake("mine", claims=False)}
    assert select_kernel_key((*PACKED_PREFILL_KEYS, "mine"), packed(), kernels) == SQUARE


def test_a_named_build_is_part_of_the_question_and_of_the_message():
    with pytest.raises(NoImplementationError) as refused:
        select_kernel_key(DECODE_KEYS, decode(dtype="bfloat16", head_dim=96), build="sm90")
    message = str(refused.value)
    assert re.search(r"gqa_decode_bs1_kernel +needs dtype float16, the call has bfloat16", message)
    assert message.splitlines()[-1] == "  build: sm90"
    with pytest.raises(NoImplementationError, match="has no xla build"):
        select_kernel_key((SQUARE, CAUSAL), packed(), build="xla")


def test_candidates_are_listed_with_their_refusals():
    listed = {c.key: c for c in candidates(PACKED_PREFILL_KEYS, packed(), replaced=frozenset({SQUARE}))}
    assert set(listed) == set(PACKED_PREFILL_KEYS)
    assert listed[SQUARE].refusals == ()
    assert (listed[SQUARE].is_replacement, listed[CAUSAL].is_replacement) == (True, False)
    assert listed[GENERAL].is_general
    assert listed[CAUSAL].refusals == ("needs a call outside the square region, the call has one inside it",)


# Speed.


def counting(counts: dict[str, int]) -> Kernel:
    def test(call: AttentionCall) -> bool:
        counts["asked"] = counts.get("asked", 0) + 1
        return True

    return Kernel("counted", Region("counted", (Condition("anything", test, lambda call: ""),)), (Build("fake"),))


def test_a_selection_is_made_once_per_distinct_call():
    counts: dict[str, int] = {}
    kernels = {"counted": counting(counts)}
    select_kernel_key(("counted",), packed(), kernels)
    once = counts["asked"]
    for _ in range(50):
        select_kernel_key(("counted",), packed(scale=128**-0.5), kernels)
    assert counts["asked"] == once
    select_kernel_key(("counted",), packed(batch=3), kernels)
    assert counts["asked"] == 2 * once


@pytest.mark.parametrize(
    "keys, make",
    [
        (PACKED_PREFILL_EXTENDED_KEYS, packed),
        (DECODE_EXTENDED_KEYS, decode),
        (PAGED_DECODE_EXTENDED_KEYS, decode_paged),
        (PAGED_PREFILL_EXTENDED_KEYS, prefill_paged),
    ],
)
def test_selection_takes_under_200_microseconds_uncached(keys: tuple[str, ...], make: Any):
    def seconds(call: AttentionCall) -> float:
        start = time.perf_counter()
        choose(keys, call)
        return time.perf_counter() - start

    calls = [make(scale=1.0 / n) for n in range(3, 103)]
    assert min(statistics.median(map(seconds, calls[start : start + 25])) for start in (0, 25, 50, 75)) < 200e-6


def test_windows_and_paging_in_a_message_are_readable():
    call = decode_paged(V100, window=Window(64, None), paging=Paging(64, 128))
    with pytest.raises(NoImplementationError, match=r"window=\(64, None\), paging=128 pages of 64"):
        select_kernel_key(PAGED_DECODE_KEYS, call)
