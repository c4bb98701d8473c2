"""Batches of prompts: packing, pages, and greedy tokens equal to those of a Llama in float64 NumPy."""

import numpy as np
import pytest

from jax_ops.demo.errors import DemoError
from jax_ops.demo.generate import PACKED_MULTIPLE, Generation
from tests.jax_ops.demo import llama
from tests.jax_ops.demo.llama import TINY

pytestmark = pytest.mark.newest_jax

PROMPTS = ([7, 3, 41, 0, 12, 12, 5], [9], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11])


def test_uneven_prompts_batched_equal_single_runs(params):
    want = [llama.greedy(params, TINY, prompt, 9) for prompt in PROMPTS]
    batched = np.stack(list(Generation(params, TINY, PROMPTS, 9, page_size=4)), axis=1)
    np.testing.assert_array_equal(batched, want)
    assert [int(token) for (token,) in Generation(params, TINY, PROMPTS[:1], 9, page_size=4)] == want[0]


@pytest.mark.parametrize("count", [1, 2])
def test_a_generation_yields_as_many_steps_as_asked_for(params, count):
    generation = Generation(params, TINY, PROMPTS, count)
    assert len(list(generation)) == count
    np.testing.assert_array_equal(generation.cache.lengths, [len(prompt) + count - 1 for prompt in PROMPTS])


def test_pages_are_handed_out_as_sequences_grow(params):
    generation = Generation(params, TINY, PROMPTS, 9, page_size=4)
    assert generation.cache.num_pages == 4 + 3 + 5  # ceil of 7 + 9, 1 + 9 and 11 + 9 tokens
    assert generation.cache.num_free_pages == 12
    steps = iter(generation)
    next(steps)
    assert generation.cache.num_free_pages == 12 - (2 + 1 + 3)  # with the step that runs ahead: 8, 2 and 12 tokens
    list(steps)
    assert generation.cache.num_free_pages == 12 - (4 + 3 + 5)  # 15, 9 and 19 tokens: the last was never fed back


def test_packed_prompts_are_padded(params):
    generation = Generation(params, TINY, PROMPTS, 1)
    assert len(generation.tokens) == PACKED_MULTIPLE
    np.testing.assert_array_equal(generation.tokens[: generation.prompt_tokens], np.concatenate(PROMPTS))
    np.testing.assert_array_equal(generation.cu_seqlens, [0, 7, 8, 19])


@pytest.mark.parametrize(
    "prompts, max_tokens, message",
    [
        (PROMPTS, 0, r"max_tokens is 0; need 1 or more"),
        ([], 4, r"prompts is empty; need at least one"),
        ([[1], []], 4, r"prompt 2 has 0 tokens, to be followed by 4; need at least 1, and at most 64 together"),
        ([[1] * 61], 4, r"prompt 1 has 61 tokens, to be followed by 4; need at least 1, and at most 64 together"),
    ],
)
def test_a_batch_that_the_model_cannot_take_is_refused(params, prompts, max_tokens, message):
    with pytest.raises(DemoError, match=message):
        Generation(params, TINY, prompts, max_tokens)


def test_the_context_can_be_filled(params):
    assert Generation(params, TINY, [[1] * 60], 4).cache.capacity == TINY.context_length
