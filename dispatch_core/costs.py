"""What a call costs at least: floating-point operations, bytes moved, and the roofline time of its device.

Counts are of the static bounds (every sequence as long as the call allows) and of what must be moved: each operand once, K and
V once per KV head, pages as distinct per sequence, every element at its own width.
"""

from __future__ import annotations

from dataclasses import dataclass

from dispatch_core.calls import ELEMENT_BYTES, FLOAT8, AttentionCall, Window
from dispatch_core.hardware import Device
from dispatch_core.splitting import reachable_keys

INDEX_BYTES = 4
FLOAT32_BYTES = 4


@dataclass(frozen=True)
class Cost:
    """A lower bound.

    Attributes:
      flops: of both matrix products, over visible pairs only.
      bytes: read and written.
      seconds: the longer of flops at the device's matrix rate and bytes at its bandwidth.
      bound: which of the two it is, "compute" or "memory".
    """

    flops: int
    bytes: int
    seconds: float
    bound: str

    def __str__(self) -> str:
        return f"{self.seconds * 1e6:.3g} us, {self.bound} bound ({self.flops / 1e9:.4g} GFLOP, {self.bytes / 1e6:.4g} MB)"


def visible_pairs(q_len: int, kv_len: int, is_causal: bool = False, window: Window | None = None) -> int:
    """Pairs (query, key) that attend in one request: bottom-right causal, window ends inclusive; exact, in constant time.

    With o = kv_len - q_len, query i sees keys from i + o - left up to i + o + right, cut to [0, kv_len). Both ends are
    clamped lines in i, so the count is a difference of two sums of clamped integers. 3 queries of 5 causal keys see
    3 + 4 + 5 = 12.
    """
    offset = kv_len - q_len
    left = kv_len + q_len if window is None or window.left is None else window.left
    right = kv_len + q_len if window is None or window.right is None else window.right
    if is_causal:
        right = 0

    def clamped_below(n: int) -> int:
        """The sum of min(max(j, 0), kv_len) over j < n."""
        if n <= 0:
            return 0
        short = min(n, kv_len + 1)
        return short * (short - 1) // 2 + (n - short) * kv_len

    def clamped_line(start: int) -> int:
        return clamped_below(start + q_len) - clamped_below(start)

    return clamped_line(offset + right + 1) - clamped_line(offset - left)


def attention_flops(call: AttentionCall) -> int:
    """Operations of q.k and of the weighted sum of v over the visible pairs."""
    pairs = visible_pairs(call.max_seqlen_q, call.max_seqlen_kv, call.is_causal, call.window)
    return 2 * call.batch * call.q_heads * pairs * (call.head_dim + call.v_dim)


def append_bytes(call: AttentionCall) -> int:
    """Reading max_seqlen_q new tokens of k and v a sequence and writing them to the cache."""
    elements = call.batch * call.max_seqlen_q * call.kv_heads * (call.head_dim + call.v_dim)
    return elements * (ELEMENT_BYTES[call.dtype] + ELEMENT_BYTES[call.cache_dtype])


def attention_bytes(call: AttentionCall, appends: bool = False) -> int:
    """Bytes read and written; with `appends`, the last max_seqlen_q keys arrive with the call and are written to the cache."""
    queries = call.batch * call.max_seqlen_q * call.q_heads
    keys = reachable_keys(call)
    cached = max(0, keys - call.max_seqlen_q) if appends else keys
    total = queries * (call.head_dim * ELEMENT_BYTES[call.dtype] + call.v_dim * ELEMENT_BYTES[call.o_dtype])
    total += call.batch * cached * call.kv_heads * (call.head_dim + call.v_dim) * ELEMENT_BYTES[call.cache_dtype]
    if appends:
        total += append_bytes(call)
    if call.return_lse:
        total += queries * FLOAT32_BYTES
    if call.has_sinks:
        total += call.q_heads * FLOAT32_BYTES
    if call.paging is not None:
        total += call.batch * (-(-keys // call.paging.page_size) + 1) * INDEX_BYTES
    return total


def matrix_rate(device: Device, dtype: str) -> int | None:
    """FLOP/s for inputs of an element type; FP8 is multiplied as 16-bit, and 16-bit as float32, where the device lacks it."""
    for computed in (dtype, *(("bfloat16",) if dtype == FLOAT8 else ()), "float32"):
        rate = device.flops(computed)
        if rate is not None:
            return rate
    return None


def roofline(call: AttentionCall, appends: bool = False) -> Cost:
    """The least a device needs for a call, by the matrix rate and bandwidth of its record."""
    return _cost(call, attention_flops(call), attention_bytes(call, appends))


def append_roofline(call: AttentionCall) -> Cost:
    """The least a device needs to append max_seqlen_q tokens a sequence to a cache."""
    return _cost(call, 0, append_bytes(call))


def _cost(call: AttentionCall, flops: int, moved: int) -> Cost:
    rate = matrix_rate(call.device, call.dtype)
    compute = 0.0 if rate is None else flops / rate
    memory = moved / call.device.memory_bandwidth
    return Cost(flops, moved, max(compute, memory), "compute" if compute > memory else "memory")
