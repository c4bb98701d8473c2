"""What a call must be before anything is traced: shapes, element types, static options.

Each error names the argument, what came, and what is accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.core import Tracer

from dispatch_core import FLOAT8, HALF_TYPES, Window
from jax_ops.signature import SIGNATURES, Signature, axis_words

ACCEPTED_TYPES = (*HALF_TYPES, "float32")
_FLOATS = (*ACCEPTED_TYPES, "float64")
_INTEGERS = ("int32", "int64")
_MAX_FLOAT32 = float(np.finfo(np.float32).max)


def fail(op: str, argument: str, came: object, rule: str, remedy: str = "") -> ValueError:
    """The ValueError of this library's one form: `<op>: <argument> <what came>; need <rule>. <remedy>`."""
    return ValueError(f"{op}: {argument} {came}; need {rule}.{' ' + remedy if remedy else ''}")


def wrong_type(op: str, argument: str, came: object, rule: str, remedy: str = "") -> TypeError:
    """As `fail`, for kinds and element types."""
    return TypeError(f"{op}: {argument} {came}; need {rule}.{' ' + remedy if remedy else ''}")


def is_array(value: object) -> bool:
    """Whether a value has a shape and an element type: a jax.Array, a tracer, a NumPy array, a ShapeDtypeStruct."""
    return hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, type)


def check_static(op: str, options: Mapping[str, Any]) -> None:
    """Refuses tracers and arrays among the options that decide the compiled program."""
    for name, value in options.items():
        if isinstance(value, Tracer):
            raise wrong_type(
                op, name, f"is a tracer of type {value.aval}", "a static Python value", f"Mark {name} static, or close over it."
            )
        if is_array(value) and getattr(value, "ndim", 0) > 0:
            raise wrong_type(op, name, f"is an array of shape {value.shape}", "a static Python value")


def static_bool(op: str, name: str, value: Any) -> bool:
    """The option as a bool."""
    if not isinstance(value, (bool, np.bool_)):
        raise wrong_type(op, name, f"is {value!r}", "True or False")
    return bool(value)


def static_number(op: str, name: str, value: Any) -> float | None:
    """The option as a float that float32 holds, or None."""
    if value is None:
        return None
    is_number = isinstance(value, (int, float)) or (is_array(value) and np.issubdtype(value.dtype, np.number))
    if not is_number or isinstance(value, bool) or np.iscomplexobj(value):
        raise wrong_type(op, name, f"is {value!r}", "a Python number or None")
    if not abs(value) <= _MAX_FLOAT32:
        raise fail(op, name, f"is {value}", "a finite number within float32")
    return float(value)


def static_softcap(op: str, value: Any) -> float | None:
    """The cap on scores as a positive float; 0 and None are no cap."""
    cap = static_number(op, "softcap", value)
    if cap is not None and cap < 0:
        raise fail(op, "softcap", f"is {cap}", "0 or more (0 and None: no cap)")
    return cap or None


def static_length(op: str, name: str, value: Any) -> int | None:
    """The option as a positive int, or None."""
    if value is None:
        return None
    check_static(op, {name: value})
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise wrong_type(op, name, f"is {value!r}", "a Python int or None")
    if value < 1:
        raise fail(op, name, f"is {value}", "a positive int")
    return int(value)


def static_window(op: str, window: Any) -> Window | None:
    """(left, right) as a Window; None and -1 are unbounded."""
    if window is None:
        return None
    if isinstance(window, (int, np.integer)) and not isinstance(window, bool):
        remedy = f"A window of {window} keys that ends at the query is window=({int(window) - 1}, 0)."
        remedy = remedy if window > 0 else "No window is None."
        raise wrong_type(op, "window", f"is the int {window}", "(left, right), the keys beside the query's own", remedy)
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise wrong_type(op, "window", f"is {window!r}", "a pair (left, right) of ints or None")
    for side, value in zip(("left", "right"), window, strict=True):
        if isinstance(value, Tracer):
            raise wrong_type(op, "window", f"has a tracer as its {side} bound", "static ints", "Close over the bounds.")
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, np.integer))):
            raise wrong_type(op, "window", f"has {value!r} as its {side} bound", "an int or None")
        if value is not None and value < -1:
            raise fail(op, "window", f"has {value} as its {side} bound", "an int of 0 or more, or None (or -1) for unbounded")
    left, right = (None if side is None else int(side) for side in window)
    return Window(left, right)


def check_shapes(op: str, slot: str, arrays: Mapping[str, Any]) -> dict[str, int]:
    """Matches every array against the axes of its op and returns the size of each axis."""
    signature = SIGNATURES[slot]
    for name, axes in signature.inputs.items():
        if name not in arrays and not _is_optional(signature, name):
            raise fail(op, name, "is None", f"an array {axis_words(axes)}")
    sizes: dict[str, int] = {}
    seen_in: dict[str, str] = {}
    for name, array in arrays.items():
        axes = signature.axes_given(name, len(array.shape)).split()
        if len(array.shape) != len(axes):
            raise fail(op, name, f"has shape {tuple(array.shape)}", *_axes_rule(signature, name, len(array.shape)))
        given = list(zip(axes, array.shape, strict=True))
        if "t" in signature.inputs[name].split() and "t" not in axes:
            given.append(("t", 1))
        for axis, size in given:
            if axis in sizes and sizes[axis] != size:
                word = axis_words(axis).strip("(),")
                raise fail(
                    op, name, f"has shape {tuple(array.shape)}, so {word} is {size}", f"{sizes[axis]}, as in {seen_in[axis]}"
                )
            sizes[axis], seen_in[axis] = size, seen_in.get(axis, name)
    for axis in ("hg", "h", "d", "e", "n", "m", "p"):
        if sizes.get(axis) == 0:
            raise fail(op, seen_in[axis], f"has 0 {axis_words(axis).strip('(),')}", "at least 1")
    if "hg" in sizes and sizes["hg"] % sizes["h"]:
        raise fail(op, "q", f"has {sizes['hg']} heads", f"a multiple of the {sizes['h']} heads of {seen_in['h']}")
    bounds, rows = sizes.get("b1"), sizes.get("b")
    if bounds == 0:
        raise fail(op, seen_in["b1"], "has 0 entries", "batch + 1")
    if bounds == 1 and sizes["t"]:
        raise fail(op, seen_in["b1"], f"has 1 entry for {sizes['t']} tokens", "batch + 1, of at least one sequence")
    if bounds is not None and rows is not None and bounds != rows + 1:
        raise fail(op, seen_in["b1"], f"has {bounds} entries", f"{rows + 1}: one more than the batch of {seen_in['b']}")
    return sizes


def _is_optional(signature: Signature, name: str) -> bool:
    if name == "kv_lengths":
        return "page_table" not in signature.inputs
    return name.endswith("_scale") or name in ("q_lengths", "k_new", "v_new", "cu_seqlens", "inv_freq", "sinks")


def _axes_rule(signature: Signature, name: str, ndim: int) -> tuple[str, str]:
    """Which axes an argument may have, and what to do about an array of `ndim`."""
    axes = signature.inputs[name]
    count = len(axes.split())
    if name.endswith("_scale"):
        remedy = "Finer scales, such as one per token or page, are not served." if ndim > count else ""
        return f"a scalar, (kv_heads,) or {axis_words(axes)}", remedy
    one_token = f", or {count - 1} without query tokens" if signature.one_token and "t" in axes.split() else ""
    return f"{count} {'axis' if count == 1 else 'axes'} {axis_words(axes)}{one_token}", ""


def check_types(op: str, arrays: Mapping[str, Any]) -> None:
    """Element types: one float type for q, k and v (caches may be FP8), integers for lengths and tables."""
    leader = "q" if "q" in arrays else "k"
    dtype = str(arrays[leader].dtype)
    fp8_inputs = op in ("gqa_prefill", "gqa_prefill_packed")
    accepted = (*ACCEPTED_TYPES, FLOAT8) if fp8_inputs else ACCEPTED_TYPES
    if dtype not in accepted:
        remedy = "Cast it with .astype(jnp.float32)." if dtype == "float64" else ""
        raise wrong_type(op, leader, f"has element type {dtype}", f"one of {', '.join(accepted)}", remedy)
    has_pages = "k_pages" in arrays
    for name, array in arrays.items():
        came = str(array.dtype)
        if name in ("k", "v", "k_new", "v_new") and not (op == "gqa_decode" and came == FLOAT8):
            if came != dtype:
                raise wrong_type(op, name, f"has element type {came}", f"{dtype}, as {leader} has")
        elif name in ("k_pages", "v_pages") and came not in (dtype, FLOAT8):
            raise wrong_type(op, name, f"has element type {came}", f"{dtype}, as {leader} has, or {FLOAT8}")
        elif name in (
            "q_lengths",
            "kv_lengths",
            "cache_lengths",
            "lengths",
            "cu_seqlens",
            "cu_seqlens_q",
            "cu_seqlens_kv",
            "page_table",
        ):
            if came not in _INTEGERS:
                raise wrong_type(
                    op, name, f"has element type {came}", "an integer type, int32 or int64", "Cast it with .astype(jnp.int32)."
                )
        elif name in ("sinks", "inv_freq", "q_scale", "k_scale", "v_scale") and came not in _FLOATS:
            raise wrong_type(op, "rope.inv_freq" if name == "inv_freq" else name, f"has element type {came}", "float32")
    for first, second in (("k", "v"), ("k_pages", "v_pages"), ("k_new", "v_new")):
        if first in arrays and str(arrays[first].dtype) != str(arrays[second].dtype):
            raise wrong_type(op, second, f"has element type {arrays[second].dtype}", f"{arrays[first].dtype}, as {first} has")
    cache = "k_pages" if has_pages else "k"
    if str(arrays[cache].dtype) != FLOAT8:
        for name in ("q_scale", "k_scale", "v_scale"):
            if name in arrays:
                raise fail(
                    op, name, f"is given and {cache} is {arrays[cache].dtype}", f"{FLOAT8} data to scale", f"Drop {name}."
                )
