"""Other attention implementations in JAX, for measuring beside them. One that is not importable says so."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dispatch_core import FLOAT8
from jax_ops.tools.workloads import Workload

Arrays = dict[str, Any]
SM_COUNT = 132  # of the H100 and H200, from which the split counts below are made


class Run(NamedTuple):
    """A rival's call on a workload's arrays, which `layout` first puts as the rival wants them; only the call is timed."""

    call: Callable[[Arrays], Any]
    layout: Callable[[Arrays], Arrays] = lambda arrays: arrays


Rival = Callable[[Workload], Run]


class Refused(Exception):
    """A rival does not take this workload; the message says why."""


def rivals() -> dict[str, Rival]:
    """Every rival that can be imported, by name: a function from a workload to its run."""
    found: dict[str, Rival] = {"jax xla": partial(_jax_nn, "xla")}
    if jax.default_backend() == "gpu":
        found |= {"jax cudnn": partial(_jax_nn, "cudnn"), "jax pallas": _jax_pallas}
        if find_spec("flash_attn3_jax"):
            found["flash-attn3-jax"] = _flash_attn3
        if find_spec("tokamax"):
            found |= {f"tokamax {name}": partial(_tokamax, name) for name in ("mosaic", "triton")}
    return found


def missing() -> dict[str, str]:
    """Rivals that are not measured here, and why."""
    if jax.default_backend() != "gpu":
        return dict.fromkeys(("jax cudnn", "jax pallas", "flash-attn3-jax", "tokamax"), "needs a GPU")
    packages = {"flash-attn3-jax": "flash_attn3_jax", "tokamax": "tokamax"}
    return {name: "is not installed" for name, package in packages.items() if not find_spec(package)}


def _refuse_fp8(work: Workload, who: str) -> None:
    if FLOAT8 in (work.dtype, work.kv_dtype):
        raise Refused(f"{who} no FP8")


def _refuse_packs_and_pages(work: Workload, who: str) -> None:
    if work.op not in ("prefill", "decode"):
        raise Refused(f"{who} neither packed sequences nor pages")


def _refuse_chunks(work: Workload) -> None:
    if work.op == "prefill" and work.q_len != work.kv_len and work.is_causal:
        raise Refused("its causal mask is top-left")


def _with_token_axis(work: Workload, arrays: Arrays) -> Any:
    return arrays["q"][:, None] if work.is_decode else arrays["q"]


def _jax_nn(implementation: Any, work: Workload) -> Run:
    _refuse_packs_and_pages(work, "jax.nn has")
    _refuse_fp8(work, "jax.nn takes")
    _refuse_chunks(work)
    if implementation == "xla" and work.op == "prefill" and work.batch * work.q_heads * work.q_len * work.kv_len > 2**31:
        raise Refused("its score matrix passes 8 GB")
    window: Any = work.window

    def call(a: Arrays) -> Any:
        return jax.nn.dot_product_attention(
            _with_token_axis(work, a),
            a["k"],
            a["v"],
            is_causal=work.is_causal and work.op == "prefill",
            local_window_size=window,
            implementation=implementation,
        )

    return Run(call)


def _jax_pallas(work: Workload) -> Run:
    """JAX's Pallas-Triton samples, each given its arrays in the layout its kernel reads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # in favour of tokamax, which is measured beside them
        from jax.experimental.pallas.ops.gpu import attention, decode_attention, paged_attention

    _refuse_fp8(work, "its samples take")
    scale = work.head_dim**-0.5
    if work.op == "decode":
        return Run(lambda a: decode_attention.gqa(a["q"], a["k"], a["v"], k_splits=_splits(work, most=64)))
    if work.op == "decode_paged":

        def heads_first(a: Arrays) -> Arrays:
            pools = {name: jnp.transpose(a[name], (2, 0, 1, 3)) for name in ("k_pages", "v_pages")}
            return a | pools | {"q": a["q"] * jnp.asarray(scale, a["q"].dtype), "page_table": jnp.maximum(a["page_table"], 0)}

        def call(a: Arrays) -> Any:
            splits = 16 if work.batch <= 32 else 4
            together = max(1, min(128 // work.page_size, a["page_table"].shape[1] // splits))
            return paged_attention.paged_attention(
                a["q"],
                a["k_pages"],
                a["v_pages"],
                a["page_table"],
                a["kv_lengths"],
                pages_per_compute_block=together,
                k_splits=splits,
            )

        return Run(call, heads_first)
    if work.op != "prefill" or work.q_len != work.kv_len or work.window is not None:
        raise Refused("its prefill sample is square or full, without a window, packs or pages")
    group = work.q_heads // work.kv_heads
    sizes = attention.BlockSizes(128, 64, block_q_dkv=64, block_kv_dkv=64, block_q_dq=64, block_kv_dq=64)

    def repeated(a: Arrays) -> Arrays:
        return a | {name: jnp.repeat(a[name], group, axis=2) for name in ("k", "v")}

    def mha(a: Arrays) -> Any:
        return attention.mha(a["q"], a["k"], a["v"], None, scale, work.is_causal, sizes, num_warps=4, num_stages=2)

    return Run(mha, repeated)


def _splits(work: Workload, most: int) -> int:
    """A power of two of splits that together fill the device."""
    fill = max(1, SM_COUNT // (work.batch * work.kv_heads))
    return min(most, 1 << (fill.bit_length() - 1))


def _flash_attn3(work: Workload) -> Run:
    import flash_attn3_jax as fa3  # pyright: ignore[reportMissingImports]

    if work.head_dim != 128 or FLOAT8 in (work.dtype, work.kv_dtype):
        raise Refused("its wheel has head_dim 128 and 16-bit types only")
    window = (-1, -1) if work.window is None else work.window
    if work.op == "prefill":
        return Run(lambda a: fa3.flash_mha(a["q"], a["k"], a["v"], is_causal=work.is_causal, window_size=window))
    if work.op == "prefill_packed":

        def packed(a: Arrays) -> Any:
            bounds, longest = (a["cu_seqlens_q"], a["cu_seqlens_kv"]), max(work.q_lengths)
            return fa3.flash_mha_varlen(
                *(a[name] for name in ("q", "k", "v")),
                *bounds,
                max_seqlen_q=longest,
                max_seqlen_k=max(work.kv_lengths),
                softmax_scale=work.head_dim**-0.5,
                is_causal=work.is_causal,
            )

        return Run(packed)
    with_cache = partial(fa3.flash_mha_with_kvcache, is_causal=True, num_splits=_splits(work, most=32))
    if work.op == "decode":
        return Run(lambda a: with_cache(a["q"][:, None], a["k"], a["v"]))
    if work.op == "decode_paged":
        return Run(
            lambda a: with_cache(
                a["q"][:, None],
                a["k_pages"],
                a["v_pages"],
                cache_seqlens=a["kv_lengths"],
                page_table=jnp.maximum(a["page_table"], 0),
            )
        )
    if len(set(work.q_lengths)) > 1:
        raise Refused("its chunks over pages are of one length")
    # It attends over pages alone: given the chunk as if it had been appended, it is spared the append.
    return Run(
        lambda a: fa3.flash_mha_with_kvcache(
            a["q"].reshape(work.batch, work.q_len, *a["q"].shape[1:]),
            a["k_pages"],
            a["v_pages"],
            cache_seqlens=a["cache_lengths"] + work.q_len,
            page_table=jnp.maximum(a["page_table"], 0),
            is_causal=True,
        )
    )


def _tokamax(implementation: str, work: Workload) -> Run:
    import tokamax  # pyright: ignore[reportMissingImports]

    _refuse_packs_and_pages(work, "it has")
    _refuse_fp8(work, "it takes")
    _refuse_chunks(work)

    def call(a: Arrays) -> Any:
        return tokamax.dot_product_attention(
            _with_token_axis(work, a),
            a["k"],
            a["v"],
            is_causal=work.is_causal and work.op == "prefill",
            local_window_size=work.window,
            implementation=implementation,
        )

    return Run(call)
