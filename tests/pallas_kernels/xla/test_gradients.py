"""Gradients of prefill against differences of the float64 reference, and where they must be exactly 0."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dispatch_core import DEVICES, AttentionCall, TileConfig, Window
from pallas_kernels.xla.prefill import dense_prefill, dense_prefill_vjp, packed_prefill, packed_prefill_vjp
from tests import oracle
from tests.tolerance import assert_same_bits

TILES = {"one block": TileConfig(512, 1024), "many blocks": TileConfig(10, 7)}
SCALES = dict.fromkeys(("q_scale", "k_scale", "v_scale"))
Q_LENS, KV_LENS = np.array([13, 0, 17, 5], np.int32), np.array([21, 6, 9, 0], np.int32)
CU_Q, CU_KV = (np.concatenate([[0], np.cumsum(lens)]).astype(np.int32) for lens in (Q_LENS, KV_LENS))
PACKS = {"cu_seqlens_q": jnp.asarray(CU_Q), "cu_seqlens_kv": jnp.asarray(CU_KV), **SCALES}
RULES = {
    "causal": {"is_causal": True},
    "softcap and sinks": {"is_causal": True, "softcap": 1.5, "sinks": True},
    "window, not causal": {"is_causal": False, "window": (4, 3)},
}


def inputs(rules):
    rng = np.random.default_rng(2)
    normal = partial(rng.standard_normal, dtype=np.float32)
    arrays = {"q": normal((35, 6, 16)), "k": normal((36, 2, 16)), "v": normal((36, 2, 24))}
    return arrays | ({"sinks": normal(6)} if "sinks" in rules else {}), normal((35, 6, 24)), normal((35, 6))


def facts(arrays, batch, tokens, keys, rules):
    window = rules.get("window")
    return AttentionCall(
        DEVICES["CPU"], "float32", batch, 6, 2, 16, tokens, keys, head_dim_v=24, is_uniform=False, return_lse=True,
        has_sinks="sinks" in arrays, is_causal=rules["is_causal"], softcap=rules.get("softcap"),
        window=window and Window(*window),
    )  # fmt: skip


def reference_loss(arrays, do, dlse, rules):
    """<o, do> + <lse, dlse>, over the rows whose lse is finite."""
    static = {name: rules[name] for name in ("is_causal", "softcap", "window") if name in rules}
    o, lse = oracle.gqa_prefill_packed(**arrays, cu_seqlens_q=CU_Q, cu_seqlens_kv=CU_KV, **static)
    return (o * do).sum() + (np.where(np.isfinite(lse), lse, 0) * dlse).sum()


def assert_slopes(gradient, arrays, do, dlse, rules):
    """Each cotangent times a random direction is the slope of the reference's loss along it."""
    rng = np.random.default_rng(3)
    assert set(gradient) == set(arrays)
    for name, x in arrays.items():
        direction = rng.standard_normal(x.shape)
        up, down = ({**arrays, name: x + sign * 1e-5 * direction} for sign in (1, -1))
        slope = (reference_loss(up, do, dlse, rules) - reference_loss(down, do, dlse, rules)) / 2e-5
        size = np.linalg.norm(np.asarray(gradient[name], np.float64)) * np.linalg.norm(direction)
        assert abs((np.asarray(gradient[name], np.float64) * direction).sum() - slope) < 1e-6 * size + 1e-6, name


@pytest.mark.parametrize(
    "case", [("causal", "one block"), *((rules, "many blocks") for rules in RULES)], ids=lambda case: ", ".join(case)
)
def test_packed_gradient(case):
    rules, tile = RULES[case[0]], TILES[case[1]]
    arrays, do, dlse = inputs(rules)
    rest = PACKS | ({} if "sinks" in arrays else {"sinks": None})
    call = facts(arrays, 4, 35, 36, rules)

    @jax.jit
    def gradient(arrays):
        return packed_prefill_vjp(call, tile, arrays | rest, *packed_prefill(call, tile, **arrays, **rest), do, dlse)

    assert_slopes(gradient(arrays), arrays, do, dlse, rules)


def padded(x, lens, fill):
    """Packed rows as a padded batch."""
    rows = np.full((len(lens), lens.max() + 2, *x.shape[1:]), fill, x.dtype)
    for b, part in enumerate(np.split(x, np.cumsum(lens)[:-1])):
        rows[b, : lens[b]] = part
    return rows


def test_dense_gradient_where_nan_lies_beyond_every_length():
    rules = RULES["softcap and sinks"]
    packed, do, dlse = inputs(rules)
    lens = {"q": Q_LENS, "k": KV_LENS, "v": KV_LENS}
    arrays = {name: padded(packed[name], lens[name], np.nan) for name in lens} | {"sinks": packed["sinks"]}
    rest = {"q_lengths": Q_LENS, "kv_lengths": KV_LENS, **SCALES}
    call, tile = facts(arrays, 4, arrays["q"].shape[1], arrays["k"].shape[1], rules), TILES["many blocks"]
    cotangents = padded(do, Q_LENS, np.nan), padded(dlse, Q_LENS, 0)

    @jax.jit
    def gradient(arrays):
        return dense_prefill_vjp(call, tile, arrays | rest, *dense_prefill(call, tile, **arrays, **rest), *cotangents)

    result = gradient(arrays)
    for name, lengths in lens.items():
        live = np.arange(arrays[name].shape[1]) < lengths[:, None]
        assert not np.asarray(result[name])[~live].any()
        result[name] = np.asarray(result[name])[live]
    assert_slopes(result, packed, do, dlse, rules)


def test_what_is_not_finite_in_one_sequence_leaves_the_gradients_of_the_others_alone():
    rules = RULES["causal"]
    arrays, do, dlse = inputs(rules)
    rest = {**PACKS, "sinks": None}
    call, tile = facts(arrays, 4, 35, 36, rules), TILES["one block"]

    @jax.jit
    def gradient(do, **arrays):
        return packed_prefill_vjp(call, tile, arrays | rest, *packed_prefill(call, tile, **arrays, **rest), do, dlse)

    sound = {**arrays, "do": do}
    clean = gradient(**sound)
    for name, value in itertools.product(sound, (np.nan, np.inf)):
        spoiled = sound | {name: sound[name].copy()}
        spoiled[name][4, 1] = value  # a row of the first sequence
        result = gradient(**spoiled)
        assert np.isnan(result["q"]).any()
        for of, first in (("q", CU_Q[1]), ("k", CU_KV[1]), ("v", CU_KV[1])):
            assert_same_bits(result[of][first:], clean[of][first:], f"d{of}, with {value} in {name}")


def test_gradients_have_the_types_of_their_arrays():
    arrays, *_ = inputs({"sinks": True})
    arrays |= {name: jnp.asarray(arrays[name], jnp.bfloat16) for name in "qkv"}
    call = AttentionCall(DEVICES["CPU"], "bfloat16", 4, 6, 2, 16, 35, 36, head_dim_v=24, has_sinks=True, return_lse=True)

    def gradient(arrays):
        o, lse = packed_prefill(call, TILES["one block"], **arrays, **PACKS)
        return packed_prefill_vjp(call, TILES["one block"], arrays | PACKS, o, lse, o, lse)

    assert {name: x.dtype for name, x in jax.eval_shape(gradient, arrays).items()} == {n: x.dtype for n, x in arrays.items()}
