"""Prefill: many query tokens against keys of the same call, as padded batches or packed sequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dispatch_core import Device, Kernel
from jax_ops import checks
from jax_ops.dispatch import op
from jax_ops.options import common, present
from jax_ops.request import Invocation


@op
def gqa_prefill(
    q: Any,
    k: Any,
    v: Any,
    *,
    is_causal: bool = True,
    q_lengths: Any = None,
    kv_lengths: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    sinks: Any = None,
    q_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    out_dtype: Any = None,
    return_lse: bool = False,
    backend: str = "auto",
    build: str | None = None,
    kernel_map: Mapping[str, Kernel] | None = None,
    device: str | Device | None = None,
    interpret: bool = False,
) -> Invocation:
    """Grouped-query attention over a batch, each sequence dense or padded to a common length.

    o = softmax(mask(softcap(scale * q k^T))) v, with float32 accumulation; query head h reads KV head h // (Hq // Hkv).

    Causal masks and windows align bottom-right in each sequence, so that the last query sees the last key (jax.nn aligns
    top-left). With 3 queries and 5 keys, causal:

        key     0 1 2 3 4
        query 0 x x x
        query 1 x x x x
        query 2 x x x x x

    Args:
      q: (B, Sq, Hq, D) float16, bfloat16, float32, or float8_e4m3fn.
      k: (B, Skv, Hkv, D) of q's type; Hq is a multiple of Hkv, by any factor.
      v: (B, Skv, Hkv, Dv) of q's type.
      is_causal: key j is visible to query i iff j <= i + kv_len - q_len.
      q_lengths: int32 (B,): the leading q rows of each sequence that are real; None: all. Rows past a length give o = 0 and
        lse = -inf. Clamped to [0, Sq].
      kv_lengths: int32 (B,): likewise for k and v. What lies past a length, NaN included, has no effect. Clamped to [0, Skv].
      scale: factor on q k^T; None: D ** -0.5.
      softcap: c in s = c * tanh(s / c), applied to scaled scores before masking; None or 0: none.
      window: (left, right): key j is visible to query i iff i + o - left <= j <= i + o + right, o = kv_len - q_len. The
        bounds count the keys beside the query's own; None or -1 is unbounded. A causal window of W keys is (W - 1, 0).
      sinks: float (Hq,): a logit per query head that joins the softmax's denominator and has no value.
      q_scale, k_scale, v_scale: float32 scalar, (Hkv,) or (B, Hkv): factors of FP8 inputs.
      out_dtype: element type of o; None: q's type (bfloat16 for FP8 inputs).
      return_lse: also return the log-sum-exp.
      backend: "auto", "dense", "varlen", "sliding_window" or "fp8": a recorded request rule the kernel must satisfy.
      build: "sm90", "sm80" or "xla": that build or an error, never another in its place.
      kernel_map: {key: Kernel}: the caller's implementations by dispatch key.
      device: a known device's name or a Device: the target to choose for; None: where the arrays are, or the default GPU.
      interpret: run the build of a named CUDA device in Pallas' interpreter on the host.

    Returns:
      o: (B, Sq, Hq, Dv). A row that sees no key is 0.
      With return_lse, (o, lse), lse float32 (B, Sq, Hq): the natural log of the sum of exp of the scaled, capped, masked
      scores, plus the sink if there is one; -inf where no key is seen and there is no sink.

    Raises:
      ValueError: shapes, options or requests that contradict each other, by name and value.
      TypeError: element types, tracers among the static options.
      NoImplementationError, ReplacementRefusedError: no kernel serves the call; every candidate with its reasons.

    Differentiable in q, k, v and sinks (not with FP8 inputs). Idea of the tiled softmax: Dao et al., FlashAttention, 2022.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> q, k = jnp.ones((2, 5, 6, 16)), jnp.ones((2, 7, 2, 16))
      >>> gqa_prefill(q, k, k, window=(3, 0)).shape
      (2, 5, 6, 16)
    """
    name, slot = "gqa_prefill", "prefill"
    arrays = present(
        q=q,
        k=k,
        v=v,
        q_lengths=q_lengths,
        kv_lengths=kv_lengths,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        sinks=sinks,
    )
    is_uniform = q_lengths is None and kv_lengths is None
    return common(
        name,
        slot,
        arrays,
        is_uniform=is_uniform,
        is_causal=is_causal,
        scale=scale,
        softcap=softcap,
        window=window,
        out_dtype=out_dtype,
        return_lse=return_lse,
        backend=backend,
        build=build,
        kernel_map=kernel_map,
        device=device,
        interpret=interpret,
    )


@op
def gqa_prefill_packed(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_kv: Any,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    is_causal: bool = True,
    is_uniform: bool | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    sinks: Any = None,
    q_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    out_dtype: Any = None,
    return_lse: bool = False,
    backend: str = "auto",
    build: str | None = None,
    kernel_map: Mapping[str, Kernel] | None = None,
    device: str | Device | None = None,
    interpret: bool = False,
) -> Invocation:
    """Grouped-query attention over sequences packed end to end, of any lengths, zero included.

    Sequence i is rows cu_seqlens_q[i] : cu_seqlens_q[i + 1] of q and cu_seqlens_kv[i] : cu_seqlens_kv[i + 1] of k and v. No
    sequence sees another. Causal masks and windows align bottom-right in each, as in `gqa_prefill`.

    Args:
      q: (Tq, Hq, D) float16, bfloat16, float32, or float8_e4m3fn.
      k: (Tkv, Hkv, D) of q's type.
      v: (Tkv, Hkv, Dv) of q's type.
      cu_seqlens_q: int32 (B + 1,), non-decreasing from 0. Rows past the last entry give o = 0 and lse = -inf. Values are
        clamped to a non-decreasing sequence in [0, Tq]; `check_packed_inputs` tells on the host what is wrong.
      cu_seqlens_kv: int32 (B + 1,): likewise for k and v.
      max_seqlen_q, max_seqlen_kv: static bounds that steer the choice and the tile; None: the token counts. Longer sequences
        stay correct.
      is_uniform: every sequence has exactly max_seqlen tokens. None: read from NumPy cu_seqlens, else ragged. True is the
        caller's promise, checked as T == B * max_seqlen: a false promise gives wrong rows, never an access out of bounds.
      is_causal, scale, softcap, window, sinks, q_scale, k_scale, v_scale, out_dtype, return_lse, backend, build, kernel_map,
      device, interpret: as in `gqa_prefill`.

    Returns:
      o: (Tq, Hq, Dv); with return_lse, (o, lse), lse float32 (Tq, Hq).

    Raises:
      ValueError, TypeError, NoImplementationError, ReplacementRefusedError: as `gqa_prefill`.

    Differentiable in q, k, v and sinks (not with FP8 inputs).

    Example:
      >>> import numpy as np, jax.numpy as jnp
      >>> bounds = np.array([0, 5, 5, 12], np.int32)  # three sequences, the second one empty
      >>> gqa_prefill_packed(jnp.ones((12, 6, 16)), jnp.ones((12, 2, 16)), jnp.ones((12, 2, 16)), bounds, bounds).shape
      (12, 6, 16)
    """
    name, slot = "gqa_prefill_packed", "prefill_packed"
    arrays = present(
        q=q,
        k=k,
        v=v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_kv=cu_seqlens_kv,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        sinks=sinks,
    )
    checks.check_static(name, {"is_uniform": is_uniform})
    max_q = checks.static_length(name, "max_seqlen_q", max_seqlen_q)
    max_kv = checks.static_length(name, "max_seqlen_kv", max_seqlen_kv)
    uniform = _uniform_lengths(name, arrays, is_uniform, max_q, max_kv)
    return common(
        name,
        slot,
        arrays,
        is_uniform=uniform is not None,
        max_seqlen_q=uniform[0] if uniform else max_q,
        max_seqlen_kv=uniform[1] if uniform else max_kv,
        is_causal=is_causal,
        scale=scale,
        softcap=softcap,
        window=window,
        out_dtype=out_dtype,
        return_lse=return_lse,
        backend=backend,
        build=build,
        kernel_map=kernel_map,
        device=device,
        interpret=interpret,
    )


def _uniform_lengths(
    op: str, arrays: dict[str, Any], is_uniform: bool | None, max_q: int | None, max_kv: int | None
) -> tuple[int, int] | None:
    """The one (query, key) length of every sequence, promised or read from NumPy bounds; None when ragged."""
    bounds = arrays["cu_seqlens_q"], arrays["cu_seqlens_kv"]
    tokens = arrays["q"].shape[0], arrays["k"].shape[0]
    batch = (bounds[0].shape or (1,))[0] - 1
    if is_uniform is False or batch < 1 or 0 in tokens:
        return None
    if is_uniform is None:
        if any(not isinstance(b, np.ndarray) or b.shape != (batch + 1,) for b in bounds):
            return None
        lengths = [int(t) // batch for t in tokens]
        even = all(np.array_equal(b, np.arange(batch + 1) * n) for b, n in zip(bounds, lengths, strict=True))
        exact = even and all(n * batch == t for n, t in zip(lengths, tokens, strict=True))
        return (lengths[0], lengths[1]) if exact else None
    if checks.static_bool(op, "is_uniform", is_uniform):
        lengths = [hint or t // batch for hint, t in zip((max_q, max_kv), tokens, strict=True)]
        for side, length, total in zip(("q", "kv"), lengths, tokens, strict=True):
            if length * batch != total:
                raise checks.fail(
                    op,
                    "is_uniform",
                    f"is True with max_seqlen_{side} {length}, a batch of {batch} and {total} {side} tokens",
                    f"batch * max_seqlen_{side} == tokens",
                    "Pass is_uniform=False for ragged sequences.",
                )
        return lengths[0], lengths[1]
    return None
