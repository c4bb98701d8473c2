from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from dispatch_core import DEVICES, AttentionCall, Cost, Paging, Window, roofline, visible_pairs
from dispatch_core.costs import append_bytes, append_roofline, attention_bytes, attention_flops, matrix_rate
from tests.dispatch_core.facts import A100, CPU, H200, decode, decode_paged, packed, prefill_paged

FP8 = "float8_e4m3fn"
BOUNDS = (None, 0, 1, 2, 5, 20)


def counted(q_len: int, kv_len: int, is_causal: bool, window: Window) -> int:
    """Pairs by the definition, one at a time."""
    offset = kv_len - q_len
    return sum(
        (not is_causal or j <= i + offset)
        and (window.left is None or j >= i + offset - window.left)
        and (window.right is None or j <= i + offset + window.right)
        for i in range(q_len)
        for j in range(kv_len)
    )


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("q_len, kv_len", [(1, 1), (1, 9), (9, 1), (4, 4), (3, 8), (8, 3), (13, 11)])
def test_pairs_are_exact(q_len: int, kv_len: int, is_causal: bool):
    for window in itertools.starmap(Window, itertools.product(BOUNDS, BOUNDS)):
        assert visible_pairs(q_len, kv_len, is_causal, window) == counted(q_len, kv_len, is_causal, window), window


def test_pairs_of_empty_requests():
    assert visible_pairs(0, 5, True) == visible_pairs(5, 0, True) == visible_pairs(0, 0) == 0


def test_the_worked_example():
    assert visible_pairs(3, 5, is_causal=True) == 3 + 4 + 5


def test_pairs_of_long_requests_take_no_longer():
    assert visible_pairs(10**9, 10**9, is_causal=True) == 10**9 * (10**9 + 1) // 2


@pytest.mark.parametrize(
    "call, flops",
    [
        (packed(is_causal=False), 4 * 4 * 32 * 512 * 512 * 128),
        (packed(), 4 * 4 * 32 * (512 * 513 // 2) * 128),
        (packed(max_seqlen_kv=4096), 4 * 4 * 32 * (512 * 4096 - 511 * 512 // 2) * 128),
        (packed(head_dim_v=64, is_causal=False), 2 * 4 * 32 * 512 * 512 * (128 + 64)),
        (packed(window=Window(0, 0)), 4 * 4 * 32 * 512 * 128),
        (decode(), 4 * 32 * 8192 * 128),
    ],
)
def test_flops(call: AttentionCall, flops: int):
    assert attention_flops(call) == flops


@pytest.mark.parametrize(
    "call, moved",
    [
        # q and o, then k and v; each at its own width
        (packed(), 4 * 512 * (2 * 32 + 2 * 8) * 128 * 2),
        (packed(dtype="float32"), 4 * 512 * (2 * 32 + 2 * 8) * 128 * 4),
        (packed(head_dim_v=64), 4 * 512 * (32 + 8) * (128 + 64) * 2),
        (packed(dtype=FP8, backend="auto"), 4 * 512 * (32 * 128 * (1 + 2) + 2 * 8 * 128)),
        (packed(dtype=FP8, backend="auto", out_dtype="float32"), 4 * 512 * (32 * 128 * (1 + 4) + 2 * 8 * 128)),
        (packed(return_lse=True, has_sinks=True), 4 * 512 * (2 * 32 + 2 * 8) * 128 * 2 + 4 * 512 * 32 * 4 + 32 * 4),
        (decode(), 2 * 32 * 128 * 2 + 2 * 8192 * 4 * 128 * 2),
        (decode(kv_dtype=FP8), 2 * 32 * 128 * 2 + 2 * 8192 * 4 * 128),
        (decode(window=Window(1023, 0)), 2 * 32 * 128 * 2 + 2 * 1024 * 4 * 128 * 2),
        (decode_paged(batch=3), 3 * (2 * 32 * 128 * 2 + 2 * 8192 * 4 * 128 * 2 + (32 + 1) * 4)),  # distinct pages
    ],
)
def test_bytes(call: AttentionCall, moved: int):
    assert attention_bytes(call) == moved


def test_bytes_of_an_appended_chunk():
    """The chunk is read once in q's type and written once in the cache's; only the older keys come from pages."""
    call = prefill_paged(kv_dtype=FP8)
    chunk = 2 * 512 * 8 * (128 + 128)
    assert append_bytes(call) == chunk * 2 + chunk
    older = 2 * (2048 - 512) * 8 * (128 + 128)
    queries = 2 * 512 * 32 * 2 * 128 * 2
    assert attention_bytes(call, appends=True) == queries + older + append_bytes(call) + 2 * (8 + 1) * 4


def test_seconds_are_the_longer_of_compute_and_memory():
    prefill = roofline(packed(max_seqlen_q=4096, max_seqlen_kv=4096))
    assert prefill.bound == "compute"
    assert prefill.seconds == prefill.flops / 989e12
    token = roofline(decode())
    assert token.bound == "memory"
    assert token.seconds == token.bytes / 4.8e12
    assert append_roofline(prefill_paged()).flops == 0


@pytest.mark.parametrize(
    "device, dtype, rate",
    [
        (H200, FP8, 1979e12),
        (A100, FP8, 312e12),
        (A100, "bfloat16", 312e12),
        (A100, "float32", 19.5e12),
        (CPU, "float16", 0.1e12),
        (DEVICES["BI-V100"], FP8, 147e12),
    ],
)
def test_the_rate_is_that_of_the_type_it_is_multiplied_in(device, dtype: str, rate: float):
    assert matrix_rate(device, dtype) == rate


def test_a_device_without_rates_is_bound_by_memory():
    device = replace(H200, name="unrated", matrix_flops=())
    assert matrix_rate(device, "float16") is None
    assert roofline(packed(device)).bound == "memory"


def test_a_cost_prints_time_bound_and_counts():
    assert str(Cost(2 * 10**9, 3 * 10**6, 12.5e-6, "memory")) == "12.5 us, memory bound (2 GFLOP, 3 MB)"


def test_a_page_is_counted_whole_pages_only():
    call = decode_paged(paging=Paging(64, 2), max_seqlen_kv=65)
    assert attention_bytes(call) == 2 * 32 * 128 * 2 + 2 * 65 * 4 * 128 * 2 + (2 + 1) * 4
