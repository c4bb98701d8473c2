"""Prefill whatever the tile: values, isolation of what is not finite, and memory linear in length."""

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dispatch_core import DEVICES, AttentionCall, TileConfig, Window
from pallas_kernels.xla.prefill import dense_prefill, dense_prefill_vjp, packed_prefill, packed_prefill_vjp
from tests import oracle
from tests.tolerance import assert_same_bits, check_lse, check_output

ONE_BLOCK, MANY_BLOCKS = TileConfig(512, 1024), TileConfig(10, 7)
ABSENT: dict[str, Any] = dict.fromkeys(("q_lengths", "kv_lengths", "q_scale", "k_scale", "v_scale", "sinks"))


def facts(q, k, v, **rules):
    return AttentionCall(
        DEVICES["CPU"], str(q.dtype), 1 if q.ndim == 3 else q.shape[0], q.shape[-2], k.shape[-2], q.shape[-1], q.shape[-3],
        k.shape[-3], head_dim_v=v.shape[-1], return_lse=True, **rules,
    )  # fmt: skip


def normal(rng, *shape):
    return rng.standard_normal(shape, np.float32)


@pytest.mark.parametrize("tile", [ONE_BLOCK, MANY_BLOCKS], ids=["one block", "many blocks"])
def test_blocks_do_not_show_in_the_result(tile):
    rng = np.random.default_rng(0)
    q, k, v = normal(rng, 3, 29, 6, 16), normal(rng, 3, 41, 2, 16), normal(rng, 3, 41, 2, 24)
    rules = {"softcap": 2.0, "is_causal": True}
    lengths = {"q_lengths": np.array([29, 0, 11], np.int32), "kv_lengths": np.array([41, 9, 5], np.int32)}
    sinks = normal(rng, 6)
    call = facts(q, k, v, window=Window(12, None), has_sinks=True, **rules)
    o, lse = jax.jit(partial(dense_prefill, call, tile))(**(ABSENT | lengths | {"sinks": sinks}), q=q, k=k, v=v)
    reference = partial(oracle.gqa_prefill, q, k, v, window=(12, None), sinks=sinks, **lengths, **rules)
    truth, plain = reference(), reference(arithmetic=oracle.plain(np.float32))
    check_output(o, truth[0], plain[0], dtype=np.float32, v_max=np.abs(v).max())
    check_lse(lse, truth[1], plain[1], dtype=np.float32)


@pytest.mark.parametrize("tile", [ONE_BLOCK, MANY_BLOCKS], ids=["one block", "many blocks"])
def test_what_is_not_finite_reaches_the_rows_that_see_it_and_no_other(tile):
    rng = np.random.default_rng(1)
    cu = np.array([0, 9, 20, 31], np.int32)
    arrays = {"q": normal(rng, 31, 4, 8), "k": normal(rng, 31, 2, 8), "v": normal(rng, 31, 2, 8)}
    packs = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), jnp.asarray(cu))
    call = facts(**arrays, is_causal=True, is_uniform=False)
    attend = jax.jit(partial(packed_prefill, call, tile, **packs, q_scale=None, k_scale=None, v_scale=None, sinks=None))
    clean, _ = attend(**arrays)
    seen = np.zeros((31, 4, 1), bool)
    seen[12:20, 2:] = True
    for name, value in itertools.product(("k", "v"), (np.nan, np.inf, -np.inf)):
        spoiled = arrays | {name: arrays[name].copy()}
        spoiled[name][12, 1] = value  # seen by the queries 12 to 19 of the second sequence, heads 2 and 3
        o, _ = attend(**spoiled)
        assert_same_bits(np.where(seen, 0, o), np.where(seen, 0, clean), f"{name} {value}")
        want, _ = oracle.gqa_prefill_packed(**spoiled, cu_seqlens_q=cu, cu_seqlens_kv=cu, is_causal=True)
        np.testing.assert_array_equal(np.where(np.isfinite(o), 0, o), np.where(np.isfinite(want), 0, want))


def bytes_of_gradient(op, length):
    """What a jitted forward and backward pass keeps beside its arguments and results."""
    layout = (1, length) if op == "dense" else (length,)
    q, k = (jax.ShapeDtypeStruct((*layout, heads, 16), jnp.float32) for heads in (4, 2))
    call = facts(q, k, k, is_causal=True, is_uniform=op == "dense")
    rest: dict[str, Any] = dict.fromkeys(("q_scale", "k_scale", "v_scale", "sinks"))
    if op == "dense":
        forward, backward, rest = dense_prefill, dense_prefill_vjp, ABSENT
    else:
        forward, backward = packed_prefill, packed_prefill_vjp
        rest |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), jnp.array([0, length], jnp.int32))

    def gradient(q, k, v, do):
        o, lse = forward(call, ONE_BLOCK, q=q, k=k, v=v, **rest)
        return backward(call, ONE_BLOCK, {"q": q, "k": k, "v": v, **rest}, o, lse, do, jnp.ones_like(lse))

    return jax.jit(gradient).lower(q, k, k, q).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("op", ["dense", "packed"])
def test_memory_of_forward_and_gradient_grows_linearly(op):
    short, long = bytes_of_gradient(op, 4096), bytes_of_gradient(op, 8192)
    assert long < 2.2 * short
    assert long < 8192 * 8192  # the scores of one head are four times that
