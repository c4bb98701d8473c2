"""Memory grows with length, not with its square, forward and backward; and a donated pool is never copied."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

import jax_ops
from jax_ops import Rope

S = jax.ShapeDtypeStruct
HEADS, DIM = (4, 2), 16


def temporaries(function, *args, **jit):
    """Bytes of scratch memory of a compiled program."""
    return jax.jit(function, **jit).lower(*args).compile().memory_analysis().temp_size_in_bytes


def prefill(length, **options):
    q, kv = S((1, length, HEADS[0], DIM), jnp.float32), S((1, length, HEADS[1], DIM), jnp.float32)
    return lambda q, k, v: jax_ops.gqa_prefill(q, k, v, **options), (q, kv, kv)


def packed(length, **options):
    q, kv = S((length, HEADS[0], DIM), jnp.float32), S((length, HEADS[1], DIM), jnp.float32)
    bounds = jnp.asarray([0, length // 3, length], jnp.int32)
    return lambda q, k, v: jax_ops.gqa_prefill_packed(q, k, v, bounds, bounds, **options), (q, kv, kv)


def decode(length):
    kv = S((2, length, HEADS[1], DIM), jnp.float32)
    return jax_ops.gqa_decode, (S((2, HEADS[0], DIM), jnp.float32), kv, kv, S((2,), jnp.int32))


def prefill_paged(length):
    """A chunk of 32 tokens against a cache of a given capacity."""
    pool, chunk = S((length // 16, 16, HEADS[1], DIM), jnp.float32), S((32, HEADS[1], DIM), jnp.float32)
    arrays = (S((32, HEADS[0], DIM), jnp.float32), chunk, chunk, pool, pool)
    return jax_ops.gqa_prefill_paged, (*arrays, S((1, length // 16), jnp.int32), S((2,), jnp.int32), S((1,), jnp.int32))


def gradient(make):
    def of(length):
        op, args = make(length)
        return jax.grad(lambda *a: jnp.sin(op(*a)).sum(), argnums=(0, 1, 2)), args

    return of


CASES = {
    "prefill": prefill,
    "prefill_windowed_with_sinks": lambda n: prefill(n, window=(100, 0), sinks=jnp.ones(HEADS[0])),
    "packed": packed,
    "prefill_gradient": gradient(prefill),
    "prefill_gradient_softcapped": gradient(lambda n: prefill(n, softcap=5.0)),
    "packed_gradient": gradient(packed),
    "decode": decode,
    "prefill_paged": prefill_paged,
}


@pytest.mark.parametrize("name", CASES)
def test_twice_the_length_takes_about_twice_the_memory(name):
    sizes = []
    for length in (2048, 4096):
        function, args = CASES[name](length)
        donated = {"donate_argnums": (3, 4)} if name == "prefill_paged" else {}
        sizes.append(temporaries(function, *args, **donated))
    assert sizes[1] < 2.5 * sizes[0]
    assert sizes[1] < HEADS[0] * 4096**2 * 4 / 8  # an eighth of the scores


def test_remat_keeps_the_gradient_of_a_stack_of_layers_linear():
    def sizes(length):
        layer, args = prefill(length)
        step = jax.checkpoint(lambda x, k, v: x + layer(x, k, v))

        def loss(q, k, v):
            return jax.lax.scan(lambda x, _: (step(x, k, v), None), jnp.sin(q), None, length=3)[0].sum()

        return temporaries(jax.grad(loss), *args)

    small, large = sizes(512), sizes(1024)
    assert large < 2.5 * small


# ---- pools

PAGES, PAGE, LAYERS = 512, 16, 4
POOL = S((PAGES, PAGE, HEADS[1], DIM), jnp.float32)
POOL_BYTES = PAGES * PAGE * HEADS[1] * DIM * 4


def decode_step(k_pages, v_pages, x, table, lengths):
    new = x[:, : HEADS[1]]
    o, k_pages, v_pages = jax_ops.gqa_decode_paged(
        x, k_pages, v_pages, table, lengths, k_new=new, v_new=new, rope=Rope(max_position=64)
    )
    return k_pages, v_pages, o


def prefill_step(k_pages, v_pages, x, table, lengths):
    new = x[:, : HEADS[1]]
    bounds = jnp.arange(3, dtype=jnp.int32)
    o, k_pages, v_pages = jax_ops.gqa_prefill_paged(
        x, new, new, k_pages, v_pages, table, bounds, lengths, rope=Rope(max_position=64)
    )
    return k_pages, v_pages, o


def append_step(k_pages, v_pages, x, table, lengths):
    new = x[:, : HEADS[1]]
    return (*jax_ops.append_paged(new, new, k_pages, v_pages, table, lengths), x)


STEPS = {"gqa_decode_paged": decode_step, "gqa_prefill_paged": prefill_step, "append_paged": append_step}


def layered(step):
    """The step of every layer over one pool in the loop's carry, each layer at its own pages."""

    def run(k_pages, v_pages, x, table, lengths):
        def layer(carry, index):
            k_pages, v_pages, x = carry
            return step(k_pages, v_pages, x, table + index * (PAGES // LAYERS), lengths), None

        return jax.lax.scan(layer, (k_pages, v_pages, x), jnp.arange(LAYERS))[0]

    return run


def generation(step):
    """Several tokens in one program, the lengths advancing in the carry."""

    def run(k_pages, v_pages, x, table, lengths):
        def token(i, carry):
            return step(*carry[:3], table, lengths + i)

        return jax.lax.fori_loop(0, 8, token, (k_pages, v_pages, x))

    return run


@pytest.mark.parametrize("loop", [None, layered, generation])
@pytest.mark.parametrize("name", STEPS)
def test_a_donated_pool_is_updated_in_place(name, loop):
    step = STEPS[name] if loop is None else loop(STEPS[name])
    args = (POOL, POOL, S((2, HEADS[0], DIM), jnp.float32), S((2, 4), jnp.int32), S((2,), jnp.int32))
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*args).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    shape = ",".join(map(str, POOL.shape))
    assert not re.search(rf"f32\[{shape}\]\S* copy\(", text)
    assert memory.alias_size_in_bytes >= 2 * POOL_BYTES
    assert memory.temp_size_in_bytes < POOL_BYTES / 2


def test_a_pool_that_is_not_donated_is_copied_once_and_stays_what_it_was():
    pool = jnp.zeros(POOL.shape)
    table, lengths = jnp.asarray([[1, 2, 3, 4], [5, 6, 7, 8]], jnp.int32), jnp.asarray([3, 0], jnp.int32)
    k_pages, _, _ = jax.jit(append_step)(pool, pool, jnp.ones((2, HEADS[0], DIM)), table, lengths)
    assert float(pool.sum()) == 0 and float(k_pages.sum()) == 2 * HEADS[1] * DIM
