"""segment_ids_to_cu_seqlens: packed-by-segment batches on the packed op."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ops import gqa_prefill_packed, segment_ids_to_cu_seqlens

pytestmark = pytest.mark.newest_jax


def _ids(lengths, total, first=1):
    ids = np.repeat(np.arange(first, first + len(lengths)), lengths)
    return np.pad(ids, (0, total - len(ids))).astype(np.int32)


def _attend_by_id(q, k, v, ids):
    """Causal attention where a token sees the tokens of its own id, and padding (id 0) sees nothing, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    seen = (ids[:, None] == ids[None]) & (ids[:, None] > 0) & np.tri(len(ids), dtype=bool)
    s = np.where(seen[None], np.einsum("thd,shd->hts", q, k) * q.shape[-1] ** -0.5, -np.inf)
    p = np.exp(s - np.where(seen.any(-1), s.max(-1), 0)[..., None])
    return np.einsum("hts,shd->thd", p / np.maximum(p.sum(-1, keepdims=True), 1e-300), v)


def _tokens(total, heads=4, kv_heads=2, dim=8):
    rng = np.random.default_rng(total)
    return [jnp.asarray(rng.standard_normal((total, h, dim)), jnp.float32) for h in (heads, kv_heads, kv_heads)]


@pytest.mark.parametrize(
    "lengths, total", [((5, 0, 27), 40), ((5, 0, 27), 32), ((1,), 1), ((0, 0, 3), 3), ((7, 1, 1, 12), 30), ((2731,), 2731)]
)
def test_no_attention_across_documents(lengths, total):
    ids = _ids(lengths, total)
    q, k, v = _tokens(total, 2, 1) if total > 100 else _tokens(total)
    cu = segment_ids_to_cu_seqlens(jnp.asarray(ids), max_segments=len(lengths))
    assert cu.tolist() == [0, *np.cumsum(lengths)] and cu.dtype == jnp.int32
    np.testing.assert_allclose(gqa_prefill_packed(q, k, v, cu, cu), _attend_by_id(q, k, v, ids), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("total", [0, 1, 2, 5])
def test_every_sequence_of_small_ids_splits_where_the_id_changes(total):
    """Whatever the ids: trailing padding belongs to nothing, and two tokens share a sequence iff one run of ids holds both."""
    convert = jax.jit(lambda ids: segment_ids_to_cu_seqlens(ids, max_segments=8))
    for ids in itertools.product(range(-1, 4), repeat=total):
        cu = np.asarray(convert(jnp.asarray(ids, jnp.int32)))
        clamped = np.maximum(ids, 0) if total else np.zeros(0, int)
        real = np.max(np.flatnonzero(clamped), initial=-1) + 1
        assert len(cu) == 9 and cu[0] == 0 and cu[-1] == real and (np.diff(cu) >= 0).all(), ids
        sequence = np.searchsorted(cu, np.arange(real), side="right")
        np.testing.assert_array_equal(np.diff(sequence) != 0, np.diff(clamped[:real]) != 0)
        if (np.diff(clamped[:real]) >= 0).all() and real and clamped[0] > 0:
            np.testing.assert_array_equal(sequence, clamped[:real])


def test_a_batch_of_rows_is_one_pack():
    rows = np.stack([_ids((5, 3), 12), _ids((0, 12), 12), _ids((2, 4), 12), np.zeros(12, np.int32)])
    cu = segment_ids_to_cu_seqlens(jnp.asarray(rows), max_segments=2)
    assert cu.tolist() == [0, 5, 8, 12, 12, 24, 24, 26, 30, 36, 36, 36, 48]
    q, k, v = _tokens(48)
    o = gqa_prefill_packed(q, k, v, cu, cu).reshape(4, 12, 4, 8)
    for row, ids in enumerate(rows):
        mine = slice(12 * row, 12 * row + 12)
        want = _attend_by_id(q[mine], k[mine], v[mine], ids)
        np.testing.assert_allclose(o[row][ids > 0], want[ids > 0], rtol=2e-5, atol=2e-6)


def test_ids_from_zero_and_unsorted_ids_do_not_join_documents():
    assert segment_ids_to_cu_seqlens(jnp.array([0, 0, 1, 1, 2]), max_segments=3).tolist() == [0, 2, 4, 5]
    assert segment_ids_to_cu_seqlens(jnp.array([1, 1, 2, 1, 1]), max_segments=3).tolist() == [0, 2, 3, 5]


def test_sequences_past_max_segments_are_padding():
    assert segment_ids_to_cu_seqlens(jnp.array([1, 1, 2, 3, 3, 9]), max_segments=2).tolist() == [0, 2, 3]
    assert segment_ids_to_cu_seqlens(jnp.array([[1, 3, 2, 0], [7, 7, 7, 7]]), max_segments=2).tolist() == [0, 1, 1, 4, 4, 4, 8]


def test_changing_ids_do_not_retrace():
    traces = []

    @jax.jit
    def convert(ids):
        traces.append(1)
        return segment_ids_to_cu_seqlens(ids, max_segments=4)

    for lengths in ((1, 2), (0, 0, 5), (), (1, 1, 1, 1)):
        assert convert(_ids(lengths, 6))[-1] == sum(lengths)
    assert len(traces) == 1


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.int32])
def test_any_integer_type(dtype):
    ids = _ids((5, 0, 27), 40).astype(dtype)
    with jax.enable_x64(True):
        assert segment_ids_to_cu_seqlens(jnp.asarray(ids), max_segments=3).tolist() == [0, 5, 5, 32]


@pytest.mark.parametrize(
    "ids, options, error, message",
    [
        (np.zeros((2, 3, 4), np.int32), {"max_segments": 3}, ValueError, r"segment_ids has shape \(2, 3, 4\); need 2 axes"),
        (np.int32(3), {"max_segments": 3}, ValueError, r"segment_ids has shape \(\); need 2 axes"),
        (np.zeros(3, np.float32), {"max_segments": 3}, TypeError, "segment_ids has element type float32; need an integer type"),
        ([1, 1, 5], {"max_segments": 4}, ValueError, "segment_ids has the id 5; need ids of at most max_segments, which is 4"),
        ([1], {"max_segments": 0}, ValueError, "max_segments is 0; need a positive int"),
        ([1], {"max_segments": 2.0}, TypeError, "max_segments is 2.0; need a Python int"),
        ([1], {"max_segments": None}, TypeError, "max_segments is None; need a Python int"),
    ],
)
def test_wrong_ids_are_named(ids, options, error, message):
    with pytest.raises(error, match=message):
        segment_ids_to_cu_seqlens(ids, **options)


def test_a_traced_max_segments_is_named():
    with pytest.raises(TypeError, match="max_segments is a tracer"):
        jax.jit(lambda n: segment_ids_to_cu_seqlens(jnp.array([1]), max_segments=n))(3)
