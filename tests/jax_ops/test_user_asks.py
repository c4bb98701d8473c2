"""What users of attention libraries report: each case that a CPU can show.

The cases below that need a sharper look than the oracle's stand here as tests; the others are held elsewhere:

| case                                                    | held by                                                          |
|---------------------------------------------------------|------------------------------------------------------------------|
| U01 rows that see no key                                | here; test_oracle_cases: edge cases 8x3, no_keys_in_some         |
| U03 merging empty parts                                 | test_merge                                                       |
| U05 no keys in a batch, no tokens at all                | here; edge cases no_keys_at_all, no_tokens_at_all                |
| U06 rows past the last offset                           | here; edge case padded_past_the_last_offset; feature tail        |
| U07 gradients of masked rows                            | here; pallas_kernels/xla/test_gradients                          |
| U08 lengths that no block divides                       | edge cases 113x203, 799x3, 192x192, 1025_tokens; here (slow)     |
| U09 alignment of unequal lengths                        | here; edge cases 1x17, 5x17, 17x5                                |
| U10 a chunk over a cached prefix                        | here                                                             |
| U11 NaN in unused slots                                 | every poisoned twin; edge case kv_130_of_256                     |
| U14 a sequence's NaN stays its own                      | here; edge case not_finite_in_valid_keys                         |
| U15 odd head sizes, U17 odd groups                      | edge cases head_dim_*, heads_*                                   |
| U23 any page size                                       | edge cases page_*, 129_plus_1_page_3, 4_plus_1_page_256          |
| U24 table entries past the used range                   | every poisoned twin of a paged op; here                          |
| U26 an append across a page edge                        | here; edge cases *_plus_*_page_*                                 |
| U27 idle slots                                          | here; edge case inactive_slots; test_dispatch_behaviour          |
| U28 an update that copies the pool                      | test_memory                                                      |
| U30 partial and odd rotary sizes                        | here; edge cases rotary_*; test_errors                           |
| U32 positions of cached queries                         | here                                                             |
| U33 windows off by one                                  | here; edge cases window_*                                        |
| U35 a window ignored in decode                          | here; edge case window_128_of_400                                |
| U37 a right bound without a causal mask                 | here; edge case window_64_0_full_200                             |
| U38 softcap in low precision                            | edge case softcap_of_large_scores; feature softcap               |
| U40 sinks                                               | here; edge cases sink_*, huge_sink                               |
| U41 the base of the lse                                 | test_merge                                                       |
| U42 packed documents                                    | here; test_segments; edge case documents_5_0_27                  |
| U44 scales that are not 1                               | edge case scales_half_three_eighth; features fp8, fp8_cache      |
| U47 finer scales                                        | test_errors                                                      |
| U48 large scores                                        | edge cases large_float16, large_bfloat16                         |
| U49 vmap, U51 remat and scan, U54 sharding, U57 export, |                                                                  |
| U59 layers share one lowering, U62 no host transfer     | test_transforms                                                  |
| U52 traced lengths, a flooded log                       | test_transforms; test_errors; test_dispatch_behaviour            |
| U63 tiles that do not fit                               | dispatch_core/test_tiling                                        |
| U66 a new architecture                                  | here                                                             |
| U67 the target decides                                  | test_dispatch_behaviour                                          |
| U69 a refusal without a reason, U70 a silent slow path  | test_dispatch_behaviour                                          |
| U71 the wrong platform, type or rank                    | test_errors                                                      |
| U72 promises of the documentation                       | test_docstrings, test_readme, notebooks                          |
| U73 an interpreter kinder than the device               | pallas_kernels; poisoned twins                                   |
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ops
from dispatch_core import DEVICES
from jax_ops import Rope, device_from_jax, explain
from tests import oracle
from tests.calling import call, public_rope, quick_compilation
from tests.inputs import random_case
from tests.tolerance import assert_same_bits, check_case

TIGHT = {"rtol": 2e-6, "atol": 2e-6}


@pytest.fixture(scope="module", autouse=True)
def _quickly_compiled():
    with quick_compilation():
        yield


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32), dtype)


def ints(*values):
    return jnp.asarray(values, jnp.int32)


# ---- empty and masked rows


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        ("gqa_prefill", jnp.float16),
        ("gqa_prefill", jnp.float32),
        ("gqa_prefill_packed", jnp.bfloat16),
        ("gqa_decode", jnp.float16),
        ("gqa_decode", jnp.bfloat16),
    ],
)
def test_rows_that_see_no_key_are_zero_and_their_lse_minus_infinity(op, dtype):
    if op == "gqa_prefill":  # the first 5 of 8 queries stand before the first of 3 keys; the second sequence has no keys
        q, k = normal(0, 2, 8, 4, 16, dtype=dtype), normal(1, 2, 3, 2, 16, dtype=dtype)
        o, lse = jax_ops.gqa_prefill(q, k, k, kv_lengths=ints(3, 0), return_lse=True)
        empty = np.asarray([[True] * 5 + [False] * 3, [True] * 8])
    elif op == "gqa_prefill_packed":
        q, k = normal(0, 16, 4, 16, dtype=dtype), normal(1, 3, 2, 16, dtype=dtype)
        o, lse = jax_ops.gqa_prefill_packed(q, k, k, ints(0, 8, 16), ints(0, 3, 3), return_lse=True)
        empty = np.asarray([True] * 5 + [False] * 3 + [True] * 8)
    else:
        q, k = normal(0, 2, 4, 16, dtype=dtype), normal(1, 2, 3, 2, 16, dtype=dtype)
        o, lse = jax_ops.gqa_decode(q, k, k, ints(3, 0), return_lse=True)
        empty = np.asarray([False, True])
    assert (np.asarray(o)[empty] == 0).all() and (np.asarray(lse)[empty] == -np.inf).all()
    assert np.isfinite(np.asarray(lse)[~empty]).all() and (np.asarray(o)[~empty] != 0).any()


def test_sequences_without_keys_between_others():
    q, k = normal(0, 8, 4, 16), normal(1, 9, 2, 16)
    o, lse = jax_ops.gqa_prefill_packed(q, k, k, ints(0, 2, 4, 6, 8), ints(0, 0, 5, 5, 9), return_lse=True)
    empty = np.repeat([True, False, True, False], 2)
    assert (np.asarray(o)[empty] == 0).all() and (np.asarray(lse)[empty] == -np.inf).all()
    for rows, keys in ((slice(2, 4), slice(0, 5)), (slice(6, 8), slice(5, 9))):
        np.testing.assert_allclose(o[rows], jax_ops.gqa_prefill(q[None, rows], k[None, keys], k[None, keys])[0], **TIGHT)


def test_no_tokens_at_all_launch_nothing():
    none = jnp.zeros((0, 4, 16))
    pool = normal(0, 4, 2, 4, 16)
    packed = lambda q, k: jax_ops.gqa_prefill_packed(q, k, k, ints(0, 0), ints(0, 0), return_lse=True)  # noqa: E731
    assert [x.shape for x in packed(none, none)] == [(0, 4, 16), (0, 4)]
    paged = lambda q, pool: jax_ops.gqa_prefill_paged(q, q, q, pool, pool, ints(0, 1)[None], ints(0, 0), ints(0))  # noqa: E731
    o, k_pages, _ = paged(none, pool)
    assert o.shape == (0, 4, 16)
    assert_same_bits(k_pages, pool)
    for program in (jax.make_jaxpr(packed)(none, none), jax.make_jaxpr(paged)(none, pool)):
        assert not any(word in str(program) for word in ("while", "dot_general", "pallas_call"))


def test_rows_past_the_last_offset_are_empty():
    q, k = normal(0, 64, 4, 16), normal(1, 64, 2, 16)
    bounds = ints(0, 20, 50)
    o, lse = jax_ops.gqa_prefill_packed(q, k, k, bounds, bounds, return_lse=True)
    assert (np.asarray(o)[50:] == 0).all() and (np.asarray(lse)[50:] == -np.inf).all()
    assert "past the last entry give o = 0" in jax_ops.gqa_prefill_packed.__doc__


def test_the_gradient_of_masked_rows_is_zero_and_of_no_row_nan():
    q, k = normal(0, 256, 4, 32, dtype=jnp.float16), normal(1, 3, 2, 32, dtype=jnp.float16)

    def loss(q, k, v):
        bounds = ints(0, 76, 110, 256), ints(0, 1, 2, 3)
        return jax_ops.gqa_prefill_packed(q, k, v, *bounds).astype(jnp.float32).sum()

    gradients = [np.asarray(gradient, np.float32) for gradient in jax.grad(loss, (0, 1, 2))(q, k, k)]
    assert all(np.isfinite(gradient).all() for gradient in gradients)
    sees_a_key = np.isin(np.arange(256), (75, 109, 255))
    assert (gradients[0][~sees_a_key] == 0).all()


# ---- lengths and alignment


@pytest.mark.slow
@pytest.mark.parametrize("length", [2731, 4092])
def test_long_sequences_that_no_block_divides(length):
    lens = {"q_lens": (length,), "kv_lens": (length,)}
    case = random_case("gqa_prefill_packed", 0, (), **lens, kv_heads=1, group=1, head_dim=16, dtype="float32", amplitude=1.0)
    check_case(case, *call(case))


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 17), (5, 17), (17, 5)])
def test_the_last_query_sees_the_last_key(q_len, kv_len):
    """Bottom-right: each query sees one key more than the one before it, and the last one all of them."""
    q, k = jnp.zeros((1, q_len, 1, 8)), jnp.zeros((1, kv_len, 1, 8))
    _, lse = jax_ops.gqa_prefill(q, k, k, return_lse=True)
    seen = np.maximum(np.arange(q_len) + 1 + kv_len - q_len, 0)
    np.testing.assert_allclose(np.exp(np.asarray(lse)[0, :, 0]), seen, rtol=1e-6)


@pytest.mark.parametrize("name", ["gqa_prefill", "gqa_decode", "gqa_prefill_paged"])
def test_the_alignment_is_in_the_docstring_with_a_picture(name):
    text = getattr(jax_ops, name).__doc__
    assert " x x x x x\n" in text
    assert name != "gqa_prefill" or ("bottom-right" in text and "jax.nn aligns\n    top-left" in text)


def paged(batch=2, pages=9, page_size=16, columns=4, heads=2, dim=16, seed=5):
    table = np.random.default_rng(seed).permutation(pages)[: batch * columns].reshape(batch, columns)
    return {
        "k_pages": normal(seed, pages, page_size, heads, dim),
        "v_pages": normal(seed + 1, pages, page_size, heads, dim),
        "page_table": jnp.asarray(table, jnp.int32),
    }


def test_a_chunk_over_a_cached_prefix_equals_its_tokens_one_by_one():
    cache, rope = paged(batch=1), Rope(max_position=64)
    q, k, v = normal(0, 5, 8, 16), normal(1, 5, 2, 16), normal(2, 5, 2, 16)
    whole, *pools = jax_ops.gqa_prefill_paged(q, k, v, **cache, cu_seqlens_q=ints(0, 5), cache_lengths=ints(37), rope=rope)
    step = jax.jit(lambda q, k, v, cache, n: jax_ops.gqa_decode_paged(q, **cache, kv_lengths=n, k_new=k, v_new=v, rope=rope))
    for i in range(5):
        o, cache["k_pages"], cache["v_pages"] = step(q[i : i + 1], k[i : i + 1], v[i : i + 1], cache, ints(37 + i))
        np.testing.assert_allclose(o[0], whole[i], **TIGHT)
    for mine, theirs in zip(pools, (cache["k_pages"], cache["v_pages"]), strict=True):
        np.testing.assert_allclose(mine, theirs, **TIGHT)


def test_what_is_not_finite_in_one_sequence_stays_there():
    q, k, v = (np.array(normal(i, 30, h, 16)) for i, h in enumerate((4, 2, 2)))
    bounds = ints(0, 10, 20, 30)
    attend = jax.jit(lambda q, k, v: jax_ops.gqa_prefill_packed(q, k, v, bounds, bounds, is_causal=False, return_lse=True))
    clean = attend(q, k, v)
    k[3, 0, 2], v[5, 1, 0], k[25, 1, 3], q[28, 2, 0] = np.nan, np.inf, -np.inf, np.nan
    for got, want in zip(attend(q, k, v), clean, strict=True):
        assert_same_bits(got[10:20], want[10:20])
        assert not np.isfinite(np.asarray(got)[:10]).all() and not np.isfinite(np.asarray(got)[20:]).all()


# ---- paging


def test_table_entries_past_the_used_range_are_never_read():
    cache, q = paged(), normal(0, 2, 8, 16)
    lengths = ints(17, 32)
    want = jax_ops.gqa_decode_paged(q, **cache, kv_lengths=lengths)
    for junk in (-1, 2**30, 9, -(2**31)):
        table = np.array(cache["page_table"])
        table[:, 2:] = junk
        assert_same_bits(jax_ops.gqa_decode_paged(q, **{**cache, "page_table": jnp.asarray(table)}, kv_lengths=lengths), want)


@pytest.mark.parametrize("new", [1, 3])
def test_appending_in_the_call_equals_writing_first_and_attending_then(new):
    """Up to a page's edge, from it, across it, and from nothing."""
    cache, lengths = paged(batch=4, pages=17), ints(16 - new, 16, 15, 0)
    q, k, v = normal(0, 4, new, 8, 16), normal(1, 4, new, 2, 16), normal(2, 4, new, 2, 16)
    o, *pools = jax_ops.gqa_decode_paged(q, **cache, kv_lengths=lengths, k_new=k, v_new=v)
    flat, bounds = [x.reshape(4 * new, 2, 16) for x in (k, v)], new * ints(0, 1, 2, 3, 4)
    table = cache["page_table"]
    written = jax_ops.append_paged(*flat, **cache, lengths=lengths, cu_seqlens=bounds)
    for mine, theirs in zip(pools, written, strict=True):
        assert_same_bits(mine, theirs)
    np.testing.assert_allclose(o, jax_ops.gqa_decode_paged(q, *written, table, lengths + new), **TIGHT)
    packed = jax_ops.gqa_prefill_paged(q.reshape(4 * new, 8, 16), *flat, **cache, cu_seqlens_q=bounds, cache_lengths=lengths)
    np.testing.assert_allclose(packed[0].reshape(o.shape), o, **TIGHT)


def test_idle_slots_of_a_fixed_batch_give_zeros_and_never_retrace():
    cache = paged(batch=8, pages=33)
    q, new = normal(0, 8, 8, 16), normal(1, 8, 2, 16)
    traces = []

    @jax.jit
    def step(table, lengths):
        traces.append(1)
        return jax_ops.gqa_decode_paged(q, cache["k_pages"], cache["v_pages"], table, lengths, return_lse=True)

    for active in ((0, 3, 7), (1,), (), (0, 1, 2, 3, 4, 5, 6, 7)):
        is_active = np.isin(np.arange(8), active)
        table = np.where(is_active[:, None], cache["page_table"], -1)
        o, lse = step(jnp.asarray(table), jnp.asarray(np.where(is_active, 21, 0), jnp.int32))
        assert (np.asarray(o)[~is_active] == 0).all() and (np.asarray(lse)[~is_active] == -np.inf).all()
        assert np.isfinite(np.asarray(lse)[is_active]).all()
    assert len(traces) == 1

    # An append in an idle slot goes nowhere.
    idle = jnp.full((8, 4), -1, jnp.int32)
    pools = jax_ops.append_paged(new, new, cache["k_pages"], cache["v_pages"], idle, ints(*[0] * 8))
    assert_same_bits(pools[0], cache["k_pages"])


# ---- RoPE


@pytest.mark.parametrize("rotary_dim", [32, 64, 96])
@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_dims_that_are_not_rotated_reach_the_cache_unchanged(rotary_dim, style):
    pool, k = jnp.zeros((4, 16, 2, 128), jnp.bfloat16), normal(1, 1, 2, 128, dtype=jnp.bfloat16)
    rope = Rope(rotary_dim=rotary_dim, style=style, max_position=64)
    stored = jax_ops.append_paged(k, k, pool, pool, ints(2, 1)[None], ints(17), rope=rope)[0][1, 1]
    assert_same_bits(stored[:, rotary_dim:], k[0, :, rotary_dim:])
    assert (np.asarray(stored[:, :rotary_dim]) != np.asarray(k[0, :, :rotary_dim])).mean() > 0.9


@pytest.mark.parametrize("is_causal", [True, False])
def test_new_tokens_are_rotated_at_their_place_in_the_sequence(is_causal):
    rope = oracle.Rope(theta=500.0)
    cache, (q, k, v) = paged(), (normal(i, 5, h, 16) for i, h in enumerate((4, 2, 2)))
    rest = {"cu_seqlens_q": ints(0, 1, 5), "cache_lengths": ints(37, 21), "is_causal": is_causal}
    fused = jax_ops.gqa_prefill_paged(q, k, v, **cache, **rest, rope=public_rope(rope))
    at = np.asarray([37, 21, 22, 23, 24])
    by_hand = [jnp.asarray(oracle.rotate(np.asarray(x), at, rope), jnp.float32) for x in (q, k)]
    for got, want in zip(fused, jax_ops.gqa_prefill_paged(*by_hand, v, **cache, **rest), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


# ---- windows, sinks, packing


def test_a_window_of_one_key_is_the_query_itself():
    q, k, v = normal(0, 1, 9, 4, 16), normal(1, 1, 9, 2, 16), normal(2, 1, 9, 2, 16)
    np.testing.assert_allclose(jax_ops.gqa_prefill(q, k, v, window=(0, 0)), jnp.repeat(v, 2, axis=2), rtol=1e-6)


def test_a_window_of_two_keys_is_the_query_and_the_one_before_it():
    q, k = jnp.zeros((1, 9, 1, 8)), jnp.zeros((1, 9, 1, 8))
    v = jnp.arange(9.0).reshape(1, 9, 1, 1)
    o = jax_ops.gqa_prefill(q, k, v, window=(1, 0))
    np.testing.assert_allclose(o[0, :, 0, 0], [0, *np.arange(8) + 0.5], rtol=1e-6)


@pytest.mark.parametrize(("left", "right"), [(8, 0), (9, None), (100, -1), (2**31 - 1, 2**31 - 1), (2**40, 0)])
def test_a_window_as_wide_as_the_keys_is_no_window(left, right):
    q, k = normal(0, 1, 9, 4, 16), normal(1, 1, 9, 2, 16)
    assert_same_bits(jax_ops.gqa_prefill(q, k, k, window=(left, right)), jax_ops.gqa_prefill(q, k, k))


def test_decode_looks_through_its_window():
    q, k, v = normal(0, 2, 4, 16), normal(1, 2, 300, 2, 16), normal(2, 2, 300, 2, 16)
    one = jax_ops.gqa_decode(q, k, v, ints(300, 200), window=(127, 0))
    prefill = jax_ops.gqa_prefill(q[:, None], k, v, kv_lengths=ints(300, 200), window=(127, 0))
    np.testing.assert_allclose(one, prefill[:, 0], **TIGHT)
    last = jax_ops.gqa_decode(q[:1], k[:1, 172:], v[:1, 172:])
    np.testing.assert_allclose(one[:1], last, **TIGHT)


def test_a_right_bound_of_zero_is_causal_without_a_causal_mask():
    q, k = normal(0, 1, 40, 4, 16), normal(1, 1, 40, 2, 16)
    np.testing.assert_allclose(
        jax_ops.gqa_prefill(q, k, k, window=(12, 0), is_causal=False), jax_ops.gqa_prefill(q, k, k, window=(12, None)), **TIGHT
    )


@pytest.mark.parametrize("sink", [1.5, -2.0, 80.0])
def test_a_sink_takes_its_share_of_the_weight_and_adds_no_value(sink):
    q, k, v = jnp.zeros((1, 7, 4, 16)), normal(1, 1, 7, 2, 16), jnp.ones((1, 7, 2, 16))
    o, lse = jax_ops.gqa_prefill(q, k, v, sinks=jnp.full(4, sink), is_causal=False, return_lse=True)
    np.testing.assert_allclose(o, np.full(o.shape, 7 / (7 + np.exp(sink))), rtol=1e-5)
    np.testing.assert_allclose(lse, np.full(lse.shape, np.log(7 + np.exp(sink))), rtol=1e-6)
    assert "plus the sink if there is one" in jax_ops.gqa_prefill.__doc__


def test_packed_documents_see_themselves_alone():
    q, k, v = normal(0, 40, 4, 16), normal(1, 40, 2, 16), normal(2, 40, 2, 16)
    bounds = ints(0, 5, 5, 32)
    o = jax_ops.gqa_prefill_packed(q, k, v, bounds, bounds)
    for rows in (slice(0, 5), slice(5, 32)):
        alone = jax_ops.gqa_prefill(q[None, rows], k[None, rows], v[None, rows])
        np.testing.assert_allclose(o[rows], alone[0], **TIGHT)
    assert (np.asarray(o)[32:] == 0).all()


# ---- devices


class Reported:
    """A device as the runtime reports it."""

    def __init__(self, platform, device_kind, compute_capability=None, **facts):
        self.platform, self.device_kind = platform, device_kind
        if compute_capability is not None:
            self.compute_capability = compute_capability
        vars(self).update(facts)


@pytest.mark.parametrize(
    ("device", "arch", "build"),
    [
        (Reported("gpu", "NVIDIA B200", "10.0"), 100, "sm80"),
        (Reported("gpu", "NVIDIA B300", "10.3"), 103, "sm80"),
        (Reported("gpu", "NVIDIA RTX PRO 6000", "12.0"), 120, "sm80"),
        (Reported("gpu", "AMD Instinct MI355X", "gfx950"), 0, "xla"),
        (Reported("gpu", "a part that says nothing"), 0, "xla"),
        (Reported("tpu", "TPU v5 lite"), 0, "xla"),
        (Reported("cpu", "cpu"), 0, "xla"),
    ],
)
def test_an_architecture_of_tomorrow_or_another_vendor_is_served_and_told_why(device, arch, build):
    record = device_from_jax(device)
    call = [jax.ShapeDtypeStruct((2, 64, heads, 128), jnp.float16) for heads in (8, 2, 2)]
    told = explain(jax_ops.gqa_prefill, *call, device=record)
    assert (record.arch, told.key, told.build) == (arch, "gqa_prefill_fwd_kernel", build)
    assert any(reason.startswith("sm90 build needs ") for _, reasons in told.others for reason in reasons)


def test_a_slice_of_a_gpu_is_described_by_what_it_reports():
    mig = device_from_jax(
        Reported("gpu", "NVIDIA H200 MIG 1g.18gb", "9.0", core_count=16, shared_memory_per_block_optin=227 * 1024)
    )
    assert (mig.sm_count, mig.arch, mig.memory_bandwidth) == (16, 90, DEVICES["H200"].memory_bandwidth)
    h20 = device_from_jax(Reported("gpu", "NVIDIA H20", "9.0", core_count=78))
    assert (h20.sm_count, h20.l2_bytes) == (78, DEVICES["H20"].l2_bytes)
