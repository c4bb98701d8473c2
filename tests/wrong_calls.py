"""Wrong calls of the public ops, each a change to a valid one, and the message that each must give."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from dispatch_core import DEVICES, SLOTS
from jax_ops import Rope

FP8 = ml_dtypes.float8_e4m3fn
BF16 = ml_dtypes.bfloat16


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def ints(*values, dtype=np.int32):
    return np.asarray(values, dtype)


POOLS = {"k_pages": zeros(7, 4, 3, 8), "v_pages": zeros(7, 4, 3, 8), "page_table": zeros(2, 3, dtype=np.int32)}
# A valid call of each op: batch 2, 6 / 3 heads of 8.
VALID = {
    "gqa_prefill": {"q": zeros(2, 4, 6, 8), "k": zeros(2, 5, 3, 8), "v": zeros(2, 5, 3, 8)},
    "gqa_prefill_packed": {
        "q": zeros(8, 6, 8),
        "k": zeros(10, 3, 8),
        "v": zeros(10, 3, 8),
        "cu_seqlens_q": ints(0, 4, 8),
        "cu_seqlens_kv": ints(0, 5, 10),
    },
    "gqa_decode": {"q": zeros(2, 6, 8), "k": zeros(2, 5, 3, 8), "v": zeros(2, 5, 3, 8), "kv_lengths": ints(5, 3)},
    "gqa_decode_paged": {"q": zeros(2, 6, 8), **POOLS, "kv_lengths": ints(5, 3)},
    "gqa_prefill_paged": {
        "q": zeros(8, 6, 8),
        "k": zeros(8, 3, 8),
        "v": zeros(8, 3, 8),
        **POOLS,
        "cu_seqlens_q": ints(0, 4, 8),
        "cache_lengths": ints(5, 3),
    },
    "append_paged": {"k": zeros(2, 3, 8), "v": zeros(2, 3, 8), **POOLS, "lengths": ints(5, 3)},
}
QKV8 = {"q": zeros(2, 4, 6, 8, dtype=FP8), "k": zeros(2, 5, 3, 8, dtype=FP8), "v": zeros(2, 5, 3, 8, dtype=FP8)}
POOLS8 = {"k_pages": zeros(7, 4, 3, 8, dtype=FP8), "v_pages": zeros(7, 4, 3, 8, dtype=FP8)}
NEW = {"k_new": zeros(2, 3, 8), "v_new": zeros(2, 3, 8)}

ANY = "float16, bfloat16, float32"
DEVICE_NAMES = ", ".join(sorted(DEVICES))
DECODE_KEYS, PREFILL_KEYS = ", ".join(SLOTS["decode"]), ", ".join(SLOTS["prefill"])
CAST = "Cast it with .astype(jnp.int32)."
FINER = "Finer scales, such as one per token or page, are not served."
PRODUCT = "need batch * max_seqlen_kv == tokens."
RAGGED = "Pass is_uniform=False for ragged sequences."
PAIR = "need (left, right), the keys beside the query's own."
ON_DEVICE = "arrays on such a device, a lowering (jax.jit(...).lower, jax.export), or interpret=True."
SCALES = "need a scalar, (kv_heads,) or (batch, kv_heads)."

# (op, changes to its valid call, error, message after "<op>: ")
SHAPES = [
    ("gqa_prefill", {"q": 1.0}, "q has shape (); need 4 axes (batch, query tokens, q_heads, head_dim)."),
    ("gqa_prefill", {"q": zeros(4, 6, 8)}, "q has shape (4, 6, 8); need 4 axes (batch, query tokens, q_heads, head_dim)."),
    ("gqa_prefill", {"k": zeros(5, 3, 8)}, "k has shape (5, 3, 8); need 4 axes (batch, key tokens, kv_heads, head_dim)."),
    ("gqa_prefill", {"k": zeros(5, 2, 3, 8)}, "k has shape (5, 2, 3, 8), so batch is 5; need 2, as in q."),
    ("gqa_prefill", {"k": zeros(2, 5, 3, 16)}, "k has shape (2, 5, 3, 16), so head_dim is 16; need 8, as in q."),
    ("gqa_prefill", {"v": zeros(2, 6, 3, 8)}, "v has shape (2, 6, 3, 8), so key tokens is 6; need 5, as in k."),
    ("gqa_prefill", {"v": zeros(2, 5, 2, 8)}, "v has shape (2, 5, 2, 8), so kv_heads is 2; need 3, as in k."),
    ("gqa_prefill", {"k": zeros(2, 5, 4, 8), "v": zeros(2, 5, 4, 8)}, "q has 6 heads; need a multiple of the 4 heads of k."),
    ("gqa_prefill", {"k": zeros(2, 5, 0, 8), "v": zeros(2, 5, 0, 8)}, "k has 0 kv_heads; need at least 1."),
    ("gqa_prefill", {"q": zeros(2, 4, 0, 8)}, "q has 0 q_heads; need at least 1."),
    ("gqa_prefill", {"q": zeros(2, 4, 6, 0), "k": zeros(2, 5, 3, 0)}, "q has 0 head_dim; need at least 1."),
    ("gqa_prefill", {"v": zeros(2, 5, 3, 0)}, "v has 0 head_dim_v; need at least 1."),
    ("gqa_prefill", {"q_lengths": 3}, "q_lengths has shape (); need 1 axis (batch,)."),
    ("gqa_prefill", {"kv_lengths": ints(1, 2, 3)}, "kv_lengths has shape (3,), so batch is 3; need 2, as in q."),
    ("gqa_prefill", {"sinks": zeros(3)}, "sinks has shape (3,), so q_heads is 3; need 6, as in q."),
    ("gqa_prefill", QKV8 | {"q_scale": zeros(6)}, "q_scale has shape (6,), so kv_heads is 6; need 3, as in k."),
    ("gqa_prefill", QKV8 | {"v_scale": zeros(2, 1)}, "v_scale has shape (2, 1), so kv_heads is 1; need 3, as in k."),
    ("gqa_prefill", QKV8 | {"k_scale": zeros(2, 5, 3)}, f"k_scale has shape (2, 5, 3); {SCALES} {FINER}"),
    (
        "gqa_prefill_packed",
        {"q": zeros(1, 8, 6, 8)},
        "q has shape (1, 8, 6, 8); need 3 axes (query tokens, q_heads, head_dim).",
    ),
    (
        "gqa_prefill_packed",
        {"cu_seqlens_kv": ints(0, 5)},
        "cu_seqlens_kv has shape (2,), so batch + 1 is 2; need 3, as in cu_seqlens_q.",
    ),
    ("gqa_prefill_packed", {"cu_seqlens_q": ints(), "cu_seqlens_kv": ints()}, "cu_seqlens_q has 0 entries; need batch + 1."),
    (
        "gqa_prefill_packed",
        {"cu_seqlens_q": ints(0), "cu_seqlens_kv": ints(0)},
        "cu_seqlens_q has 1 entry for 8 tokens; need batch + 1, of at least one sequence.",
    ),
    ("gqa_prefill_packed", {"cu_seqlens_q": np.int32(0)}, "cu_seqlens_q has shape (); need 1 axis (batch + 1,)."),
    (
        "gqa_decode",
        {"q": zeros(6, 8)},
        "q has shape (6, 8); need 4 axes (batch, query tokens, q_heads, head_dim), or 3 without query tokens.",
    ),
    ("gqa_decode", {"q": zeros(3, 6, 8)}, "k has shape (2, 5, 3, 8), so batch is 2; need 3, as in q."),
    ("gqa_decode", {"kv_lengths": ints(5)}, "kv_lengths has shape (1,), so batch is 1; need 2, as in q."),
    (
        "gqa_decode",
        {"k": zeros(2, 3, 8), "kv_lengths": None},
        "k has shape (2, 3, 8); need 4 axes (batch, key tokens, kv_heads, head_dim).",
    ),
    (
        "gqa_decode_paged",
        {"v_pages": zeros(7, 5, 3, 8)},
        "v_pages has shape (7, 5, 3, 8), so page_size is 5; need 4, as in k_pages.",
    ),
    (
        "gqa_decode_paged",
        {"v_pages": zeros(6, 4, 3, 8)},
        "v_pages has shape (6, 4, 3, 8), so pages is 6; need 7, as in k_pages.",
    ),
    ("gqa_decode_paged", {"k_pages": zeros(0, 4, 3, 8), "v_pages": zeros(0, 4, 3, 8)}, "k_pages has 0 pages; need at least 1."),
    (
        "gqa_decode_paged",
        {"k_pages": zeros(7, 0, 3, 8), "v_pages": zeros(7, 0, 3, 8)},
        "k_pages has 0 page_size; need at least 1.",
    ),
    ("gqa_decode_paged", {"page_table": zeros(2, 0, dtype=np.int32)}, "page_table has 0 max_pages; need at least 1."),
    ("gqa_decode_paged", {"page_table": ints(1, 2, 3)}, "page_table has shape (3,); need 2 axes (batch, max_pages)."),
    (
        "gqa_decode_paged",
        {"page_table": zeros(3, 3, dtype=np.int32)},
        "page_table has shape (3, 3), so batch is 3; need 2, as in q.",
    ),
    ("gqa_decode_paged", {"page_table": None}, "page_table is None; need an array (batch, max_pages)."),
    ("gqa_decode_paged", {"kv_lengths": None}, "kv_lengths is None; need an array (batch,)."),
    (
        "gqa_decode_paged",
        NEW | {"k_new": zeros(2, 2, 8)},
        "k_new has shape (2, 2, 8), so kv_heads is 2; need 3, as in k_pages.",
    ),
    ("gqa_decode_paged", NEW | {"q": zeros(2, 2, 6, 8)}, "k_new has shape (2, 3, 8), so query tokens is 1; need 2, as in q."),
    ("gqa_decode_paged", {"k_new": zeros(2, 3, 8)}, "v_new is None and k_new is given; need both or neither."),
    ("gqa_decode_paged", {"v_new": zeros(2, 3, 8)}, "k_new is None and v_new is given; need both or neither."),
    ("gqa_decode_paged", POOLS8 | {"k_scale": zeros(7, 4, 3)}, f"k_scale has shape (7, 4, 3); {SCALES} {FINER}"),
    ("gqa_decode_paged", POOLS8 | {"v_scale": zeros(7, 3)}, "v_scale has shape (7, 3), so batch is 7; need 2, as in q."),
    ("gqa_prefill_paged", {"k": zeros(7, 3, 8)}, "k has shape (7, 3, 8), so query tokens is 7; need 8, as in q."),
    (
        "gqa_prefill_paged",
        {"cu_seqlens_q": ints(0, 8)},
        "cu_seqlens_q has 2 entries; need 3: one more than the batch of page_table.",
    ),
    (
        "gqa_prefill_paged",
        {"v_pages": zeros(7, 4, 3, 16)},
        "v_pages has shape (7, 4, 3, 16), so head_dim_v is 16; need 8, as in v.",
    ),
    (
        "append_paged",
        {"k": zeros(3, 3, 8), "v": zeros(3, 3, 8)},
        "k has 3 tokens for 2 sequences; need one a sequence, or cu_seqlens.",
    ),
    ("append_paged", {"lengths": zeros(2, 1, dtype=np.int32)}, "lengths has shape (2, 1); need 1 axis (batch,)."),
    (
        "append_paged",
        {"page_table": zeros(3, 3, dtype=np.int32)},
        "lengths has shape (2,), so batch is 2; need 3, as in page_table.",
    ),
]
TYPES = [
    (
        "gqa_prefill",
        {"q": zeros(2, 4, 6, 8, dtype=np.float64)},
        f"q has element type float64; need one of {ANY}, float8_e4m3fn. Cast it with .astype(jnp.float32).",
    ),
    (
        "append_paged",
        {"k": zeros(2, 3, 8, dtype=np.float64)},
        f"k has element type float64; need one of {ANY}. Cast it with .astype(jnp.float32).",
    ),
    ("gqa_prefill", {"q": zeros(2, 4, 6, 8, dtype=np.int32)}, f"q has element type int32; need one of {ANY}, float8_e4m3fn."),
    (
        "gqa_prefill",
        {"q": zeros(2, 4, 6, 8, dtype=ml_dtypes.float8_e5m2)},
        f"q has element type float8_e5m2; need one of {ANY}, float8_e4m3fn.",
    ),
    ("gqa_decode", {"q": zeros(2, 6, 8, dtype=FP8)}, f"q has element type float8_e4m3fn; need one of {ANY}."),
    ("gqa_prefill", {"k": zeros(2, 5, 3, 8, dtype=BF16)}, "k has element type bfloat16; need float32, as q has."),
    ("gqa_prefill", {"v": zeros(2, 5, 3, 8, dtype=np.float16)}, "v has element type float16; need float32, as q has."),
    ("gqa_prefill", QKV8 | {"v": zeros(2, 5, 3, 8)}, "v has element type float32; need float8_e4m3fn, as q has."),
    ("gqa_decode", {"k": zeros(2, 5, 3, 8, dtype=FP8)}, "v has element type float32; need float8_e4m3fn, as k has."),
    (
        "gqa_decode_paged",
        {"v_pages": POOLS8["v_pages"]},
        "v_pages has element type float8_e4m3fn; need float32, as k_pages has.",
    ),
    (
        "gqa_decode_paged",
        {"k_pages": zeros(7, 4, 3, 8, dtype=BF16)},
        "k_pages has element type bfloat16; need float32, as q has, or float8_e4m3fn.",
    ),
    (
        "gqa_decode_paged",
        NEW | {"k_new": zeros(2, 3, 8, dtype=BF16)},
        "k_new has element type bfloat16; need float32, as q has.",
    ),
    (
        "gqa_prefill",
        {"q_lengths": zeros(2)},
        f"q_lengths has element type float32; need an integer type, int32 or int64. {CAST}",
    ),
    (
        "gqa_prefill",
        {"kv_lengths": np.asarray([True, False])},
        f"kv_lengths has element type bool; need an integer type, int32 or int64. {CAST}",
    ),
    (
        "gqa_decode",
        {"kv_lengths": ints(5, 3, dtype=np.int8)},
        f"kv_lengths has element type int8; need an integer type, int32 or int64. {CAST}",
    ),
    (
        "gqa_decode_paged",
        {"page_table": zeros(2, 3, dtype=np.uint32)},
        f"page_table has element type uint32; need an integer type, int32 or int64. {CAST}",
    ),
    (
        "gqa_prefill_packed",
        {"cu_seqlens_q": zeros(3)},
        f"cu_seqlens_q has element type float32; need an integer type, int32 or int64. {CAST}",
    ),
    ("gqa_prefill", {"sinks": zeros(6, dtype=np.int32)}, "sinks has element type int32; need float32."),
    ("gqa_prefill", QKV8 | {"q_scale": zeros(3, dtype=np.int32)}, "q_scale has element type int32; need float32."),
    ("gqa_prefill", QKV8 | {"k_scale": zeros(3, dtype=FP8)}, "k_scale has element type float8_e4m3fn; need float32."),
    (
        "gqa_decode_paged",
        {"rope": Rope(inv_freq=zeros(4, dtype=np.int32), max_position=8)},
        "rope.inv_freq has element type int32; need float32.",
    ),
]
STATIC_VALUES = [
    ("gqa_prefill", {"scale": float("nan")}, ValueError, "scale is nan; need a finite number within float32."),
    ("gqa_prefill", {"scale": 1e300}, ValueError, "scale is 1e+300; need a finite number within float32."),
    ("gqa_prefill", {"scale": "1"}, TypeError, "scale is '1'; need a Python number or None."),
    ("gqa_prefill", {"scale": True}, TypeError, "scale is True; need a Python number or None."),
    ("gqa_prefill", {"scale": 1j}, TypeError, "scale is 1j; need a Python number or None."),
    ("gqa_prefill", {"scale": zeros(1)}, TypeError, "scale is an array of shape (1,); need a static Python value."),
    ("gqa_prefill", {"softcap": -1}, ValueError, "softcap is -1.0; need 0 or more (0 and None: no cap)."),
    ("gqa_prefill", {"softcap": float("inf")}, ValueError, "softcap is inf; need a finite number within float32."),
    ("gqa_prefill", {"is_causal": 1}, TypeError, "is_causal is 1; need True or False."),
    ("gqa_prefill", {"is_causal": None}, TypeError, "is_causal is None; need True or False."),
    ("gqa_prefill", {"return_lse": "yes"}, TypeError, "return_lse is 'yes'; need True or False."),
    ("gqa_prefill_packed", {"max_seqlen_q": 0}, ValueError, "max_seqlen_q is 0; need a positive int."),
    ("gqa_prefill_packed", {"max_seqlen_kv": 4.0}, TypeError, "max_seqlen_kv is 4.0; need a Python int or None."),
    ("gqa_prefill_packed", {"max_seqlen_kv": True}, TypeError, "max_seqlen_kv is True; need a Python int or None."),
    ("gqa_prefill_packed", {"is_uniform": 1}, TypeError, "is_uniform is 1; need True or False."),
    (
        "gqa_prefill_packed",
        {"is_uniform": True, "max_seqlen_q": 3},
        ValueError,
        f"is_uniform is True with max_seqlen_q 3, a batch of 2 and 8 q tokens; need batch * max_seqlen_q == tokens. {RAGGED}",
    ),
    (
        "gqa_prefill_packed",
        {"is_uniform": True, "k": zeros(9, 3, 8), "v": zeros(9, 3, 8)},
        ValueError,
        f"is_uniform is True with max_seqlen_kv 4, a batch of 2 and 9 kv tokens; {PRODUCT} {RAGGED}",
    ),
    (
        "gqa_prefill",
        {"window": 4},
        TypeError,
        f"window is the int 4; {PAIR} A window of 4 keys that ends at the query is window=(3, 0).",
    ),
    (
        "gqa_decode",
        {"window": -1},
        TypeError,
        f"window is the int -1; {PAIR} No window is None.",
    ),
    ("gqa_prefill", {"window": True}, TypeError, "window is True; need a pair (left, right) of ints or None."),
    ("gqa_prefill", {"window": (1, 2, 3)}, TypeError, "window is (1, 2, 3); need a pair (left, right) of ints or None."),
    ("gqa_prefill", {"window": (1.0, 0)}, TypeError, "window has 1.0 as its left bound; need an int or None."),
    (
        "gqa_prefill",
        {"window": (0, -2)},
        ValueError,
        "window has -2 as its right bound; need an int of 0 or more, or None (or -1) for unbounded.",
    ),
    ("gqa_prefill", {"out_dtype": np.float64}, TypeError, f"out_dtype is float64; need one of {ANY}, or None."),
    ("gqa_prefill", {"out_dtype": "flot32"}, TypeError, f"out_dtype is 'flot32'; need one of {ANY}, or None."),
    (
        "gqa_prefill",
        {"backend": "flash"},
        ValueError,
        "backend is 'flash'; need one of auto, dense, varlen, sliding_window, fp8.",
    ),
    ("gqa_prefill", {"build": 90}, TypeError, "build is 90; need a build's name (sm90, sm80, xla) or None."),
    (
        "gqa_prefill",
        {"device": "H300"},
        ValueError,
        f"device is 'H300'; need one of {DEVICE_NAMES}, or a dispatch_core.Device.",
    ),
    ("gqa_prefill", {"device": 0}, TypeError, "device is 0; need a name, a dispatch_core.Device, or None."),
    (
        "gqa_prefill",
        {"device": "H200"},
        ValueError,
        f"device is 'H200', a CUDA target, and the arrays are on the CPU; need {ON_DEVICE}",
    ),
    ("gqa_prefill", {"interpret": 1, "device": "H200"}, TypeError, "interpret is 1; need True or False."),
    (
        "gqa_prefill",
        {"interpret": True},
        ValueError,
        'interpret is True without a device; need device= naming a CUDA target. Say device="H200", for instance.',
    ),
    (
        "gqa_prefill",
        {"interpret": True, "device": "CPU"},
        ValueError,
        "interpret is True for device 'CPU'; need device= naming a CUDA target. Say device=\"H200\", for instance.",
    ),
    (
        "gqa_prefill",
        {"kernel_map": {"gqa_prefil_fwd_kernel": None}},
        ValueError,
        f"kernel_map has the key 'gqa_prefil_fwd_kernel'; need one of {PREFILL_KEYS}. Did you mean 'gqa_prefill_fwd_kernel'?",
    ),
    (
        "gqa_decode",
        {"kernel_map": {"gqa_decode_bs_kernel": None}},
        ValueError,
        f"kernel_map has the key 'gqa_decode_bs_kernel'; need one of {DECODE_KEYS}. Did you mean 'gqa_decode_bs1_kernel'?",
    ),
    (
        "gqa_prefill",
        {"kernel_map": {"gqa_prefill_fwd_kernel": None}},
        TypeError,
        "kernel_map['gqa_prefill_fwd_kernel'] is None; need a dispatch_core.Kernel.",
    ),
    (
        "gqa_prefill",
        {"kernel_map": ["gqa_prefill_fwd_kernel"]},
        TypeError,
        "kernel_map is ['gqa_prefill_fwd_kernel']; need a mapping of dispatch keys to dispatch_core.Kernel, or None.",
    ),
]
REQUESTS = [
    ("gqa_prefill", {"k_scale": 1.0}, "k_scale is given and k is float32; need float8_e4m3fn data to scale. Drop k_scale."),
    ("gqa_decode", {"v_scale": 1.0}, "v_scale is given and k is float32; need float8_e4m3fn data to scale. Drop v_scale."),
    (
        "append_paged",
        {"k_scale": 1.0},
        "k_scale is given and k_pages is float32; need float8_e4m3fn data to scale. Drop k_scale.",
    ),
    ("gqa_prefill", QKV8 | {"backend": "dense"}, "backend is 'dense' and q is float8_e4m3fn; need auto or fp8 for FP8 inputs."),
    ("gqa_prefill", {"backend": "fp8"}, "backend is 'fp8' and q is not FP8; need float8_e4m3fn q, k and v."),
    (
        "gqa_prefill",
        {"backend": "varlen", "window": (1, 0)},
        "backend is 'varlen' and window is (1, 0); need auto or sliding_window with a window.",
    ),
    (
        "gqa_prefill",
        {"backend": "sliding_window", "window": (-1, None)},
        "backend is 'sliding_window' and there is no window; need window=(left, right) with at least one bound.",
    ),
    (
        "gqa_prefill",
        {"backend": "dense", "kv_lengths": ints(1, 2)},
        "backend is 'dense' and the sequences are ragged; need auto or varlen for ragged sequences.",
    ),
    (
        "gqa_prefill_packed",
        {"backend": "dense", "is_uniform": False},
        "backend is 'dense' and the sequences are ragged; need auto or varlen for ragged sequences.",
    ),
]
EVEN = "need a positive even int of at most head_dim, which is 8."
ROPES = [
    ({"theta": 1.0}, TypeError, "rope is {'theta': 1.0}; need a jax_ops.Rope or None."),
    (
        Rope(),
        ValueError,
        "rope.max_position is None; need the number of positions to allow for. The cache's capacity per sequence will do.",
    ),
    (Rope(max_position=0), ValueError, "rope.max_position is 0; need a positive int."),
    (Rope(max_position=8.0), TypeError, "rope.max_position is 8.0; need a Python int or None."),
    (Rope(rotary_dim=3, max_position=8), ValueError, f"rope.rotary_dim is 3; {EVEN}"),
    (Rope(rotary_dim=0, max_position=8), ValueError, f"rope.rotary_dim is 0; {EVEN}"),
    (Rope(rotary_dim=10, max_position=8), ValueError, f"rope.rotary_dim is 10; {EVEN}"),
    (Rope(rotary_dim=4.0, max_position=8), TypeError, "rope.rotary_dim is 4.0; need a Python int or None."),
    (Rope(style="neox", max_position=8), ValueError, "rope.style is 'neox'; need one of half, interleaved."),
    (Rope(theta=-1, max_position=8), ValueError, "rope.theta is -1; need a positive number."),
    (Rope(theta="1", max_position=8), TypeError, "rope.theta is '1'; need a Python number or None."),
    (Rope(inv_freq=zeros(8), max_position=8), ValueError, "rope.inv_freq has shape (8,); need (4,), half of rotary_dim 8."),
]
CASES = [
    *((op, changes, ValueError, message) for op, changes, message in SHAPES + REQUESTS),
    *((op, changes, TypeError, message) for op, changes, message in TYPES),
    *STATIC_VALUES,
    *((op, {"rope": value}, error, message) for value, error, message in ROPES for op in ("gqa_decode_paged",)),
    *((op, {"rope": Rope()}, ROPES[1][1], ROPES[1][2]) for op in ("gqa_prefill_paged", "append_paged")),
]
# Options that decide the compiled program: a traced one is refused by name.
TRACED = {
    "gqa_prefill": (
        ("scale", 1.0),
        ("softcap", 1.0),
        ("window", 1),
        ("is_causal", True),
        ("return_lse", True),
        ("interpret", True),
        ("out_dtype", 1),
        ("backend", 1),
        ("build", 1),
        ("device", 1),
        ("kernel_map", 1),
    ),
    "gqa_prefill_packed": (("max_seqlen_q", 4), ("max_seqlen_kv", 5), ("is_uniform", True)),
    "gqa_decode": (("scale", 1.0), ("softcap", 1.0), ("window", 1), ("return_lse", True), ("build", 1), ("device", 1)),
    "gqa_decode_paged": (("scale", 1.0), ("softcap", 1.0), ("window", 1), ("return_lse", True), ("build", 1), ("device", 1)),
    "gqa_prefill_paged": (("max_seqlen_q", 4), ("is_causal", True), ("scale", 1.0), ("window", 1), ("return_lse", True)),
    "append_paged": (("build", 1), ("device", 1), ("interpret", True), ("kernel_map", 1)),
}
