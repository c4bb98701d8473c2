"""The real model: what transformers generates from the same file in float32."""

import jax
import numpy as np
import pytest

from jax_ops.demo.generate import Generation
from jax_ops.demo.model import prefill


@pytest.fixture(scope="module")
def batched(smollm2, reference):
    """Ids (B, 64) that follow the three prompts, answered as one batch."""
    prompts = [case["prompt_ids"] for case in reference]
    steps = Generation(smollm2.params, smollm2.config, prompts, max_tokens=len(reference[0]["generated_ids"]))
    return np.stack(list(steps), axis=1)


def test_greedy_tokens_equal_the_reference(batched, reference):
    assert len(reference) == 3
    for tokens, case in zip(batched, reference, strict=True):
        assert len(tokens) == 64
        assert tokens.tolist() == case["generated_ids"], case["prompt"]


def test_a_prompt_alone_gives_what_it_gives_in_a_batch(smollm2, batched, reference):
    alone = Generation(smollm2.params, smollm2.config, [reference[0]["prompt_ids"]], max_tokens=12)
    assert [int(token) for (token,) in alone] == batched[0, :12].tolist()


def test_first_logits_equal_the_reference(smollm2, reference):
    generation = Generation(smollm2.params, smollm2.config, [case["prompt_ids"] for case in reference], max_tokens=1)
    step = jax.jit(prefill, static_argnames="config")
    logits, _ = step(smollm2.params, generation.tokens, generation.cu_seqlens, generation.cache, config=smollm2.config)
    for row, case in zip(np.asarray(logits), reference, strict=True):
        np.testing.assert_allclose(row[case["first_top_ids"]], case["first_top_logits"], atol=1e-3)
