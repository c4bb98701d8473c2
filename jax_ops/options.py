"""The options every op shares, checked and gathered into an invocation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from dispatch_core import BACKENDS, FLOAT8, Device, Kernel, RopeFacts, Window
from jax_ops import checks
from jax_ops.dispatch import freeze_kernel_map, target
from jax_ops.request import Arrays, Invocation, Request


def present(**arrays: Any) -> Arrays:
    """The arrays that were given; Python scalars and lists are made arrays, and wide NumPy integers int32 without wrapping."""
    return {name: _array(name, a) for name, a in arrays.items() if a is not None}


def _array(name: str, value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype == np.int64:
        bounds = np.iinfo(np.int32)
        return np.clip(value, bounds.min, bounds.max).astype(np.int32)
    if checks.is_array(value):
        return value
    return jnp.asarray(value, jnp.float32) if name.endswith("_scale") else jnp.asarray(value)


def common(
    op: str,
    slot: str,
    arrays: Arrays,
    *,
    build: str | None,
    kernel_map: Mapping[str, Kernel] | None,
    device: str | Device | None,
    interpret: bool,
    is_uniform: bool = True,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    rope: RopeFacts | None = None,
    **options: Any,
) -> Invocation:
    """Checks arrays and options together and returns the invocation.

    Args:
      op: the public op, for messages.
      slot: its signature and key tuple.
      arrays: what was given, by name.
      build, kernel_map, device, interpret: as every op takes them.
      is_uniform, max_seqlen_q, max_seqlen_kv, rope: facts the op has worked out.
      **options: is_causal, scale, softcap, window, out_dtype, return_lse, backend, where the op has them.
    """
    static = {"build": build, "kernel_map": kernel_map, "device": device, "interpret": interpret, **options}
    checks.check_static(op, static)
    if kernel_map is not None and not isinstance(kernel_map, Mapping):
        raise checks.wrong_type(
            op, "kernel_map", f"is {kernel_map!r}", "a mapping of dispatch keys to dispatch_core.Kernel, or None"
        )
    checks.check_shapes(op, slot, arrays)
    checks.check_types(op, arrays)
    window = checks.static_window(op, options.get("window"))
    backend = options.get("backend", "auto")
    if backend not in BACKENDS:
        raise checks.fail(op, "backend", f"is {backend!r}", f"one of {', '.join(BACKENDS)}")
    _check_request(op, backend, is_fp8="q" in arrays and str(arrays["q"].dtype) == FLOAT8, window=window, is_uniform=is_uniform)
    if build is not None and not isinstance(build, str):
        raise checks.wrong_type(op, "build", f"is {build!r}", "a build's name (sm90, sm80, xla) or None")
    request = Request(
        op=op,
        slot=slot,
        build=build,
        replacements=freeze_kernel_map(op, slot, kernel_map),
        is_causal=checks.static_bool(op, "is_causal", options.get("is_causal", False)),
        scale=checks.static_number(op, "scale", options.get("scale")),
        softcap=checks.static_softcap(op, options.get("softcap")),
        window=window,
        backend=backend,
        out_dtype=_out_dtype(op, options.get("out_dtype")),
        return_lse=checks.static_bool(op, "return_lse", options.get("return_lse", False)),
        max_seqlen_q=max_seqlen_q,
        max_seqlen_kv=max_seqlen_kv,
        is_uniform=is_uniform,
        rope=rope,
        **target(op, device, interpret, arrays),
    )
    return Invocation(request, arrays)


def _check_request(op: str, backend: str, *, is_fp8: bool, window: Any, is_uniform: bool) -> None:
    """Requests that contradict themselves are errors before any kernel is asked."""
    sides = None if window is None or window == Window() else (window.left, window.right)
    if is_fp8 and backend not in ("auto", "fp8"):
        raise checks.fail(op, "backend", f"is {backend!r} and q is {FLOAT8}", "auto or fp8 for FP8 inputs")
    if backend == "fp8" and not is_fp8:
        raise checks.fail(op, "backend", "is 'fp8' and q is not FP8", f"{FLOAT8} q, k and v")
    if sides is not None and backend not in ("auto", "sliding_window"):
        raise checks.fail(
            op,
            "backend",
            f"is {backend!r} and window is {sides}",
            "auto or sliding_window with a window",
        )
    if backend == "sliding_window" and sides is None:
        raise checks.fail(
            op, "backend", "is 'sliding_window' and there is no window", "window=(left, right) with at least one bound"
        )
    if backend == "dense" and not is_uniform:
        raise checks.fail(op, "backend", "is 'dense' and the sequences are ragged", "auto or varlen for ragged sequences")


def _out_dtype(op: str, dtype: Any) -> str | None:
    if dtype is None:
        return None
    try:
        name = str(jnp.dtype(dtype))
    except TypeError:
        name = repr(dtype)
    if name not in checks.ACCEPTED_TYPES:
        raise checks.wrong_type(op, "out_dtype", f"is {name}", f"one of {', '.join(checks.ACCEPTED_TYPES)}, or None")
    return name
