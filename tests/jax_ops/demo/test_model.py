"""The decoder on a tiny random model, against a Llama in float64 NumPy."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ops import PagedKVCache
from jax_ops.demo import model
from tests.jax_ops.demo import llama
from tests.jax_ops.demo.llama import TINY

pytestmark = pytest.mark.newest_jax

PROMPTS = ([7, 3, 41, 0, 12, 12, 5], [9], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11])


def empty_cache(batch: int, dtype=jnp.float32, fill: float = np.nan, num_pages: int = 20) -> PagedKVCache:
    """A cache over poison: what was not written must not be read."""
    cache = PagedKVCache.create(
        num_pages=num_pages,
        page_size=4,
        kv_heads=TINY.kv_heads,
        head_dim=TINY.head_dim,
        batch=batch,
        max_pages=6,
        dtype=dtype,
        num_layers=TINY.num_layers,
    )
    return replace(cache, k_pages=jnp.full_like(cache.k_pages, fill), v_pages=jnp.full_like(cache.v_pages, fill))


def packed(chunks) -> tuple[jax.Array, jax.Array]:
    return jnp.asarray(np.concatenate(chunks), jnp.int32), jnp.asarray(np.cumsum([0, *map(len, chunks)]), jnp.int32)


prefill = jax.jit(partial(model.prefill, config=TINY))
decode = jax.jit(partial(model.decode, config=TINY))


@pytest.mark.parametrize("padding", [0, 13])
def test_prefill_gives_the_logits_after_each_prompt(params, padding):
    tokens, cu_seqlens = packed(PROMPTS)
    got, cache = prefill(params, jnp.pad(tokens, (0, padding)), cu_seqlens, empty_cache(len(PROMPTS)))
    want = [llama.logits(params, TINY, prompt)[-1] for prompt in PROMPTS]
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(cache.lengths, [len(prompt) for prompt in PROMPTS])


def test_decode_continues_uneven_prompts(params):
    """Past page bounds, and with each sequence at its own position."""
    _, cache = prefill(params, *packed(PROMPTS), empty_cache(len(PROMPTS)))
    texts = [list(prompt) for prompt in PROMPTS]
    for step in range(6):
        tokens = [(7 * step + row) % TINY.vocab_size for row in range(len(texts))]
        got, cache = decode(params, jnp.asarray(tokens, jnp.int32), cache)
        for text, token in zip(texts, tokens, strict=True):
            text.append(token)
        want = [llama.logits(params, TINY, text)[-1] for text in texts]
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def test_prompts_may_come_in_chunks(params):
    cache = empty_cache(2)
    for chunks in (PROMPTS[0][:3], PROMPTS[2][:6]), (PROMPTS[0][3:], PROMPTS[2][6:]):
        got, cache = prefill(params, *packed(chunks), cache)
    want = [llama.logits(params, TINY, prompt)[-1] for prompt in (PROMPTS[0], PROMPTS[2])]
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def test_bfloat16_weights_give_nearly_the_same_logits(params):
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    got, cache = prefill(half, *packed(PROMPTS), empty_cache(len(PROMPTS), jnp.bfloat16))
    want = np.stack([llama.logits(params, TINY, prompt)[-1] for prompt in PROMPTS])
    assert got.dtype == jnp.float32
    assert cache.k_pages.dtype == jnp.bfloat16
    assert np.linalg.norm(got - want) < 0.05 * np.linalg.norm(want)


@pytest.mark.parametrize("step", ["prefill", "decode"])
def test_donated_pools_stay_in_place(params, step):
    """A pool far larger than the rest is not copied: neither by the layers' scan nor by the ops."""
    cache = empty_cache(len(PROMPTS), fill=0, num_pages=5000)
    pool_bytes = cache.k_pages.nbytes
    tokens, cu_seqlens = packed(PROMPTS)
    if step == "prefill":
        lowered = jax.jit(model.prefill, static_argnames="config", donate_argnames="cache").lower(
            params, tokens, cu_seqlens, cache, config=TINY
        )
    else:
        lowered = jax.jit(model.decode, static_argnames="config", donate_argnames="cache").lower(
            params, tokens[: len(PROMPTS)], cache, config=TINY
        )
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 4


def test_config_is_a_static_argument():
    assert hash(TINY) == hash(replace(TINY))
    assert TINY.rope.theta == TINY.rope_theta
