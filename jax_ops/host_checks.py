"""What is wrong with the values of a call's lengths, bounds and tables, told on the host.

The ops see values only on the device: there they are clamped, masked and dropped, so that nothing foreign is ever touched, and
a mistake gives wrong rows without a word. These functions read the values and say what the mistake is; call them outside jit,
while debugging or where requests come in. Shapes and element types are checked as by the op.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jax.core import Tracer

from jax_ops import checks
from jax_ops.options import present


def check_packed_inputs(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_kv: Any, *, is_uniform: bool = False) -> None:
    """Whether the bounds of a `gqa_prefill_packed` call are what it takes them for.

    Args:
      q: (Tq, Hq, D); only its shape and type are read, as those of k (Tkv, Hkv, D) and v (Tkv, Hkv, Dv).
      k: keys.
      v: values.
      cu_seqlens_q: int32 (B + 1,), concrete: non-decreasing from 0, at most Tq. Rows past the last bound are padding.
      cu_seqlens_kv: int32 (B + 1,), likewise for k and v.
      is_uniform: whether the call says so: every sequence has Tq / B and Tkv / B tokens.

    Raises:
      ValueError: the first wrong value, with its sequence and the rule it breaks; shapes, as the op.
      TypeError: bounds that are tracers, whose values cannot be read; element types, as the op.

    Example:
      >>> import jax.numpy as jnp
      >>> q, kv = jnp.ones((9, 4, 8)), jnp.ones((9, 2, 8))
      >>> check_packed_inputs(q, kv, kv, jnp.array([0, 5, 9]), jnp.array([0, 5, 4]))
      Traceback (most recent call last):
      ValueError: check_packed_inputs: cu_seqlens_kv of sequence 1 goes from 5 to 4; need a non-decreasing sequence.
    """
    op = "check_packed_inputs"
    arrays = present(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv)
    values = _values(op, cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv)
    _check_arrays("gqa_prefill_packed", "prefill_packed", arrays)
    for name, tokens in (("cu_seqlens_q", arrays["q"].shape[0]), ("cu_seqlens_kv", arrays["k"].shape[0])):
        _check_bounds(op, name, values[name], tokens)
        if checks.static_bool(op, "is_uniform", is_uniform):
            _check_uniform(op, name, values[name], tokens)


def check_decode_inputs(q: Any, k: Any, v: Any, kv_lengths: Any = None) -> None:
    """Whether the lengths of a `gqa_decode` call are what it takes them for.

    Args:
      q: (B, Hq, D) or (B, Tq, Hq, D); only its shape and type are read, as those of k (B, S, Hkv, D) and v (B, S, Hkv, Dv).
      k: cached keys.
      v: cached values.
      kv_lengths: int32 (B,), concrete, in [0, S]; None: S.

    Raises:
      ValueError: the first length out of range, with its sequence; shapes, as the op.
      TypeError: lengths that are a tracer, whose values cannot be read; element types, as the op.

    Example:
      >>> import jax.numpy as jnp
      >>> cache = jnp.ones((2, 64, 2, 8))
      >>> check_decode_inputs(jnp.ones((2, 4, 8)), cache, cache, jnp.array([64, 65]))
      Traceback (most recent call last):
      ValueError: check_decode_inputs: kv_lengths of sequence 1 is 65; need 0 to 64, the capacity.
    """
    op = "check_decode_inputs"
    arrays = present(q=q, k=k, v=v, kv_lengths=kv_lengths)
    values = _values(op, kv_lengths=kv_lengths)
    _check_arrays("gqa_decode", "decode", arrays)
    if "kv_lengths" in values:
        _check_lengths(op, values["kv_lengths"], arrays["k"].shape[1])


def check_paged_inputs(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    page_table: Any,
    kv_lengths: Any,
    *,
    k_new: Any = None,
    v_new: Any = None,
    cu_seqlens_q: Any = None,
    allow_shared: bool = False,
) -> None:
    """Whether the lengths and the page table of a paged call are what it takes them for.

    Serves the three paged ops: `gqa_decode_paged` as it is called; `gqa_prefill_paged` with its k and v as k_new and v_new and
    its cache_lengths as kv_lengths; `append_paged` likewise, with None for q.

    Args:
      q: queries, or None; only shapes and types are read of q, the pools and the new tokens.
      k_pages: (P, page_size, Hkv, D).
      v_pages: (P, page_size, Hkv, Dv).
      page_table: int32 (B, max_pages), concrete. Entries that hold tokens, new ones included, are in [0, P) and all
        different; the entries after them may be anything.
      kv_lengths: int32 (B,), concrete, before the append if there are new tokens. They fit the capacity, max_pages * page_size,
        with the new tokens.
      k_new: keys to append, as the op takes them, or None.
      v_new: values to append, or None.
      cu_seqlens_q: int32 (B + 1,), concrete: bounds of the new tokens of each sequence, for packed ones.
      allow_shared: sequences may share pages that the call does not write to (a common prefix).

    Raises:
      ValueError: the first wrong value, with its sequence and the rule it breaks; shapes, as the op.
      TypeError: lengths, bounds or a table that are tracers, whose values cannot be read; element types, as the op.

    Example:
      >>> import jax.numpy as jnp
      >>> pool, table = jnp.ones((8, 4, 2, 8)), jnp.array([[7, 8], [2, -1]])
      >>> check_paged_inputs(jnp.ones((2, 4, 8)), pool, pool, table, jnp.array([5, 3]))
      Traceback (most recent call last):
      ValueError: check_paged_inputs: page_table of sequence 0, entry 1, is 8; need 0 to 7, a page.
    """
    op = "check_paged_inputs"
    read = _values(op, kv_lengths=kv_lengths, page_table=page_table, cu_seqlens_q=cu_seqlens_q)
    called = "append_paged" if q is None else "gqa_decode_paged" if cu_seqlens_q is None else "gqa_prefill_paged"
    if k_new is None and called != "gqa_decode_paged":
        raise checks.fail(op, "k_new", "is None", f"the new keys, k of {called}")
    for name, given, other in (("k_new", k_new, v_new), ("v_new", v_new, k_new)):
        if given is None and other is not None:
            raise checks.fail(op, name, "is None and the other is given", "both or neither")
    slot, names = _PAGED_OPS[called]
    arrays = present(q=q, k_pages=k_pages, v_pages=v_pages, page_table=page_table)
    arrays |= present(**dict(zip(names, (kv_lengths, k_new, v_new, cu_seqlens_q), strict=True)))
    _check_arrays(called, slot, arrays)

    table, old = read["page_table"], read["kv_lengths"]
    pages, page_size = arrays["k_pages"].shape[:2]
    new = np.zeros_like(old)
    shape = None if k_new is None else np.shape(k_new)
    if cu_seqlens_q is not None and shape is not None:
        _check_bounds(op, "cu_seqlens_q", read["cu_seqlens_q"], shape[0])
        new = np.diff(read["cu_seqlens_q"])
    elif shape is not None:
        new += shape[1] if len(shape) == 4 else 1
        if q is None and shape[0] != len(old):
            came = f"has {shape[0]} tokens for {len(old)} sequences"
            raise checks.fail(op, "k_new", came, "one a sequence, or cu_seqlens_q")
    capacity = table.shape[1] * page_size
    _check_lengths(op, old, capacity)
    for b in np.flatnonzero(old + new > capacity):
        raise checks.fail(
            op,
            "kv_lengths",
            f"of sequence {b} is {old[b]}, with {new[b]} new tokens",
            f"room in the {capacity} of the capacity",
        )
    entry = np.arange(table.shape[1])
    used = entry < -(-(old + new) // page_size)[:, None]
    written = used & (entry >= (old // page_size)[:, None]) & (new > 0)[:, None]
    for b, i in np.argwhere(used & ((table < 0) | (table >= pages))):
        remedy = "It is written by this call." if written[b, i] else ""
        raise checks.fail(
            op, "page_table", f"of sequence {b}, entry {i}, is {table[b, i]}", f"0 to {pages - 1}, a page", remedy
        )
    _check_distinct(op, table, used, written, checks.static_bool(op, "allow_shared", allow_shared))


# The paged ops' slots, and what each calls the lengths, the new keys and values, and their bounds.
_PAGED_OPS = {
    "gqa_decode_paged": ("decode_paged", ("kv_lengths", "k_new", "v_new", "cu_seqlens_q")),
    "gqa_prefill_paged": ("prefill_paged", ("cache_lengths", "k", "v", "cu_seqlens_q")),
    "append_paged": ("append_paged", ("lengths", "k", "v", "cu_seqlens")),
}


def _check_arrays(op: str, slot: str, arrays: dict[str, Any]) -> None:
    checks.check_shapes(op, slot, arrays)
    checks.check_types(op, arrays)


def _values(op: str, **arrays: Any) -> dict[str, np.ndarray]:
    """The values of the arrays that are given, as int64."""
    for name, array in arrays.items():
        if isinstance(array, Tracer):
            came, rule = f"is a tracer of type {array.aval}", "a concrete array, whose values can be read"
            raise checks.wrong_type(op, name, came, rule, "Call it outside jit, on the arrays that go in.")
    return {name: np.asarray(array).astype(np.int64) for name, array in arrays.items() if array is not None}


def _check_bounds(op: str, name: str, bounds: np.ndarray, tokens: int) -> None:
    if bounds[0] != 0:
        raise checks.fail(op, name, f"starts at {bounds[0]}", "0, where sequence 0 begins")
    for b in np.flatnonzero(np.diff(bounds) < 0):
        raise checks.fail(op, name, f"of sequence {b} goes from {bounds[b]} to {bounds[b + 1]}", "a non-decreasing sequence")
    for b in np.flatnonzero(bounds[1:] > tokens):
        raise checks.fail(op, name, f"of sequence {b} ends at {bounds[b + 1]}", f"at most {tokens}, the tokens there are")


def _check_uniform(op: str, name: str, bounds: np.ndarray, tokens: int) -> None:
    batch = len(bounds) - 1
    for b in np.flatnonzero(np.diff(bounds) * batch != tokens):
        came = f"is True, and sequence {b} of {name} has {bounds[b + 1] - bounds[b]} tokens"
        raise checks.fail(op, "is_uniform", came, f"{tokens} / {batch} in each", "Pass is_uniform=False for ragged sequences.")


def _check_lengths(op: str, lengths: np.ndarray, capacity: int) -> None:
    for b in np.flatnonzero((lengths < 0) | (lengths > capacity)):
        raise checks.fail(op, "kv_lengths", f"of sequence {b} is {lengths[b]}", f"0 to {capacity}, the capacity")


def _check_distinct(op: str, table: np.ndarray, used: np.ndarray, written: np.ndarray, allow_shared: bool) -> None:
    """No page stands twice among the used entries, or, if they may be shared, none that is written does."""
    first: dict[int, tuple[int, int]] = {}
    for b, i in np.argwhere(used):
        page = int(table[b, i])
        other = first.setdefault(page, (b, i))
        if other == (b, i) or (allow_shared and other[0] != b and not (written[b, i] or written[other])):
            continue
        came = f"of sequence {b}, entry {i}, is page {page}, as of sequence {other[0]}, entry {other[1]}"
        rule = "unshared pages where this call writes" if allow_shared else "a page of its own"
        raise checks.fail(op, "page_table", came, rule)
