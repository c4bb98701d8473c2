"""The ops under JAX's transformations: each is what a loop, a single device, or a plain call gives."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import print_saved_residuals
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ops

B, T, S, H, G, D = 4, 6, 10, 4, 2, 8
OPS = {}


def _normal(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def _op(name):
    def register(make):
        OPS[name] = make
        return make

    return register


@_op("prefill")
def _prefill(rng):
    arrays = {"q": _normal(rng, B, T, H * G, D), "k": _normal(rng, B, S, H, D), "v": _normal(rng, B, S, H, D)}
    arrays["kv_lengths"] = jnp.asarray([10, 3, 0, 7], jnp.int32)
    return functools.partial(jax_ops.gqa_prefill, window=(5, None), return_lse=True), arrays


@_op("prefill_packed")
def _prefill_packed(rng):
    arrays = {"q": _normal(rng, B * T, H * G, D), "k": _normal(rng, B * S, H, D), "v": _normal(rng, B * S, H, D)}
    arrays["cu_seqlens_q"] = jnp.asarray([0, 5, 5, 17, 20], jnp.int32)
    arrays["cu_seqlens_kv"] = jnp.asarray([0, 9, 12, 30, 30], jnp.int32)
    return functools.partial(jax_ops.gqa_prefill_packed, return_lse=True), arrays


@_op("decode")
def _decode(rng):
    arrays = {"q": _normal(rng, B, H * G, D), "k": _normal(rng, B, S, H, D), "v": _normal(rng, B, S, H, D)}
    arrays["kv_lengths"] = jnp.asarray([10, 3, 0, 7], jnp.int32)
    return functools.partial(jax_ops.gqa_decode, return_lse=True), arrays


def _pages(rng):
    table = jnp.asarray(np.random.default_rng(3).permutation(4 * B).reshape(B, 4), jnp.int32)
    return {"k_pages": _normal(rng, 4 * B, 4, H, D), "v_pages": _normal(rng, 4 * B, 4, H, D), "page_table": table}


@_op("decode_paged")
def _decode_paged(rng):
    arrays = {"q": _normal(rng, B, H * G, D), **_pages(rng), "kv_lengths": jnp.asarray([10, 3, 0, 7], jnp.int32)}
    return functools.partial(jax_ops.gqa_decode_paged, return_lse=True), arrays


@_op("decode_paged_append")
def _decode_paged_append(rng):
    arrays = {"q": _normal(rng, B, H * G, D), **_pages(rng), "kv_lengths": jnp.asarray([10, 3, 0, 7], jnp.int32)}
    arrays |= {"k_new": _normal(rng, B, H, D), "v_new": _normal(rng, B, H, D)}
    return functools.partial(jax_ops.gqa_decode_paged, rope=jax_ops.Rope(max_position=16)), arrays


@_op("prefill_paged")
def _prefill_paged(rng):
    arrays = {"q": _normal(rng, 12, H * G, D), "k": _normal(rng, 12, H, D), "v": _normal(rng, 12, H, D), **_pages(rng)}
    arrays["cu_seqlens_q"] = jnp.asarray([0, 4, 4, 9, 11], jnp.int32)
    arrays["cache_lengths"] = jnp.asarray([5, 3, 0, 7], jnp.int32)
    return jax_ops.gqa_prefill_paged, arrays


@_op("append_paged")
def _append_paged(rng):
    arrays = {"k": _normal(rng, B, H, D), "v": _normal(rng, B, H, D), **_pages(rng)}
    arrays["lengths"] = jnp.asarray([10, 3, 0, 7], jnp.int32)
    return jax_ops.append_paged, arrays


@pytest.fixture(params=sorted(OPS))
def case(request):
    op, arrays = OPS[request.param](np.random.default_rng(7))
    return request.param, op, arrays


def assert_same(got, want, rtol=2e-5):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=2e-6)


def test_jit_equals_eager(case):
    _, op, arrays = case
    assert_same(jax.jit(lambda a: op(**a))(arrays), op(**arrays))


@pytest.mark.parametrize("shared", ["none", "k", "lengths"])
def test_vmap_equals_a_loop(case, shared):
    name, op, arrays = case
    rng = np.random.default_rng(11)
    kept = {"none": (), "k": ("k", "v", "k_pages", "v_pages"), "lengths": ("kv_lengths", "page_table", "cu_seqlens_q")}[shared]
    axes = {n: None if n in kept else 0 for n in arrays}
    stack = lambda n, a: a if n in kept else jnp.stack([a, jnp.asarray(rng.permutation(np.asarray(a), axis=-1)), a])  # noqa: E731
    stacked = {n: a if n in kept else jnp.stack([a] * 3) if a.dtype == jnp.int32 else stack(n, a) for n, a in arrays.items()}
    if all(axis is None for axis in axes.values()):
        pytest.fail(f"{name}: nothing is mapped")
    got = jax.vmap(lambda a: op(**a), in_axes=(axes,))(stacked)
    members = [op(**{n: a if n in kept else a[i] for n, a in stacked.items()}) for i in range(3)]
    assert_same(got, jax.tree.map(lambda *m: jnp.stack(m), *members))


@pytest.mark.parametrize("name", ["prefill", "prefill_packed"])
def test_vmap_of_grad_equals_a_loop(name):
    op, arrays = OPS[name](np.random.default_rng(7))
    loss = lambda q: jnp.sin(op(**{**arrays, "q": q})[0]).sum()  # noqa: E731
    qs = jnp.stack([arrays["q"], arrays["q"] * 2])
    assert_same(jax.vmap(jax.grad(loss))(qs), jnp.stack([jax.grad(loss)(q) for q in qs]))


@pytest.mark.parametrize("name", ["prefill", "prefill_packed"])
def test_scan_and_remat_keep_the_gradient(name):
    op, arrays = OPS[name](np.random.default_rng(7))

    def loss(q, layer):
        def body(carry, _):
            o = layer(carry)
            return carry + o, None

        return jnp.sin(jax.lax.scan(body, q, None, length=3)[0]).sum()

    plain = lambda q: op(**{**arrays, "q": q})[0]  # noqa: E731
    policy = jax.checkpoint_policies.save_only_these_names("attention_out", "attention_lse")
    want = jax.grad(lambda q: loss(q, plain))(arrays["q"])
    for layer in (jax.checkpoint(plain), jax.checkpoint(plain, policy=policy)):
        assert_same(jax.grad(lambda q, layer=layer: loss(q, layer))(arrays["q"]), want)


def test_remat_policies_can_save_output_and_lse_by_name(capsys):
    op, arrays = OPS["prefill"](np.random.default_rng(7))
    layer = lambda q: op(**{**arrays, "q": q})[0].sum()  # noqa: E731
    policy = jax.checkpoint_policies.save_only_these_names("attention_out", "attention_lse")
    saved = {}
    for name, p in (("nothing", None), ("named", policy)):
        print_saved_residuals(jax.checkpoint(layer, policy=p), arrays["q"])
        saved[name] = [line for line in capsys.readouterr().out.splitlines() if "output of jitted function '_entry'" in line]
    assert saved["nothing"] == [] and len(saved["named"]) == 2


def test_while_loop_with_lengths_from_the_carry():
    op, arrays = OPS["decode"](np.random.default_rng(7))

    def body(carry):
        lengths, total = carry
        return lengths + 1, total + op(**{**arrays, "kv_lengths": lengths})[0].sum()

    start = (jnp.asarray([1, 2, 3, 4], jnp.int32), jnp.float32(0))
    _, total = jax.jit(lambda c: jax.lax.while_loop(lambda c: c[0][0] < 4, body, c))(start)
    want = sum(float(op(**{**arrays, "kv_lengths": start[0] + i})[0].sum()) for i in range(3))
    np.testing.assert_allclose(total, want, rtol=1e-5)


def test_fifty_length_vectors_trace_once():
    op, arrays = OPS["decode"](np.random.default_rng(7))
    traces = []

    @jax.jit
    def step(a):
        traces.append(1)
        return op(**a)

    for i in range(50):
        step({**arrays, "kv_lengths": jnp.asarray([i % 11, 3, 0, 7], jnp.int32)})
    assert len(traces) == 1


def _mesh(explicit):
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit if explicit else AxisType.Auto,) * 2)


def _specs(name, arrays):
    heads = {"q": -2, "k": -2, "v": -2, "k_pages": -2, "v_pages": -2, "k_new": -2, "v_new": -2}
    by_batch = name in ("prefill", "decode", "decode_paged")
    specs = {}
    for n, a in arrays.items():
        spec = [None] * a.ndim
        if n in heads:
            spec[heads[n]] = "model"
        if by_batch and n in ("q", "k", "v", "kv_lengths", "page_table"):
            spec[0] = "data"
        specs[n] = P(*spec)
    return specs


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_sharded_over_batch_and_kv_heads(case, explicit):
    name, op, arrays = case
    want = op(**arrays)
    mesh = _mesh(explicit)
    with jax.set_mesh(mesh):
        placed = {
            n: jax.device_put(a, NamedSharding(mesh, s))
            for (n, a), s in zip(arrays.items(), _specs(name, arrays).values(), strict=True)
        }
        run = jax.jit(lambda a: op(**a))
        assert_same(run(placed), want)
        text = run.lower(placed).compile().as_text()
        assert "all-gather" not in text and "all-to-all" not in text


@pytest.mark.parametrize("name", ["prefill", "prefill_packed"])
def test_sharded_gradient_needs_no_gather(name):
    op, arrays = OPS[name](np.random.default_rng(7))

    def grad(a):
        loss = lambda q, k, v: jnp.sin(op(**{**a, "q": q, "k": k, "v": v})[0]).sum()  # noqa: E731
        return jax.grad(loss, (0, 1, 2))(a["q"], a["k"], a["v"])

    want = grad(arrays)
    mesh = _mesh(explicit=False)
    placed = {
        n: jax.device_put(a, NamedSharding(mesh, s))
        for (n, a), s in zip(arrays.items(), _specs(name, arrays).values(), strict=True)
    }
    assert_same(jax.jit(grad)(placed), want)
    assert "all-gather" not in jax.jit(grad).lower(placed).compile().as_text()


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_a_users_shard_map(case, check_vma):
    name, op, arrays = case
    mesh = _mesh(explicit=False)
    specs = _specs(name, arrays)
    o_spec = specs["q"] if "q" in specs else specs["k_pages"]
    first = lambda a: jax.tree.leaves(op(**a))[0]  # noqa: E731
    run = jax.jit(jax.shard_map(first, mesh=mesh, in_specs=(specs,), out_specs=o_spec, check_vma=check_vma))
    assert_same(run(arrays), first(arrays))


def test_uneven_heads_are_not_split():
    q, k = _normal(np.random.default_rng(0), 2, 5, 6, D), _normal(np.random.default_rng(1), 2, 5, 3, D)
    mesh = _mesh(explicit=False)
    want = jax_ops.gqa_prefill(q, k, k)
    placed = jax.device_put(q, NamedSharding(mesh, P(None, None, "model")))
    assert_same(jax.jit(jax_ops.gqa_prefill)(placed, k, k), want)


def test_export_round_trips(case):
    _, op, arrays = case
    exported = jax.export.export(jax.jit(lambda a: op(**a)))(arrays)
    again = jax.export.deserialize(exported.serialize())
    assert_same(again.call(arrays), op(**arrays))


def test_export_for_cuda_from_a_cpu(case):
    _, op, arrays = case
    exported = jax.export.export(jax.jit(lambda a: op(**a)), platforms=["cuda"])(arrays)
    assert exported.platforms == ("cuda",)


def test_layers_share_one_lowering():
    op, arrays = OPS["decode"](np.random.default_rng(7))

    def model(a, layers):
        for _ in range(layers):
            a = {**a, "q": a["q"] + op(**a)[0]}
        return a["q"]

    text = {n: len(jax.jit(lambda a, n=n: model(a, n)).lower(arrays).as_text()) for n in (1, 40)}
    assert text[40] < 3 * text[1]


def test_no_host_transfer_and_no_callback(case):
    _, op, arrays = case
    step = jax.jit(lambda a: op(**a))
    step(arrays)
    with jax.transfer_guard("disallow"):
        jax.block_until_ready(step(arrays))
    jaxpr = str(jax.make_jaxpr(lambda a: op(**a))(arrays))
    assert not any(word in jaxpr for word in ("callback", "infeed", "outfeed"))


def test_x64_mode_changes_nothing(case):
    _, op, arrays = case
    want = op(**arrays)
    with jax.enable_x64(True):
        wide = {n: jnp.asarray(np.asarray(a), jnp.int64) if a.dtype == jnp.int32 else a for n, a in arrays.items()}
        got = op(**wide)
    assert all(a.dtype == b.dtype for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))
    assert_same(got, want)


@pytest.mark.parametrize("name", ["decode", "decode_paged", "prefill_paged"])
def test_an_op_without_derivative_names_one_that_has(name):
    op, arrays = OPS[name](np.random.default_rng(7))
    with pytest.raises(TypeError, match="has no derivative.*gqa_prefill"):
        jax.grad(lambda q: jax.tree.leaves(op(**{**arrays, "q": q}))[0].sum())(arrays["q"])


def test_donated_pools_alias_and_are_not_copied():
    for name, pools in itertools.product(("decode_paged_append", "prefill_paged", "append_paged"), (("k_pages", "v_pages"),)):
        op, arrays = OPS[name](np.random.default_rng(7))
        rest = {n: a for n, a in arrays.items() if n not in pools}
        step = jax.jit(lambda kp, vp, rest, op=op: op(k_pages=kp, v_pages=vp, **rest)[-2:], donate_argnums=(0, 1))
        text = step.lower(arrays["k_pages"], arrays["v_pages"], rest).compile().as_text()
        assert "input_output_alias" in text and "may-alias" in text.split("\n", 1)[0]
        shape = ",".join(map(str, arrays["k_pages"].shape))
        assert not any(f"f32[{shape}]" in line and " copy(" in line for line in text.splitlines()), name
