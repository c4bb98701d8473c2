"""dot_product_attention: what jax.nn's gives, wherever a query sees a key; 0 elsewhere."""

import inspect
import itertools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from dispatch_core import CATALOGUE
from jax_ops import bands, dot_product_attention
from jax_ops.options import common
from tests import oracle
from tests.tolerance import assert_same_bits

B, N, K, H = 2, 4, 2, 8
INF = np.inf


def _arrays(t, s, dtype=np.float32, heads=(N, K), seed=0):
    rng = np.random.default_rng(seed)
    shapes = (B, t, heads[0], H), (B, s, heads[1], H), (B, s, heads[1], H)
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32).astype(dtype) for shape in shapes]


def _seen(t, s, is_causal=False, window=None, q_lengths=None, kv_lengths=None):
    """Which keys each query sees, (B, T, S), in the words of jax.nn's documentation."""
    i, j = np.arange(t)[None, :, None], np.arange(s)[None, None]
    seen = np.ones((B, t, s), bool)
    if is_causal:
        seen &= j <= i
    if window is not None:
        left, right = (window, window) if isinstance(window, int) else window
        seen &= (j >= i - left) & (j <= i + right)
    if q_lengths is not None:
        seen &= i < np.asarray(q_lengths)[:, None, None]
    if kv_lengths is not None:
        seen &= j < np.asarray(kv_lengths)[:, None, None]
    return seen


def _truth(q, k, v, seen, **rules):
    results = [oracle.attend(*(np.asarray(x[b], np.float64) for x in (q, k, v)), seen[b], **rules) for b in range(B)]
    return tuple(np.stack(r) for r in zip(*results, strict=True))


STATIC = ("scale", "is_causal", "local_window_size", "return_residual")
_ours = jax.jit(dot_product_attention, static_argnames=STATIC)
_original = jax.jit(jax.nn.dot_product_attention, static_argnames=STATIC)


def _jax_nn(*args, **options):
    """The original, which promotes types and ranks implicitly."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return _original(*args, **options)


def _close(a, b, tolerance=2e-5):
    np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=tolerance, atol=tolerance)


def test_every_argument_of_jax_nn_is_here_with_its_default():
    ours, theirs = (inspect.signature(f).parameters for f in (dot_product_attention, jax.nn.dot_product_attention))
    for (name, parameter), mine in zip(theirs.items(), ours, strict=False):
        assert name == mine and parameter.default == ours[name].default and parameter.kind == ours[name].kind


def _prefill_by_oracle(rules, operands, left, right, return_lse):
    """What `bands` asks of gqa_prefill, computed by the oracle."""
    del rules, return_lse
    assert (left or 0) >= 0 and (right or 0) >= 0
    arrays = {name: np.asarray(x) for name, x in operands._asdict().items() if x is not None}
    o, lse = oracle.gqa_prefill(**arrays, is_causal=False, window=(left, right))
    return jnp.asarray(o, jnp.float32), jnp.asarray(lse, jnp.float32)


@pytest.mark.parametrize("high", [None, -1, 0, 1, 4])
@pytest.mark.parametrize("low", [None, 1, 0, -1, -4])
def test_every_small_band_is_converted_exactly(low, high, monkeypatch):
    monkeypatch.setattr(bands, "_prefill", _prefill_by_oracle)
    rng = np.random.default_rng(0)
    for t, s, has_sinks in itertools.product(range(5), range(5), (False, True)):
        q, k, v = (rng.standard_normal((1, n, 1, 2)).astype(np.float32) for n in (t, s, s))
        sinks = np.float32([0.5]) if has_sinks else None
        o, lse = bands.attend(bands.Rules("op"), bands.Operands(q, k, v, sinks=sinks), bands.Band(low, high), None, None, True)
        gap = np.arange(s)[None] - np.arange(t)[:, None]
        seen = (gap >= (-INF if low is None else low)) & (gap <= (INF if high is None else high))
        want = oracle.attend(*(x[0].astype(np.float64) for x in (q, k, v)), seen, sinks=sinks)
        _close(o[0], want[0])
        _close(lse[0], want[1])


@pytest.mark.parametrize("high", [None, 0, 2])
@pytest.mark.parametrize("low", [None, 0, -1, -3])
def test_every_small_band_with_lengths_is_converted_exactly(low, high, monkeypatch):
    monkeypatch.setattr(bands, "_prefill", _prefill_by_oracle)
    rng = np.random.default_rng(0)
    every = np.array(list(itertools.product((-1, 0, 1, 2, 4, 9), repeat=2)), np.int32)
    batch = len(every)
    for t, s, given in ((4, 4, "qk"), (3, 5, "qk"), (5, 3, "qk"), (4, 3, "q"), (3, 4, "k")):
        q, k, v = (jnp.asarray(rng.standard_normal((batch, n, 1, 2)), jnp.float32) for n in (t, s, s))
        lengths = [jnp.asarray(every[:, i]) if side in given else None for i, side in enumerate("qk")]
        o, lse = bands.attend(bands.Rules("op"), bands.Operands(q, k, v, *lengths), bands.Band(low, high), None, None, True)
        for b, (q_length, kv_length) in enumerate(every):
            i, j = np.arange(t)[:, None], np.arange(s)[None]
            seen = (j - i >= (-INF if low is None else low)) & (j - i <= (INF if high is None else high))
            seen &= (i < q_length if "q" in given else True) & (j < kv_length if "k" in given else True)
            want = oracle.attend(*(np.asarray(x[b], np.float64) for x in (q, k, v)), seen)
            _close(o[b], want[0])
            _close(lse[b], want[1])


LENGTHS = {"query_seq_lengths": jnp.array([4, 2], jnp.int32), "key_value_seq_lengths": jnp.array([2, 5], jnp.int32)}
CASES = {
    "plain": {},
    "scale": {"scale": 0.2, "is_causal": True},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (2, 1)},
    "window_int": {"local_window_size": 1},
    "window_causal": {"local_window_size": (3, 2), "is_causal": True},
    "padding": LENGTHS,
    "padding_causal": LENGTHS | {"is_causal": True},
    "padding_window": LENGTHS | {"local_window_size": (3, 1)},
    "keys_padding_causal": {"key_value_seq_lengths": jnp.array([3, 1], jnp.int32), "is_causal": True},
    "queries_padding_causal": {"query_seq_lengths": jnp.array([3, 1], jnp.int32), "is_causal": True},
}


def _of_truth(options):
    rules = {"scale": options["scale"]} if "scale" in options else {}
    names = {"query_seq_lengths": "q_lengths", "key_value_seq_lengths": "kv_lengths", "local_window_size": "window"}
    return rules, {names.get(n, n): x for n, x in options.items() if n != "scale"}


SIZES = {
    (6, 6): ("scale", "window_causal", "padding"),
    (5, 8): ("causal", "window", "keys_padding_causal"),
    (8, 5): ("window_int", "padding_window", "queries_padding_causal"),
}


@pytest.mark.parametrize("sizes, name", [(sizes, name) for sizes, names in SIZES.items() for name in names], ids=str)
def test_equals_jax_nn_and_the_oracle(sizes, name):
    options, (q, k, v) = CASES[name], _arrays(*sizes)
    o, lse = _ours(q, k, v, return_residual=True, **options)
    rules, facts = _of_truth(options)
    seen = _seen(*sizes, **facts)
    want_o, want_lse = _truth(q, k, v, seen, **rules)
    _close(o, want_o)
    _close(lse, want_lse)
    theirs = _jax_nn(q, k, v, return_residual=True, **options)
    rows = seen.any(-1)
    _close(np.asarray(o)[rows], np.asarray(theirs[0])[rows])
    _close(np.asarray(lse)[rows], np.asarray(theirs[1])[rows])


def _forward_and_gradients(attend, arrays, weights):
    """The output, and the cotangents of all arrays, compiled once."""

    def loss(a):
        o = attend(*a).astype(jnp.float32)
        return (o * weights).sum(), o

    with jax.numpy_dtype_promotion("standard"):
        (_, o), cotangents = jax.jit(jax.value_and_grad(loss, has_aux=True))(tuple(arrays))
    return o, *cotangents


@pytest.mark.parametrize("sizes, name", [((5, 8), "window_causal"), ((8, 5), "causal"), ((6, 6), "padding_causal")], ids=str)
def test_forward_and_gradients_equal_jax_nn(sizes, name):
    options, arrays = CASES[name], _arrays(*sizes)
    seen = _seen(*sizes, **_of_truth(options)[1]).any(-1)[..., None, None]
    weights = _arrays(*sizes, seed=3)[0] * np.float32(seen)
    ours = _forward_and_gradients(lambda *a: dot_product_attention(*a, **options), arrays, weights)
    theirs = _forward_and_gradients(lambda *a: _jax_nn(*a, **options), arrays, weights)
    _close(ours[0], np.where(seen, theirs[0], 0))
    for mine, other in zip(ours[1:], theirs[1:], strict=True):
        _close(mine, other, 1e-4)


@pytest.mark.parametrize("dtype, group, mapped", [("bfloat16", 1, True), ("float16", 4, False)])
def test_low_precision_groups_and_vmap(dtype, group, mapped):
    """The cases of jax's own tests: no mask, under vmap with None for bias and mask, forward and backward."""
    arrays = _arrays(16, 16, dtype, (4, 4 // group))
    weights = _arrays(16, 16, heads=(4, 4), seed=3)[0]
    run = jax.vmap(dot_product_attention, in_axes=(0, 0, 0, None, None)) if mapped else dot_product_attention
    repeat = lambda x: jnp.repeat(x, group, axis=2)  # noqa: E731
    theirs = lambda *a: _jax_nn(a[0].astype(jnp.float32), *(repeat(x.astype(jnp.float32)) for x in a[1:]))  # noqa: E731
    ours = _forward_and_gradients(lambda *a: run(*a, None, None), arrays, weights)
    for mine, other in zip(ours, _forward_and_gradients(theirs, arrays, weights), strict=True):
        _close(mine, other, 0.03)
    assert jax.eval_shape(run, *arrays, None, None).dtype == dtype


def test_three_axes_are_one_sequence():
    q, k, v = _arrays(5, 8)
    o, lse = dot_product_attention(q[0], k[0], v[0], is_causal=True, return_residual=True)
    want, want_lse = _jax_nn(q[0], k[0], v[0], is_causal=True, return_residual=True)
    assert o.shape == want.shape and lse.shape == want_lse.shape
    _close(o, want)
    short = dot_product_attention(q[0], k[0], v[0], key_value_seq_lengths=jnp.array([3]))
    _close(short, _jax_nn(q[0], k[0, :3], v[0, :3]))


def test_residual_has_the_type_and_the_missing_derivative_it_has_there():
    q, k, v = _arrays(4, 4, "bfloat16")
    shapes = [jax.eval_shape(lambda f=f: f(q, k, v, return_residual=True)) for f in (dot_product_attention, _jax_nn)]
    assert shapes[0] == shapes[1]
    mask = jnp.ones((4, 4), bool)
    grad = jax.grad(lambda q: dot_product_attention(q, k, v, None, mask, return_residual=True)[1].astype(jnp.float32).sum())(q)
    assert not grad.any()


def test_a_head_size_of_its_own_for_value():
    q, k, v = _arrays(5, 7)
    o = dot_product_attention(q, k, v[..., :3], is_causal=True)
    assert o.shape == (B, 5, N, 3)
    _close(o, _truth(q, k, v[..., :3], _seen(5, 7, is_causal=True))[0])


def test_python_lists_and_numpy_arrays_are_arrays():
    arrays = _arrays(3, 3)
    want = dot_product_attention(*arrays)
    assert_same_bits(dot_product_attention(*(np.asarray(x) for x in arrays)), want)
    assert_same_bits(dot_product_attention(*(np.asarray(x).tolist() for x in arrays)), want)


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"local_window_size": 2}, {"mask": np.ones((1, 1), bool)}])
def test_no_queries_or_no_keys(sizes, options):
    q, k, v = _arrays(*sizes)
    o, lse = dot_product_attention(q, k, v, return_residual=True, **options)
    assert o.shape == q.shape and not o.any() and (lse == -INF).all()


def test_softcap_and_sinks_are_those_of_gqa_prefill():
    q, k, v = _arrays(5, 5)
    sinks = jnp.array([0.5, 2.0, -1.0, 0.0])
    for mask in (None, jnp.ones((1, 1, 1, 1), bool)):
        o = dot_product_attention(q, k, v, None, mask, is_causal=True, softcap=1.5, sinks=sinks)
        want, _ = oracle.gqa_prefill(*(np.asarray(x) for x in (q, k, v)), softcap=1.5, sinks=np.asarray(sinks))
        _close(o, want)


# ---- bias and mask


MASKS = {
    "mask": {"mask": (1, 1)},
    "mask_of_heads": {"mask": (B, N)},
    "mask_of_keys": {"mask": (B, 1, 1)},
    "bias": {"bias": (1, N)},
    "bias_of_batch": {"bias": (B, 1)},
    "both": {"bias": (1, N), "mask": (B, 1)},
}


def _score_arrays(kinds, t, s, dtype=np.float32):
    rng = np.random.default_rng(5)
    arrays = {}
    for name, lead in kinds.items():
        shape = (*lead, s) if len(lead) == 3 else (*lead, t, s)
        arrays[name] = (
            jnp.asarray(rng.random(shape) < 0.7) if name == "mask" else jnp.asarray(rng.standard_normal(shape), dtype)
        )
    return arrays


@pytest.mark.parametrize(
    "name, rest",
    [
        ("mask", "causal"),
        ("mask_of_heads", "plain"),
        ("mask_of_keys", "padding_causal"),
        ("bias", "padding_window"),
        ("bias", "causal"),
        ("bias_of_batch", "plain"),
        ("both", "padding"),
    ],
)
def test_bias_and_mask_equal_jax_nn(name, rest):
    q, k, v = _arrays(5, 8)
    arrays, options = _score_arrays(MASKS[name], 5, 8), CASES[rest]
    mask = np.asarray(arrays.get("mask", True)) & _seen(5, 8, **_of_truth(options)[1])[:, None]
    rows = np.moveaxis(np.broadcast_to(mask, (B, N, 5, 8)).any(-1), 1, 2)
    results = [f(q, k, v, **arrays, **options, return_residual=True) for f in (_ours, _jax_nn)]
    (o, lse), (theirs, their_lse) = results
    _close(np.asarray(o)[rows], np.asarray(theirs)[rows])
    _close(np.asarray(lse)[rows], np.asarray(their_lse)[rows])
    assert not np.asarray(o)[~rows].any() and (np.asarray(lse)[~rows] == -INF).all()


@pytest.mark.parametrize("name", ["mask", "both"])
def test_gradients_with_bias_and_mask_equal_jax_nn(name):
    arrays, kinds = _arrays(8, 8), _score_arrays(MASKS[name], 8, 8)
    mask = kinds["mask"] | jnp.eye(8, dtype=bool)[None, None]
    arrays.append(kinds.get("bias", jnp.zeros((1, 1, 1, 1))))
    weights = _arrays(8, 8, seed=3)[0]
    ours = _forward_and_gradients(lambda *a: dot_product_attention(*a, mask, is_causal=True), arrays, weights)
    theirs = _forward_and_gradients(lambda *a: _jax_nn(*a, mask, is_causal=True), arrays, weights)
    for mine, other in zip(ours, theirs, strict=True):
        _close(mine, other, 1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_bias(dtype):
    q, k, v = _arrays(8, 8, dtype)
    bias = _score_arrays({"bias": (1, N)}, 8, 8)["bias"].astype(dtype)
    o = dot_product_attention(q, k, v, bias)
    assert o.dtype == dtype
    _close(o, _jax_nn(*(x.astype(jnp.float32) for x in (q, k, v, bias))), 0.02)


@pytest.mark.parametrize("masked_by", ["mask", "bias"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_fully_masked_row_is_zero_without_nan_in_the_gradient(masked_by, dtype):
    q, k, v = _arrays(4, 6, dtype)
    off = jnp.zeros((B, 1, 4, 6), bool).at[:, :, 2].set(True).at[1].set(True)
    arrays = {"mask": ~off} if masked_by == "mask" else {"bias": jnp.where(off, -INF, 0.0)}
    run = lambda q, k, v: dot_product_attention(q, k, v, **arrays, return_residual=True)  # noqa: E731
    o, lse = run(q, k, v)
    assert not o[0, 2].any() and not o[1].any() and (lse[0, 2] == -INF).all() and (lse[1] == -INF).all() and o[0, 0].any()
    grads = _forward_and_gradients(lambda *a: run(*a)[0], (q, k, v), 1.0)[1:]
    assert all(jnp.isfinite(g).all() for g in grads) and not grads[0][1].any()


@pytest.mark.parametrize("name, masked", [("padding", True), ("padding_window", False)])
def test_nan_past_the_lengths_has_no_effect(name, masked):
    q, k, v = _arrays(6, 7)
    options = CASES[name] | ({"mask": jnp.ones((1, 1, 1, 7), bool)} if masked else {})
    past = lambda x, n: x.at[jnp.arange(x.shape[1])[None] >= n[:, None]].set(jnp.nan)  # noqa: E731
    q_lengths, kv_lengths = options["query_seq_lengths"], options["key_value_seq_lengths"]
    run = jax.jit(jax.value_and_grad(lambda *a: (dot_product_attention(*a, **options) ** 2).sum(), (0, 1, 2)))
    want = run(q, k, v)
    got = run(past(q, q_lengths), past(k, kv_lengths), past(v, kv_lengths))
    jax.tree.map(assert_same_bits, got, want)


def test_changing_lengths_do_not_retrace():
    q, k, v = _arrays(6, 7)
    traces = []

    @jax.jit
    def run(lengths):
        traces.append(1)
        return dot_product_attention(q, k, v, is_causal=True, key_value_seq_lengths=lengths)

    for lengths in ([1, 2], [0, 7], [9, -1]):
        run(jnp.array(lengths))
    assert len(traces) == 1


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
@pytest.mark.parametrize("masked", [False, True])
def test_sharded_over_batch_and_heads(masked, explicit):
    q, k, v = _arrays(6, 6)
    options = CASES["padding_causal"] | ({"mask": jnp.ones((B, 1, 1, 6), bool)} if masked else {})
    want = dot_product_attention(q, k, v, **options)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit if explicit else AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        place = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P("data", *spec)))  # noqa: E731
        q, k, v = (place(x, None, "model") for x in (q, k, v))
        options = {n: place(x) if n.endswith("lengths") or n == "mask" else x for n, x in options.items()}
        run = jax.jit(lambda *a: dot_product_attention(*a, **options))
        _close(run(q, k, v), want)
        assert "all-gather" not in run.lower(q, k, v).compile().as_text()


def test_a_mask_is_logged_once_for_each_distinct_call(caplog):
    q, k, v = _arrays(3, 11)
    with caplog.at_level(logging.INFO, "jax_ops"):
        for _ in range(2):
            dot_product_attention(q, k, v, mask=jnp.ones((1, 1, 3, 11), bool))
        dot_product_attention(q, k, v, jnp.zeros((1, 1, 3, 11)), jnp.ones((1, 1, 3, 11), bool))
    said = [r.getMessage() for r in caplog.records if "XLA serves" in r.getMessage()]
    assert len(said) == 2 and "with a mask" in said[0] and "with a bias and a mask" in said[1] and "(2, 4, 3, 11)" in said[0]


def test_scores_of_a_masked_float32_call_are_full_float32():
    q, k, v = _arrays(4, 4)
    text = jax.jit(lambda *a: dot_product_attention(*a, mask=jnp.ones((4, 4), bool))).lower(q, k, v).as_text()
    dots = [line for line in text.splitlines() if "dot_general" in line]
    assert dots and all("precision = [HIGHEST, HIGHEST]" in line for line in dots)


# ---- implementation


def test_implementation_xla_names_the_build(monkeypatch):
    builds = []
    monkeypatch.setattr(bands, "common", lambda *a, build, **kw: builds.append(build) or common(*a, build=build, **kw))
    q, k, v = _arrays(3, 3)
    for implementation, build in ((None, None), ("xla", None), (None, "xla"), ("xla", "xla")):
        jax.eval_shape(lambda i=implementation, b=build: dot_product_attention(q, k, v, implementation=i, build=b))
    assert builds == [None, "xla", "xla", "xla"]


def test_implementation_cudnn_is_handed_over(monkeypatch):
    calls = []
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *a, **kw: calls.append((a, kw)) or "theirs")
    q, k, v = _arrays(3, 3)
    options = {"is_causal": True, "local_window_size": (2, 0), "scale": 0.5, **LENGTHS}
    assert dot_product_attention(q, k, v, None, None, implementation="cudnn", **options) == "theirs"
    assert calls == [((q, k, v, None, None), {**options, "implementation": "cudnn", "return_residual": False})]


def _zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


Q, KV, ON = _zeros(B, 5, N, H), _zeros(B, 7, K, H), np.ones((5, 7), bool)
ERRORS = [
    ({"query": _zeros(5, H)}, ValueError, r"query has shape \(5, 8\); need 4 axes \(batch, tokens, heads, head size\)"),
    ({"key": _zeros(3, 7, K, H)}, ValueError, r"key has shape \(3, 7, 2, 8\); need \(2, 7, 2, 8\), to match query"),
    ({"key": _zeros(B, 7, K, 4)}, ValueError, r"key has shape \(2, 7, 2, 4\); need \(2, 7, 2, 8\), to match query"),
    ({"value": _zeros(B, 8, K, H)}, ValueError, r"value has shape \(2, 8, 2, 8\); need \(2, 7, 2, 8\), to match key"),
    ({"value": _zeros(B, 7, 1, H)}, ValueError, r"value has shape \(2, 7, 1, 8\); need \(2, 7, 2, 8\), to match key"),
    ({"query": _zeros(B, 5, 3, H)}, ValueError, "query has 3 heads; need a multiple of the 2 heads of key"),
    ({"query": _zeros(B, 5, 0, H)}, ValueError, r"query has shape \(2, 5, 0, 8\); need at least 1 head"),
    ({"query": Q.astype(np.int32)}, TypeError, "query has element type int32; need one of float16, bfloat16, float32"),
    ({"key": KV.astype(np.float16)}, TypeError, "key has element type float16; need float32, as query has"),
    (
        {"query_seq_lengths": _zeros(3, dtype=np.int32)},
        ValueError,
        r"query_seq_lengths has shape \(3,\); need \(2,\), one entry a sequence",
    ),
    ({"key_value_seq_lengths": _zeros(2)}, TypeError, "key_value_seq_lengths has element type float32; need an integer"),
    ({"sinks": _zeros(2)}, ValueError, r"sinks has shape \(2,\); need \(4,\), one per query head"),
    ({"bias": _zeros(1, 2, 5, 7)}, ValueError, r"bias has shape \(1, 2, 5, 7\); need broadcastable to \(2, 4, 5, 7\)"),
    (
        {"mask": _zeros(1, B, N, 5, 7, dtype=bool)},
        ValueError,
        r"mask has shape \(1, 2, 4, 5, 7\); need broadcastable to \(2, 4, 5, 7\)",
    ),
    ({"mask": _zeros(5, 7)}, TypeError, "mask has element type float32; need bool. Pass what is to be added"),
    ({"bias": _zeros(5, 7, dtype=bool)}, TypeError, "bias has element type bool; need a float type"),
    ({"local_window_size": (1, 2, 3)}, TypeError, r"local_window_size is \(1, 2, 3\); need an int, or a pair"),
    (
        {"local_window_size": (1.0, 2)},
        TypeError,
        r"local_window_size is \(1.0, 2\); need an int, or a pair \(left, right\) of ints",
    ),
    (
        {"local_window_size": (-1, 2)},
        ValueError,
        r"local_window_size is \(-1, 2\); need ints of 0 or more, or None for no window",
    ),
    ({"is_causal": 1}, TypeError, "is_causal is 1; need True or False"),
    ({"return_residual": None}, TypeError, "return_residual is None; need True or False"),
    ({"scale": "big"}, TypeError, "scale is 'big'; need a Python number or None"),
    ({"scale": np.nan}, ValueError, "scale is nan; need a finite number"),
    ({"scale": np.nan, "mask": ON}, ValueError, "scale is nan; need a finite number"),
    ({"softcap": -1.0}, ValueError, "softcap is -1.0; need 0 or more"),
    ({"softcap": -1.0, "mask": ON}, ValueError, "softcap is -1.0; need 0 or more"),
    ({"implementation": "triton"}, ValueError, "implementation is 'triton'; need None, 'xla' or 'cudnn'"),
    (
        {"implementation": "xla", "build": "sm90"},
        ValueError,
        "build is 'sm90' and implementation is 'xla'; need one of the two",
    ),
    (
        {"implementation": "cudnn", "softcap": 3.0},
        ValueError,
        "softcap is given and implementation is 'cudnn'; need implementation None",
    ),
    ({"implementation": "cudnn", "interpret": True}, ValueError, "interpret is given and implementation is 'cudnn'"),
    ({"build": "sm90", "mask": ON}, ValueError, "build is 'sm90' with a mask; need None or 'xla'.*argument"),
    ({"kernel_map": dict(CATALOGUE), "bias": np.ones((5, 7))}, ValueError, "kernel_map is given with a bias; need None"),
    ({"interpret": True, "device": "H200", "mask": ON}, ValueError, "interpret is True with a mask; need False"),
    ({"kernel_map": {"gqa": 0}}, ValueError, "kernel_map has the key 'gqa'; need one of"),
    ({"device": "H2000", "mask": ON}, ValueError, "device is 'H2000'; need one of"),
]


@pytest.mark.parametrize("change, error, message", ERRORS)
def test_wrong_arguments_are_named(change, error, message):
    with pytest.raises(error, match=f"dot_product_attention: {message}"):
        dot_product_attention(**{"query": Q, "key": KV, "value": KV, **change})


@pytest.mark.parametrize("name", ["scale", "is_causal", "softcap", "return_residual"])
@pytest.mark.parametrize("masked", [False, True])
def test_a_traced_option_is_named(name, masked):
    mask = jnp.ones((5, 7), bool) if masked else None
    with pytest.raises(TypeError, match=f"dot_product_attention: {name} is a tracer"):
        jax.jit(lambda x: dot_product_attention(Q, KV, KV, None, mask, **{name: x}))(1.0)


def test_float64_is_named():
    with jax.enable_x64(True), pytest.raises(TypeError, match="query has element type float64; need one of"):
        dot_product_attention(Q.astype(np.float64), KV, KV)
