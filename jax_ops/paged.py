"""Paged caches: decode, prefill that appends, and the append alone.

A pool holds pages of page_size tokens, (P, page_size, Hkv, D); page_table[b, i] names the page of tokens
i * page_size ... of sequence b. Entries beyond ceil(length / page_size) are never read, whatever they hold. A page id outside
[0, P) inside a length masks its tokens; an append to such a page, or past max_pages * page_size, is dropped, and the token is
still attended in its own call. The ops return updated pools that alias the ones given: donate them to the caller's jit
(`jax.jit(step, donate_argnames=("k_pages", "v_pages"))`) and nothing is copied; an eager call copies each pool once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from dispatch_core import Device, Kernel
from jax_ops import checks
from jax_ops.dispatch import op
from jax_ops.options import common, present
from jax_ops.request import Invocation
from jax_ops.rope import Rope, rope_facts


@op
def gqa_decode_paged(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    page_table: Any,
    kv_lengths: Any,
    *,
    k_new: Any = None,
    v_new: Any = None,
    rope: Rope | None = None,
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
    """Grouped-query attention of the last token(s) of each sequence against its pages; appends them first if given.

    Args:
      q: (B, Hq, D), or (B, Tq, Hq, D) with 1 to 16 tokens, the last positions of the sequence, causal among themselves;
        float16, bfloat16 or float32.
      k_pages: (P, page_size, Hkv, D) of q's type, or float8_e4m3fn. Any page_size from 1 up.
      v_pages: (P, page_size, Hkv, Dv) of k_pages' type.
      page_table: int32 (B, max_pages).
      kv_lengths: int32 (B,): live keys of each sequence. Without k_new they include the query tokens; with it they are the
        lengths before the append. Clamped to [0, max_pages * page_size].
      k_new: (B, Hkv, D) or (B, Tq, Hkv, D) of q's type: the keys of the query tokens, to append. They are attended as they
        are, unquantised.
      v_new: (B, Hkv, Dv) or (B, Tq, Hkv, Dv): their values.
      rope: rotates q, and k_new before it is stored, at their absolute positions.
      k_scale, v_scale: float32 scalar, (Hkv,) or (B, Hkv): factors of an FP8 cache, applied on reading and divided out on
        writing: the stored value is e4m3(clamp(x / scale, +-448)).
      scale, softcap, window, sinks, return_lse, build, kernel_map, device, interpret: as in `gqa_decode`.

    Returns:
      o: like q with Dv for D; then, with return_lse, lse float32 of o's shape without its last axis; then, with k_new, the
      updated k_pages and v_pages. A single result is not wrapped in a tuple.

    Raises:
      ValueError, TypeError, NoImplementationError, ReplacementRefusedError: as `gqa_decode`.

    Not differentiable; `gqa_prefill` is. Pages: Kwon et al., PagedAttention, 2023.

    Example:
      >>> import jax.numpy as jnp
      >>> pool, table = jnp.zeros((8, 4, 2, 16)), jnp.array([[0, 3], [5, -1]])
      >>> step = gqa_decode_paged(
      ...     jnp.ones((2, 6, 16)),
      ...     pool,
      ...     pool,
      ...     table,
      ...     jnp.array([4, 0]),
      ...     k_new=jnp.ones((2, 2, 16)),
      ...     v_new=jnp.ones((2, 2, 16)),
      ...     rope=Rope(max_position=8),
      ... )
      >>> [x.shape for x in step]
      [(2, 6, 16), (8, 4, 2, 16), (8, 4, 2, 16)]
    """
    name = "gqa_decode_paged"
    arrays = present(
        q=q,
        k_pages=k_pages,
        v_pages=v_pages,
        page_table=page_table,
        kv_lengths=kv_lengths,
        k_new=k_new,
        v_new=v_new,
        k_scale=k_scale,
        v_scale=v_scale,
        sinks=sinks,
    )
    for given, missing in (("k_new", "v_new"), ("v_new", "k_new")):
        if given in arrays and missing not in arrays:
            raise checks.fail(name, missing, f"is None and {given} is given", "both or neither")
    facts, frequencies = rope_facts(name, rope, arrays["q"].shape[-1])
    return common(
        name,
        "decode_paged",
        {**arrays, **frequencies},
        rope=facts,
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


@op
def gqa_prefill_paged(
    q: Any,
    k: Any,
    v: Any,
    k_pages: Any,
    v_pages: Any,
    page_table: Any,
    cu_seqlens_q: Any,
    cache_lengths: Any,
    *,
    max_seqlen_q: int | None = None,
    is_causal: bool = True,
    rope: Rope | None = None,
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
    """Appends a chunk of tokens to each sequence's pages and attends to everything cached plus the chunk.

    Token t of sequence b stands at position cache_lengths[b] + t. With 3 tokens cached and a chunk of 2, causal:

        position  0 1 2 3 4
        token 0   x x x x
        token 1   x x x x x

    Args:
      q: (T, Hq, D) float16, bfloat16 or float32: the chunks packed end to end.
      k: (T, Hkv, D) of q's type: the chunks' keys, attended unquantised.
      v: (T, Hkv, Dv) of q's type.
      k_pages: (P, page_size, Hkv, D) of q's type, or float8_e4m3fn.
      v_pages: (P, page_size, Hkv, Dv) of k_pages' type.
      page_table: int32 (B, max_pages), with pages for the chunk already allocated.
      cu_seqlens_q: int32 (B + 1,): bounds of the chunks, empty ones included. Rows past the last bound are padding: o = 0,
        lse = -inf, and nothing is stored.
      cache_lengths: int32 (B,): tokens cached before this call; they are not advanced. Clamped to [0, capacity].
      max_seqlen_q: static bound of the chunks, steers the tile; None: T. Longer chunks stay correct.
      is_causal: without a causal mask every token sees the whole chunk.
      rope: rotates q and k at their absolute positions; stored keys are the rotated ones.
      k_scale, v_scale: as in `gqa_decode_paged`.
      scale, softcap, window, sinks, return_lse, build, kernel_map, device, interpret: as in `gqa_prefill`.

    Returns:
      (o, k_pages, v_pages), or (o, lse, k_pages, v_pages) with return_lse: o (T, Hq, Dv), lse float32 (T, Hq), natural log.

    Raises:
      ValueError, TypeError, NoImplementationError, ReplacementRefusedError: as `gqa_prefill`.

    Not differentiable; `gqa_prefill_packed` is.

    Example:
      >>> import jax.numpy as jnp
      >>> pool, table = jnp.zeros((8, 4, 2, 16)), jnp.array([[0, 3], [5, -1]])
      >>> o, k_pages, v_pages = gqa_prefill_paged(
      ...     jnp.ones((7, 6, 16)),
      ...     jnp.ones((7, 2, 16)),
      ...     jnp.ones((7, 2, 16)),
      ...     pool,
      ...     pool,
      ...     table,
      ...     cu_seqlens_q=jnp.array([0, 5, 7]),
      ...     cache_lengths=jnp.array([3, 0]),
      ... )
      >>> int(k_pages[0, 3, 0, 0]), int(k_pages[0, 2, 0, 0])
      (1, 0)
    """
    name = "gqa_prefill_paged"
    arrays = present(
        q=q,
        k=k,
        v=v,
        k_pages=k_pages,
        v_pages=v_pages,
        page_table=page_table,
        cu_seqlens_q=cu_seqlens_q,
        cache_lengths=cache_lengths,
        k_scale=k_scale,
        v_scale=v_scale,
        sinks=sinks,
    )
    facts, frequencies = rope_facts(name, rope, arrays["q"].shape[-1])
    return common(
        name,
        "prefill_paged",
        {**arrays, **frequencies},
        max_seqlen_q=checks.static_length(name, "max_seqlen_q", max_seqlen_q),
        rope=facts,
        is_causal=is_causal,
        scale=scale,
        softcap=softcap,
        window=window,
        return_lse=return_lse,
        build=build,
        kernel_map=kernel_map,
        device=device,
        interpret=interpret,
    )


@op
def append_paged(
    k: Any,
    v: Any,
    k_pages: Any,
    v_pages: Any,
    page_table: Any,
    lengths: Any,
    *,
    cu_seqlens: Any = None,
    rope: Rope | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    build: str | None = None,
    kernel_map: Mapping[str, Kernel] | None = None,
    device: str | Device | None = None,
    interpret: bool = False,
) -> Invocation:
    """Writes new tokens behind each sequence's cached ones and touches nothing else.

    Args:
      k: (T, Hkv, D) float16, bfloat16 or float32: one token a sequence (T = B), or packed with cu_seqlens.
      v: (T, Hkv, Dv) of k's type.
      k_pages: (P, page_size, Hkv, D) of k's type, or float8_e4m3fn.
      v_pages: (P, page_size, Hkv, Dv) of k_pages' type.
      page_table: int32 (B, max_pages).
      lengths: int32 (B,): tokens cached before this call; they are not advanced. Clamped to [0, capacity].
      cu_seqlens: int32 (B + 1,): bounds of the sequences' new tokens; tokens past the last bound are not stored.
      rope: rotates k at its absolute positions before it is stored.
      k_scale, v_scale: float32 scalar, (Hkv,) or (B, Hkv): an FP8 cache stores e4m3(clamp(x / scale, +-448)).
      build, kernel_map, device, interpret: as in `gqa_prefill`.

    Returns:
      (k_pages, v_pages), updated.

    Raises:
      ValueError, TypeError, NoImplementationError, ReplacementRefusedError: as `gqa_prefill`.

    Example:
      >>> import jax.numpy as jnp
      >>> pool, table = jnp.zeros((4, 2, 1, 8)), jnp.array([[2, 0]])
      >>> k_pages, v_pages = append_paged(jnp.ones((1, 1, 8)), jnp.ones((1, 1, 8)), pool, pool, table, jnp.array([3]))
      >>> int(k_pages[0, 1, 0, 0])
      1
    """
    name = "append_paged"
    arrays = present(
        k=k,
        v=v,
        k_pages=k_pages,
        v_pages=v_pages,
        page_table=page_table,
        lengths=lengths,
        cu_seqlens=cu_seqlens,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    if "cu_seqlens" not in arrays and len(arrays["k"].shape) == 3 and len(arrays["lengths"].shape) == 1:
        tokens, batch = arrays["k"].shape[0], arrays["lengths"].shape[0]
        if tokens != batch:
            raise checks.fail(name, "k", f"has {tokens} tokens for {batch} sequences", "one a sequence, or cu_seqlens")
        arrays["cu_seqlens"] = jnp.arange(batch + 1, dtype=jnp.int32)
    facts, frequencies = rope_facts(name, rope, arrays["k"].shape[-1])
    return common(
        name,
        "append_paged",
        {**arrays, **frequencies},
        rope=facts,
        build=build,
        kernel_map=kernel_map,
        device=device,
        interpret=interpret,
    )
