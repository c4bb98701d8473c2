"""The paged ops: pools updated in place, and pages gathered in any order and of any size."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dispatch_core import DEVICES, AttentionCall, Paging, RopeFacts, TileConfig
from pallas_kernels.xla.paged import append, paged_decode, paged_prefill
from tests import oracle
from tests.tolerance import assert_same_bits, check_output

POOL, PAGE, MAX_PAGES, BATCH = 4096, 4, 8, 2
TILE = TileConfig(64, 16)


def facts(page_size=PAGE, max_pages=MAX_PAGES, rope=None):
    paging = Paging(page_size, max_pages)
    return AttentionCall(
        DEVICES["CPU"], "float32", BATCH, 4, 2, 16, 1, paging.capacity, is_causal=True, is_uniform=False, paging=paging,
        rope=rope, return_lse=True,
    )  # fmt: skip


def step(op, k_pages, v_pages, page_table, lengths, q, k):
    """One call of an op that writes, with a token for each sequence: what it computes, and the pools."""
    absent = {"inv_freq": None, "k_scale": None, "v_scale": None}
    pools = {"k_pages": k_pages, "v_pages": v_pages, "page_table": page_table}
    cu = jnp.arange(BATCH + 1, dtype=jnp.int32)
    if op == "append":
        return q, *append(facts(), TILE, k=k, v=k, **pools, lengths=lengths, cu_seqlens=cu, **absent)
    if op == "decode":
        arrays = {"q": q[:, None], "k_new": k[:, None], "v_new": k[:, None], "kv_lengths": lengths}
        o, _, *pools = paged_decode(facts(), TILE, **arrays, **pools, sinks=None, **absent)
        return o[:, 0], *pools
    arrays = {"q": q, "k": k, "v": k, "cu_seqlens_q": cu, "cache_lengths": lengths}
    o, _, *pools = paged_prefill(facts(), TILE, **arrays, **pools, sinks=None, **absent)
    return o, *pools


@pytest.mark.parametrize("op", ["append", "decode", "prefill"])
def test_no_array_is_wider_than_32_bits_in_x64_mode(op):
    shape = jax.ShapeDtypeStruct
    pool, new = shape((POOL, PAGE, 2, 16), jnp.bfloat16), shape((BATCH, 2, 16), jnp.bfloat16)
    tables = shape((BATCH, MAX_PAGES), jnp.int32), shape((BATCH,), jnp.int32)
    with jax.enable_x64(True):
        jaxpr = jax.make_jaxpr(partial(step, op))(pool, pool, *tables, shape((BATCH, 4, 16), jnp.bfloat16), new)
    assert not re.findall(r"[fiu]64\[\d", str(jaxpr))


@pytest.mark.parametrize("in_scan", [False, True], ids=["alone", "in scan"])
@pytest.mark.parametrize("op", ["append", "decode", "prefill"])
def test_donated_pools_are_updated_in_place(op, in_scan):
    shape = jax.ShapeDtypeStruct
    pool = shape((POOL, PAGE, 2, 16), jnp.float32)
    table, lengths = shape((BATCH, MAX_PAGES), jnp.int32), shape((BATCH,), jnp.int32)
    q, k = shape((BATCH, 4, 16), jnp.float32), shape((BATCH, 2, 16), jnp.float32)

    def layers(k_pages, v_pages, page_table, lengths, q, k):
        def layer(carry, first_page):
            q, k_pages, v_pages = carry
            return step(op, k_pages, v_pages, page_table + first_page, lengths, q, k), None

        first_pages = jnp.arange(0, POOL, POOL // 4, dtype=jnp.int32)
        return jax.lax.scan(layer, (q, k_pages, v_pages), first_pages)[0]

    run = jax.jit(layers if in_scan else partial(step, op), donate_argnums=(0, 1))
    compiled = run.lower(pool, pool, table, lengths, q, k).compile()
    memory, pool_bytes = compiled.memory_analysis(), POOL * PAGE * 2 * 16 * 4
    assert memory.alias_size_in_bytes >= 2 * pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 4
    assert not re.search(rf"= f32\[{POOL},{PAGE},2,16\]\S* copy\(", compiled.as_text())


@pytest.mark.parametrize("page_size", [1, 3, 19])
def test_pages_of_any_size(page_size):
    rng = np.random.default_rng(6)
    max_pages = 60 // page_size
    pool = BATCH * max_pages + 2
    normal = partial(rng.standard_normal, dtype=np.float32)
    k_pages, v_pages = normal((pool, page_size, 2, 16)), normal((pool, page_size, 2, 16))
    table = rng.permutation(pool)[: BATCH * max_pages].reshape(BATCH, max_pages).astype(np.int32)
    lengths, q, new = np.array([41, 0], np.int32), normal((BATCH, 2, 4, 16)), normal((BATCH, 2, 2, 16))
    for b, used in enumerate(-(-(lengths + 2) // page_size)):
        table[b, used:] = (-1, 2**30)[b]
    rope = oracle.Rope(rotary_dim=8, style="interleaved")
    arrays = {"q": q, "k_pages": k_pages, "v_pages": v_pages, "page_table": table, "kv_lengths": lengths} | {
        "k_new": new,
        "v_new": new,
    }
    truth = oracle.gqa_decode_paged(**arrays, rope=rope)
    plain = oracle.gqa_decode_paged(**arrays, rope=rope, arithmetic=oracle.plain(np.float32))
    call = facts(page_size, max_pages, RopeFacts(8, 64, "interleaved"))
    rest = {"inv_freq": oracle.inverse_frequencies(rope, 16), "k_scale": None, "v_scale": None, "sinks": None}
    o, _, k_out, v_out = jax.jit(partial(paged_decode, call, TILE))(**arrays, **rest)
    check_output(o, truth[0], plain[0], dtype=np.float32, v_max=max(np.abs(v_pages).max(), np.abs(new).max()))
    np.testing.assert_allclose(k_out, truth[2], atol=1e-6)
    assert_same_bits(v_out, truth[3])


def test_chunks_of_unequal_sequences_equal_their_tokens_one_by_one():
    rng = np.random.default_rng(7)
    normal = partial(rng.standard_normal, dtype=np.float32)
    lengths, cu, tokens = np.array([13, 9], np.int32), np.array([0, 5, 5], np.int32), 7
    pools = normal((20, PAGE, 2, 16)), normal((20, PAGE, 2, 16))
    table = rng.permutation(20)[: BATCH * MAX_PAGES].reshape(BATCH, MAX_PAGES).astype(np.int32)
    q, k, v = normal((tokens, 4, 16)), normal((tokens, 2, 16)), normal((tokens, 2, 16))
    absent = {"inv_freq": None, "k_scale": None, "v_scale": None, "sinks": None}
    o, lse, *chunked = jax.jit(partial(paged_prefill, facts(), TILE))(
        q=q, k=k, v=v, k_pages=pools[0], v_pages=pools[1], page_table=table, cu_seqlens_q=cu, cache_lengths=lengths, **absent
    )
    assert not np.asarray(o)[5:].any()
    assert np.isneginf(lse[5:]).all()
    decode = jax.jit(partial(paged_decode, facts(), TILE))
    for i in range(5):
        rows = {name: np.stack([x[i], x[i]])[:, None] for name, x in (("q", q), ("k_new", k), ("v_new", v))}
        only_first = np.where([[True], [False]], table, -1)
        one, _, *pools = decode(
            **rows, k_pages=pools[0], v_pages=pools[1], page_table=only_first, kv_lengths=lengths + [i, 0], **absent
        )
        np.testing.assert_allclose(o[i], one[0, 0], atol=1e-6)
    assert_same_bits(chunked[0], pools[0])
    assert_same_bits(chunked[1], pools[1])
