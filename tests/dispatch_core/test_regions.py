from __future__ import annotations

import pytest

from dispatch_core import ANYTHING, CATALOGUE, AttentionCall, Condition, Paging, Region, Window, regions
from tests.dispatch_core.facts import H200, LEFT_128, MIG_SLICE, ROPE, decode, decode_paged, packed, prefill_paged

FP8 = "float8_e4m3fn"
REFUSALS: list[tuple[Region, AttentionCall, str]] = [
    (regions.DENSE, packed(dtype=FP8), "needs 16-bit or float32 inputs, the call has float8_e4m3fn"),
    (regions.DENSE, packed(window=LEFT_128), "needs no window, the call has window (128, None)"),
    (regions.DENSE, packed(is_uniform=False), "needs sequences of one length, the call has ragged ones"),
    (regions.DENSE, packed(backend="varlen"), "needs backend auto or dense, the call has varlen"),
    (regions.SQUARE, packed(dtype="float32"), "needs dtype float16 or bfloat16, the call has float32"),
    (regions.SQUARE, packed(is_causal=False), "needs a causal mask, the call has none"),
    (regions.SQUARE, packed(head_dim=64), "needs head_dim 128, the call has 64"),
    (regions.SQUARE, packed(max_seqlen_kv=1024), "needs max_seqlen_q == max_seqlen_kv, the call has 512 and 1024"),
    (
        regions.SQUARE,
        packed(max_seqlen_q=640, max_seqlen_kv=640),
        "needs a length in whole pairs of 128-row tiles, the call has 640",
    ),
    (
        regions.SQUARE,
        packed(batch=2),
        "needs batch * q_heads * length / 256 of at least the device's sm_count, the call has 128 on 132 SMs",
    ),
    (regions.CAUSAL, packed(), "needs a call outside the square region, the call has one inside it"),
    (
        regions.VARLEN,
        packed(backend="auto"),
        "needs backend varlen, or auto and ragged sequences, the call has backend auto and uniform sequences",
    ),
    (
        regions.VARLEN,
        packed(is_uniform=False),
        "needs backend varlen, or auto and ragged sequences, the call has backend dense and ragged sequences",
    ),
    (regions.SLIDING_WINDOW, packed(backend="auto"), "needs a window that hides keys, the call has none"),
    (regions.SLIDING_WINDOW, packed(window=LEFT_128), "needs backend auto or sliding_window, the call has dense"),
    (regions.FP8_ANY, packed(), "needs dtype float8_e4m3fn, the call has float16"),
    (regions.FP8_ANY, packed(dtype=FP8), "needs backend auto or fp8, the call has dense"),
    (regions.FP8_SQUARE, packed(), "needs no causal mask, the call has one"),
    (regions.FP8_SQUARE, packed(head_dim=96), "needs head_dim 64 or 128 or 256, the call has 96"),
    (regions.DECODE, decode(max_seqlen_q=2), "needs max_seqlen_q 1, the call has 2"),
    (regions.DECODE, decode(kv_dtype=FP8), "needs k and v of q's element type, the call has float8_e4m3fn for float16"),
    (regions.DECODE_BS1, decode(batch=2), "needs batch 1, the call has 2"),
    (regions.DECODE_BS1, decode(dtype="bfloat16"), "needs dtype float16, the call has bfloat16"),
    (regions.DECODE_BS1, decode(head_dim=64), "needs head_dim 128, the call has 64"),
    (regions.DECODE_BS1, decode(softcap=2.0), "needs no softcap, the call has softcap 2.0"),
    (regions.DECODE_BS1, decode(window=Window(64, 0)), "needs no window, the call has window (64, None)"),
    (regions.DECODE_BS1, decode(has_sinks=True), "needs no sinks, the call has some"),
    (regions.DECODE_BS1, decode(q_heads=96, kv_heads=1), "needs 1 to 64 query heads per KV head, the call has 96"),
    (regions.DECODE_PAGED_BS1, decode_paged(page_size=192), "needs page_size 64 or a multiple of 128, the call has 192"),
    (regions.DECODE_PAGED_BS1, decode(), "needs page_size 64 or a multiple of 128, the call has no pages"),
    (regions.DECODE_FP8_CACHE, decode(), "needs a float8_e4m3fn cache, the call has float16"),
    (
        regions.DECODE_FP8_CACHE,
        decode(kv_dtype=FP8, max_seqlen_q=17),
        "needs 1 to 16 query tokens a sequence, the call has 17",
    ),
    (regions.DECODE_SEVERAL, decode(), "needs 2 to 16 query tokens a sequence, the call has 1"),
    (regions.DECODE_SEVERAL, decode(max_seqlen_q=17), "needs 2 to 16 query tokens a sequence, the call has 17"),
    (
        regions.PAGED,
        prefill_paged(rope=ROPE),
        "needs no rope, the call has rope RopeFacts(rotary_dim=128, max_position=4096, style='half')",
    ),
    (regions.PAGED_ROPE, prefill_paged(), "needs rope, the call has none"),
    (
        regions.MOSAIC_DECODE,
        decode(head_dim=64, q_heads=12),
        (
            "needs head_dim and head_dim_v 128, or 64 and an even number of query heads per KV head, "
            "the call has 64 and 64, 3 query heads"
        ),
    ),
    (
        regions.MOSAIC_DECODE,
        decode(max_seqlen_q=9),
        "needs at most 64 query rows (tokens times query heads) per KV head, the call has 72",
    ),
    (regions.MOSAIC_DECODE, decode(max_seqlen_kv=8190), "needs pages, or a capacity in multiples of 8, the call has 8190"),
    (
        regions.MOSAIC_PREFILL,
        packed(head_dim=80),
        "needs head_dim 32, 64, 96, 128 or 256 and the same head_dim_v, or 192 and 128, the call has 80 and 80",
    ),
    (regions.MOSAIC_PREFILL, packed(out_dtype="float32"), "needs o of q's element type, the call has float32 for float16"),
    (
        regions.MOSAIC_PREFILL,
        packed(head_dim=256, is_uniform=False),
        "needs head_dim_v 64 or 128 for ragged sequences or pages, the call has 256",
    ),
    (
        regions.MOSAIC_PREFILL,
        prefill_paged(head_dim=96),
        "needs head_dim_v 64 or 128 for ragged sequences or pages, the call has 96",
    ),
    (
        regions.MOSAIC_PREFILL,
        prefill_paged(paging=Paging(48, 10)),
        "needs page_size 8, 16, 32, 64 or a multiple of 128, the call has 48",
    ),
]


@pytest.mark.parametrize("region, call, refusal", REFUSALS, ids=[refusal for _, _, refusal in REFUSALS])
def test_a_refusal_names_the_rule_and_the_value(region: Region, call: AttentionCall, refusal: str):
    assert refusal in region.refusals(call)
    assert not region.serves(call)


def test_every_shipped_condition_has_been_provoked():
    stated = [region for kernel in CATALOGUE.values() for region in (kernel.region, *(b.region for b in kernel.builds))]
    shipped = {condition for region in stated for condition in region.conditions}
    provoked = {c for region, call, refusal in REFUSALS for c in region.conditions if c.refusal(call) == refusal}
    assert not shipped - provoked, [c.text for c in shipped - provoked]


def test_all_failing_conditions_are_listed_and_no_passing_one():
    call = packed(dtype=FP8, is_uniform=False, backend="varlen")
    assert regions.DENSE.refusals(call) == (
        "needs 16-bit or float32 inputs, the call has float8_e4m3fn",
        "needs sequences of one length, the call has ragged ones",
        "needs backend auto or dense, the call has varlen",
    )
    assert regions.DENSE.refusals(packed()) == ()
    assert regions.DENSE.serves(packed())


def test_an_intersection_serves_what_both_serve_and_states_each_condition_once():
    even = Condition("an even batch", lambda call: call.batch % 2 == 0, lambda call: call.batch)
    both = (regions.DENSE & Region("even", (even, regions.NOT_FP8))).named("both")
    assert both.name == "both"
    assert both.conditions == (*regions.DENSE.conditions, even)
    assert both.refusals(packed(batch=3)) == ("needs an even batch, the call has 3",)


def test_anything_serves_anything():
    assert ANYTHING.serves(packed(dtype=FP8))
    assert ANYTHING.refusals(decode()) == ()


def test_filling_the_device_is_measured_on_the_device():
    needs = "needs batch * q_heads * length / 256 of at least the device's sm_count, the call has 64 on 132 SMs"
    assert needs in regions.SQUARE.refusals(packed(H200, batch=1))
    assert regions.SQUARE.serves(packed(MIG_SLICE, batch=1))


@pytest.mark.parametrize("page_size, is_full", [(16, False), (64, True), (96, False), (128, True), (192, False), (384, True)])
def test_full_pages(page_size: int, is_full: bool):
    call = decode(paging=Paging(page_size, 8), max_seqlen_kv=8 * page_size)
    assert regions.DECODE_PAGED_BS1.serves(call) == is_full


def test_causal_and_square_never_both_apply():
    for length in (64, 128, 256, 384, 512, 1024):
        for batch in (1, 2, 3, 4, 8):
            call = packed(batch=batch, max_seqlen_q=length, max_seqlen_kv=length)
            assert regions.SQUARE.serves(call) != regions.CAUSAL.serves(call)
