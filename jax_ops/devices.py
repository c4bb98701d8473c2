"""The device a call is dispatched for."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
from jax.core import Tracer

from dispatch_core import DEVICES, Device, device_named
from jax_ops import checks


@lru_cache(maxsize=64)
def device_from_jax(device: Any) -> Device:
    """The record of a device JAX sees: what the runtime reports, and from the known devices only what it does not tell.

    The known device that fills the gaps is the one named in `device_kind`, else one of the same capability. So a MIG slice,
    an H20, or a part released after this library is described by its own SM count and shared memory.

    Example:
      >>> import jax
      >>> device_from_jax(jax.devices("cpu")[0]).platform
      'cpu'
    """
    if device.platform != "gpu" or not hasattr(device, "compute_capability"):
        return _off_cuda(device)
    major, _, minor = str(device.compute_capability).partition(".")
    if not (major.isdigit() and minor.isdigit()):
        return _off_cuda(device)  # ROCm reports names such as gfx942
    arch = int(major) * 10 + int(minor)
    known = _nearest(device.device_kind, arch)
    return Device(
        name=device.device_kind,
        platform="cuda",
        arch=arch,
        sm_count=getattr(device, "core_count", None) or known.sm_count,
        warp_size=known.warp_size,
        max_threads_per_block=known.max_threads_per_block,
        shared_memory_per_block=getattr(device, "shared_memory_per_block_optin", None) or known.shared_memory_per_block,
        l2_bytes=known.l2_bytes,
        memory_bandwidth=known.memory_bandwidth,
        matrix_flops=known.matrix_flops,
    )


def _off_cuda(device: Any) -> Device:
    cpu = DEVICES["CPU"]
    if device.platform == "cpu":
        return cpu
    return Device(device.device_kind, device.platform, 0, 1, 1, 1, 0, 0, cpu.memory_bandwidth, ())


def _nearest(kind: str, arch: int) -> Device:
    """The known CUDA device named in `kind` (the longest name), else the newest capability at or below `arch`."""
    words = kind.replace(" ", "").upper()
    cuda = [d for d in DEVICES.values() if d.platform == "cuda"]
    named = [d for d in cuda if d.name.replace("-", "").upper() in words.replace("-", "")]
    if named:
        return max(named, key=lambda d: len(d.name))
    older = [d for d in cuda if d.arch <= arch] or cuda
    newest = max(d.arch for d in older)
    return next(d for d in older if d.arch == newest)


def resolve_device(op: str, device: str | Device | None, arrays: dict[str, Any]) -> Device:
    """The named target, or where the arrays live, or (inside a trace) the default GPU if there is one."""
    if isinstance(device, Device):
        return device
    if isinstance(device, str):
        if device not in DEVICES:
            raise checks.fail(op, "device", f"is {device!r}", f"one of {', '.join(sorted(DEVICES))}, or a dispatch_core.Device")
        return device_named(device)
    if device is not None:
        raise checks.wrong_type(op, "device", f"is {device!r}", "a name, a dispatch_core.Device, or None")
    for array in arrays.values():
        if isinstance(array, jax.Array) and not isinstance(array, Tracer):
            return device_from_jax(next(iter(array.devices())))
    return device_from_jax(_default_device())


@lru_cache(maxsize=1)
def _first_gpu() -> Any:
    try:
        return jax.devices("gpu")[0]
    except RuntimeError:
        return None


def _default_device() -> Any:
    return _first_gpu() or jax.devices()[0]
