"""Grouped-query attention for JAX on NVIDIA GPUs: ops that choose their kernel when they are traced."""

from jax_ops.decode import gqa_decode
from jax_ops.devices import device_from_jax
from jax_ops.dispatch import explain
from jax_ops.paged import append_paged, gqa_decode_paged, gqa_prefill_paged
from jax_ops.prefill import gqa_prefill, gqa_prefill_packed
from jax_ops.rope import Rope

__all__ = [
    "Rope",
    "append_paged",
    "device_from_jax",
    "explain",
    "gqa_decode",
    "gqa_decode_paged",
    "gqa_prefill",
    "gqa_prefill_packed",
    "gqa_prefill_paged",
]
