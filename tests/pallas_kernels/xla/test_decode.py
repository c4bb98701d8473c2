"""Decode whatever the tile and the live length."""

from functools import partial

import jax
import numpy as np
import pytest

from dispatch_core import DEVICES, AttentionCall, TileConfig
from pallas_kernels.xla.decode import decode
from tests import oracle
from tests.tolerance import assert_same_bits, check_lse, check_output


def launch(tile, q, k, v, lengths):
    call = AttentionCall(
        DEVICES["CPU"], str(q.dtype), q.shape[0], q.shape[2], k.shape[2], q.shape[3], q.shape[1], k.shape[1],
        is_uniform=False, return_lse=True,
    )  # fmt: skip
    run = jax.jit(partial(decode, call, tile, k_scale=None, v_scale=None, sinks=None))
    return run(q=q, k=k, v=v, kv_lengths=lengths)


@pytest.mark.parametrize("block_kv", [8, 17, 512])
def test_tiles_do_not_show_in_the_result(block_kv):
    rng = np.random.default_rng(4)
    q, k, v = (rng.standard_normal(shape, np.float32) for shape in ((4, 3, 6, 8), (4, 43, 2, 8), (4, 43, 2, 8)))
    lengths = np.array([43, 0, 2, 25], np.int32)
    o, lse = launch(TileConfig(1, block_kv), q, k, v, lengths)
    truth = oracle.gqa_decode(q, k, v, lengths)
    plain = oracle.gqa_decode(q, k, v, lengths, arithmetic=oracle.plain(np.float32))
    check_output(o, truth[0], plain[0], dtype=np.float32, v_max=np.abs(v).max())
    check_lse(lse, truth[1], plain[1], dtype=np.float32)


def test_poison_in_a_tile_that_is_read_in_part():
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal(shape, np.float32) for shape in ((1, 1, 6, 8), (1, 43, 2, 8), (1, 43, 2, 8)))
    lengths = np.array([20], np.int32)
    results = []
    for tail in (0, np.nan, np.inf):
        k[:, 20:], v[:, 20:] = tail, tail
        results.append(launch(TileConfig(1, 16), q, k, v, lengths))
    for result in results[1:]:
        assert_same_bits(result[0], results[0][0])
        assert_same_bits(result[1], results[0][1])


def test_large_finite_inputs_give_finite_outputs():
    for dtype, size in (("float16", 300), ("bfloat16", 133120)):
        q, k, v = (
            np.full(shape, size, oracle.plain(dtype).element) for shape in ((1, 1, 2, 128), (1, 9, 1, 128), (1, 9, 1, 128))
        )
        o, lse = launch(TileConfig(1, 512), q, k, v, np.array([9], np.int32))
        np.testing.assert_array_equal(o, np.full_like(o, size))
        assert np.isfinite(lse).all()
