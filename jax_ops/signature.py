"""The arrays of each op by named axes: one table from which shapes are checked, facts read, and shardings derived.

Axes: b sequences, b1 = b + 1 bounds, t query tokens, s key tokens, h KV heads, hg query heads (h times the group), d head
size of q and k, e head size of v and o, p pages, n tokens per page, m pages per table row, f rotary frequencies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Signature:
    """One op's arrays, in order.

    Attributes:
      inputs: axes by array name.
      outputs: axes by result name.
      batched: whether sequences are an axis of q, so that they can be split over devices and folded under vmap.
      writes_pages: the input whose presence makes the op return updated pools; None when it never writes.
      one_token: whether arrays may come without their token axis, for one token a sequence.
    """

    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    batched: bool
    writes_pages: str | None = None
    one_token: bool = False

    def backward(self) -> Signature:
        """The signature of the pull-back: the inputs, what the forward saved, and cotangents in; those of q, k and v out."""
        cotangents = {f"d{name}": axes for name, axes in self.outputs.items()}
        return replace(self, inputs={**self.inputs, **self.outputs, **cotangents}, outputs={n: self.inputs[n] for n in "qkv"})

    def axes_given(self, name: str, ndim: int) -> str:
        """The axes of an array of `ndim` axes: a scale may lack its leading ones, one decoded token its token axis."""
        axes = self.inputs[name].split()
        if name.endswith("_scale") and ndim < len(axes):
            return " ".join(axes[len(axes) - ndim :])
        if self.one_token and ndim == len(axes) - 1:
            return " ".join(a for a in axes if a != "t")
        return " ".join(axes)

    def results(self, names: tuple[str, ...], return_lse: bool) -> tuple[str, ...]:
        """The names of what a call with these arrays returns."""
        wanted = {"o"} | ({"lse"} if return_lse else set())
        if self.writes_pages in names:
            wanted |= {"k_pages", "v_pages"}
        return tuple(name for name in self.outputs if name in wanted)

    def split_axes(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """The axes along which the work may be divided over devices: KV heads, and sequences unless a pool is written."""
        return ("b", "h") if self.batched and self.writes_pages not in names else ("h",)

    def sizes(self, names: tuple[str, ...], shapes: tuple[tuple[int, ...], ...]) -> dict[str, int]:
        """The size of every axis of shapes that are known to match."""
        return {
            axis: size
            for name, shape in zip(names, shapes, strict=True)
            for axis, size in zip(self.inputs[name].split(), shape, strict=True)
        }


_POOLS = {"k_pages": "p n h d", "v_pages": "p n h e"}
_CACHE_SCALES = {"k_scale": "b h", "v_scale": "b h"}
_SCALES = {"q_scale": "b h", **_CACHE_SCALES}
_PACKED_RESULTS = {"o": "t hg e", "lse": "t hg"}
_BATCHED_RESULTS = {"o": "b t hg e", "lse": "b t hg"}

SIGNATURES: Mapping[str, Signature] = {
    "prefill": Signature(
        {"q": "b t hg d", "k": "b s h d", "v": "b s h e", "q_lengths": "b", "kv_lengths": "b", **_SCALES, "sinks": "hg"},
        _BATCHED_RESULTS,
        batched=True,
    ),
    "prefill_packed": Signature(
        {"q": "t hg d", "k": "s h d", "v": "s h e", "cu_seqlens_q": "b1", "cu_seqlens_kv": "b1", **_SCALES, "sinks": "hg"},
        _PACKED_RESULTS,
        batched=False,
    ),
    "decode": Signature(
        {"q": "b t hg d", "k": "b s h d", "v": "b s h e", "kv_lengths": "b", **_CACHE_SCALES, "sinks": "hg"},
        _BATCHED_RESULTS,
        batched=True,
        one_token=True,
    ),
    "decode_paged": Signature(
        {
            "q": "b t hg d",
            **_POOLS,
            "page_table": "b m",
            "kv_lengths": "b",
            "k_new": "b t h d",
            "v_new": "b t h e",
            "inv_freq": "f",
            **_CACHE_SCALES,
            "sinks": "hg",
        },
        {**_BATCHED_RESULTS, **_POOLS},
        batched=True,
        writes_pages="k_new",
        one_token=True,
    ),
    "prefill_paged": Signature(
        {
            "q": "t hg d",
            "k": "t h d",
            "v": "t h e",
            **_POOLS,
            "page_table": "b m",
            "cu_seqlens_q": "b1",
            "cache_lengths": "b",
            "inv_freq": "f",
            **_CACHE_SCALES,
            "sinks": "hg",
        },
        {**_PACKED_RESULTS, **_POOLS},
        batched=False,
        writes_pages="k",
    ),
    "append_paged": Signature(
        {
            "k": "t h d",
            "v": "t h e",
            **_POOLS,
            "page_table": "b m",
            "lengths": "b",
            "cu_seqlens": "b1",
            "inv_freq": "f",
            **_CACHE_SCALES,
        },
        _POOLS,
        batched=False,
        writes_pages="k",
    ),
}


def axis_words(axes: str) -> str:
    """An axes string as a reader of an error message knows it."""
    return f"({', '.join(_WORDS[a] for a in axes.split())}{',' if len(axes.split()) == 1 else ''})"


_WORDS: Mapping[str, Any] = {
    "b": "batch",
    "b1": "batch + 1",
    "t": "query tokens",
    "s": "key tokens",
    "h": "kv_heads",
    "hg": "q_heads",
    "d": "head_dim",
    "e": "head_dim_v",
    "p": "pages",
    "n": "page_size",
    "m": "max_pages",
    "f": "rotary_dim / 2",
}
