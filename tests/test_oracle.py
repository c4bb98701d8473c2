"""The oracle against arithmetic done by hand, against a scalar loop, against identities, and against jax.nn."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests import oracle

E4M3 = ml_dtypes.float8_e4m3fn
NO_KEY = -math.inf


def rows(*values):
    """Values as float32 rows of one request, one head and one dim: (1, n, 1, 1)."""
    return np.array(values, np.float32).reshape(1, -1, 1, 1)


def random_qkv(seed, n, m, q_heads=6, kv_heads=2, dim=16, batch=2, dtype=np.float32):
    rng = np.random.default_rng(seed)
    shapes = ((batch, n, q_heads, dim), (batch, m, kv_heads, dim), (batch, m, kv_heads, dim + 8))
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


class TestByHand:
    def test_weights_are_the_exponentials_of_the_scores(self):
        # Scores ln 3 and 0: weights 3/4 and 1/4.
        o, lse = oracle.gqa_prefill(rows(1), rows(math.log(3), 0), rows(8, 4), is_causal=False)
        np.testing.assert_allclose(o.item(), 7, rtol=1e-7)
        np.testing.assert_allclose(lse.item(), math.log(4), rtol=1e-7)

    def test_default_scale_is_head_dim_to_the_minus_half(self):
        q, k = np.full((1, 1, 1, 4), 2, np.float32), np.ones((1, 1, 1, 4), np.float32)
        assert oracle.gqa_prefill(q, k, k)[1].item() == 8 / 2

    @pytest.mark.parametrize("scale", [3.0, 0.0, -0.5])
    def test_scale_is_the_factor_on_the_score(self, scale):
        assert oracle.gqa_prefill(rows(2), rows(5), rows(1), scale=scale)[1].item() == 10 * scale

    def test_softcap_comes_after_the_scale(self):
        assert oracle.gqa_prefill(rows(2), rows(5), rows(1), scale=0.5, softcap=4.0)[1].item() == 4 * math.tanh(5 / 4)

    def test_softcap_does_not_lift_masked_scores(self):
        o, _ = oracle.gqa_prefill(rows(1, 1), rows(9, 9), rows(1, 5), softcap=2.0)
        assert o.ravel().tolist() == [1, 3]

    def test_softcap_zero_is_none(self):
        assert oracle.gqa_prefill(rows(2), rows(5), rows(1), softcap=0.0)[1].item() == 10

    def test_sink_joins_the_denominator_only(self):
        sinks = np.array([math.log(2)], np.float32)
        o, lse = oracle.gqa_prefill(rows(0), rows(1, 1), rows(6, 10), is_causal=False, sinks=sinks)
        np.testing.assert_allclose(o.item(), (6 + 10) / 4, rtol=1e-7)
        np.testing.assert_allclose(lse.item(), math.log(4), rtol=1e-7)

    def test_huge_sink_takes_all_the_weight(self):
        o, lse = oracle.gqa_prefill(rows(0), rows(1), rows(6), sinks=np.array([1e30], np.float32))
        assert o.item() == 0
        assert lse.item() == np.float32(1e30)

    def test_query_heads_read_the_kv_head_of_their_group(self):
        q, k = np.zeros((1, 1, 6, 1), np.float32), np.zeros((1, 1, 2, 1), np.float32)
        v = np.array([10, 20], np.float32).reshape(1, 1, 2, 1)
        assert oracle.gqa_prefill(q, k, v)[0].ravel().tolist() == [10, 10, 10, 20, 20, 20]

    def test_plain_computation_rounds_weights_to_the_element_type(self):
        # Scores 0 and ln(1 + 2^-12): float16 cannot tell the weights, relative to the larger, from 1.
        q, v = rows(1).astype(np.float16), rows(0, 1).astype(np.float16)
        k = np.array([math.log1p(2**-12), 0]).reshape(1, -1, 1, 1).astype(np.float16)
        o, lse = oracle.gqa_prefill(q, k, v, is_causal=False, arithmetic=oracle.plain(np.float16))
        total = np.float32(1) + np.exp(-k[0, 0, 0, 0].astype(np.float32))
        assert o.item() == np.float32(1) / total
        assert o.dtype == lse.dtype == np.float32


class TestMasks:
    def test_causal_aligns_at_the_bottom_right(self):
        assert oracle.visible_keys(2, 4, True).astype(int).tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
        assert oracle.visible_keys(4, 2, True).astype(int).tolist() == [[0, 0], [0, 0], [1, 0], [1, 1]]

    @pytest.mark.parametrize(
        "window, is_causal, expected",
        [
            ((1, 0), False, [[0, 1, 1, 0], [0, 0, 1, 1]]),
            ((1, 0), True, [[0, 1, 1, 0], [0, 0, 1, 1]]),
            ((0, 0), True, [[0, 0, 1, 0], [0, 0, 0, 1]]),
            ((0, 1), False, [[0, 0, 1, 1], [0, 0, 0, 1]]),
            ((0, 1), True, [[0, 0, 1, 0], [0, 0, 0, 1]]),
            ((2, None), False, [[1, 1, 1, 1], [0, 1, 1, 1]]),
            ((-1, 0), False, [[1, 1, 1, 0], [1, 1, 1, 1]]),
            ((None, -1), False, [[1, 1, 1, 1], [1, 1, 1, 1]]),
        ],
    )
    def test_window_counts_the_keys_beside_the_querys_own(self, window, is_causal, expected):
        assert oracle.visible_keys(2, 4, is_causal, window).astype(int).tolist() == expected

    def test_window_may_leave_queries_without_keys(self):
        assert oracle.visible_keys(5, 2, False, (0, 0)).astype(int).tolist() == [[0, 0]] * 3 + [[1, 0], [0, 1]]

    def test_rows_that_see_no_key_are_zero_and_minus_infinity(self):
        o, lse = oracle.gqa_prefill(rows(1, 1, 1), rows(1), rows(7))
        assert o.ravel().tolist() == [0, 0, 7]
        assert lse.ravel().tolist() == [NO_KEY, NO_KEY, 1]

    def test_rows_that_see_no_key_have_their_sink_as_lse(self):
        sinks = np.array([0.25], np.float32)
        lengths = np.array([1], np.int32)
        o, lse = oracle.gqa_prefill(
            rows(1, 1, 1), rows(1, 1), rows(7, 7), q_lengths=lengths, kv_lengths=0 * lengths, sinks=sinks
        )
        assert o.ravel().tolist() == [0, 0, 0]
        assert lse.ravel().tolist() == [0.25] * 3

    def test_lengths_move_the_alignment(self):
        # Two queries and three keys are live: query 0 sees keys 0 and 1.
        q_lengths, kv_lengths = np.array([2], np.int32), np.array([3], np.int32)
        o, lse = oracle.gqa_prefill(
            rows(0, 0, 0), rows(0, 0, 0, 0), rows(1, 3, 8, 99), q_lengths=q_lengths, kv_lengths=kv_lengths
        )
        close(o.ravel(), [2, 4, 0])
        close(lse.ravel(), [math.log(2), math.log(3), NO_KEY])

    def test_lengths_are_clamped(self):
        q, k, v = rows(0, 0), rows(0, 0), rows(1, 3)
        for q_len, kv_len, expected in ((9, 9, [1, 2]), (2, -4, [0, 0]), (-1, 2, [0, 0])):
            q_lengths, kv_lengths = np.array([q_len], np.int32), np.array([kv_len], np.int32)
            o, _ = oracle.gqa_prefill(q, k, v, q_lengths=q_lengths, kv_lengths=kv_lengths)
            assert o.ravel().tolist() == expected

    def test_offsets_are_clamped_to_a_non_decreasing_sequence(self):
        assert oracle.clamped_cu_seqlens(np.array([-2, 3, 1, 99], np.int32), 7).tolist() == [0, 3, 3, 7]

    def test_packed_rows_of_no_request_are_empty(self):
        q, k, v = (x[0] for x in (rows(0, 0, 0), rows(0, 0, 0), rows(2, 4, 9)))
        o, lse = oracle.gqa_prefill_packed(q, k, v, np.array([0, 2], np.int32), np.array([0, 2], np.int32))
        close(o.ravel(), [2, 3, 0])
        close(lse.ravel(), [0, math.log(2), NO_KEY])


class TestFloat8:
    @pytest.mark.parametrize(
        "x, scale, expected",
        [
            (1.0, 1.0, 1.0),
            (17.0, 1.0, 16.0),  # spacing 2 from 16 on: a tie goes to the even code
            (19.0, 1.0, 20.0),
            (17.0, 0.5, 32.0),  # 34 is a tie of spacing 4
            (449.0, 1.0, 448.0),
            (-1e9, 1.0, -448.0),
            (math.inf, 2.0, 448.0),
            (2.0**-10, 1.0, 0.0),  # half the smallest subnormal
            (3 * 2.0**-10, 1.0, 2.0**-8),
        ],
    )
    def test_stored_value(self, x, scale, expected):
        got = oracle.stored(np.array([[[x]]], np.float32), oracle.FLOAT8, np.array([[scale]], np.float32))
        assert got.dtype == E4M3
        assert float(got.item()) == expected

    def test_stored_nan_is_nan(self):
        assert np.isnan(oracle.stored(np.array([np.nan], np.float16), oracle.FLOAT8).astype(np.float32)).all()

    @pytest.mark.parametrize("shape", ["scalar", "per head", "per request and head"])
    def test_scales_multiply_q_k_and_v(self, shape):
        q, k, v = (x.astype(E4M3) for x in random_qkv(0, 4, 5))
        rng = np.random.default_rng(1)
        size = {"scalar": (), "per head": (2,), "per request and head": (2, 2)}[shape]
        scales = [rng.uniform(0.1, 4, size).astype(np.float32) for _ in range(3)]
        full = [np.broadcast_to(s, (2, 2)).astype(np.float64) for s in scales]
        dequantised = (
            q.astype(np.float64) * np.repeat(full[0], 3, axis=1)[:, None, :, None],
            k.astype(np.float64) * full[1][:, None, :, None],
            v.astype(np.float64) * full[2][:, None, :, None],
        )
        o, lse = oracle.gqa_prefill(q, k, v, q_scale=scales[0], k_scale=scales[1], v_scale=scales[2])
        expected_o, expected_lse = oracle.gqa_prefill(*dequantised)
        close(o, expected_o)
        close(lse, expected_lse)


class TestNotFinite:
    def test_nan_in_a_key_reaches_the_rows_that_see_it(self):
        q, k, v = random_qkv(0, 5, 5)
        clean, clean_lse = oracle.gqa_prefill(q, k, v)
        k[1, 3, 0, 2] = np.nan
        o, lse = oracle.gqa_prefill(q, k, v)
        hit = np.zeros(lse.shape, bool)
        hit[1, 3:, :3] = True
        assert np.isnan(o[hit]).all()
        assert np.isnan(lse[hit]).all()
        np.testing.assert_array_equal(o[~hit], clean[~hit])
        np.testing.assert_array_equal(lse[~hit], clean_lse[~hit])

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_value_reaches_its_dim_in_the_rows_that_see_it(self, value):
        q, k, v = random_qkv(0, 5, 5)
        clean, clean_lse = oracle.gqa_prefill(q, k, v)
        v[1, 3, 0, 2] = value
        o, lse = oracle.gqa_prefill(q, k, v)
        hit = np.zeros(o.shape, bool)
        hit[1, 3:, :3, 2] = True
        np.testing.assert_array_equal(o[hit], np.full(hit.sum(), value))
        close(o[~hit], clean[~hit])
        np.testing.assert_array_equal(lse, clean_lse)

    def test_infinite_scores(self):
        # +inf has no softmax; -inf weighs nothing, and alone it is no key at all.
        o, lse = oracle.gqa_prefill(rows(1), rows(math.inf, 0), rows(3, 5), is_causal=False)
        assert math.isnan(o.item())
        assert math.isnan(lse.item())
        o, lse = oracle.gqa_prefill(rows(1), rows(-math.inf, 0), rows(3, 5), is_causal=False)
        assert (o.item(), lse.item()) == (5, 0)
        o, lse = oracle.gqa_prefill(rows(1), rows(-math.inf), rows(3))
        assert (o.item(), lse.item()) == (0, NO_KEY)


def scalar_loop(q, k, v, is_causal, scale, softcap, window, sinks):
    """Dense attention one score at a time."""
    batch, n, q_heads, _ = q.shape
    m, kv_heads = k.shape[1:3]
    o, lse = np.zeros((batch, n, q_heads, v.shape[-1])), np.full((batch, n, q_heads), NO_KEY)
    for b, i, h in np.ndindex(batch, n, q_heads):
        g, at = h // (q_heads // kv_heads), i + m - n
        total = math.exp(sinks[h]) if sinks is not None else 0.0
        for j in range(m):
            if is_causal and j > at:
                continue
            if window is not None and (j < at - window[0] or j > at + window[1]):
                continue
            s = scale * sum(float(x) * float(y) for x, y in zip(q[b, i, h], k[b, j, g], strict=True))
            if softcap is not None:
                s = softcap * math.tanh(s / softcap)
            total += math.exp(s)
            o[b, i, h] += math.exp(s) * v[b, j, g].astype(np.float64)
        if total:
            o[b, i, h] /= total
            lse[b, i, h] = math.log(total)
    return o, lse


@pytest.mark.parametrize("n, m", [(5, 5), (3, 8), (8, 3), (1, 6)])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("softcap, window, with_sinks", [(None, None, False), (1.5, (2, 1), True), (None, (0, 3), False)])
def test_equals_a_loop_over_scalars(n, m, is_causal, softcap, window, with_sinks):
    q, k, v = random_qkv(n, n, m, dim=4)
    sinks = np.linspace(-1, 1, 6).astype(np.float32) if with_sinks else None
    got = oracle.gqa_prefill(q, k, v, is_causal=is_causal, scale=0.7, softcap=softcap, window=window, sinks=sinks)
    for x, y in zip(got, scalar_loop(q, k, v, is_causal, 0.7, softcap, window, sinks), strict=True):
        close(x, y)


class TestIdentities:
    def test_merge_of_two_halves_is_the_whole(self):
        q, k, v = random_qkv(0, 6, 20)
        parts = [oracle.gqa_prefill(q, k[:, keys], v[:, keys], is_causal=False) for keys in (slice(7), slice(7, 20))]
        for x, y in zip(
            oracle.merge_attention(*parts[0], *parts[1]), oracle.gqa_prefill(q, k, v, is_causal=False), strict=True
        ):
            close(x, y)

    def test_merge_with_nothing_changes_nothing(self):
        q, k, v = random_qkv(0, 6, 20)
        part = oracle.gqa_prefill(q, k, v)
        nothing = oracle.gqa_prefill(q, k[:, :0], v[:, :0])
        for merged in (oracle.merge_attention(*part, *nothing), oracle.merge_attention(*nothing, *part)):
            np.testing.assert_array_equal(merged[0], part[0])
            np.testing.assert_array_equal(merged[1], part[1])
        o, lse = oracle.merge_attention(*nothing, *nothing)
        assert not o.any()
        assert (lse == NO_KEY).all()

    @pytest.mark.parametrize("window", [(19, 0), (19, None), (100, 100)])
    def test_window_as_wide_as_the_keys_is_none(self, window):
        q, k, v = random_qkv(0, 20, 20)
        for x, y in zip(oracle.gqa_prefill(q, k, v, window=window), oracle.gqa_prefill(q, k, v), strict=True):
            np.testing.assert_array_equal(x, y)

    def test_window_of_self_only_returns_the_value(self):
        q, k, v = random_qkv(0, 20, 20)
        close(oracle.gqa_prefill(q, k, v, window=(0, 0))[0], np.repeat(v, 3, axis=2))

    def test_packed_requests_are_dense_requests(self):
        q, k, v = random_qkv(0, 9, 14, batch=3)
        q_lens, kv_lens = np.array([9, 0, 4], np.int32), np.array([14, 3, 9], np.int32)
        cu_q, cu_kv = (np.array([0, *np.cumsum(n)], np.int32) for n in (q_lens, kv_lens))
        packed_q, packed_k, packed_v = (
            np.concatenate([x[b, :n] for b, n in enumerate(lens)]) for x, lens in ((q, q_lens), (k, kv_lens), (v, kv_lens))
        )
        dense = oracle.gqa_prefill(q, k, v, q_lengths=q_lens, kv_lengths=kv_lens)
        for x, y in zip(oracle.gqa_prefill_packed(packed_q, packed_k, packed_v, cu_q, cu_kv), dense, strict=True):
            close(x, np.concatenate([y[b, :n] for b, n in enumerate(q_lens)]))

    def test_decode_is_the_last_rows_of_prefill(self):
        q, k, v = random_qkv(0, 20, 20)
        options = {"window": (5, 0), "softcap": 2.0}
        whole = oracle.gqa_prefill(q, k, v, **options)
        for x, y in zip(oracle.gqa_decode(q[:, -4:], k, v, **options), whole, strict=True):
            close(x, y[:, -4:])
        for x, y in zip(oracle.gqa_decode(q[:, -1], k, v, **options), whole, strict=True):
            close(x, y[:, -1])


@pytest.mark.parametrize("kwargs", [{}, {"is_causal": True}, {"scale": 0.3}, {"local_window_size": (3, 1)}, {"lengths": True}])
def test_agrees_with_jax_nn_where_both_are_defined(kwargs):
    kwargs = dict(kwargs)
    q, k, v = random_qkv(4, 12, 12)
    v = v[..., :16]
    own: dict[str, Any] = {"is_causal": False} | {name: x for name, x in kwargs.items() if name in ("is_causal", "scale")}
    if "local_window_size" in kwargs:
        own["window"] = kwargs["local_window_size"]
    if kwargs.pop("lengths", False):
        own["kv_lengths"] = np.array([12, 5], np.int32)
        kwargs["key_value_seq_lengths"] = jnp.asarray(own["kv_lengths"])
    expected = jax.nn.dot_product_attention(*(jnp.asarray(x) for x in (q, k, v)), **kwargs, implementation="xla")
    np.testing.assert_allclose(oracle.gqa_prefill(q, k, v, **own)[0], expected, rtol=0, atol=2e-6)
