"""merge_attention: the union of two parts, exactly where a part is empty, and without NaN in its derivative."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ops import gqa_decode, gqa_decode_paged, gqa_prefill, gqa_prefill_packed, merge_attention
from tests import oracle
from tests.edge_cases import edge_cases
from tests.inputs import feature_cases, random_case
from tests.tolerance import assert_same_bits, check_case, check_lse, check_output

INF = np.inf


def _parts(dtype="float32", rows=(2, 3), heads=4, dim=8, seed=0):
    rng = np.random.default_rng(seed)
    make = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    o = [make(*rows, heads, dim).astype(dtype) for _ in range(2)]
    lse = [make(*rows, heads) * 4 for _ in range(2)]
    return o[0], lse[0], o[1], lse[1]


@pytest.mark.parametrize("case", [pytest.param(c, id=n) for n, c in feature_cases("merge_attention")])
def test_features_match_the_oracle(case):
    check_case(case, *merge_attention(**case.arrays))


@pytest.mark.parametrize("case", [pytest.param(c, id=n) for n, c in edge_cases("merge_attention").items()])
def test_edge_cases_match_the_oracle(case):
    check_case(case, *merge_attention(**case.arrays))


@pytest.mark.parametrize("seed", range(20))
def test_random_parts_match_the_oracle(seed):
    case = random_case("merge_attention", seed)
    check_case(case, *merge_attention(**case.arrays))


def test_two_empty_parts_are_an_empty_row():
    o_a, _, o_b, _ = _parts()
    lse = jnp.full(o_a.shape[:-1], -INF)
    o, merged = merge_attention(o_a * 0, lse, o_b * 0, lse)
    assert not o.any() and (merged == -INF).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("garbage", [0.0, 7.0, INF, np.nan])
@pytest.mark.parametrize("flip", [False, True], ids=["first", "second"])
def test_a_lone_part_passes_through_to_the_bit(dtype, garbage, flip):
    o_a, lse_a, o_b, lse_b = _parts(dtype)
    o_a, lse_a = o_a.at[0, 0].set(-0.0), lse_a.at[0, 0].set(-0.0)
    parts = [(o_a, lse_a), (jnp.full_like(o_b, garbage), jnp.full_like(lse_b, -INF))]
    o, lse = merge_attention(*parts[flip], *parts[not flip])
    assert np.asarray(o).tobytes() == np.asarray(o_a).tobytes()
    assert np.asarray(lse).tobytes() == np.asarray(lse_a).tobytes()


@pytest.mark.parametrize("value", [INF, np.nan])
def test_an_overflow_or_nan_stays_in_its_row(value):
    o_a, lse_a, o_b, lse_b = _parts()
    want = merge_attention(o_a, lse_a, o_b, lse_b)
    o, lse = merge_attention(o_a, lse_a.at[1, 2, 3].set(value), o_b, lse_b)
    assert np.isnan(o[1, 2, 3]).all() and not np.isfinite(lse[1, 2, 3])
    untouched = np.ones(lse.shape, bool)
    untouched[1, 2, 3] = False
    assert_same_bits(np.asarray(o)[untouched], np.asarray(want[0])[untouched])
    assert_same_bits(np.asarray(lse)[untouched], np.asarray(want[1])[untouched])


def test_far_apart_parts_lose_nothing():
    o_a, lse_a, o_b, lse_b = _parts()
    o, lse = merge_attention(o_a, lse_a + 1e4, o_b, lse_b - 1e4)
    assert_same_bits(o, o_a)
    assert_same_bits(lse, lse_a + 1e4)


@pytest.mark.parametrize("empty", ["neither", "a", "b", "both"])
def test_derivative_is_that_of_the_formula_and_never_nan(empty):
    o_a, lse_a, o_b, lse_b = _parts()
    if empty in ("a", "both"):
        o_a, lse_a = o_a.at[0].set(0), lse_a.at[0].set(-INF)
    if empty in ("b", "both"):
        o_b, lse_b = o_b.at[0].set(jnp.nan), lse_b.at[0].set(-INF)

    def loss(merge, *parts):
        o, lse = merge(*parts)
        return (jnp.sin(o) + jnp.cos(jnp.where(lse == -INF, 0, lse))[..., None]).sum()

    def formula(o_a, lse_a, o_b, lse_b):
        lse = jnp.logaddexp(lse_a, lse_b)
        return o_a * jnp.exp(lse_a - lse)[..., None] + o_b * jnp.exp(lse_b - lse)[..., None], lse

    got = jax.grad(lambda *p: loss(merge_attention, *p), (0, 1, 2, 3))(o_a, lse_a, o_b, lse_b)
    assert all(np.isfinite(g).all() for g in got)
    want = jax.grad(lambda *p: loss(formula, *p), (0, 1, 2, 3))(o_a, lse_a, o_b, lse_b)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g[1], w[1], rtol=1e-5, atol=1e-6)
    if empty == "a":
        np.testing.assert_allclose(got[2][0], np.cos(o_b[0]), rtol=1e-6)
        assert not got[0][0].any() and not got[1][0].any()


def test_jit_and_vmap_equal_the_plain_call():
    parts = _parts()
    want = merge_attention(*parts)
    for run in (jax.jit(merge_attention), jax.vmap(merge_attention)):
        for a, b in zip(run(*parts), want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def _halves(op, dtype="float32"):
    """The same attention whole, and over two halves of its keys, through one op."""
    rng = np.random.default_rng(4)
    q, k, v = (jnp.asarray(rng.standard_normal(s), dtype) for s in ((2, 6, 8), (2, 40, 2, 8), (2, 40, 2, 8)))
    if op == "decode":
        run = lambda k, v: gqa_decode(q, k, v, return_lse=True)  # noqa: E731
    elif op == "prefill":
        run = lambda k, v: gqa_prefill(q[:, None], k, v, is_causal=False, return_lse=True)  # noqa: E731
    elif op == "packed":
        run = lambda k, v: gqa_prefill_packed(  # noqa: E731
            q, k.reshape(-1, 2, 8), v.reshape(-1, 2, 8), jnp.arange(3), jnp.arange(3) * k.shape[1], return_lse=True
        )
    else:
        pages = lambda x: x.reshape(-1, 4, 2, 8)  # noqa: E731
        table = lambda n: jnp.arange(2 * n, dtype=jnp.int32).reshape(2, n)  # noqa: E731
        lengths = lambda k: jnp.full(2, k.shape[1], jnp.int32)  # noqa: E731
        run = lambda k, v: gqa_decode_paged(q, pages(k), pages(v), table(k.shape[1] // 4), lengths(k), return_lse=True)  # noqa: E731
    return run(k, v), run(k[:, :12], v[:, :12]), run(k[:, 12:], v[:, 12:])


@pytest.mark.parametrize("op", ["decode", "prefill", "packed", "paged"])
def test_halves_of_the_keys_merge_to_the_whole(op):
    (want_o, want_lse), first, second = _halves(op)
    for a, b in ((first, second), (second, first)):
        o, lse = merge_attention(*a, *b)
        check_output(o, np.asarray(want_o, np.float64), np.asarray(want_o), dtype=np.float32, v_max=4.0)
        check_lse(lse, np.asarray(want_lse, np.float64), np.asarray(want_lse), dtype=np.float32)


def test_eight_splits_of_one_key_merge_to_it():
    """Seven of eight splits are empty, as in split decoding of a short sequence."""
    rng = np.random.default_rng(0)
    q, k = (
        jnp.asarray(rng.standard_normal((1, 4, 8)), jnp.float32),
        jnp.asarray(rng.standard_normal((1, 16, 2, 8)), jnp.float32),
    )
    for length in (0, 1):
        keys = [k[:, first : first + 2] for first in range(0, 16, 2)]
        parts = [gqa_decode(q, x, x, jnp.clip(length - 2 * jnp.array([i]), 0, 2), return_lse=True) for i, x in enumerate(keys)]
        o, lse = functools.reduce(lambda a, b: merge_attention(*a, *b), parts)
        assert_same_bits(o, parts[0][0])
        assert_same_bits(lse, parts[0][1])
        assert (lse == -INF).all() == (length == 0)


def test_sinks_given_to_one_part_count_once():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(s).astype(np.float32) for s in ((1, 4, 8), (1, 16, 2, 8), (1, 16, 2, 8)))
    sinks = np.float32([0.5, 3.0, -1.0, 1.0])
    first = gqa_decode(q, k[:, :5], v[:, :5], sinks=sinks, return_lse=True)
    o, lse = merge_attention(*first, *gqa_decode(q, k[:, 5:], v[:, 5:], return_lse=True))
    want_o, want_lse = oracle.gqa_decode(q, k, v, sinks=sinks)
    np.testing.assert_allclose(o, want_o, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"o_b": (2, 3, 4, 9)}, ValueError, r"merge_attention: o_b has shape \(2, 3, 4, 9\); need \(2, 3, 4, 8\), as o_a has."),
        (
            {"lse_a": (2, 4, 3)},
            ValueError,
            r"lse_a has shape \(2, 4, 3\); need \(2, 3, 4\), the shape of o_a without its last axis",
        ),
        ({"lse_b": (2, 3, 4, 1)}, ValueError, r"lse_b has shape \(2, 3, 4, 1\); need \(2, 3, 4\)"),
        ({"o_a": "int32"}, TypeError, "o_a has element type int32; need one of float16, bfloat16, float32"),
        ({"o_b": "bfloat16"}, TypeError, "o_b has element type bfloat16; need float32, as o_a has"),
        ({"lse_a": "float16"}, TypeError, "lse_a has element type float16; need float32"),
        ({"lse_b": "int32"}, TypeError, "lse_b has element type int32; need float32"),
        ({"o_a": ()}, ValueError, r"o_a has shape \(\); need \(..., heads, head_dim_v\)"),
    ],
)
def test_wrong_parts_are_named(change, error, message):
    parts = dict(zip(("o_a", "lse_a", "o_b", "lse_b"), _parts(), strict=True))
    for name, value in change.items():
        parts[name] = parts[name].astype(value) if isinstance(value, str) else jnp.zeros(value)
    with pytest.raises(error, match=message):
        merge_attention(**parts)
