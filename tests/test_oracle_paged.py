"""The oracle's paged caches and rotary embedding, against arithmetic done by hand and against identities."""

import math

import ml_dtypes
import numpy as np
import pytest

from tests import inputs, oracle

E4M3 = ml_dtypes.float8_e4m3fn
NO_KEY = -math.inf


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


class TestRope:
    @pytest.mark.parametrize("style, pairs", [("half", [(0, 3), (1, 4), (2, 5)]), ("interleaved", [(0, 1), (2, 3), (4, 5)])])
    def test_pairs_turn_by_position_times_frequency(self, style, pairs):
        x = np.arange(1.0, 9.0).reshape(1, 1, 8)
        rope = oracle.Rope(theta=100.0, rotary_dim=6, style=style)
        y = oracle.rotate(x, np.array([5]), rope)[0, 0]
        for d, (a, b) in enumerate(pairs):
            angle = 5 * 100.0 ** (-2 * d / 6)
            expected = (
                x[0, 0, a] * math.cos(angle) - x[0, 0, b] * math.sin(angle),
                x[0, 0, b] * math.cos(angle) + x[0, 0, a] * math.sin(angle),
            )
            np.testing.assert_allclose((y[a], y[b]), expected, rtol=1e-5, atol=1e-5)
        assert y[6:].tolist() == [7, 8]

    def test_given_frequencies_replace_theta(self):
        rope = oracle.Rope(theta=3.0, inv_freq=np.array([0.5], np.float32))
        y = oracle.rotate(np.array([[[1.0, 0.0, 9.0]]]), np.array([2]), rope)[0, 0]
        close(y, [math.cos(1), math.sin(1), 9])

    def test_angle_is_a_float32_product(self):
        inv_freq = np.array([1 / 3], np.float32)
        y = oracle.rotate(np.array([[[1.0, 0.0]]]), np.array([99_999]), oracle.Rope(inv_freq=inv_freq))[0, 0]
        angle = float(np.float32(99_999) * inv_freq[0])
        assert angle != 99_999 * float(inv_freq[0])
        close(y, [math.cos(angle), math.sin(angle)])

    @pytest.mark.parametrize("style", ["half", "interleaved"])
    def test_scores_depend_on_distance_only(self, style):
        rng = np.random.default_rng(0)
        q, k = rng.standard_normal((2, 1, 1, 16))
        rope = oracle.Rope(style=style)
        scores = [
            float((oracle.rotate(q, np.array([at + 7]), rope) * oracle.rotate(k, np.array([at]), rope)).sum()) for at in (0, 50)
        ]
        np.testing.assert_allclose(*scores, rtol=1e-4)

    def test_query_tokens_stand_at_their_absolute_positions(self):
        rng = np.random.default_rng(2)
        rope = oracle.Rope()
        q, k_new, v_new = (rng.standard_normal((1, 4, heads, 16)) for heads in (6, 2, 2))
        cache = {
            "k_pages": rng.standard_normal((3, 16, 2, 16)),
            "v_pages": rng.standard_normal((3, 16, 2, 16)),
            "page_table": np.array([[1, 0, 2]], np.int32),
            "kv_lengths": np.array([37], np.int32),
        }
        o, lse, *_ = oracle.gqa_decode_paged(q, **cache, k_new=k_new, v_new=v_new, rope=rope)
        turned_q, turned_k = (oracle.rotate(x[0], np.arange(37, 41), rope)[None] for x in (q, k_new))
        expected_o, expected_lse, *_ = oracle.gqa_decode_paged(turned_q, **cache, k_new=turned_k, v_new=v_new)
        close(o, expected_o)
        close(lse, expected_lse)


class TestPaging:
    PAGES = np.arange(1, 7, dtype=np.float32).reshape(3, 2, 1, 1)  # page 0 holds 1, 2; page 1 holds 3, 4; page 2 holds 5, 6
    ZERO = np.zeros((3, 2, 1, 1), np.float32)
    Q = np.zeros((1, 1, 1), np.float32)

    def decode(self, table, length, **more):
        result = oracle.gqa_decode_paged(
            self.Q, self.ZERO, self.PAGES, np.array([table], np.int32), np.array([length], np.int32), **more
        )
        return result[0].item(), result[1].item(), *result[2:]

    def test_rows_are_found_through_the_table(self):
        assert self.decode([2, 0], 3)[:2] == ((5 + 6 + 1) / 3, math.log(3))

    def test_entries_past_the_length_are_not_read(self):
        assert self.decode([2, 2**30], 2)[0] == 5.5
        assert self.decode([-1, -1], 0)[:2] == (0, NO_KEY)

    @pytest.mark.parametrize("page", [-1, 3, 2**30])
    def test_page_that_does_not_exist_masks_its_tokens(self, page):
        assert self.decode([page, 0], 3)[:2] == (1, 0)

    def test_length_is_clamped_to_the_capacity(self):
        assert self.decode([2, 0], 99)[:2] == ((5 + 6 + 1 + 2) / 4, math.log(4))

    def append(self, table, length, new):
        rows = np.full((1, 1, 1), new, np.float32)
        o, lse, k_pages, v_pages = self.decode(table, length, k_new=0 * rows, v_new=rows)
        assert not k_pages.any()
        return o, lse, v_pages.ravel().tolist()

    def test_appended_token_is_written_and_attended(self):
        assert self.append([2, 0], 2, 40) == ((5 + 6 + 40) / 3, math.log(3), [40, 2, 3, 4, 5, 6])

    def test_token_past_the_capacity_is_dropped_and_attended(self):
        o, lse, pages = self.append([2, 0], 4, 40)
        assert (o, lse) == ((5 + 6 + 1 + 2 + 40) / 5, math.log(5))
        assert pages == [1, 2, 3, 4, 5, 6]

    def test_token_of_a_page_that_does_not_exist_is_dropped_and_attended(self):
        assert self.append([2, -1], 2, 40) == ((5 + 6 + 40) / 3, math.log(3), [1, 2, 3, 4, 5, 6])

    def test_append_one_token_per_sequence(self):
        tokens = np.array([7, 8], np.float32).reshape(2, 1, 1)
        table, lengths = np.array([[1, 9], [0, 2]], np.int32), np.array([1, 3], np.int32)
        _, pages = oracle.append_paged(tokens, tokens, self.ZERO, self.PAGES, table, lengths)
        assert pages.ravel().tolist() == [1, 2, 3, 7, 5, 8]

    def test_append_packed_across_a_page_edge(self):
        tokens = np.array([7, 8, 9, 99], np.float32).reshape(4, 1, 1)
        table, lengths, cu = np.array([[1, 0], [2, 9]], np.int32), np.array([1, 0], np.int32), np.array([0, 2, 3], np.int32)
        _, pages = oracle.append_paged(tokens, tokens, self.ZERO, self.PAGES, table, lengths, cu_seqlens=cu)
        assert pages.ravel().tolist() == [8, 2, 3, 7, 9, 6]

    def test_cached_rows_are_dequantised_and_the_chunk_is_not(self):
        pages = self.PAGES.astype(E4M3)
        chunk = np.full((1, 1, 1), 17, np.float32)
        o, _, _, v_pages = oracle.gqa_prefill_paged(
            self.Q, 0 * chunk, chunk, (0 * self.PAGES).astype(E4M3), pages, np.array([[2, 0]], np.int32),
            np.array([0, 1], np.int32), np.array([2], np.int32), v_scale=np.float32(0.5),
        )  # fmt: skip
        assert o.item() == (2.5 + 3 + 17) / 3
        assert v_pages.astype(np.float32).ravel().tolist() == [32, 2, 3, 4, 5, 6]


class TestIdentities:
    @pytest.mark.parametrize("rope", [None, oracle.Rope(rotary_dim=8, style="interleaved")])
    def test_chunk_is_as_many_decode_calls(self, rope):
        case = inputs.random_case(
            "gqa_prefill_paged", 3, (), q_lens=(5, 2), kv_lens=(37, 15), page_size=16, kv_heads=2, group=4, dtype="float32"
        )
        a = case.arrays
        options = {"rope": rope, "window": (30, 0)}
        o, lse, *pages = oracle.gqa_prefill_paged(**a, **options)
        k_pages, v_pages = a["k_pages"], a["v_pages"]
        for b, (start, end) in enumerate([(0, 5), (5, 7)]):
            for t in range(start, end):
                length = a["cache_lengths"][b : b + 1] + (t - start)
                token = slice(t, t + 1)
                one_o, one_lse, k_pages, v_pages = oracle.gqa_decode_paged(
                    a["q"][token], k_pages, v_pages, a["page_table"][b : b + 1], length,
                    k_new=a["k"][token], v_new=a["v"][token], **options,
                )  # fmt: skip
                np.testing.assert_allclose(one_o[0], o[t], rtol=0, atol=1e-6)
                np.testing.assert_allclose(one_lse[0], lse[t], rtol=0, atol=1e-6)
        np.testing.assert_array_equal(k_pages, pages[0])
        np.testing.assert_array_equal(v_pages, pages[1])

    @pytest.mark.parametrize("tokens", [1, 3])
    def test_decode_that_appends_is_append_and_then_decode(self, tokens):
        case = inputs.random_case(
            "gqa_decode_paged", 5, ("append", "tokens", "sinks"), q_lens=(tokens,) * 3, kv_lens=(15, 0, 40), page_size=16
        )
        a = dict(case.arrays)
        o, lse, *pages = oracle.gqa_decode_paged(**a, **case.options)
        k, v = (x.reshape(-1, *x.shape[2:]) for x in (a.pop("k_new"), a.pop("v_new")))
        cu = tokens * np.arange(4, dtype=np.int32)
        appended = oracle.append_paged(k, v, a["k_pages"], a["v_pages"], a["page_table"], a["kv_lengths"], cu_seqlens=cu)
        a |= {"k_pages": appended[0], "v_pages": appended[1], "kv_lengths": a["kv_lengths"] + tokens}
        for x, y in zip((o, lse, *pages), (*oracle.gqa_decode_paged(**a, **case.options), *appended), strict=True):
            np.testing.assert_array_equal(x, y)

    def test_paged_decode_is_decode_of_the_gathered_cache(self):
        case = inputs.random_case("gqa_decode_paged", 1, ("fp8_cache", "tokens", "window_left"))
        a = dict(case.arrays)
        table = a.pop("page_table")
        a["k"], a["v"] = (
            a.pop(name)[table].reshape(len(table), -1, *case.arrays[name].shape[2:]) for name in ("k_pages", "v_pages")
        )
        paged = oracle.gqa_decode_paged(**case.arrays, **case.options)
        for x, y in zip(oracle.gqa_decode(**a, **case.options), paged, strict=True):
            close(x, y)
