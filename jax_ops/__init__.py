"""Grouped-query attention for JAX on NVIDIA GPUs: ops that choose their kernel when they are traced."""

from jax_ops.cache import PagedKVCache
from jax_ops.compat import dot_product_attention, flax_attention_fn
from jax_ops.decode import gqa_decode
from jax_ops.devices import device_from_jax
from jax_ops.dispatch import explain
from jax_ops.host_checks import check_decode_inputs, check_packed_inputs, check_paged_inputs
from jax_ops.merge import merge_attention
from jax_ops.paged import append_paged, gqa_decode_paged, gqa_prefill_paged
from jax_ops.prefill import gqa_prefill, gqa_prefill_packed
from jax_ops.rope import Rope
from jax_ops.segments import segment_ids_to_cu_seqlens

__all__ = [
    "PagedKVCache",
    "Rope",
    "append_paged",
    "check_decode_inputs",
    "check_packed_inputs",
    "check_paged_inputs",
    "device_from_jax",
    "dot_product_attention",
    "explain",
    "flax_attention_fn",
    "gqa_decode",
    "gqa_decode_paged",
    "gqa_prefill",
    "gqa_prefill_packed",
    "gqa_prefill_paged",
    "merge_attention",
    "segment_ids_to_cu_seqlens",
]
