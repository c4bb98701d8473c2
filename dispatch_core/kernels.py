"""The records that describe kernels and their builds, the key tuples of each slot, and the catalogue of what is shipped.

A kernel is a key, the region of calls it serves, and its builds: the same mathematics for different targets. One key is
thus one build on an A100, another on an H200 and a third on a laptop, and the recorded dispatch does not move when a
faster build arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

from dispatch_core import regions
from dispatch_core.calls import AttentionCall
from dispatch_core.hardware import Device
from dispatch_core.regions import ANYTHING, Region
from dispatch_core.tiling import POLICIES, TileConfig, fitting_tile


@dataclass(frozen=True)
class Target:
    """The devices a build runs on: a platform ("" is every one), and bounds on the compute capability."""

    platform: str = ""
    min_arch: int = 0
    max_arch: int | None = None

    def refusal(self, device: Device) -> str | None:
        """Why the device is outside, or None."""
        if self.platform and device.platform != self.platform:
            return f"needs platform {self.platform}, {device.name} has {device.platform}"
        if device.arch < self.min_arch or (self.max_arch is not None and device.arch > self.max_arch):
            return f"needs arch {self._archs()}, {device.name} has {device.arch}"
        return None

    def _archs(self) -> str:
        if self.max_arch is None:
            return f"{self.min_arch} or newer"
        return f"{self.min_arch}" if self.min_arch == self.max_arch else f"{self.min_arch} to {self.max_arch}"


EVERYWHERE = Target()
SM80_AND_NEWER = Target("cuda", 80)
SM90_EXACTLY = Target("cuda", 90, 90)  # wgmma and setmaxnreg exist on sm_90a alone


@dataclass(frozen=True)
class Build:
    """One implementation of a kernel for a target.

    Attributes:
      name: the target's name ("sm90", "sm80", "xla"), which `build=` asks for.
      target: the devices it runs on.
      region: what it serves of its kernel's region.
      launch: launch(call, tile, **arrays) -> (o, lse or None[, k_pages, v_pages]); None for shipped builds, which
        pallas_kernels.builds finds by (key, name).
      tiles: the policy family that tiles it; None when it takes no tile.
    """

    name: str
    target: Target = EVERYWHERE
    region: Region = ANYTHING
    launch: Callable[..., Any] | None = field(default=None)
    tiles: str | None = None

    def __post_init__(self) -> None:
        if self.tiles is not None and self.tiles not in POLICIES:
            raise ValueError(f"Build: tiles is {self.tiles!r}; need one of {', '.join(sorted(POLICIES))}, or None.")

    def refusals(self, call: AttentionCall, is_named: bool = False) -> tuple[str, ...]:
        """Why this build does not serve the call; empty when it does. A CUDA device takes an xla build only by name."""
        outside = self.target.refusal(call.device)
        if outside is not None:
            return (outside,)
        reasons = self.region.refusals(call)
        if self.name == "xla" and call.device.platform == "cuda" and not is_named:
            reasons += ('serves a CUDA device only when named: build="xla"',)
        if not reasons and self.tiles is not None:
            tile = fitting_tile(call, self.tiles)
            return () if isinstance(tile, TileConfig) else (tile,)
        return reasons


@dataclass(frozen=True)
class Kernel:
    """An implementation under a dispatch key.

    Attributes:
      key: the name under which it is recorded.
      region: the calls it serves.
      builds: most specialised first; the first that serves a call is used.
      general: whether it yields to any specialised kernel that serves the same call.
    """

    key: str
    region: Region
    builds: tuple[Build, ...]
    general: bool = False

    @cached_property
    def _hash(self) -> int:
        return hash((self.key, self.region, self.builds, self.general))

    def __hash__(self) -> int:
        return self._hash  # every decision is looked up by its kernels

    def build_for(self, call: AttentionCall, build: str | None = None) -> Build | None:
        """The first build that serves the call, None where the kernel does not serve it; `build` admits that name alone."""
        if not self.region.serves(call):
            return None
        return next((b for b in self._named(build) if not b.refusals(call, is_named=build is not None)), None)

    def refusals(self, call: AttentionCall, build: str | None = None) -> tuple[str, ...]:
        """Why the kernel does not serve the call: its builds' reasons, then its region's; empty when it does."""
        by_build = {b.name: b.refusals(call, is_named=build is not None) for b in self._named(build)}
        reasons: tuple[str, ...] = ()
        if not by_build:
            reasons = (f"has no {build} build" if build else "has no builds",)
        elif all(by_build.values()):
            reasons = tuple(f"{name} build {why}" for name, refused in by_build.items() for why in refused)
        return reasons + self.region.refusals(call)

    def _named(self, build: str | None) -> Iterator[Build]:
        return (b for b in self.builds if build is None or b.name == build)


DENSE_PREFILL_KEYS = ("gqa_prefill_square_fwd_kernel", "gqa_prefill_causal_fwd_kernel", "gqa_prefill_fwd_kernel")
PACKED_PREFILL_KEYS = (
    "gqa_prefill_fp8_tensor_core_fwd_kernel",
    "gqa_sliding_window_varlen_fwd_kernel",
    *DENSE_PREFILL_KEYS,
    "gqa_prefill_varlen_fwd_kernel",
)
PAGED_PREFILL_KEYS = (
    "gqa_prefill_paged_with_kv_cache_rope_fwd_kernel",
    "gqa_prefill_paged_with_fp8_kv_cache_fwd_kernel",
    "gqa_prefill_paged_with_kv_cache_fwd_kernel",
)
DECODE_KEYS = ("gqa_decode_bs1_kernel", "gqa_decode_kernel")
PAGED_DECODE_KEYS = ("gqa_decode_paged_bs1_kernel", "gqa_decode_paged_kernel")

PACKED_PREFILL_EXTENDED_KEYS = (*PACKED_PREFILL_KEYS, "gqa_prefill_fp8_fwd_kernel")
DENSE_PREFILL_EXTENDED_KEYS = PACKED_PREFILL_EXTENDED_KEYS
PAGED_PREFILL_EXTENDED_KEYS = (*PAGED_PREFILL_KEYS, "gqa_prefill_paged_with_fp8_kv_cache_rope_fwd_kernel")
DECODE_EXTENDED_KEYS = (*DECODE_KEYS, "gqa_decode_fp8_kv_cache_kernel", "gqa_decode_multi_token_kernel")
PAGED_DECODE_EXTENDED_KEYS = (
    *PAGED_DECODE_KEYS,
    "gqa_decode_paged_fp8_kv_cache_kernel",
    "gqa_decode_paged_multi_token_kernel",
)
APPEND_PAGED_KEYS = ("append_paged_kernel",)

SLOTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "prefill": DENSE_PREFILL_EXTENDED_KEYS,
        "prefill_packed": PACKED_PREFILL_EXTENDED_KEYS,
        "decode": DECODE_EXTENDED_KEYS,
        "decode_paged": PAGED_DECODE_EXTENDED_KEYS,
        "prefill_paged": PAGED_PREFILL_EXTENDED_KEYS,
        "append_paged": APPEND_PAGED_KEYS,
    }
)
"""The keys each public op asks, by slot."""


def _everywhere(work: str) -> tuple[Build, ...]:
    return (
        Build("sm80", SM80_AND_NEWER, tiles=f"sm80_{work}"),
        Build("xla", EVERYWHERE, tiles=f"xla_{work}"),
    )


_MOSAIC = Build("sm90", SM90_EXACTLY, regions.MOSAIC_PREFILL, tiles="sm90_prefill")
# Behind the sm80 build, which serves all that it does: it answers by name alone until it has been measured on hardware.
_MOSAIC_DECODE = Build("sm90", SM90_EXACTLY, regions.MOSAIC_DECODE, tiles="sm90_decode")


def _catalogue() -> Mapping[str, Kernel]:
    prefill, decode = _everywhere("prefill"), _everywhere("decode")
    mosaic, several = (_MOSAIC, *prefill), (*decode, _MOSAIC_DECODE)
    hopper = (Build("sm90", SM90_EXACTLY, tiles="sm80_decode"),)
    kernels = (
        Kernel("gqa_prefill_fp8_tensor_core_fwd_kernel", regions.FP8_SQUARE, prefill),
        Kernel("gqa_sliding_window_varlen_fwd_kernel", regions.SLIDING_WINDOW, mosaic),
        Kernel("gqa_prefill_square_fwd_kernel", regions.SQUARE, (_MOSAIC,)),
        Kernel("gqa_prefill_causal_fwd_kernel", regions.CAUSAL, (_MOSAIC,)),
        Kernel("gqa_prefill_fwd_kernel", regions.DENSE, mosaic, general=True),
        Kernel("gqa_prefill_varlen_fwd_kernel", regions.VARLEN, mosaic),
        Kernel("gqa_prefill_fp8_fwd_kernel", regions.FP8_ANY, prefill, general=True),
        Kernel("gqa_decode_bs1_kernel", regions.DECODE_BS1, hopper),
        Kernel("gqa_decode_kernel", regions.DECODE, several, general=True),
        Kernel("gqa_decode_fp8_kv_cache_kernel", regions.DECODE_FP8_CACHE, decode),
        Kernel("gqa_decode_multi_token_kernel", regions.DECODE_SEVERAL, several),
        Kernel("gqa_decode_paged_bs1_kernel", regions.DECODE_PAGED_BS1, hopper),
        Kernel("gqa_decode_paged_kernel", regions.DECODE, several, general=True),
        Kernel("gqa_decode_paged_fp8_kv_cache_kernel", regions.DECODE_FP8_CACHE, decode),
        Kernel("gqa_decode_paged_multi_token_kernel", regions.DECODE_SEVERAL, several),
        Kernel("gqa_prefill_paged_with_kv_cache_fwd_kernel", regions.PAGED, mosaic),
        Kernel("gqa_prefill_paged_with_kv_cache_rope_fwd_kernel", regions.PAGED_ROPE, mosaic),
        Kernel("gqa_prefill_paged_with_fp8_kv_cache_fwd_kernel", regions.PAGED_FP8, prefill),
        Kernel("gqa_prefill_paged_with_fp8_kv_cache_rope_fwd_kernel", regions.PAGED_FP8_ROPE, prefill),
        Kernel("append_paged_kernel", ANYTHING, (Build("sm80", SM80_AND_NEWER), Build("xla"))),
    )
    return MappingProxyType({kernel.key: kernel for kernel in kernels})


CATALOGUE: Mapping[str, Kernel] = _catalogue()
"""What is shipped, by key."""
