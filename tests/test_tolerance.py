"""The tolerance passes an honest low-precision kernel and fails every fault that is put into one."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from tests import inputs, oracle, tolerance
from tests.edge_cases import edge_cases

HALF_TYPES = ("float16", "bfloat16")
DTYPES = (*HALF_TYPES, "float32")
LOG2_E = np.float32(np.log2(np.e))


def online_softmax(q, k, v, visible, *, arithmetic, scale=None, softcap=None, sinks=None, window=None, tile=16):
    """What a kernel does with one request: tiles of keys, base-2 exponentials, float32, one division at the end."""
    del window  # it is in `visible`
    scale = np.float32(q.shape[-1] ** -0.5 if scale is None else scale)
    with np.errstate(all="ignore"):
        top = np.full((q.shape[1], len(q)), -np.inf, np.float32)
        if sinks is not None:
            top[:] = (sinks * LOG2_E)[:, None]
        total = np.where(np.isneginf(top), np.float32(0), np.float32(1))
        o = np.zeros((*top.shape, v.shape[-1]), np.float32)
        for at in range(0, len(k), tile):
            keys = slice(at, at + tile)
            s = oracle._by_query_head(q, k[keys])
            if softcap:
                s = np.float32(softcap) * LOG2_E * np.tanh(s * np.float32(scale / softcap))
            else:
                s = s * (scale * LOG2_E)
            s = np.where(visible[:, keys], s, np.float32(-np.inf))
            higher = np.maximum(top, s.max(-1))
            base = np.where(np.isneginf(higher), np.float32(0), higher)
            p, decay = np.exp2(s - base[..., None]), np.exp2(top - base)
            total = total * decay + p.sum(-1)
            o = o * decay[..., None] + oracle._weighted_values(arithmetic.weights(p), v[keys], visible[:, keys])
            top = higher
        o = np.where(total[..., None] == 0, np.float32(0), o / total[..., None])
        lse = np.where(total == 0, np.float32(-np.inf), (top + np.log2(total)) / LOG2_E)
    return o.transpose(1, 0, 2), lse.T


def run(case):
    """An honest kernel's results of a case."""
    op = getattr(oracle, case.op)
    if case.op == "append_paged":
        return op(**case.arrays, **case.options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oracle, "attend", online_softmax)
        o, lse, *pages = op(**case.arrays, **case.options, arithmetic=oracle.plain(case.dtype))
    return o.astype(case.out_dtype), lse, *pages


def with_arrays(case, **arrays):
    return replace(case, arrays={name: x for name, x in (case.arrays | arrays).items() if x is not None})


def with_options(case, **options):
    return replace(case, options=case.options | options)


def prefill(*features, **pinned):
    facts = {"q_lens": (33, 33), "kv_lens": (57, 57), "kv_heads": 2, "group": 3, "head_dim": 64, "amplitude": 1.0}
    return inputs.random_case("gqa_prefill", 0, features, **(facts | pinned))


def paged(op, *features, **pinned):
    facts = {
        "kv_lens": (37, 20),
        "q_lens": (5, 5),
        "kv_heads": 2,
        "group": 3,
        "head_dim": 64,
        "page_size": 16,
        "amplitude": 1.0,
    }
    return inputs.random_case(op, 0, features, **(facts | pinned))


@pytest.mark.parametrize("op", inputs.OPS)
def test_honest_kernels_pass(op):
    for seed in range(30):
        case = inputs.random_case(op, seed)
        for twin in (case, inputs.poisoned(case)):
            tolerance.check_case(twin, *run(twin))


@pytest.mark.slow
@pytest.mark.parametrize("op", inputs.OPS)
def test_honest_kernels_pass_everywhere(op):
    cases = {f"seed {seed}": inputs.random_case(op, seed) for seed in range(30, 500)}
    for case in (cases | dict(inputs.feature_cases(op)) | edge_cases(op)).values():
        tolerance.check_case(case, *run(case))


def refuses(case, results, match):
    with pytest.raises(AssertionError, match=match):
        tolerance.check_case(case, *results)


def top_left(q_len, kv_len, is_causal, window=None):
    return np.arange(kv_len) <= np.arange(q_len)[:, None]


def heads_interleaved(case):
    """Query head h reads KV head h % Hkv."""
    heads = case.arrays["q"].shape[2]
    order = np.arange(heads).reshape(-1, case.arrays["k"].shape[2]).T.ravel()
    back = np.argsort(order)
    o, lse = run(with_arrays(case, q=case.arrays["q"][:, :, order]))
    return o[:, :, back], lse[:, :, back]


@pytest.mark.parametrize("dtype", DTYPES)
class TestFaultsOfPrefill:
    def test_scale_off_by_two_percent(self, dtype):
        case = prefill(dtype=dtype)
        refuses(case, run(with_options(case, scale=1.02 * 64**-0.5)), "o: |lse: ")

    def test_scale_of_a_padded_head_dim(self, dtype):
        case = prefill(dtype=dtype, head_dim=72)
        refuses(case, run(with_options(case, scale=128**-0.5)), "o: ")

    def test_last_key_dropped(self, dtype):
        case = with_options(prefill(dtype=dtype), is_causal=False)
        refuses(case, run(with_arrays(case, kv_lengths=np.array([57, 56], np.int32))), "o: ")

    def test_padding_key_counted(self, dtype):
        case = with_options(prefill(dtype=dtype), is_causal=False)
        padded = {name: np.pad(case.arrays[name], ((0, 0), (0, 1), (0, 0), (0, 0))) for name in ("k", "v")}
        refuses(case, run(with_arrays(case, **padded)), "o: ")

    @pytest.mark.parametrize("window, wrong", [((8, None), (9, None)), ((8, None), (7, None)), ((None, 4), (None, 5))])
    def test_window_off_by_one(self, dtype, window, wrong):
        case = with_options(prefill(dtype=dtype), is_causal=False, window=window)
        refuses(case, run(with_options(case, window=wrong)), "o: ")

    def test_causal_at_the_top_left(self, dtype, monkeypatch):
        case = prefill(dtype=dtype)
        with monkeypatch.context() as patch:
            patch.setattr(oracle, "visible_keys", top_left)
            results = run(case)
        refuses(case, results, "o: ")

    def test_heads_of_the_wrong_group(self, dtype):
        case = prefill(dtype=dtype)
        refuses(case, heads_interleaved(case), "o: ")

    def test_lse_in_base_two(self, dtype):
        case = prefill(dtype=dtype)
        o, lse = run(case)
        refuses(case, (o, lse * LOG2_E), "lse: ")

    def test_lse_without_the_sink(self, dtype):
        case = prefill("sinks", dtype=dtype)
        o, _ = run(case)
        refuses(case, (o, run(with_arrays(case, sinks=None))[1]), "lse: ")

    def test_sink_left_out(self, dtype):
        case = prefill("sinks", dtype=dtype)
        refuses(case, run(with_arrays(case, sinks=None)), "o: ")

    def test_softcap_left_out(self, dtype):
        case = with_options(prefill(dtype=dtype, amplitude=2.0), softcap=5.0)
        refuses(case, run(with_options(case, softcap=None)), "o: ")

    def test_one_row_of_another(self, dtype):
        case = prefill(dtype=dtype)
        o, lse = run(case)
        o[1, 20, 4] = o[1, 21, 4]
        refuses(case, (o, lse), "o: error")

    def test_weights_one_percent_short_in_all_rows(self, dtype):
        case = prefill(dtype=dtype)
        o, lse = run(case)
        refuses(case, ((o.astype(np.float32) * 0.99).astype(o.dtype), lse), "o: ")

    def test_rows_without_keys_not_exactly_zero(self, dtype):
        case = prefill(dtype=dtype, q_lens=(9, 9), kv_lens=(4, 4))
        o, lse = run(case)
        o[0, 0, 0, 0] = 1e-7
        refuses(case, (o, lse), "1 rows that see no key")

    def test_lse_of_rows_without_keys_finite(self, dtype):
        case = prefill(dtype=dtype, q_lens=(9, 9), kv_lens=(4, 4))
        o, lse = run(case)
        refuses(case, (o, np.maximum(lse, np.float32(-1e30))), "lse: .* need -inf")

    def test_nan_in_one_element(self, dtype):
        case = prefill(dtype=dtype)
        o, lse = run(case)
        o[1, 2, 3, 4] = np.nan
        refuses(case, (o, lse), r"o: nan at \(1, 2, 3, 4\)")

    def test_nan_missing(self, dtype):
        case = edge_cases("gqa_prefill")["not_finite_in_valid_keys"]
        o, lse = run(case)
        refuses(case, (np.nan_to_num(o), lse), "o: .* need nan")

    def test_wrong_types_and_shapes(self, dtype):
        case = prefill(dtype=dtype)
        o, lse = run(case)
        other = np.float16 if dtype == "float32" else np.float32
        refuses(case, (o.astype(other), lse), "o: element type")
        refuses(case, (o, lse.astype(np.float64)), "lse: element type float64; need float32")
        refuses(case, (o[:, :-1], lse), "o: shape")
        refuses(case, (o,), "1 results; need 2")


class TestFaultsOfFloat8:
    @pytest.mark.parametrize("name", ["q_scale", "k_scale", "v_scale"])
    def test_scale_left_out(self, name):
        case = edge_cases("gqa_prefill")["scales_half_three_eighth"]
        refuses(case, run(with_arrays(case, **{name: None})), "o: ")

    def test_scales_of_keys_and_values_swapped(self):
        case = edge_cases("gqa_prefill")["scales_half_three_eighth"]
        a = case.arrays
        refuses(case, run(with_arrays(case, k_scale=a["v_scale"], v_scale=a["k_scale"])), "o: ")

    def test_scale_of_the_other_head(self):
        case = with_arrays(prefill("fp8"), k_scale=np.array([0.5, 0.6], np.float32), v_scale=np.array([1, 1.2], np.float32))
        refuses(case, run(with_arrays(case, v_scale=case.arrays["v_scale"][::-1])), "o: ")

    def test_one_key_dropped(self):
        case = with_options(prefill("fp8"), is_causal=False)
        refuses(case, run(with_arrays(case, kv_lengths=np.array([56, 56], np.int32))), "o: ")

    def test_coarse_weights_where_fine_ones_are_asked_for(self):
        case = prefill("fp8")
        results = run(case)
        tolerance.check_case(case, *results)
        with pytest.raises(AssertionError, match="o: "):
            tolerance.check_case(case, *results, p_dtype="bfloat16")


class TestFaultsOfPaging:
    @pytest.mark.parametrize("dtype", HALF_TYPES)
    @pytest.mark.parametrize("style", ["half", "interleaved"])
    def test_rope_of_the_wrong_style(self, dtype, style):
        case = with_options(paged("gqa_prefill_paged", dtype=dtype), rope=oracle.Rope(style=style))
        other = {"half": "interleaved", "interleaved": "half"}[style]
        refuses(case, run(with_options(case, rope=oracle.Rope(style=other))), "o: ")

    @pytest.mark.parametrize("dtype", HALF_TYPES)
    def test_rope_of_queries_that_start_at_zero(self, dtype, monkeypatch):
        case = with_options(paged("gqa_decode_paged", "tokens", dtype=dtype), rope=oracle.Rope())
        honest = oracle.rotate
        with monkeypatch.context() as patch:
            patch.setattr(oracle, "rotate", lambda x, at, *more: honest(x, at - at[0], *more))
            results = run(case)
        refuses(case, results, "o: ")

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_keys_rotated_one_position_late(self, dtype, monkeypatch):
        case = with_options(paged("append_paged", "packed", dtype=dtype), rope=oracle.Rope())
        tolerance.check_case(case, *run(case))
        honest = oracle.rotate
        with monkeypatch.context() as patch:
            patch.setattr(oracle, "rotate", lambda x, at, *more: honest(x, at + 1, *more))
            results = run(case)
        refuses(case, results, "k_pages: ")

    def test_new_tokens_not_attended(self):
        case = paged("gqa_decode_paged", "tokens", "append")
        old = with_arrays(case, k_new=None, v_new=None)
        refuses(case, (*run(old), *run(case)[2:]), "o: ")

    @pytest.mark.parametrize("dtype", HALF_TYPES)
    def test_chunk_attended_quantised(self, dtype):
        case = paged("gqa_prefill_paged", "fp8_cache", dtype=dtype, q_lens=(20, 20))
        a = case.arrays
        chunk = {}
        for name, scale in (("k", a["k_scale"]), ("v", a["v_scale"])):
            per_head = np.broadcast_to(scale, (2, 2)).repeat(20, axis=0)[..., None]
            chunk[name] = (oracle.stored(a[name], oracle.FLOAT8, per_head).astype(np.float32) * per_head).astype(a[name].dtype)
        refuses(case, (*run(with_arrays(case, **chunk))[:2], *run(case)[2:]), "o: ")

    def test_tokens_of_a_page_that_does_not_exist_attended(self):
        case = paged("gqa_decode_paged", "tokens")
        table = case.arrays["page_table"].copy()
        table[0, 1] = -1
        refuses(with_arrays(case, page_table=table), run(case), "o: ")

    @pytest.mark.parametrize("features", [("packed",), ("packed", "fp8_cache")])
    def test_one_element_of_the_pages_differs(self, features):
        case = paged("append_paged", *features)
        for which in (0, 1):
            pages = [x.copy() for x in run(case)]
            pages[which].view(np.uint8).flat[99] ^= 1
            refuses(case, pages, "1 of .* elements differ")


class TestBits:
    def test_any_nan_is_any_nan_and_zeros_are_equal(self):
        a = np.array([np.nan, 0.0, 1.0], np.float32)
        b = np.array([-np.nan, -0.0, 1.0], np.float32)
        tolerance.assert_same_bits(a, b)

    @pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, ml_dtypes.float8_e4m3fn])
    def test_last_bit_counts(self, dtype):
        a = np.ones((2, 3), dtype)
        b = a.copy()
        b[1, 2] = 1 + tolerance.eps(dtype)
        with pytest.raises(AssertionError, match=r"pages: 1 of 6 elements differ, first at \(1, 2\)"):
            tolerance.assert_same_bits(b, a, "pages")

    def test_nan_is_no_number(self):
        with pytest.raises(AssertionError, match="1 of 1"):
            tolerance.assert_same_bits(np.array([np.nan], np.float32), np.zeros(1, np.float32))

    def test_types_and_shapes_count(self):
        with pytest.raises(AssertionError, match=r"float32\[1\]; need float32\[2\]"):
            tolerance.assert_same_bits(np.zeros(1, np.float32), np.zeros(2, np.float32))
        with pytest.raises(AssertionError, match=r"float32\[1\]; need float16\[1\]"):
            tolerance.assert_same_bits(np.zeros(1, np.float32), np.zeros(1, np.float16))
