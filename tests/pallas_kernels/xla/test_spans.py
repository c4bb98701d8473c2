"""A span per query says what the reference's mask says."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from dispatch_core import DEVICES, AttentionCall, Window
from pallas_kernels.xla.spans import Span, dense_spans, last_positions, packed_spans, seen_from, segments
from tests import oracle

WINDOWS = (None, (0, None), (2, None), (None, 0), (None, 1), (3, 2))
LENGTHS = ((1, 1), (1, 7), (7, 1), (5, 5), (3, 8), (8, 3), (0, 4), (4, 0))


def facts(is_causal, window):
    return AttentionCall(DEVICES["CPU"], "float32", 1, 1, 1, 8, 8, 8, is_causal=is_causal, window=window and Window(*window))


def mask(span: Span, keys: int) -> np.ndarray:
    key = np.arange(keys)
    return (np.asarray(span.start)[..., None] <= key) & (key < np.asarray(span.stop)[..., None])


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_padded_batches_and_packs_see_what_each_request_alone_sees(is_causal, window):
    call = facts(is_causal, window)
    q_lens, kv_lens = np.array(LENGTHS, np.int32).T
    want = [oracle.visible_keys(q_len, kv_len, is_causal, window) for q_len, kv_len in LENGTHS]

    sizes = (len(LENGTHS), 9, 1, 1)
    dense = mask(dense_spans(call, jnp.zeros(sizes), jnp.zeros(sizes), jnp.asarray(q_lens), jnp.asarray(kv_lens)), 9)
    cu_q, cu_kv = (np.concatenate([[0], np.cumsum(lens)]).astype(np.int32) for lens in (q_lens, kv_lens))
    packed = mask(packed_spans(call, cu_q[-1] + 3, jnp.asarray(cu_q), jnp.asarray(cu_kv)), cu_kv[-1] + 3)

    for b, (q_len, kv_len) in enumerate(LENGTHS):
        np.testing.assert_array_equal(dense[b, :q_len, :kv_len], want[b])
        np.testing.assert_array_equal(packed[cu_q[b] : cu_q[b + 1], cu_kv[b] : cu_kv[b + 1]], want[b])
    assert dense.sum() == packed.sum() == sum(w.sum() for w in want), "a key beyond a length, or of another request, is seen"


@pytest.mark.parametrize("window", [None, (2, None)], ids=str)
def test_decode_sees_the_last_rows_of_the_whole_sequence(window):
    lengths = np.array([0, 1, 2, 9], np.int32)
    seen = seen_from(
        facts(True, window), last_positions(jnp.asarray(lengths), 3), jnp.asarray(lengths)[:, None], is_causal=True
    )
    for row, length in zip(mask(seen, 9), lengths):
        np.testing.assert_array_equal(row[:, :length], oracle.visible_keys(3, length, True, window))
        assert not row[:, length:].any()


def test_segments_skip_empty_sequences_and_what_lies_outside():
    sequence, offset, live = segments(jnp.array([1, 1, 4, 4, 6], jnp.int32), 8)
    np.testing.assert_array_equal(live, [False, True, True, True, True, True, False, False])
    np.testing.assert_array_equal(sequence[1:6], [1, 1, 1, 3, 3])
    np.testing.assert_array_equal(offset[1:6], [0, 1, 2, 0, 1])


def test_a_part_of_a_span_is_counted_from_its_first_key():
    spans = list(itertools.product(range(7), range(7)))
    start, stop = (jnp.array(x, jnp.int32) for x in zip(*spans))
    np.testing.assert_array_equal(mask(Span(start, stop).within(2, 3), 3), mask(Span(start, stop), 7)[:, 2:5])
