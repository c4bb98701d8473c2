"""Decode: one or a few query tokens a sequence against a contiguous cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from dispatch_core import Device, Kernel
from jax_ops.dispatch import op
from jax_ops.options import common, present
from jax_ops.request import Invocation


@op
def gqa_decode(
    q: Any,
    k: Any,
    v: Any,
    kv_lengths: Any = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    sinks: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    return_lse: bool = False,
    build: str | None = None,
    kernel_map: Mapping[str, Kernel] | None = None,
    device: str | Device | None = None,
    interpret: bool = False,
) -> Invocation:
    """Grouped-query attention of the last token(s) of each sequence against its cache.

    The query tokens are the last Tq positions of the sequence, causal among themselves; one token sees the whole sequence.
    With 2 query tokens and a length of 5:

        key     0 1 2 3 4
        query 0 x x x x
        query 1 x x x x x

    The G query heads of a KV head are rows of one matrix product, so K and V are read once whatever G is.

    Args:
      q: (B, Hq, D), or (B, Tq, Hq, D) with 1 to 16 tokens; float16, bfloat16 or float32.
      k: (B, S, Hkv, D) of q's type, or float8_e4m3fn. S is the capacity.
      v: (B, S, Hkv, Dv) of k's type.
      kv_lengths: int32 (B,): live keys of each sequence, its query tokens included; None: S. What lies past a length, NaN
        included, has no effect. Clamped to [0, S]; a sequence of length 0 gives o = 0.
      scale, softcap, window, sinks, build, kernel_map, device, interpret: as in `gqa_prefill`. A window counts from each
        query's own position: (W - 1, 0) sees the last W keys.
      k_scale, v_scale: float32 scalar, (Hkv,) or (B, Hkv): factors of an FP8 cache.
      return_lse: also return the log-sum-exp.

    Returns:
      o: like q with Dv for D; with return_lse, (o, lse), lse float32 of o's shape without its last axis, natural log.

    Raises:
      ValueError, TypeError, NoImplementationError, ReplacementRefusedError: as `gqa_prefill`. More than 16 query tokens are
        refused: `gqa_prefill` with kv_lengths serves them.

    Not differentiable; `gqa_prefill` is. Idea of the folded group: Shazeer, Fast Transformer Decoding, 2019; of the split
    over keys: Dao et al., Flash-Decoding, 2023.

    Example:
      >>> import jax.numpy as jnp
      >>> cache = jnp.ones((2, 64, 3, 16))
      >>> gqa_decode(jnp.ones((2, 9, 16)), cache, cache, jnp.array([64, 17])).shape
      (2, 9, 16)
    """
    arrays = present(q=q, k=k, v=v, kv_lengths=kv_lengths, k_scale=k_scale, v_scale=v_scale, sinks=sinks)
    if "kv_lengths" not in arrays and len(arrays["k"].shape) == 4:
        arrays["kv_lengths"] = jnp.full(arrays["k"].shape[0], arrays["k"].shape[1], jnp.int32)
    return common(
        "gqa_decode",
        "decode",
        arrays,
        is_causal=True,
        scale=scale,
        softcap=softcap,
        window=window,
        return_lse=return_lse,
        build=build,
        kernel_map=kernel_map,
        device=device,
        interpret=interpret,
    )
