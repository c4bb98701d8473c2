"""PagedKVCache: pages are handed out, grown and taken back without two owners, under every transformation it claims."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ops import PagedKVCache, Rope, append_paged, gqa_decode_paged, gqa_prefill_paged
from tests import oracle
from tests.tolerance import assert_same_bits

SIZES = {"num_pages": 10, "page_size": 4, "kv_heads": 2, "head_dim": 8, "batch": 4, "max_pages": 5}


def _cache(**sizes):
    return PagedKVCache.create(**(SIZES | sizes))


def _normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def _owners(cache):
    table = np.asarray(cache.page_table)
    return table[(table >= 0) & (table < cache.num_pages)]


def _held(cache):
    """Pages held at the front of each row."""
    return np.cumprod(np.asarray(cache.page_table) >= 0, axis=1).sum(1)


def _pages(tokens, page_size):
    return -(-np.asarray(tokens) // page_size)


class Model:
    """What the cache promises, in the plainest words: a list of pages a row, and a set of free ones."""

    def __init__(self, num_pages, page_size, batch, max_pages):
        self.free_pages, self.page_size, self.max_pages = set(range(num_pages)), page_size, max_pages
        self.rows, self.lengths = [[] for _ in range(batch)], [0] * batch

    def free(self, rows):
        for b in np.flatnonzero(rows):
            self.free_pages |= set(self.rows[b])
            self.rows[b], self.lengths[b] = [], 0

    def extend(self, tokens):
        for b, n in enumerate(tokens):
            wanted = min(_pages(self.lengths[b] + max(n, 0), self.page_size), self.max_pages)
            while n > 0 and len(self.rows[b]) < wanted and self.free_pages:
                self.rows[b].append(min(self.free_pages))
                self.free_pages.remove(self.rows[b][-1])

    def advance(self, tokens):
        for b, n in enumerate(tokens):
            self.lengths[b] = min(self.lengths[b] + max(n, 0), len(self.rows[b]) * self.page_size)

    def fits(self, tokens):
        missing = sum(
            max(_pages(length + n, self.page_size) - len(row), 0)
            for n, row, length in zip(np.maximum(tokens, 0), self.rows, self.lengths, strict=True)
            if n > 0
        )
        capacity = self.max_pages * self.page_size
        return missing <= len(self.free_pages) and all(n <= capacity - m for n, m in zip(tokens, self.lengths, strict=True))


def _step(cache, what, tokens, rows):
    """One step of a serving loop, chosen by a traced number, so that a thousand steps compile once."""
    branches = (
        lambda c: c.allocate(tokens),
        lambda c: c.extend(tokens),
        lambda c: c.free(rows),
        lambda c: c.advance(tokens),
    )
    return cache.fits(tokens), cache.fits(tokens, fresh=True), jax.lax.switch(what, branches, cache)


@pytest.mark.parametrize(
    "sizes", [{}, {"num_pages": 40}, {"num_pages": 3, "page_size": 1}, {"page_size": 19, "max_pages": 2}], ids=str
)
def test_any_sequence_of_steps_keeps_the_promises(sizes):
    cache, rng = _cache(**sizes), np.random.default_rng(0)
    model = Model(cache.num_pages, cache.page_size, cache.batch, cache.page_table.shape[1])
    step = jax.jit(_step)
    for _ in range(300):
        what = rng.integers(4)
        tokens = rng.integers(-2, cache.capacity + 3, cache.batch) * (rng.random(cache.batch) < 0.5)
        rows = rng.random(cache.batch) < 0.4
        fits, fits_fresh, cache = step(cache, what, jnp.asarray(tokens), jnp.asarray(rows))
        assert bool(fits) == model.fits(tokens)
        if what == 0:
            model.free(tokens > 0)
            assert bool(fits_fresh) == model.fits(tokens)
            model.extend(tokens)
        elif what == 1:
            model.extend(tokens)
        elif what == 2:
            model.free(rows)
        else:
            model.advance(tokens)
        assert len(set(_owners(cache))) == len(_owners(cache)), "a page has two owners"
        want = [row + [-1] * (cache.page_table.shape[1] - len(row)) for row in model.rows]
        np.testing.assert_array_equal(cache.page_table, want)
        np.testing.assert_array_equal(cache.lengths, model.lengths)
        assert int(cache.num_free_pages) == len(model.free_pages)
        np.testing.assert_array_equal(cache.room, _held(cache) * cache.page_size)


def test_created_empty():
    cache = _cache(head_dim_v=6, num_layers=3, dtype=jnp.bfloat16)
    assert cache.k_pages.shape == (30, 4, 2, 8) and cache.v_pages.shape == (30, 4, 2, 6)
    assert cache.k_pages.dtype == cache.v_pages.dtype == jnp.bfloat16
    assert (cache.num_pages, cache.page_size, cache.batch, cache.capacity) == (10, 4, 4, 20)
    assert (cache.page_table == -1).all() and not cache.lengths.any() and cache.num_free_pages == 10


def test_only_the_rows_asked_for_change():
    cache = _cache().allocate(jnp.array([9, 0, 4, 1]))
    before = np.asarray(cache.page_table)
    cache = dataclasses.replace(cache, lengths=jnp.array([9, 0, 4, 1]))
    for changed in (cache.allocate(jnp.array([0, 5, 0, 0])), cache.extend(jnp.array([0, 5, 0, 0]))):
        np.testing.assert_array_equal(np.delete(changed.page_table, 1, 0), np.delete(before, 1, 0))
        np.testing.assert_array_equal(changed.lengths, [9, 0, 4, 1])
    freed = cache.free(jnp.array([True, False, False, True]))
    np.testing.assert_array_equal(freed.page_table[1:3], before[1:3])
    np.testing.assert_array_equal(freed.lengths, [0, 0, 4, 0])
    assert (np.asarray(freed.page_table)[[0, 3]] == -1).all()


def test_a_page_that_rows_share_is_free_when_none_has_it():
    table = jnp.array([[3, 1, -1, -1, -1], [3, 2, -1, -1, -1], [-1] * 5, [-1] * 5])
    cache = dataclasses.replace(_cache(), page_table=table, lengths=jnp.array([5, 6, 0, 0]))
    assert cache.num_free_pages == 7
    cache = cache.free(jnp.array([True, False, False, False]))
    assert cache.num_free_pages == 8 and 3 not in np.asarray(cache.allocate(jnp.array([20, 0, 0, 0])).page_table[0])


def test_an_exhausted_pool_leaves_entries_empty_and_drops_their_tokens():
    """The rows that came first have pages; what found none is neither stored nor counted, and its neighbours are untouched."""
    cache = _cache(num_pages=4)
    tokens = jnp.array([6, 0, 9, 3])
    assert not cache.fits(tokens, fresh=True)
    cache = cache.allocate(tokens)
    np.testing.assert_array_equal(cache.page_table[:, :3], [[0, 1, -1], [-1, -1, -1], [2, 3, -1], [-1, -1, -1]])
    k, v = _normal(0, 18, 2, 8), _normal(1, 18, 2, 8)
    cu = jnp.array([0, 6, 6, 15, 18])
    cache = cache.append(k, v, cu)
    np.testing.assert_array_equal(cache.lengths, [6, 0, 8, 0])
    o = gqa_decode_paged(_normal(2, 4, 4, 8), cache.k_pages, cache.v_pages, cache.page_table, cache.lengths)
    dense = [(k[0:6], v[0:6]), (k[:0], v[:0]), (k[6:14], v[6:14]), (k[:0], v[:0])]
    for b, (keys, values) in enumerate(dense):
        want, _ = oracle.gqa_decode(
            np.asarray(_normal(2, 4, 4, 8))[b : b + 1], np.asarray(keys)[None], np.asarray(values)[None]
        )
        np.testing.assert_allclose(o[b], want[0], rtol=1e-5, atol=1e-6)


def test_a_page_found_later_does_not_uncover_what_was_never_written():
    """An entry within a length whose page was missing stays empty: a page put there would show what it held before."""
    table = jnp.array([[0, -1, -1, -1, -1]] + [[-1] * 5] * 3)
    cache = dataclasses.replace(_cache(), page_table=table, lengths=jnp.array([6, 0, 0, 0]))
    np.testing.assert_array_equal(cache.extend(4).page_table[0], [0, -1, 1, -1, -1])
    assert cache.room[0] == 4 and cache.advance(3).lengths[0] == 6


def test_reused_pages_show_nothing_of_their_last_owner():
    cache = _cache(num_pages=5).allocate(jnp.array([20, 0, 0, 0]))
    poison = jnp.full((20, 2, 8), jnp.nan)
    cache = cache.append(poison, poison, jnp.array([0, 20, 20, 20, 20])).free(jnp.array([True, False, False, False]))
    cache = cache.allocate(jnp.array([0, 3, 0, 2]))
    k, v = _normal(0, 5, 2, 8), _normal(1, 5, 2, 8)
    cache = cache.append(k, v, jnp.array([0, 0, 3, 3, 5]))
    o = gqa_decode_paged(_normal(2, 4, 4, 8), cache.k_pages, cache.v_pages, cache.page_table, cache.lengths)
    assert jnp.isfinite(o).all() and not o[0].any() and not o[2].any() and o[1].any() and o[3].any()


@pytest.mark.parametrize("packed", [False, True], ids=["one_each", "packed"])
def test_append_is_append_paged_and_counts(packed):
    cache = _cache(num_pages=12).allocate(jnp.array([9, 5, 1, 4]))
    cache = dataclasses.replace(cache, lengths=jnp.array([3, 0, 0, 2]))
    cu = jnp.array([0, 4, 4, 5, 6]) if packed else None
    k, v, rope = _normal(0, 8 if packed else 4, 2, 8), _normal(1, 8 if packed else 4, 2, 8), Rope(max_position=20)
    got = cache.append(k, v, cu, rope)
    want = append_paged(k, v, cache.k_pages, cache.v_pages, cache.page_table, cache.lengths, cu_seqlens=cu, rope=rope)
    assert_same_bits(got.k_pages, want[0])
    assert_same_bits(got.v_pages, want[1])
    np.testing.assert_array_equal(got.lengths, [7, 0, 1, 3] if packed else [4, 1, 1, 3])
    np.testing.assert_array_equal(cache.append(k, v, cu, advance=False).lengths, cache.lengths)


def test_append_counts_no_more_than_bounds_as_they_are_read():
    cache = _cache().allocate(8)
    k = _normal(0, 6, 2, 8)
    np.testing.assert_array_equal(cache.append(k, k, jnp.array([-3, 2, 1, 4, 99])).lengths, [2, 0, 2, 2])


def test_an_fp8_cache_takes_scales():
    cache = _cache(dtype=jnp.float8_e4m3fn).allocate(4)
    k, v = _normal(0, 4, 2, 8), _normal(1, 4, 2, 8)
    cache = cache.append(k, v, k_scale=0.5, v_scale=jnp.array([2.0, 0.25]))
    want = oracle.stored(np.asarray(k[1]), oracle.FLOAT8, np.float32(0.5))
    assert_same_bits(cache.k_pages[cache.page_table[1, 0], 0], want)


def test_layers_share_a_pool_and_keep_apart():
    cache = _cache(num_layers=3, num_pages=8).allocate(jnp.array([5, 0, 3, 2]))
    k, v = _normal(0, 3, 4, 2, 8), _normal(1, 3, 4, 2, 8)

    def layer(cache, inputs):
        k, v, index = inputs
        return cache.append(k, v, layer=index, advance=False), None

    scanned, _ = jax.jit(lambda c: jax.lax.scan(layer, c, (k, v, jnp.arange(3))))(cache)
    unrolled = cache
    for i in range(3):
        unrolled = unrolled.append(k[i], v[i], layer=i, advance=False)
    assert_same_bits(scanned.k_pages, unrolled.k_pages)
    counted = scanned.advance(1)
    np.testing.assert_array_equal(counted.lengths, [1, 0, 1, 1])
    for i in range(3):
        table = cache.layer_table(i)
        assert ((table >= 8 * i) & (table < 8 * (i + 1)) | (table == -1)).all()
        np.testing.assert_array_equal(table == -1, cache.page_table == -1)
        for b in (0, 2, 3):
            assert_same_bits(counted.k_pages[table[b, 0], 0], k[i, b])
    assert int(jnp.count_nonzero(counted.k_pages.any((1, 2, 3)))) == 9


def test_a_traced_layer_past_the_end_names_no_page():
    cache = _cache(num_layers=2).allocate(4)
    for layer in (2, -1):
        table = jax.jit(lambda i: cache.layer_table(i))(layer)
        assert ((table < 0) | (table >= 20)).all()


def test_a_serving_loop_never_retraces_and_matches_dense_attention():
    """Eight slots, of which any set is active: sequences come, decode for a while and go, all through one compiled step."""
    rng, batch, heads, dim = np.random.default_rng(0), 8, 2, 8
    cache = PagedKVCache.create(num_pages=30, page_size=4, kv_heads=heads, head_dim=dim, batch=batch, max_pages=6)
    traces = []

    @jax.jit
    def admit(cache, prompts, done, k, v, q):
        traces.append("admit")
        cache = cache.free(done).allocate(prompts)
        cu = jnp.pad(jnp.cumsum(prompts, dtype=jnp.int32), (1, 0))
        o, k_pages, v_pages = gqa_prefill_paged(q, k, v, cache.k_pages, cache.v_pages, cache.page_table, cu, cache.lengths)
        cache = dataclasses.replace(cache, k_pages=k_pages, v_pages=v_pages)
        return o, cache.advance(prompts)

    @jax.jit
    def decode(cache, active, k, v, q):
        traces.append("decode")
        cache = cache.extend(active.astype(jnp.int32))
        o, k_pages, v_pages = gqa_decode_paged(
            q, cache.k_pages, cache.v_pages, cache.page_table, cache.lengths, k_new=k, v_new=v
        )
        return o, dataclasses.replace(cache, k_pages=k_pages, v_pages=v_pages).advance(active.astype(jnp.int32))

    dense = [np.zeros((2, 0, heads, dim), np.float32) for _ in range(batch)]
    active = np.zeros(batch, bool)
    for step in range(25):
        done = active & (np.array([x.shape[1] for x in dense]) > 14)
        active &= ~done
        if step % 4 == 0:
            prompts = np.where(~active & (rng.random(batch) < 0.5), rng.integers(1, 8, batch), 0)
            q, k, v = (rng.standard_normal((64, h, dim)).astype(np.float32) for h in (2 * heads, heads, heads))
            o, cache = admit(cache, jnp.asarray(prompts, jnp.int32), jnp.asarray(done), k, v, q)
            start = 0
            for b in np.flatnonzero(prompts):
                rows = slice(start, start := start + prompts[b])
                dense[b] = np.stack([k[rows], v[rows]])
                want, _ = oracle.gqa_prefill(q[rows][None], *dense[b][:, None])
                np.testing.assert_allclose(o[rows], want[0], rtol=2e-5, atol=2e-6)
            active |= prompts > 0
        else:
            q, k, v = (rng.standard_normal((batch, h, dim)).astype(np.float32) for h in (2 * heads, heads, heads))
            cache = cache.free(jnp.asarray(done))
            o, cache = decode(cache, jnp.asarray(active), k, v, q)
            for b in np.flatnonzero(active):
                dense[b] = np.concatenate([dense[b], np.stack([k[b], v[b]])[:, None]], axis=1)
                want, _ = oracle.gqa_decode(q[b : b + 1], *dense[b][:, None])
                np.testing.assert_allclose(o[b], want[0], rtol=2e-5, atol=2e-6)
        for b in np.flatnonzero(~active):
            dense[b] = dense[b][:, :0]
        np.testing.assert_array_equal(cache.lengths, [x.shape[1] for x in dense])
        o = gqa_decode_paged(
            np.ones((batch, 2, dim), np.float32), cache.k_pages, cache.v_pages, cache.page_table, cache.lengths
        )
        assert not np.asarray(o)[~active].any()
    assert sorted(traces) == ["admit", "decode"]


def test_vmap_over_caches_equals_a_loop():
    caches = [_cache(), _cache().allocate(jnp.array([5, 1, 0, 9]))]
    tokens = [jnp.array([3, 0, 9, 1]), jnp.array([0, 4, 4, 1])]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *caches)
    got = jax.vmap(lambda c, t: (c.extend(t), c.fits(t), c.num_free_pages))(stacked, jnp.stack(tokens))
    want = jax.tree.map(lambda *x: jnp.stack(x), *[(c.extend(t), c.fits(t), c.num_free_pages) for c, t in zip(caches, tokens)])
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_it_is_a_pytree_with_static_layers():
    cache = _cache(num_layers=2)
    leaves, tree = jax.tree.flatten(cache)
    assert len(leaves) == 4 and jax.tree.unflatten(tree, leaves).num_layers == 2
    shapes = jax.eval_shape(lambda c: c.allocate(3), cache)
    assert shapes.page_table.shape == (4, 5) and shapes.num_layers == 2


def test_a_donated_cache_is_updated_in_place():
    cache = _cache(num_layers=2).allocate(4)
    k = _normal(0, 2, 4, 2, 8)

    def step(cache, k):
        cache = cache.extend(1)
        cache, _ = jax.lax.scan(lambda c, x: (c.append(x[0], x[0], layer=x[1], advance=False), None), cache, (k, jnp.arange(2)))
        return cache.advance(1)

    text = jax.jit(step, donate_argnames="cache").lower(cache, k).compile().as_text()
    assert text.split("\n", 1)[0].count("may-alias") >= 4
    shape = ",".join(map(str, cache.k_pages.shape))
    assert not any(f"f32[{shape}]" in line and " copy(" in line for line in text.splitlines())


def test_x64_mode_changes_nothing():
    with jax.enable_x64(True):
        cache = _cache().allocate(np.array([5, 0, 3, 1])).extend(jnp.array([1, 2, 3, 4])).advance(2)
        cache = cache.append(_normal(0, 4, 2, 8), _normal(1, 4, 2, 8))
        assert cache.page_table.dtype == cache.lengths.dtype == cache.num_free_pages.dtype == jnp.int32
    np.testing.assert_array_equal(cache.lengths, [3, 3, 3, 3])


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda c: _cache(num_pages=0), ValueError, "PagedKVCache.create: num_pages is 0; need a positive int"),
        (lambda c: _cache(page_size=2.5), TypeError, "page_size is 2.5; need a Python int"),
        (lambda c: _cache(batch=None), TypeError, "batch is None; need a Python int"),
        (lambda c: _cache(num_pages=2**30, num_layers=2), ValueError, "num_pages is 1073741824 for 2 layers; need fewer than"),
        (lambda c: _cache(dtype=jnp.int8), TypeError, "dtype is int8; need one of float16, bfloat16, float32, float8_e4m3fn"),
        (
            lambda c: c.allocate(jnp.ones(3, jnp.int32)),
            ValueError,
            r"PagedKVCache.allocate: tokens has shape \(3,\); need \(4,\)",
        ),
        (
            lambda c: c.extend(jnp.ones(4)),
            TypeError,
            "PagedKVCache.extend: tokens has element type float32; need an integer type",
        ),
        (lambda c: c.advance([True] * 4), TypeError, "PagedKVCache.advance: tokens has element type bool"),
        (lambda c: c.fits(1, fresh=1), TypeError, "PagedKVCache.fits: fresh is 1; need True or False"),
        (lambda c: c.free(jnp.array([0, 2])), ValueError, r"PagedKVCache.free: rows has shape \(2,\); need \(4,\)"),
        (lambda c: c.free(jnp.arange(4)), TypeError, "PagedKVCache.free: rows has element type int32; need bool"),
        (lambda c: c.layer_table(1), ValueError, "PagedKVCache.layer_table: layer is 1; need an int from 0 to 0"),
        (lambda c: c.layer_table(0.0), TypeError, "PagedKVCache.layer_table: layer is 0.0; need an int, or an integer scalar"),
        (
            lambda c: c.append(jnp.ones((3, 2, 8)), jnp.ones((3, 2, 8))),
            ValueError,
            "append_paged: k has 3 tokens for 4 sequences",
        ),
        (
            lambda c: c.append(jnp.ones((4, 2, 8)), jnp.ones((4, 2, 8)), advance=0),
            TypeError,
            "PagedKVCache.append: advance is 0",
        ),
    ],
)
def test_wrong_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call(_cache())
