"""What a target device offers, and the devices this library knows by name.

Rules read capability, SM count, shared memory and bandwidth; a name only labels.
"""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True)
class Device:
    """One compile target.

    Attributes:
      name: a label, never read by a rule.
      platform: "cuda", "cpu", "rocm", "tpu", "iluvatar", ...
      arch: CUDA compute capability as major * 10 + minor (80, 86, 89, 90, 100, 120); 0 off CUDA.
      sm_count: streaming multiprocessors.
      warp_size: threads per warp.
      max_threads_per_block: the launch limit.
      shared_memory_per_block: bytes one block may opt in to.
      l2_bytes: last-level cache, bytes.
      memory_bandwidth: bytes per second.
      matrix_flops: (element type, dense FLOP/s) pairs of the matrix units; a tuple so that the record hashes.
    """

    name: str
    platform: str
    arch: int
    sm_count: int
    warp_size: int
    max_threads_per_block: int
    shared_memory_per_block: int
    l2_bytes: int
    memory_bandwidth: int
    matrix_flops: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        if self.platform == "cuda" and self.arch < 10:
            raise ValueError(f"Device: arch is {self.arch}; need major * 10 + minor, such as 90 for capability 9.0.")
        if self.platform != "cuda" and self.arch != 0:
            raise ValueError(f"Device: arch is {self.arch} on platform {self.platform!r}; need 0 off CUDA.")
        for fact in ("sm_count", "warp_size", "max_threads_per_block", "memory_bandwidth"):
            if getattr(self, fact) <= 0:
                raise ValueError(f"Device: {fact} is {getattr(self, fact)}; need a positive number.")
        for fact in ("shared_memory_per_block", "l2_bytes"):
            if getattr(self, fact) < 0:
                raise ValueError(f"Device: {fact} is {getattr(self, fact)}; need 0 or more bytes.")

    @property
    def has_async_copy(self) -> bool:
        """Whether global memory can be copied to shared memory asynchronously (cp.async)."""
        return self.arch >= 80

    @property
    def has_fp8_matrix(self) -> bool:
        """Whether the matrix units multiply float8_e4m3fn."""
        return self.arch >= 89

    def flops(self, dtype: str) -> int | None:
        """Dense FLOP/s of the matrix units for an element type, or None where the record does not say."""
        return dict(self.matrix_flops).get(dtype)


def _tera(**rates: float) -> tuple[tuple[str, int], ...]:
    """Matrix rates in TFLOP/s by short name (half: float16 and bfloat16) as the record's pairs."""
    names = {"half": ("float16", "bfloat16"), "fp8": ("float8_e4m3fn",), "fp32": ("float32",)}
    return tuple((dtype, int(rate * 1e12)) for short, rate in rates.items() for dtype in names[short])


def _cuda(
    name: str, arch: int, sm_count: int, smem_kib: int, l2_mib: int, gb_per_s: int, matrix_flops: tuple[tuple[str, int], ...]
) -> Device:
    return Device(name, "cuda", arch, sm_count, 32, 1024, smem_kib * KIB, l2_mib * MIB, gb_per_s * 10**9, matrix_flops)


# Vendor datasheets: SM counts, L2, bandwidth and dense matrix rates without sparsity; opt-in shared memory from the
# CUDA programming guide's table of compute capabilities (163 KiB on 8.0, 99 on 8.6 and 8.9, 227 on 9.0 and 10.0, 99 on 12.0).
DEVICES: dict[str, Device] = {
    d.name: d
    for d in (
        _cuda("V100", 70, 80, 96, 6, 900, _tera(half=125, fp32=15.7)),
        _cuda("A100-40", 80, 108, 163, 40, 1555, _tera(half=312, fp32=19.5)),
        _cuda("A100-80", 80, 108, 163, 40, 2039, _tera(half=312, fp32=19.5)),
        _cuda("A30", 80, 56, 163, 24, 933, _tera(half=165, fp32=10.3)),
        _cuda("A10", 86, 72, 99, 6, 600, _tera(half=125, fp32=31.2)),
        _cuda("L4", 89, 58, 99, 48, 300, _tera(half=121, fp8=242, fp32=30.3)),
        _cuda("L40", 89, 142, 99, 96, 864, _tera(half=181, fp8=362, fp32=90.5)),
        _cuda("RTX4090", 89, 128, 99, 72, 1008, _tera(half=165, fp8=330, fp32=82.6)),
        _cuda("H100", 90, 132, 227, 50, 3350, _tera(half=989, fp8=1979, fp32=67)),
        _cuda("H100-PCIE", 90, 114, 227, 50, 2000, _tera(half=756, fp8=1513, fp32=51)),
        _cuda("H200", 90, 132, 227, 50, 4800, _tera(half=989, fp8=1979, fp32=67)),
        _cuda("GH200", 90, 132, 227, 50, 4000, _tera(half=989, fp8=1979, fp32=67)),
        _cuda("H20", 90, 78, 227, 60, 4000, _tera(half=148, fp8=296, fp32=44)),
        _cuda("B200", 100, 148, 227, 126, 8000, _tera(half=2250, fp8=4500, fp32=80)),
        Device("BI-V100", "iluvatar", 0, 16, 32, 1024, 48 * KIB, 6 * MIB, 900 * 10**9, _tera(half=147, fp32=37)),
        Device("CPU", "cpu", 0, 1, 1, 1, 0, 32 * MIB, 50 * 10**9, _tera(fp32=0.1)),
    )
}


def device_named(name: str) -> Device:
    """The known device of that name; a ValueError lists the known names."""
    if name not in DEVICES:
        raise ValueError(f"device {name!r} is not known; need one of {', '.join(sorted(DEVICES))}, or a Device of your own.")
    return DEVICES[name]
