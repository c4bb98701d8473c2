"""Cases of `tests.inputs` as calls of the public ops, and twins of a case that need no new compilation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import jax
import numpy as np

import jax_ops
from tests.inputs import Case
from tests.oracle import Rope

_LENGTHS = ("q_lengths", "kv_lengths", "cache_lengths", "lengths")
_BOUNDS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens")


@contextmanager
def quick_compilation() -> Iterator[None]:
    """Programs compiled within are not optimised by LLVM, which halves the time; XLA's own passes are the usual ones."""
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)


def keywords(case: Case) -> dict[str, Any]:
    """Everything but the arrays, as the public op takes it, with the lse asked for where there is one."""
    static = {**case.options, **case.hints}
    if "rope" in static:
        static["rope"] = public_rope(static["rope"])
    if case.op not in ("append_paged", "merge_attention"):
        static["return_lse"] = True
    return static


def public_rope(rope: Rope) -> jax_ops.Rope:
    """The oracle's rope as the public one, which wants a max_position."""
    values = {f.name: getattr(rope, f.name) for f in fields(rope)}
    return jax_ops.Rope(**{**values, "max_position": rope.max_position or 16})


def call(case: Case, **more: Any) -> tuple[Any, ...]:
    """The public op's results for a case."""
    return getattr(jax_ops, case.op)(**case.arrays, **{**keywords(case), **more})


def redrawn(case: Case, seed: int) -> Case:
    """A twin of the same shapes and static facts: other values, other pages, and live lengths of at most the case's.

    Sequences that fill a page table row keep to the pages they had, so no two of them ever write to one place.
    """
    rng = np.random.default_rng(seed)
    arrays = {name: _redrawn_array(rng, name, x) for name, x in case.arrays.items()}
    if "page_table" in arrays:
        pages = len(arrays["k_pages"])
        table = arrays["page_table"]
        real = (table >= 0) & (table < pages)
        arrays["page_table"] = np.where(real, rng.permutation(pages)[np.where(real, table, 0)], table).astype(np.int32)
    return replace(case, arrays=arrays)


def _redrawn_array(rng: np.random.Generator, name: str, x: np.ndarray) -> np.ndarray:
    if name in _LENGTHS:
        return _at_most(rng, x)
    if name in _BOUNDS:
        return np.concatenate([x[:1], x[:1] + np.cumsum(_at_most(rng, np.diff(x)))]).astype(np.int32)
    if name == "page_table":
        return x
    return rng.permutation(x.reshape(-1)).reshape(x.shape)


def _at_most(rng: np.random.Generator, lengths: np.ndarray) -> np.ndarray:
    """Lengths in [0, the given one], the ends often."""
    kind = rng.integers(4, size=lengths.shape)
    return np.choose(kind, (lengths, np.minimum(lengths, 1), rng.integers(lengths + 1), rng.integers(lengths + 1))).astype(
        np.int32
    )
