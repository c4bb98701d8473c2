"""The calls of the dispatch record, on stated devices, and changes to them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dispatch_core import DEVICES, AttentionCall, Device, Paging, RopeFacts, Window

H200 = DEVICES["H200"]
A100 = DEVICES["A100-80"]
V100 = DEVICES["V100"]
CPU = DEVICES["CPU"]
MIG_SLICE = replace(H200, name="a MIG slice", sm_count=16, l2_bytes=7 * 2**20, memory_bandwidth=600 * 10**9)
ROPE = RopeFacts(rotary_dim=128, max_position=4096)
LEFT_128 = Window(128, None)


def packed(device: Device = H200, **changes: Any) -> AttentionCall:
    """The base of the packed rows: batch 4, 32 / 8 heads of 128, 512 x 512, causal, float16, dense, uniform."""
    facts: dict[str, Any] = {
        "dtype": "float16",
        "batch": 4,
        "q_heads": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "max_seqlen_q": 512,
        "max_seqlen_kv": 512,
        "is_causal": True,
        "backend": "dense",
    }
    return AttentionCall(device, **facts | changes)


def decode(device: Device = H200, **changes: Any) -> AttentionCall:
    """The base of the decode rows: batch 1, 32 / 4 heads of 128, 8192 keys, float16, one token."""
    facts: dict[str, Any] = {
        "dtype": "float16",
        "batch": 1,
        "q_heads": 32,
        "kv_heads": 4,
        "head_dim": 128,
        "max_seqlen_q": 1,
        "max_seqlen_kv": 8192,
        "is_causal": True,
    }
    return AttentionCall(device, **facts | changes)


def decode_paged(device: Device = H200, page_size: int = 256, **changes: Any) -> AttentionCall:
    """The decode base over pages."""
    keys = changes.get("max_seqlen_kv", 8192)
    return decode(device, **{"paging": Paging(page_size, -(-keys // page_size))} | changes)


def prefill_paged(device: Device = H200, **changes: Any) -> AttentionCall:
    """The base of the paged prefill rows: batch 2, 32 / 8 heads of 128, 8 pages of 256."""
    facts: dict[str, Any] = {
        "dtype": "float16",
        "batch": 2,
        "q_heads": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "max_seqlen_q": 512,
        "max_seqlen_kv": 2048,
        "is_causal": True,
        "is_uniform": False,
        "paging": Paging(256, 8),
    }
    return AttentionCall(device, **facts | changes)
