"""Derivatives of the differentiable ops against differences of the float64 oracle, in random directions."""

from __future__ import annotations

import zlib
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ops
from tests import oracle
from tests.calling import keywords, quick_compilation
from tests.inputs import FEATURES, Case, random_case

STEP = 1e-5
WITHOUT_DERIVATIVE = {"fp8", "out_dtype"}


@pytest.fixture(scope="module", autouse=True)
def _quickly_compiled():
    with quick_compilation():
        yield


def features_of(op: str, seed: int) -> tuple[str, ...]:
    rng = np.random.default_rng([zlib.crc32(op.encode()), 1, seed])
    return tuple(name for name in FEATURES[op] if name not in WITHOUT_DERIVATIVE and rng.random() < 0.5)


def moved(case: Case, by: dict[str, np.ndarray], step: float) -> Case:
    return replace(case, arrays=case.arrays | {name: case.arrays[name].astype(np.float64) + step * u for name, u in by.items()})


def check_gradient(case: Case, seed: int) -> None:
    """The derivative of a random function of o and lse, along a random direction of q, k, v and sinks, each alone."""
    rng = np.random.default_rng(seed)
    shapes = {name: case.arrays[name].shape for name in ("q", "k", "v", "sinks") if name in case.arrays}
    o, lse = getattr(oracle, case.op)(**case.arrays, **case.options)
    weights = rng.standard_normal(o.shape), np.where(np.isfinite(lse), rng.standard_normal(lse.shape), 0)

    def exact(case: Case) -> float:
        o, lse = getattr(oracle, case.op)(**case.arrays, **case.options)
        return (weights[0] * o).sum() + (weights[1] * np.where(np.isfinite(lse), lse, 0)).sum()

    def loss(inputs):
        o, lse = getattr(jax_ops, case.op)(**(case.arrays | inputs), **keywords(case))
        w, x = (jnp.asarray(weight, jnp.float32) for weight in weights)
        return (w * o).sum() + (x * jnp.where(jnp.isfinite(lse), lse, 0)).sum()

    gradients = jax.grad(loss)({name: jnp.asarray(case.arrays[name]) for name in shapes})
    for name, shape in shapes.items():
        gradient, direction = np.asarray(gradients[name], np.float64), rng.standard_normal(shape)
        difference = exact(moved(case, {name: direction}, STEP)) - exact(moved(case, {name: direction}, -STEP))
        tolerance = 1e-4 * np.linalg.norm(gradient) + 1e-6
        assert abs((gradient * direction).sum() - difference / (2 * STEP)) < tolerance, f"d{name} of {case}"


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("op", ["gqa_prefill", "gqa_prefill_packed"])
def test_derivatives_are_those_of_the_oracle(op, seed):
    check_gradient(random_case(op, seed, features_of(op, seed), dtype="float32", amplitude=1.0), seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6, 100))
@pytest.mark.parametrize("op", ["gqa_prefill", "gqa_prefill_packed"])
def test_many_derivatives_are_those_of_the_oracle(op, seed):
    check_gradient(random_case(op, seed, features_of(op, seed), dtype="float32", amplitude=1.0), seed)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_derivatives_have_the_type_of_their_inputs(dtype):
    case = random_case("gqa_prefill", 0, ("sinks",), dtype=dtype, head_dim=16, kv_heads=1, group=2, q_lens=(5,), kv_lens=(7,))
    inputs = {name: jnp.asarray(a) for name, a in case.arrays.items()}
    gradients = jax.grad(lambda a: jax_ops.gqa_prefill(**a).astype(jnp.float32).sum())(inputs)
    assert {name: g.dtype for name, g in gradients.items()} == {name: a.dtype for name, a in inputs.items()}
