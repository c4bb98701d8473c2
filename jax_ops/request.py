"""A call as data: its static half (hashable, what jit keys on), its arrays by name, and the facts both amount to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from jax import lax

from dispatch_core import CATALOGUE, AttentionCall, Device, Kernel, Paging, RopeFacts, Window
from jax_ops.signature import SIGNATURES

Arrays = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """The static half of a call.

    Attributes:
      op: the public op's name, for messages.
      slot: its signature and key tuple.
      device: the target the choice is made for.
      is_portable: the caller named no device, so lowering for another platform takes that platform's xla build.
      interpret: run the chosen GPU build in Pallas' interpreter on the host.
      build: the build the caller demands, or None.
      replacements: the caller's kernels as sorted (key, kernel) pairs.
    The other attributes are the facts of the same names of `AttentionCall`; a None length is taken from the arrays.
    """

    op: str
    slot: str
    device: Device
    is_portable: bool = True
    interpret: bool = False
    build: str | None = None
    replacements: tuple[tuple[str, Kernel], ...] = ()
    is_causal: bool = False
    scale: float | None = None
    softcap: float | None = None
    window: Window | None = None
    backend: str = "auto"
    out_dtype: str | None = None
    return_lse: bool = False
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None
    is_uniform: bool = True
    rope: RopeFacts | None = None

    @property
    def kernels(self) -> Mapping[str, Kernel]:
        """The catalogue with the caller's replacements."""
        return MappingProxyType({**CATALOGUE, **dict(self.replacements)})

    @property
    def replaced(self) -> frozenset[str]:
        """The keys the caller replaced."""
        return frozenset(key for key, _ in self.replacements)


@dataclass(frozen=True)
class Invocation:
    """A checked call: its static half, and its arrays as the caller gave them."""

    request: Request
    arrays: Arrays


def facts(request: Request, arrays: Arrays, device: Device | None = None) -> AttentionCall:
    """The call record of a request on arrays of these shapes, for the request's device or another."""
    signature, names = SIGNATURES[request.slot], tuple(arrays)
    size = signature.sizes(names, tuple(a.shape for a in arrays.values()))
    dtype = {name: str(array.dtype) for name, array in arrays.items()}
    paging = Paging(size["n"], size["m"]) if "n" in size else None
    max_q, max_kv = _bounds(request, size, writes=signature.writes_pages in names)
    return AttentionCall(
        device=request.device if device is None else device,
        dtype=dtype.get("q") or dtype["k"],
        batch=size["b"] if "b" in size else size["b1"] - 1,
        q_heads=size.get("hg", size["h"]),
        kv_heads=size["h"],
        head_dim=size["d"],
        head_dim_v=size["e"],
        max_seqlen_q=max_q,
        max_seqlen_kv=max_kv,
        is_causal=request.is_causal,
        scale=request.scale,
        softcap=request.softcap,
        window=request.window,
        backend=request.backend,
        is_uniform=request.is_uniform,
        paging=paging,
        kv_dtype=dtype.get("k_pages") or dtype["k"],
        out_dtype=request.out_dtype,
        rope=request.rope,
        has_sinks="sinks" in arrays,
        return_lse=request.return_lse,
    )


def _bounds(request: Request, size: dict[str, int], writes: bool) -> tuple[int, int]:
    """The lengths a call is dispatched on: the caller's hints, or what the arrays hold.

    A hint may be exceeded, but a window that hides nothing within the lengths is dropped from the record. So under a
    window the lengths are never stated so short that they call it idle while the arrays (and, past a full cache, the new
    tokens) hold keys that it hides.
    """
    keys = size["m"] * size["n"] if "n" in size else size["s"]
    max_q = min(request.max_seqlen_q or size["t"], size["t"])
    max_kv = min(request.max_seqlen_kv or keys, keys)
    window = request.window or Window()
    if window.left is not None:
        max_kv = max(max_kv, min(keys + (size["t"] if writes else 0), window.left + 2))
    if window.right is not None:
        max_q = max(max_q, min(size["t"], window.right + 2))
    return max_q, max_kv


def normalise(request: Request, arrays: Arrays) -> Arrays:
    """The arrays as every build takes them, in the order of the signature.

    A token axis in decode, int32 lengths, within [0, capacity] but for decode (see `clamped_lengths`), non-decreasing int32
    bounds, float32 scales (batch, kv_heads), sinks and frequencies.
    """
    out = {name: jnp.asarray(arrays[name]) for name in SIGNATURES[request.slot].inputs if name in arrays}
    is_decode = request.slot.startswith("decode")
    if is_decode:
        for name in ("q", "k_new", "v_new"):
            if name in out and out[name].ndim == 3:
                out[name] = out[name][:, None]
    tokens = out["q" if "q" in out else "k"].shape[-3]
    keys = _capacity(out)
    if "page_table" in out and out["page_table"].dtype != jnp.int32:
        out["page_table"] = jnp.clip(out["page_table"], -1, 2**31 - 1).astype(jnp.int32)
    limits = {"q_lengths": tokens, "cu_seqlens": tokens, "cu_seqlens_q": tokens}
    limits |= dict.fromkeys(("kv_lengths", "cache_lengths", "lengths", "cu_seqlens_kv"), keys)
    for name in limits.keys() & out.keys():
        if not (is_decode and out[name].dtype == jnp.int32):
            out[name] = jnp.clip(out[name], 0, limits[name]).astype(jnp.int32)
    bounds = [name for name in out if name.startswith("cu_")]
    if bounds:  # one launch for both
        rising = lax.cummax(jnp.stack([out[name] for name in bounds]), axis=1)
        out |= dict(zip(bounds, rising, strict=True))
    for name in ("sinks", "inv_freq"):
        if name in out:
            out[name] = out[name].astype(jnp.float32)
    for name in ("q_scale", "k_scale", "v_scale"):
        if name in out:
            scale = out[name].astype(jnp.float32)
            out[name] = jnp.broadcast_to(scale.reshape((1,) * (2 - scale.ndim) + scale.shape), _scale_shape(out))
    return out


def clamped_lengths(arrays: Arrays) -> Arrays:
    """The arrays of a decode with its lengths within [0, capacity], for kernels that the caller supplied.

    Not part of `normalise`, because in front of a kernel it is a launch of its own; the shipped ones see to it.
    """
    return arrays | {"kv_lengths": jnp.clip(arrays["kv_lengths"], 0, _capacity(arrays))}


def _capacity(arrays: Arrays) -> int:
    """Keys that a sequence can hold."""
    if "page_table" in arrays:
        return arrays["page_table"].shape[1] * arrays["k_pages"].shape[1]
    return arrays["k"].shape[-3]


def _scale_shape(arrays: Arrays) -> tuple[int, int]:
    bounds = arrays.get("cu_seqlens_q", arrays.get("cu_seqlens"))
    kv_heads = arrays["k_pages" if "k_pages" in arrays else "k"].shape[-2]
    return (arrays["q"].shape[0] if bounds is None else bounds.shape[0] - 1, kv_heads)
