"""flax_attention_fn in the attention layers of Flax, NNX and Linen, against the attention they come with."""

import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dispatch_core import CATALOGUE
from jax_ops import compat, flax_attention_fn
from tests import oracle

FEATURES, HEADS, TOKENS = 16, 4, 6


def _inputs(*lead, tokens=TOKENS, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((*lead, tokens, FEATURES)), jnp.float32)


def _linen(attention=None, **options):
    given = {} if attention is None else {"attention_fn": attention}
    return nn.MultiHeadDotProductAttention(HEADS, qkv_features=FEATURES, **given, **options)


def _nnx(attention=None, **options):
    given = {} if attention is None else {"attention_fn": attention}
    return nnx.MultiHeadAttention(HEADS, FEATURES, decode=False, rngs=nnx.Rngs(0), **given, **options)


def _close(a, b, tolerance=2e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), a, b)


def _value_and_grad(loss, *args):
    """Compiled once, with the implicit promotions that Flax's own attention needs."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return jax.jit(jax.value_and_grad(loss))(*args)


CASES = {
    "full": ({}, lambda x: None),
    "causal": ({"is_causal": True}, lambda x: nn.make_causal_mask(x[..., 0])),
    "window": ({"is_causal": True, "window": (2, 0)}, lambda x: _banded(x.shape[-2], -2, 0)),
    "window_both": ({"window": (1, 2)}, lambda x: _banded(x.shape[-2], -1, 2)),
}


def _banded(tokens, low, high):
    gap = np.arange(tokens)[None] - np.arange(tokens)[:, None]
    return jnp.asarray((gap >= low) & (gap <= high))[None, None]


@pytest.mark.parametrize("name", ["full", "causal", "window"])
def test_linen_forward_and_backward(name):
    options, mask_of = CASES[name]
    x = _inputs(2)
    ours, theirs = _linen(flax_attention_fn(**options)), _linen()
    params = theirs.init(jax.random.key(0), x)
    got = _value_and_grad(lambda p: (ours.apply(p, x) ** 2).sum(), params)
    want = _value_and_grad(lambda p: (theirs.apply(p, x, mask=mask_of(x)) ** 2).sum(), params)
    _close(got, want, 1e-4)


@pytest.mark.parametrize("name", ["causal", "window_both"])
def test_nnx_forward_and_backward(name):
    options, mask_of = CASES[name]
    x = _inputs(2)

    def run(model, mask):
        graph, state = nnx.split(model)
        return _value_and_grad(lambda s: (nnx.merge(graph, s)(x, mask=mask) ** 2).sum(), state)

    _close(run(_nnx(flax_attention_fn(**options)), None), run(_nnx(), mask_of(x)), 1e-4)


def test_nnx_is_causal_argument_and_grouped_heads():
    x, attention = _inputs(2), flax_attention_fn()
    models = [_nnx(a, num_kv_heads=2) for a in (attention, None)]
    outputs = []
    for model in models:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            outputs.append(model(x, is_causal=True))
    _close(*outputs)


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)], ids=str)
def test_any_batch_axes_with_mask_and_bias(lead):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((*lead, n, HEADS, 4)), jnp.float32) for n in (5, 7, 7))
    masks = [jnp.asarray(rng.random((*axes, 5, 7)) < 0.8) for axes in ((), (1,), (*lead, 1))]
    bias = jnp.asarray(rng.standard_normal((*lead, HEADS, 5, 7)), jnp.float32)
    for mask in masks:
        o = flax_attention_fn()(q, k, v, bias, mask)
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            want = nn.dot_product_attention(q, k, v, bias, mask)
        assert o.shape == want.shape
        _close(o, want)


def test_options_align_bottom_right_and_the_layers_argument_top_left():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, n, 2, 4)).astype(np.float32) for n in (3, 7, 7))
    want = oracle.gqa_prefill(q, k, v, is_causal=True, window=(2, None))[0]
    ones = np.ones((1, 1, 3, 7), bool)
    for mask in (None, ones):
        _close(flax_attention_fn(is_causal=True, window=(2, None))(q, k, v, mask=mask), np.float32(want))
    want = oracle.gqa_prefill(q, k[:, :3], v[:, :3])[0]
    for mask in (None, ones):
        _close(flax_attention_fn()(q, k, v, mask=mask, is_causal=True), np.float32(want))


def test_decoding_layers_equal_the_whole_sequence():
    """Decoding layers mask their cache; the causal option, bottom-right, does not hide it."""
    x, attention = _inputs(2), flax_attention_fn(is_causal=True)
    whole, decoder = _linen(attention), _linen(attention, decode=True)
    variables = decoder.init(jax.random.key(0), x)
    want = whole.apply({"params": variables["params"]}, x)
    cache, rows = variables["cache"], []
    with jax.numpy_rank_promotion("allow"):
        for t in range(TOKENS):
            row, changed = decoder.apply({"params": variables["params"], "cache": cache}, x[:, t : t + 1], mutable=["cache"])
            cache = changed["cache"]
            rows.append(row)
    _close(jnp.concatenate(rows, axis=1), want)


def test_dtype_of_the_layer():
    q = jnp.ones((1, 3, 2, 4))
    assert flax_attention_fn()(q, q, q, dtype=jnp.bfloat16).dtype == jnp.bfloat16
    assert flax_attention_fn()(q, q, q).dtype == jnp.float32


def test_a_mask_of_numbers_is_a_mask():
    q = _inputs(1).reshape(1, TOKENS, HEADS, 4)
    mask = nn.make_causal_mask(jnp.ones((1, TOKENS)))
    assert mask.dtype == jnp.float32
    _close(flax_attention_fn()(q, q, q, mask=mask), flax_attention_fn(is_causal=True)(q, q, q))


def test_equal_options_give_the_same_function():
    assert flax_attention_fn(is_causal=True, window=(3, -1)) is flax_attention_fn(is_causal=True, window=[3, None])
    assert flax_attention_fn(is_causal=True) is not flax_attention_fn()
    assert _linen(flax_attention_fn()) == _linen(flax_attention_fn())
    kernels = dict(CATALOGUE)
    assert flax_attention_fn(kernel_map=kernels) is flax_attention_fn(kernel_map=dict(kernels))


def test_options_reach_the_call(monkeypatch):
    seen = []
    monkeypatch.setattr(compat, "attend", lambda rules, operands, *a: seen.append(rules) or (operands.q, None))
    q = jnp.ones((1, 3, 2, 4))
    options = {"scale": 0.5, "softcap": 3.0, "build": "xla", "device": "H200", "interpret": False}
    flax_attention_fn(**options, kernel_map=CATALOGUE)(q, q, q)
    assert {name: getattr(seen[0], name) for name in options} == options and seen[0].kernel_map == dict(CATALOGUE)


def test_inactive_dropout_is_no_dropout():
    x, attention = _inputs(2), flax_attention_fn()
    layer = _linen(attention, dropout_rate=0.5, deterministic=True)
    params = layer.init(jax.random.key(0), x)
    _close(layer.apply(params, x), _linen(attention).apply(params, x))


LAYER_ERRORS = [
    (
        {"dropout_rate": 0.5, "deterministic": False},
        {},
        ValueError,
        "dropout_rate is 0.5 and deterministic is False; need no dropout",
    ),
    (
        {},
        {"sow_weights": True},
        ValueError,
        r"module was passed by the layer \(sow_weights\); need no use of the attention weights",
    ),
]


@pytest.mark.parametrize("options, call, error, message", LAYER_ERRORS)
def test_what_linen_asks_in_vain_is_named(options, call, error, message):
    x, attention = _inputs(2), flax_attention_fn()
    params = _linen().init(jax.random.key(0), x)
    with pytest.raises(error, match=f"flax_attention_fn: {message}"):
        _linen(attention, **options).apply(params, x, rngs={"dropout": jax.random.key(1)}, **call)


def test_other_einsums_of_linen_are_named():
    x = _inputs(2)
    layer = _linen(
        flax_attention_fn(), qk_attn_weights_einsum_cls=lambda: jnp.einsum, attn_weights_value_einsum_cls=lambda: jnp.einsum
    )
    with pytest.raises(ValueError, match="flax_attention_fn: qk_attn_weights_einsum was passed by the layer; need no use"):
        layer.init(jax.random.key(0), x)


@pytest.mark.parametrize("options, call, error, message", LAYER_ERRORS)
def test_what_nnx_asks_in_vain_is_named(options, call, error, message):
    with pytest.raises(error, match=f"flax_attention_fn: {message}"):
        _nnx(flax_attention_fn(), **options)(_inputs(2), **call)


def test_what_a_layer_passes_beyond_its_time_is_named():
    positions = jnp.broadcast_to(jnp.arange(TOKENS), (2, TOKENS))
    with pytest.raises(
        TypeError, match="flax_attention_fn: input_positions was passed by the layer; need a layer that does without"
    ):
        _nnx(flax_attention_fn())(_inputs(2), input_positions=positions)


Q = np.zeros((2, 5, HEADS, 4), np.float32)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: flax_attention_fn(window=3), TypeError, r"window is the int 3; need \(left, right\)"),
        (lambda: flax_attention_fn(is_causal=None), TypeError, "is_causal is None; need True or False"),
        (lambda: flax_attention_fn(scale="1"), TypeError, "scale is '1'; need a Python number or None"),
        (lambda: flax_attention_fn(softcap=-2.0), ValueError, "softcap is -2.0; need 0 or more"),
        (lambda: flax_attention_fn()(Q, Q[:1], Q), ValueError, r"key has shape \(1, 5, 4, 4\); need the axes \(2,\) of query"),
        (
            lambda: flax_attention_fn()(Q, Q, Q[:, :3]),
            ValueError,
            r"value has shape \(2, 3, 4, 4\); need \(2, 5, 4, 4\), to match key",
        ),
        (lambda: flax_attention_fn()(Q[0, 0], Q, Q), ValueError, r"query has shape \(4, 4\); need"),
        (
            lambda: flax_attention_fn()(Q, Q, Q, mask=np.ones((5, 6))),
            ValueError,
            r"mask has shape \(1, 1, 5, 6\); need broadcastable",
        ),
        (lambda: flax_attention_fn()(Q, Q, Q, is_causal=3), TypeError, "is_causal is 3; need True or False"),
        (lambda: flax_attention_fn(device="H2000")(Q, Q, Q), ValueError, "device is 'H2000'; need one of"),
        (
            lambda: flax_attention_fn(build="sm90")(Q, Q, Q, mask=np.ones((5, 5))),
            ValueError,
            "build is 'sm90' with a mask; need None",
        ),
    ],
)
def test_wrong_arguments_are_named(call, error, message):
    with pytest.raises(error, match=f"flax_attention_fn: {message}"):
        call()


def test_jax_ops_does_not_import_flax():
    code = "import sys, jax_ops; sys.exit(any(m.split('.')[0] == 'flax' for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert subprocess.run([sys.executable, "-c", f"import flax; {code}"], check=False).returncode == 1
