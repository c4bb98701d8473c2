"""From a checked call to the build that serves it: the one seam through which every op runs.

The wrappers, from the outside in: jit, custom_vjp, custom_vmap, custom_partitioning, build. custom_partitioning has neither
batching nor differentiation of its own and custom_vmap no reverse mode, hence the order. The choice is made innermost, from
the shapes a device really gets, so a sharded or mapped call is dispatched for its local work.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from dispatch_core import (
    CATALOGUE,
    DEVICES,
    SLOTS,
    AttentionCall,
    Choice,
    Device,
    Explanation,
    Kernel,
    choose,
    select_tile_config,
)
from dispatch_core import explain as explain_call
from jax_ops import checks, gradients, sharding
from jax_ops.devices import resolve_device
from jax_ops.request import Arrays, Invocation, Request, clamped_lengths, facts, normalise
from jax_ops.signature import SIGNATURES
from jax_ops.transforms import transformable
from pallas_kernels import builds

logger = logging.getLogger("jax_ops")


def op[**P](prepare: Callable[P, Invocation]) -> Callable[P, Any]:
    """Makes a public op of the function that checks its arguments."""

    @wraps(prepare)
    def call(*args: P.args, **kwargs: P.kwargs) -> Any:
        return run(prepare(*args, **kwargs))

    call.__annotations__ = {**prepare.__annotations__, "return": Any}
    call.prepare = prepare  # type: ignore[attr-defined]
    return call


def explain(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Which kernel a call of `op` would run, and why; runs nothing.

    Args:
      op: a public op (`gqa_prefill`, `gqa_decode_paged`, ...).
      *args: what the op takes: arrays, tracers or `jax.ShapeDtypeStruct`s.
      **kwargs: its keywords.

    Returns:
      The chosen key and build, tile, split plan and roofline, and every other candidate with its reasons. It prints as a
      table and renders in notebooks. A call that nobody serves is explained, too.

    Raises:
      ValueError, TypeError: the arguments are wrong for any implementation, as the op itself would say.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> q, kv = (jax.ShapeDtypeStruct((4, 512, heads, 128), jnp.bfloat16) for heads in (32, 8))
      >>> explain(gqa_prefill, q, kv, kv, device="H200").key
      'gqa_prefill_square_fwd_kernel'
    """
    if not hasattr(op, "prepare"):
        raise TypeError(f"explain: op is {op!r}; need a public op of jax_ops, such as jax_ops.gqa_prefill.")
    invocation: Invocation = op.prepare(*args, **kwargs)  # type: ignore[attr-defined]
    request = invocation.request
    arrays = jax.eval_shape(partial(normalise, request), invocation.arrays)
    call = facts(request, {name: arrays[name] for name in SIGNATURES[request.slot].inputs if name in arrays})
    return explain_call(SLOTS[request.slot], call, request.kernels, request.replaced, request.build)


def freeze_kernel_map(op: str, slot: str, kernel_map: Mapping[str, Kernel] | None) -> tuple[tuple[str, Kernel], ...]:
    """The caller's kernels as sorted items; an unknown key is a ValueError that names the nearest one."""
    for key, kernel in (kernel_map or {}).items():
        if key not in SLOTS[slot]:
            nearest = difflib.get_close_matches(str(key), SLOTS[slot], n=1, cutoff=0.0)[0]
            raise checks.fail(
                op, "kernel_map", f"has the key {key!r}", f"one of {', '.join(SLOTS[slot])}", f"Did you mean {nearest!r}?"
            )
        if not isinstance(kernel, Kernel):
            raise checks.wrong_type(op, f"kernel_map[{key!r}]", f"is {kernel!r}", "a dispatch_core.Kernel")
    return tuple(sorted((kernel_map or {}).items(), key=lambda item: item[0]))


def target(op: str, device: str | Device | None, interpret: bool, arrays: Arrays) -> dict[str, Any]:
    """The device facts of a request: the named target, or the one the arrays live on."""
    resolved = resolve_device(op, device, arrays)
    if checks.static_bool(op, "interpret", interpret) and (device is None or resolved.platform != "cuda"):
        came = "is True without a device" if device is None else f"is True for device {resolved.name!r}"
        raise checks.fail(op, "interpret", came, "device= naming a CUDA target", 'Say device="H200", for instance.')
    return {"device": resolved, "is_portable": device is None, "interpret": bool(interpret)}


def run(invocation: Invocation) -> Any:
    """Runs a checked call and returns what its op returns."""
    request, arrays = invocation.request, invocation.arrays
    if request.device.platform == "cuda" and not request.is_portable and not request.interpret:
        _refuse_host_arrays(request, arrays)
    results = sharding.under_explicit_mesh(partial(_entry, request), request, arrays)
    return results[0] if len(results) == 1 else results


def _refuse_host_arrays(request: Request, arrays: Arrays) -> None:
    if any(isinstance(a, Tracer) for a in arrays.values()):
        return
    devices = {d.platform for a in arrays.values() if isinstance(a, jax.Array) for d in a.devices()} or {jax.default_backend()}
    if devices == {"cpu"}:
        raise checks.fail(
            request.op,
            "device",
            f"is {request.device.name!r}, a CUDA target, and the arrays are on the CPU",
            "arrays on such a device, a lowering (jax.jit(...).lower, jax.export), or interpret=True",
        )


@partial(jax.jit, static_argnums=0)
def _entry(request: Request, arrays: Arrays) -> tuple[jax.Array, ...]:
    signature = SIGNATURES[request.slot]
    has_token_axis = "q" not in arrays or arrays["q"].ndim == len(signature.inputs["q"].split())
    arrays = normalise(request, arrays)
    names = tuple(arrays)
    results = signature.results(names, request.return_lse)
    if any(arrays[name].size == 0 for name in ("q", "k") if name in arrays):
        outputs = _without_work(request, arrays, results)
    else:
        outputs = _seam(request, names)(*arrays.values())
    if not has_token_axis:
        outputs = tuple(o[:, 0] if name in ("o", "lse") else o for name, o in zip(results, outputs, strict=True))
    return outputs


def _without_work(request: Request, arrays: Arrays, results: tuple[str, ...]) -> tuple[jax.Array, ...]:
    """What a call without queries or without keys returns: rows that see nothing, and pools as they came."""
    outputs: Arrays = {name: arrays[name] for name in ("k_pages", "v_pages") if name in results}
    if "o" in results:
        q, v = arrays["q"], arrays["v" if "v" in arrays else "v_pages"]
        default = jnp.bfloat16 if str(q.dtype).startswith("float8") else q.dtype
        outputs["o"] = jnp.zeros((*q.shape[:-1], v.shape[-1]), request.out_dtype or default)
        empty = arrays.get("sinks", jnp.float32(-jnp.inf))
        outputs["lse"] = jnp.zeros(q.shape[:-1], jnp.float32) + jnp.broadcast_to(empty, q.shape[:-1])
    return tuple(outputs[name] for name in results)


@lru_cache(maxsize=4096)
def _seam(request: Request, names: tuple[str, ...]) -> Callable[..., tuple[jax.Array, ...]]:
    """The op on the arrays of these names, under every JAX transformation. Cached, so that layers share one lowering."""

    def launch(*arrays: Any) -> tuple[jax.Array, ...]:
        return _launch(request, dict(zip(names, arrays, strict=True)))

    signature = SIGNATURES[request.slot]
    divisible = transformable(launch, signature, names, signature.results(names, request.return_lse))
    return gradients.differentiable(divisible, request, names, forward=lambda: _seam(replace(request, return_lse=True), names))


def _launch(request: Request, arrays: Arrays) -> tuple[jax.Array, ...]:
    """Chooses for the arrays' shapes and launches; without a named device, each platform gets its own build."""
    here = partial(_launch_on, request, request.device)
    if request.device.platform != "cuda" or not request.is_portable:
        return here(arrays)
    elsewhere = partial(_launch_on, replace(request, build=None, replacements=()), DEVICES["CPU"])
    return lax.platform_dependent(arrays, cuda=here, default=elsewhere)


def _launch_on(request: Request, device: Device, arrays: Arrays) -> tuple[jax.Array, ...]:
    signature, names = SIGNATURES[request.slot], tuple(arrays)
    call = facts(request, arrays, device)
    choice = _decide(request, call)
    tile = select_tile_config(call, choice.build)
    launch = choice.build.launch or builds.launch_function(choice.key, choice.build)
    if choice.build.launch and request.slot.startswith("decode"):
        arrays = clamped_lengths(arrays)
    interpreted = {"interpret": True} if request.interpret and choice.build.name != "xla" else {}
    returned = launch(call, tile, **{name: arrays.get(name) for name in signature.inputs}, **interpreted)
    by_name = dict(zip(signature.outputs, returned, strict=False))
    return tuple(by_name[name] for name in signature.results(names, request.return_lse))


def _decide(request: Request, call: AttentionCall) -> Choice:
    return _decide_once(request.slot, call, request.replacements, request.build)


@lru_cache(maxsize=4096)
def _decide_once(slot: str, call: AttentionCall, replacements: tuple[tuple[str, Kernel], ...], build: str | None) -> Choice:
    kernels, replaced = {**CATALOGUE, **dict(replacements)}, frozenset(key for key, _ in replacements)
    choice = choose(SLOTS[slot], call, kernels, replaced, build)
    logger.info("%s: %s (%s build) serves %s", slot, choice.key, choice.build.name, call)
    return choice
