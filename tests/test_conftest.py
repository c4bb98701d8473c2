"""The settings every test runs under."""

import jax
import jax.numpy as jnp
import pytest

from tests.conftest import CPU_DEVICES, selects_gpu


def test_eight_cpu_devices():
    assert len(jax.devices()) == CPU_DEVICES == 8
    assert jax.default_backend() == "cpu"


def test_dtype_promotion_is_strict():
    with pytest.raises(jax.dtypes.TypePromotionError, match="jax_numpy_dtype_promotion=strict"):
        _ = jnp.ones(2, jnp.int32) + jnp.ones(2, jnp.float32)


def test_rank_promotion_raises():
    with pytest.raises(ValueError, match="rank_promotion"):
        _ = jnp.ones((2, 2)) + jnp.ones(2)


@pytest.mark.parametrize("markexpr", ["gpu", "gpu and not slow", "slow or gpu", "(gpu)"])
def test_a_gpu_run_is_recognised(markexpr):
    assert selects_gpu(markexpr)


@pytest.mark.parametrize("markexpr", ["", "not gpu", "not gpu and not slow", "slow and not  gpu", "slow", "gpus"])
def test_a_cpu_run_is_recognised(markexpr):
    assert not selects_gpu(markexpr)
