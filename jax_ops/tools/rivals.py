"""Other attention implementations in JAX, for measuring beside them. One that is not importable says so."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import jax

from jax_ops.tools.workloads import Workload

Run = Callable[[dict[str, Any]], Any]


class Refused(Exception):
    """A rival does not take this workload; the message says why."""


def rivals() -> dict[str, Callable[[Workload], Run]]:
    """Every rival that can be imported, by name: a function from a workload to its call on that workload's arrays."""
    found: dict[str, Callable[[Workload], Run]] = {"jax xla": _jax_nn("xla")}
    if jax.default_backend() == "gpu":
        found["jax cudnn"] = _jax_nn("cudnn")
        if find_spec("flash_attn3_jax"):
            found["flash-attn3-jax"] = _flash_attn3
        if find_spec("tokamax"):
            found["tokamax"] = _tokamax
    return found


def missing() -> dict[str, str]:
    """Rivals that are not measured here, and why."""
    if jax.default_backend() != "gpu":
        return dict.fromkeys(("jax cudnn", "flash-attn3-jax", "tokamax"), "needs a GPU")
    packages = {"flash-attn3-jax": "flash_attn3_jax", "tokamax": "tokamax"}
    return {name: "is not installed" for name, package in packages.items() if not find_spec(package)}


def _jax_nn(implementation: Any) -> Callable[[Workload], Run]:
    def make(work: Workload) -> Run:
        if work.op not in ("prefill", "decode"):
            raise Refused("jax.nn has neither packed sequences nor pages")
        if "float8_e4m3fn" in (work.dtype, work.kv_dtype):
            raise Refused("jax.nn takes no FP8")
        if implementation == "xla" and work.op == "prefill" and work.batch * work.q_heads * work.q_len * work.kv_len > 2**31:
            raise Refused("its score matrix passes 8 GB")
        if work.q_len != work.kv_len and work.op == "prefill" and work.is_causal:
            raise Refused("its causal mask is top-left")

        window: Any = work.window

        def run(arrays: dict[str, Any]) -> Any:
            q = arrays["q"][:, None] if work.op == "decode" else arrays["q"]
            return jax.nn.dot_product_attention(
                q,
                arrays["k"],
                arrays["v"],
                is_causal=work.is_causal and work.op == "prefill",
                local_window_size=window,
                implementation=implementation,
            )

        return run

    return make


def _flash_attn3(work: Workload) -> Run:
    import flash_attn3_jax as fa3  # pyright: ignore[reportMissingImports]

    if work.head_dim != 128 or "float8_e4m3fn" in (work.dtype, work.kv_dtype):
        raise Refused("its wheel has head_dim 128 and 16-bit types only")
    window = (-1, -1) if work.window is None else work.window
    if work.op == "prefill":
        return lambda a: fa3.flash_mha(a["q"], a["k"], a["v"], is_causal=work.is_causal, window_size=window)
    if work.op == "prefill_packed":
        return lambda a: fa3.flash_mha_varlen(
            a["q"],
            a["k"],
            a["v"],
            a["cu_seqlens_q"],
            a["cu_seqlens_kv"],
            max_seqlen_q=max(work.q_lengths),
            max_seqlen_k=max(work.kv_lengths),
            softmax_scale=work.head_dim**-0.5,
            is_causal=work.is_causal,
        )
    if work.op == "decode":
        return lambda a: fa3.flash_mha_with_kvcache(a["q"][:, None], a["k"], a["v"], is_causal=True)
    if work.op == "decode_paged":
        return lambda a: fa3.flash_mha_with_kvcache(
            a["q"][:, None],
            a["k_pages"],
            a["v_pages"],
            cache_seqlens=a["kv_lengths"],
            page_table=abs(a["page_table"]),
            is_causal=True,
        )
    raise Refused("it appends in a call of its own")


def _tokamax(work: Workload) -> Run:
    import tokamax  # pyright: ignore[reportMissingImports]

    if work.op not in ("prefill", "decode"):
        raise Refused("it has neither packed sequences nor pages")
    if "float8_e4m3fn" in (work.dtype, work.kv_dtype):
        raise Refused("it takes no FP8")
    if work.q_len != work.kv_len and work.op == "prefill" and work.is_causal:
        raise Refused("its causal mask is top-left")

    def run(a: dict[str, Any]) -> Any:
        q = a["q"][:, None] if work.op == "decode" else a["q"]
        causal = work.is_causal and work.op == "prefill"
        return tokamax.dot_product_attention(q, a["k"], a["v"], is_causal=causal, local_window_size=work.window)

    return run
