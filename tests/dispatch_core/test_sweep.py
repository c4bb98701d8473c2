"""Every combination of facts that a rule reads: no tie, and the answer that the record's prose gives.

`packed_answer` and its siblings restate the record as nested questions, from `dispatch-table` prose and not from the regions: a
key, or a word for why the call is refused.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from dispatch_core import (
    CATALOGUE,
    DECODE_EXTENDED_KEYS,
    DECODE_KEYS,
    DEVICES,
    PACKED_PREFILL_EXTENDED_KEYS,
    PACKED_PREFILL_KEYS,
    PAGED_DECODE_EXTENDED_KEYS,
    PAGED_DECODE_KEYS,
    PAGED_PREFILL_EXTENDED_KEYS,
    PAGED_PREFILL_KEYS,
    AttentionCall,
    NoImplementationError,
    Paging,
    Window,
    choose,
)
from tests.dispatch_core.facts import ROPE, decode, packed, prefill_paged

FP8 = "float8_e4m3fn"
HALF = ("float16", "bfloat16")
TYPES = (*HALF, "float32", FP8)
TARGETS = [DEVICES[name] for name in ("H200", "H20", "B200", "A100-80", "A10", "V100", "CPU", "BI-V100")]
BUILDS = (None, "sm90", "sm80", "xla")

REFUSED_BECAUSE = {  # a word of the answers below, and what the message must match
    "no build for the target": r"sm\d\d build needs (arch|platform|dtype|head_dim|at most 64|page)"
    r"|has no \w+ build|build=\"xla\"",
    "ragged and dense": "needs sequences of one length, the call has ragged ones",
    "FP8 is not this backend": "needs backend auto or fp8, the call has",
    "beyond the recorded FP8 kernel": "needs (no causal mask|no window|sequences of one length|max_seqlen_q == max_seqlen_kv"
    "|head_dim 64 or 128 or 256), the call has",
    "a window is not this backend": "needs no window, the call has window",
    "no window": "needs a window that hides keys, the call has none",
    "backend fp8 without FP8": "needs dtype float8_e4m3fn, the call has",
    "cache of another type": "needs k and v of q's element type, the call has",
    "FP8 queries": "needs 16-bit or float32 inputs, the call has float8_e4m3fn",
    "too many query tokens": r"needs (max_seqlen_q 1|\d to 16 query tokens a sequence), the call has",
    "both rope and an FP8 cache": "needs no rope, the call has rope",
}


def builds_of(call: AttentionCall, build: str | None, is_hopper_only: bool, has_sm90: bool = False) -> bool:
    """Whether a key has a build for the target that the question admits."""
    device = call.device
    if is_hopper_only:
        return build in (None, "sm90") and device.platform == "cuda" and device.arch == 90
    if build == "sm90":
        return has_sm90 and device.platform == "cuda" and device.arch == 90
    if build == "xla" or (build is None and device.platform != "cuda"):
        return True
    return build in (None, "sm80") and device.platform == "cuda" and device.arch >= 80


def packed_answer(call: AttentionCall, build: str | None, is_extended: bool) -> str:
    if call.is_fp8:
        if call.backend not in ("auto", "fp8"):
            return "FP8 is not this backend"
        is_square = not call.is_causal and call.window is None and call.is_uniform and call.max_seqlen_q == call.max_seqlen_kv
        if is_square and call.head_dim in (64, 128, 256):
            key = "gqa_prefill_fp8_tensor_core_fwd_kernel"
        elif is_extended:
            key = "gqa_prefill_fp8_fwd_kernel"
        else:
            return "beyond the recorded FP8 kernel"
    elif call.window is not None:
        if call.backend not in ("auto", "sliding_window"):
            return "a window is not this backend"
        key = "gqa_sliding_window_varlen_fwd_kernel"
    elif call.backend == "sliding_window":
        return "no window"
    elif call.backend == "fp8":
        return "backend fp8 without FP8"
    elif call.backend == "varlen" or (call.backend == "auto" and not call.is_uniform):
        key = "gqa_prefill_varlen_fwd_kernel"
    elif not call.is_uniform:
        return "ragged and dense"
    else:
        if call.dtype in HALF and call.is_causal and call.head_dim == 128 and builds_of(call, build, is_hopper_only=True):
            length, work = call.max_seqlen_q, call.batch * call.q_heads * (call.max_seqlen_q / 256)
            if length == call.max_seqlen_kv and length % 256 == 0 and work >= call.device.sm_count:
                return "gqa_prefill_square_fwd_kernel"
            return "gqa_prefill_causal_fwd_kernel"
        key = "gqa_prefill_fwd_kernel"
    has_sm90 = call.dtype in HALF and (call.is_uniform or call.head_dim != 96)
    return key if builds_of(call, build, is_hopper_only=False, has_sm90=has_sm90) else "no build for the target"


def is_mosaic_decode(call: AttentionCall) -> bool:
    """Whether the sm90 build of decode, which must be asked for, takes the call."""
    group = call.q_heads // call.kv_heads
    has_heads = call.v_dim == call.head_dim and (call.head_dim == 128 or (call.head_dim == 64 and group % 2 == 0))
    page = None if call.paging is None else call.paging.page_size
    has_place = call.max_seqlen_kv % 8 == 0 if page is None else page in (8, 16, 32, 64) or page % 128 == 0
    return has_heads and has_place and group * call.max_seqlen_q <= 64


def decode_answer(call: AttentionCall, build: str | None, is_extended: bool) -> str:
    infix = "" if call.paging is None else "paged_"
    if call.is_fp8:
        return "FP8 queries"
    tokens, cache = call.max_seqlen_q, call.cache_dtype
    if cache not in (call.dtype, FP8) or (cache == FP8 and not is_extended):
        return "cache of another type"
    if tokens > (16 if is_extended else 1):
        return "too many query tokens"
    if cache == FP8:
        key = f"gqa_decode_{infix}fp8_kv_cache_kernel"
    elif tokens > 1:
        key = f"gqa_decode_{infix}multi_token_kernel"
    else:
        is_plain = call.softcap is None and call.window is None and not call.has_sinks
        has_shape = call.batch == 1 and call.dtype == "float16" and call.head_dim == 128
        is_fast = has_shape and is_plain and call.q_heads // call.kv_heads <= 64
        has_full_pages = call.paging is None or call.paging.page_size == 64 or call.paging.page_size % 128 == 0
        if is_fast and has_full_pages and builds_of(call, build, is_hopper_only=True):
            return f"gqa_decode_{infix}bs1_kernel"
        key = f"gqa_decode_{infix}kernel"
    has_sm90 = cache == call.dtype and call.dtype in HALF and is_mosaic_decode(call)
    return key if builds_of(call, build, is_hopper_only=False, has_sm90=has_sm90) else "no build for the target"


def prefill_paged_answer(call: AttentionCall, build: str | None, is_extended: bool) -> str:
    if call.is_fp8:
        return "FP8 queries"
    if call.cache_dtype not in (call.dtype, FP8):
        return "cache of another type"
    has_fp8_cache = call.cache_dtype == FP8
    if call.rope is not None and has_fp8_cache and not is_extended:
        return "both rope and an FP8 cache"
    infix = "fp8_kv_cache" if has_fp8_cache else "kv_cache"
    key = f"gqa_prefill_paged_with_{infix}{'_rope' if call.rope else ''}_fwd_kernel"
    has_sm90 = call.dtype in HALF and not has_fp8_cache
    return key if builds_of(call, build, is_hopper_only=False, has_sm90=has_sm90) else "no build for the target"


Asked = tuple[AttentionCall, str | None]


def combinations(**options: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
    """Every choice of one option per fact."""
    return (dict(zip(options, chosen, strict=True)) for chosen in itertools.product(*options.values()))


def asked(make: Callable[..., AttentionCall], all_facts: Iterator[dict[str, Any]]) -> Iterator[Asked]:
    """Each call of each target, under each build's name and none. One target is asked everything, the others a part."""
    for facts in all_facts:
        is_for_all = facts.pop("is_for_all", lambda facts: True)(facts)
        for device in TARGETS if is_for_all else TARGETS[:1]:
            call = make(device, **facts)
            yield from ((call, build) for build in BUILDS)


def packed_calls() -> Iterator[Asked]:
    facts = combinations(
        dtype=TYPES,
        is_causal=(True, False),
        is_uniform=(True, False),
        backend=("auto", "dense", "varlen", "sliding_window", "fp8"),
        window=(None, Window(100, 0)),
        head_dim=(64, 128, 96),
        max_seqlen_q=(512, 640),
        max_seqlen_kv=(512, 640, 4096),
        batch=(1, 8),
        is_for_all=(lambda facts: facts["head_dim"] == 128 and facts["max_seqlen_q"] == 512 and facts["max_seqlen_kv"] != 640,),
    )
    return asked(packed, facts)


def decode_calls() -> Iterator[Asked]:
    facts = combinations(
        dtype=("float16", "bfloat16", FP8),
        kv_dtype=(None, "float32", FP8),
        max_seqlen_q=(1, 2, 17),
        batch=(1, 3),
        softcap=(None, 30.0),
        has_sinks=(False, True),
        window=(None, Window(100, None)),
        q_heads=(16, 192),
        kv_heads=(2,),
        head_dim=(64, 128),
        paging=(None, Paging(64, 128), Paging(96, 80)),
        is_for_all=(lambda facts: not facts["has_sinks"] and facts["window"] is None and facts["q_heads"] == 16,),
    )
    return asked(decode, facts)


def prefill_paged_calls() -> Iterator[Asked]:
    return asked(
        prefill_paged,
        combinations(
            dtype=TYPES, kv_dtype=(None, *TYPES), rope=(None, ROPE), window=(None, Window(100, 0)), max_seqlen_q=(1, 512)
        ),
    )


Answer = Callable[[AttentionCall, str | None, bool], str]
Keys = Callable[[AttentionCall], tuple[str, ...]]


def sweep(calls: Iterator[Asked], recorded: Keys, extended: Keys, answer: Answer) -> Counter[str]:
    """Counts of the answers over the extended keys; a tie, another answer than the record's or another reason fails."""
    counts: Counter[str] = Counter()
    for number, (call, build) in enumerate(calls):
        expected = check(extended(call), call, build, answer(call, build, True))
        counts[expected] += 1
        if number % 5 == 0:
            check(recorded(call), call, build, answer(call, build, False))
    return counts


def check(keys: tuple[str, ...], call: AttentionCall, build: str | None, expected: str) -> str:
    found, message = expected, ""
    try:
        found = choose(keys, call, build=build).key
    except NoImplementationError as refused:
        message = str(refused)
    assert (expected in REFUSED_BECAUSE) == bool(message), (expected, call, build, message)
    assert found == expected, (call, build)
    assert not message or re.search(REFUSED_BECAUSE[expected], message), (expected, message)
    return expected


def refused(counts: Counter[str]) -> dict[str, int]:
    return {answer: count for answer, count in counts.items() if answer not in CATALOGUE}


def test_packed_prefill():
    counts = sweep(packed_calls(), lambda call: PACKED_PREFILL_KEYS, lambda call: PACKED_PREFILL_EXTENDED_KEYS, packed_answer)
    assert {key for key in counts if key in CATALOGUE} == set(PACKED_PREFILL_EXTENDED_KEYS)
    unit = (36 + 7 * 4) * len(BUILDS) * 2  # shapes of each target, builds, causal or not: what the other facts multiply
    assert refused(counts) == {
        "FP8 is not this backend": unit * 3 * 2 * 2,  # backends, uniform or not, window or not
        "a window is not this backend": unit * 3 * 3 * 2,  # types, backends, uniform or not
        "no window": unit * 3 * 2,
        "backend fp8 without FP8": unit * 3 * 2,
        "ragged and dense": unit * 3,
        "no build for the target": counts["no build for the target"],
    }
    assert counts.total() == unit * 4 * 2 * 5 * 2


def test_packed_prefill_without_a_build():
    """Of the calls that some rule claims, those refused for their target, target by target."""
    counts: Counter[tuple[str, str | None]] = Counter()
    claimed: Counter[str] = Counter()
    for call, build in packed_calls():
        answer = packed_answer(call, build, is_extended=True)
        if answer in CATALOGUE or answer == "no build for the target":
            claimed[call.device.name] += build is None
            counts[call.device.name, build] += answer == "no build for the target"
    everything = claimed["A100-80"]
    assert all(claimed[name] == everything for name in ("H20", "B200", "A10", "V100", "CPU", "BI-V100"))
    for name in ("B200", "A100-80", "A10"):
        assert [counts[name, build] for build in BUILDS] == [0, everything, 0, 0]
    assert [counts["V100", build] for build in BUILDS] == [everything, everything, everything, 0]
    for name in ("CPU", "BI-V100"):
        assert [counts[name, build] for build in BUILDS] == [0, claimed[name], claimed[name], 0]
    # build="sm90" on a Hopper is served for 16-bit types: of uniform or not, backends and windows these are nine combinations.
    served = 2 * 2 * 2 * 2 * 9  # types, causal or not, lengths, batches
    assert [counts["H20", build] for build in BUILDS] == [0, everything - served, 0, 0]


def test_decode():
    counts = sweep(
        decode_calls(),
        lambda call: DECODE_KEYS if call.paging is None else PAGED_DECODE_KEYS,
        lambda call: DECODE_EXTENDED_KEYS if call.paging is None else PAGED_DECODE_EXTENDED_KEYS,
        decode_answer,
    )
    assert {key for key in counts if key in CATALOGUE} == {*DECODE_EXTENDED_KEYS, *PAGED_DECODE_EXTENDED_KEYS}
    unit = (192 + 7 * 24) * len(BUILDS)
    assert refused(counts) == {
        "FP8 queries": unit * 3 * 3,  # caches, tokens
        "cache of another type": unit * 2 * 3,  # types, tokens
        "too many query tokens": unit * 2 * 2,  # types, caches
        "no build for the target": counts["no build for the target"],
    }
    assert counts.total() == unit * 3 * 3 * 3


def test_paged_prefill():
    counts = sweep(
        prefill_paged_calls(), lambda call: PAGED_PREFILL_KEYS, lambda call: PAGED_PREFILL_EXTENDED_KEYS, prefill_paged_answer
    )
    assert {key for key in counts if key in CATALOGUE} == set(PAGED_PREFILL_EXTENDED_KEYS)
    unit = len(BUILDS) * len(TARGETS) * 2 * 2 * 2  # rope, windows, tokens
    assert refused(counts) == {
        "FP8 queries": unit * 5,  # caches
        "cache of another type": unit * 3 * 2,  # types, and of the five caches those neither FP8 nor of q's type
        "no build for the target": counts["no build for the target"],
    }
