"""On the GPU: gradients, no host transfer inside a step, pools in place, and lowering for both platforms."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ops
from jax_ops.devices import device_from_jax

pytestmark = pytest.mark.gpu


def _normal(*shape, seed=0, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def test_gradient_equals_the_xla_builds():
    q, k, v = (
        _normal(2, 300, 8, 64, dtype=jnp.float32),
        _normal(2, 300, 2, 64, seed=1, dtype=jnp.float32),
        _normal(2, 300, 2, 64, seed=2, dtype=jnp.float32),
    )
    loss = lambda build: jax.grad(lambda *a: jnp.sin(jax_ops.gqa_prefill(*a, build=build)).sum(), (0, 1, 2))(q, k, v)  # noqa: E731
    for got, want in zip(loss(None), loss("xla"), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)


def test_a_jitted_step_touches_no_host():
    q, cache = _normal(4, 8, 64), _normal(4, 256, 2, 64, seed=1)
    lengths = jnp.asarray([256, 3, 0, 99], jnp.int32)
    step = jax.jit(lambda q, n: jax_ops.gqa_decode(q, cache, cache, n))
    step(q, lengths)
    with jax.transfer_guard("disallow"):
        jax.block_until_ready(step(q, lengths))


def test_append_time_does_not_grow_with_the_pool():
    """Copying the larger pools, 4 GiB each, would take 4 ms. The least time counts: other tests may be on the GPU."""

    def seconds(pages):
        table, lengths = jnp.arange(8, dtype=jnp.int32)[:, None], jnp.asarray([5] * 8, jnp.int32)
        new = _normal(8, 8, 128)
        step = jax.jit(lambda k, v: jax_ops.append_paged(new, new, k, v, table, lengths), donate_argnums=(0, 1))
        pools = [jnp.zeros((pages, 64, 8, 128), jnp.bfloat16) for _ in range(2)]
        times = []
        for _ in range(20):
            start = time.perf_counter()
            pools = jax.block_until_ready(step(*pools))
            times.append(time.perf_counter() - start)
        return min(times)

    small, large = seconds(512), seconds(32768)
    assert large < small + 1e-3, (small, large)


def test_the_same_program_lowers_for_the_cpu():
    q, k = _normal(1, 64, 4, 64), _normal(1, 64, 2, 64, seed=1)
    lowered = jax.jit(jax_ops.gqa_prefill).trace(q, k, k).lower(lowering_platforms=("cpu",))
    assert "__gpu$xla.gpu.triton" not in lowered.as_text() and "mosaic" not in lowered.as_text()


def test_arrays_on_the_cpu_take_the_cpus_build():
    cpu = jax.devices("cpu")[0]
    q, k = (jax.device_put(a, cpu) for a in (_normal(1, 64, 4, 64), _normal(1, 64, 2, 64, seed=1)))
    assert jax_ops.explain(jax_ops.gqa_prefill, q, k, k).build == "xla"
    assert jax_ops.gqa_prefill(q, k, k).devices() == {cpu}


def test_explain_names_a_gpu_build_here():
    q, k = _normal(1, 64, 4, 64), _normal(1, 64, 2, 64, seed=1)
    is_hopper = device_from_jax(jax.devices()[0]).arch == 90
    assert jax_ops.explain(jax_ops.gqa_prefill, q, k, k).build == ("sm90" if is_hopper else "sm80")
