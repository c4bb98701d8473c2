"""The reference of every attention op: the written semantics in float64 NumPy, sharing nothing with the code under test.

Every op has the name and the arguments of its public twin (the facts that only steer dispatch aside) and returns
``(o, lse)``, and the pages where it writes them. ``arithmetic`` chooses how exactly it computes: ``EXACT`` is the truth,
``plain(element)`` the ordinary low-precision computation that `tolerance` measures results against.

Decisions where the semantics leave room:

- A chunk or new token is attended unquantised in its own call, in decode as in prefill.
- The truth attends rotated q and k as they are; the plain computation and the stored pages round them once to k's type.
- A visible key whose score is -inf weighs nothing; a row whose visible scores are all -inf is an empty row.
- A NaN or infinity in a value row reaches exactly the rows that see its key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

import ml_dtypes
import numpy as np

Array = np.ndarray
FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
FLOAT8_MAX = 448.0
# What P is multiplied by before it is rounded to float8, as FP8 kernels do: it lifts all but vanishing weights out of
# the subnormals, and a row's largest weight, 1, stays below FLOAT8_MAX.
FLOAT8_P_LIFT = 256.0


@dataclass(frozen=True)
class Rope:
    """Rotary embedding, with the fields of the public ``Rope``; any object with these fields serves."""

    theta: float = 10000.0
    inv_freq: Array | None = None
    rotary_dim: int | None = None
    max_position: int | None = None
    style: str = "half"


@dataclass(frozen=True)
class Arithmetic:
    """How exactly to compute.

    Attributes:
      real: type of every sum and function.
      element: type the operands of both products are rounded to; None: not rounded.
    """

    real: type[np.floating] = np.float64
    element: np.dtype | None = None

    def operand(self, x: Array, scale: Array | None = None) -> Array:
        """X, times its scale if it has one, as an operand of a product."""
        y = x.astype(self.real)
        if scale is None:
            return y
        y = y * scale.astype(self.real)
        return y if self.element == FLOAT8 else self.rounded(y)

    def rounded(self, x: Array) -> Array:
        """X after one rounding to the element type."""
        return x if self.element is None else x.astype(self.element).astype(self.real)

    def weights(self, p: Array) -> Array:
        """Unnormalised softmax weights, in [0, 1], as an operand of the product with v."""
        lift = self.real(FLOAT8_P_LIFT if self.element == FLOAT8 else 1.0)
        return self.rounded(p * lift) / lift


EXACT = Arithmetic()


def plain(element: Any) -> Arithmetic:
    """The plain computation on inputs of an element type: P rounded to that type, float32 sums."""
    return Arithmetic(np.float32, np.dtype(element))


class Rules(TypedDict, total=False):
    """The keywords every op shares; `scale` None is head_dim ** -0.5."""

    scale: float | None
    softcap: float | None
    window: tuple[int | None, int | None] | None
    sinks: Array | None
    arithmetic: Arithmetic


def visible_keys(q_len: int, kv_len: int, is_causal: bool, window: tuple[int | None, int | None] | None = None) -> Array:
    """Which keys each query of a request sees, (q_len, kv_len) bool: both ends aligned at the bottom right."""
    query = np.arange(q_len)[:, None] + (kv_len - q_len)
    key = np.arange(kv_len)[None, :]
    visible = np.ones((q_len, kv_len), bool)
    if is_causal:
        visible &= key <= query
    left, right = window or (None, None)
    if left is not None and left >= 0:
        visible &= key >= query - left
    if right is not None and right >= 0:
        visible &= key <= query + right
    return visible


def attend(q: Array, k: Array, v: Array, visible: Array, **rules: Unpack[Rules]) -> tuple[Array, Array]:
    """One request: softmax over the visible keys.

    Args:
      q: (n, Hq, D), already an operand; k: (m, Hkv, D); v: (m, Hkv, Dv).
      visible: (n, m) bool.
      **rules: the shared keywords; `window` is in `visible` already.

    Returns:
      o (n, Hq, Dv) and lse (n, Hq).
    """
    arithmetic = rules.get("arithmetic", EXACT)
    real = arithmetic.real
    softcap, sinks = rules.get("softcap"), rules.get("sinks")
    with np.errstate(all="ignore"):
        s = _by_query_head(q, k) * real(_softmax_scale(q, rules))
        if softcap is not None and softcap > 0:
            s = real(softcap) * np.tanh(s / real(softcap))
        s = np.where(visible, s, real(-np.inf))
        top = s.max(-1, initial=-np.inf)
        sink = np.full((q.shape[1], 1), -np.inf, real) if sinks is None else sinks.astype(real)[:, None]
        top = np.maximum(top, sink)
        base = np.where(np.isneginf(top), real(0), top)
        p = np.exp(s - base[..., None])
        total = p.sum(-1) + np.exp(sink - base)
        lse = base + np.log(total)
        o = _weighted_values(arithmetic.weights(p), v, visible)
        o = np.where(total[..., None] == 0, real(0), o / total[..., None])
    return o.transpose(1, 0, 2), lse.T


def _softmax_scale(q: Array, rules: Rules) -> float:
    scale = rules.get("scale")
    return q.shape[-1] ** -0.5 if scale is None else scale


def _by_query_head(q: Array, k: Array) -> Array:
    """Dot products (Hq, n, m); query head h reads KV head h // (Hq // Hkv)."""
    n, q_heads, dim = q.shape
    m, kv_heads, _ = k.shape
    folded = q.transpose(1, 0, 2).reshape(kv_heads, q_heads // kv_heads * n, dim)
    return (folded @ k.transpose(1, 2, 0)).reshape(q_heads, n, m)


def _weighted_values(p: Array, v: Array, visible: Array) -> Array:
    """Sums (Hq, n, Dv) of p * v over the visible keys: a key that is not visible adds nothing, whatever v holds."""
    q_heads, n, m = p.shape
    kv_heads, dim = v.shape[1:]
    finite = np.isfinite(v)
    folded = p.reshape(kv_heads, q_heads // kv_heads * n, m)
    o = (folded @ np.where(finite, v, 0).transpose(1, 0, 2)).reshape(q_heads, n, dim)
    for j in np.flatnonzero(~finite.all((1, 2))):
        rows = np.repeat(np.where(finite[j], 0, v[j]), q_heads // kv_heads, axis=0)
        o += np.where(visible[:, j, None], p[:, :, j, None] * rows[:, None], 0)
    return o


def _attend_request(
    q: Array, k: Array, v: Array, is_causal: bool, present: Array | None = None, **rules: Unpack[Rules]
) -> tuple[Array, Array]:
    """One request from its rows; keys with `present` false are masked."""
    visible = visible_keys(len(q), len(k), is_causal, rules.get("window"))
    if present is not None:
        visible &= present
    return attend(q, k, v, visible, **rules)


def _empty_rows(shape: tuple[int, ...], dim: int, rules: Rules) -> tuple[Array, Array]:
    """Output and lse of rows (..., Hq) that see no key."""
    real = rules.get("arithmetic", EXACT).real
    sinks = rules.get("sinks")
    lse = np.full(shape, -np.inf, real)
    return np.zeros((*shape, dim), real), lse if sinks is None else np.maximum(lse, sinks.astype(real))


def per_kv_head(scale: Any, batch: int, kv_heads: int) -> Array | None:
    """FP8 scales given as a scalar, (Hkv,) or (B, Hkv), as (B, Hkv); None stays None."""
    return None if scale is None else np.broadcast_to(np.asarray(scale, np.float32), (batch, kv_heads))


def clamped_cu_seqlens(cu_seqlens: Array, total: int) -> Array:
    """Offsets as they are read: in [0, total] and non-decreasing."""
    return np.maximum.accumulate(np.clip(cu_seqlens.astype(np.int64), 0, total))


def _lengths(lengths: Array | None, batch: int, capacity: int) -> Array:
    return np.full(batch, capacity) if lengths is None else np.clip(lengths.astype(np.int64), 0, capacity)


def _of_request(scale: Array | None, b: int) -> Array | None:
    """The scales of request b, to multiply rows (n, Hkv, D) with."""
    return None if scale is None else scale[b][:, None]


def _of_queries(scale: Array | None, b: int, group: int) -> Array | None:
    """The q scales of request b, one per KV head, to multiply rows (n, Hq, D) with."""
    return None if scale is None else np.repeat(scale[b], group)[:, None]


def gqa_prefill(
    q: Array,
    k: Array,
    v: Array,
    *,
    is_causal: bool = True,
    q_lengths: Array | None = None,
    kv_lengths: Array | None = None,
    q_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    **rules: Unpack[Rules],
) -> tuple[Array, Array]:
    """Dense prefill: o (B, Sq, Hq, Dv), lse (B, Sq, Hq)."""
    batch, q_capacity, q_heads, _ = q.shape
    kv_heads = k.shape[2]
    group = q_heads // kv_heads
    q_lengths, kv_lengths = _lengths(q_lengths, batch, q_capacity), _lengths(kv_lengths, batch, k.shape[1])
    q_scale, k_scale, v_scale = (per_kv_head(x, batch, kv_heads) for x in (q_scale, k_scale, v_scale))
    operand = rules.get("arithmetic", EXACT).operand
    o, lse = _empty_rows((batch, q_capacity, q_heads), v.shape[-1], rules)
    for b, (n, m) in enumerate(zip(q_lengths, kv_lengths, strict=True)):
        o[b, :n], lse[b, :n] = _attend_request(
            operand(q[b, :n], _of_queries(q_scale, b, group)),
            operand(k[b, :m], _of_request(k_scale, b)),
            operand(v[b, :m], _of_request(v_scale, b)),
            is_causal,
            **rules,
        )
    return o, lse


def gqa_prefill_packed(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_kv: Array,
    *,
    is_causal: bool = True,
    q_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    **rules: Unpack[Rules],
) -> tuple[Array, Array]:
    """Packed prefill: o (Tq, Hq, Dv), lse (Tq, Hq)."""
    batch, q_heads, kv_heads = len(cu_seqlens_q) - 1, q.shape[1], k.shape[1]
    cu_q, cu_kv = clamped_cu_seqlens(cu_seqlens_q, len(q)), clamped_cu_seqlens(cu_seqlens_kv, len(k))
    q_scale, k_scale, v_scale = (per_kv_head(x, batch, kv_heads) for x in (q_scale, k_scale, v_scale))
    operand = rules.get("arithmetic", EXACT).operand
    o, lse = _empty_rows(q.shape[:2], v.shape[-1], rules)
    for b in range(batch):
        mine, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_kv[b], cu_kv[b + 1])
        o[mine], lse[mine] = _attend_request(
            operand(q[mine], _of_queries(q_scale, b, q_heads // kv_heads)),
            operand(k[keys], _of_request(k_scale, b)),
            operand(v[keys], _of_request(v_scale, b)),
            is_causal,
            **rules,
        )
    return o, lse


def gqa_decode(
    q: Array,
    k: Array,
    v: Array,
    kv_lengths: Array | None = None,
    *,
    k_scale: Any = None,
    v_scale: Any = None,
    **rules: Unpack[Rules],
) -> tuple[Array, Array]:
    """Decode against a contiguous cache: o like q with Dv, lse without the last axis."""
    if q.ndim == 3:
        o, lse = gqa_decode(q[:, None], k, v, kv_lengths, k_scale=k_scale, v_scale=v_scale, **rules)
        return o[:, 0], lse[:, 0]
    return gqa_prefill(q, k, v, is_causal=True, kv_lengths=kv_lengths, k_scale=k_scale, v_scale=v_scale, **rules)


def inverse_frequencies(rope: Any, head_dim: int) -> Array:
    """The float32 factors on the position, (rotary_dim / 2,)."""
    if rope.inv_freq is not None:
        return np.asarray(rope.inv_freq, np.float32)
    rotary_dim = rope.rotary_dim or head_dim
    return (float(rope.theta) ** (-np.arange(0, rotary_dim, 2) / rotary_dim)).astype(np.float32)


def rotate(x: Array, positions: Array, rope: Any, real: type[np.floating] = np.float64) -> Array:
    """Rows (n, heads, D) rotated at their positions, unrounded. The angle is a float32 product, by definition."""
    inv_freq = inverse_frequencies(rope, x.shape[-1])
    rotary_dim = 2 * len(inv_freq)
    angle = (positions.astype(np.float32)[:, None] * inv_freq).astype(real)[:, None]
    cos, sin = np.cos(angle), np.sin(angle)
    y = x.astype(real)
    if rope.style == "half":
        first, second = slice(0, rotary_dim // 2), slice(rotary_dim // 2, rotary_dim)
    else:
        first, second = slice(0, rotary_dim, 2), slice(1, rotary_dim, 2)
    a, b = y[..., first].copy(), y[..., second].copy()
    with np.errstate(invalid="ignore"):
        y[..., first], y[..., second] = a * cos - b * sin, b * cos + a * sin
    return y


def stored(x: Array, dtype: np.dtype, scale: Array | None = None) -> Array:
    """Rows as a cache of that element type holds them; FP8: e4m3(clamp(f32(x) / scale, +-448))."""
    if dtype != FLOAT8:
        return x.astype(dtype)
    with np.errstate(all="ignore"):
        y = x.astype(np.float32)
        return np.clip(y if scale is None else y / scale, -FLOAT8_MAX, FLOAT8_MAX).astype(dtype)


def read_pages(pages: Array, table_row: Array, length: int) -> tuple[Array, Array]:
    """The first `length` rows of a sequence, and which of them lie in pages that exist (the others read 0)."""
    position = np.arange(length)
    page = table_row.astype(np.int64)[position // pages.shape[1]]
    exists = (page >= 0) & (page < len(pages))
    rows = pages[np.where(exists, page, 0), position % pages.shape[1]]
    return np.where(exists[:, None, None], rows, np.zeros((), pages.dtype)), exists


def write_pages(pages: Array, table_row: Array, start: int, rows: Array) -> None:
    """Put rows at positions from `start` on, in place; those past the capacity or in no existing page are dropped."""
    page_size = pages.shape[1]
    for position, row in enumerate(rows, start):
        if position < len(table_row) * page_size and 0 <= (page := int(table_row[position // page_size])) < len(pages):
            pages[page, position % page_size] = row


def _rotated(x: Array, start: int, rope: Any, arithmetic: Arithmetic) -> Array:
    """Rows as an operand, rotated at the positions from `start` on."""
    if rope is None:
        return arithmetic.operand(x)
    y = rotate(x, start + np.arange(len(x)), rope, arithmetic.real)
    return y if arithmetic.element is None else y.astype(x.dtype).astype(arithmetic.real)


def gqa_decode_paged(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    page_table: Array,
    kv_lengths: Array,
    *,
    k_new: Array | None = None,
    v_new: Array | None = None,
    rope: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    **rules: Unpack[Rules],
) -> tuple[Array, ...]:
    """Decode against a paged cache: o, lse, and k_pages, v_pages when k_new is given (k_new, v_new have q's rank).

    `kv_lengths` counts the query tokens, except with `k_new`, where it is the length before the append.
    """
    if q.ndim == 3:
        new = {} if k_new is None or v_new is None else {"k_new": k_new[:, None], "v_new": v_new[:, None]}
        o, lse, *pages = gqa_decode_paged(
            q[:, None], k_pages, v_pages, page_table, kv_lengths, **new, rope=rope, k_scale=k_scale, v_scale=v_scale, **rules
        )
        return o[:, 0], lse[:, 0], *pages
    batch, tokens = q.shape[:2]
    lengths = _lengths(kv_lengths, batch, page_table.shape[1] * k_pages.shape[1])
    if k_new is not None and v_new is not None:
        flat_q, flat_k, flat_v = (x.reshape(-1, *x.shape[2:]) for x in (q, k_new, v_new))
        o, lse, *pages = gqa_prefill_paged(
            flat_q, flat_k, flat_v, k_pages, v_pages, page_table, tokens * np.arange(batch + 1), lengths,
            is_causal=True, rope=rope, k_scale=k_scale, v_scale=v_scale, **rules,
        )  # fmt: skip
        return o.reshape(*q.shape[:3], v_new.shape[-1]), lse.reshape(q.shape[:3]), *pages
    arithmetic = rules.get("arithmetic", EXACT)
    k_scale, v_scale = (per_kv_head(x, batch, k_pages.shape[2]) for x in (k_scale, v_scale))
    o, lse = _empty_rows(q.shape[:3], v_pages.shape[-1], rules)
    for b, length in enumerate(lengths):
        k, exists = read_pages(k_pages, page_table[b], length)
        v, _ = read_pages(v_pages, page_table[b], length)
        o[b], lse[b] = _attend_request(
            _rotated(q[b], length - tokens, rope, arithmetic),
            arithmetic.operand(k, _of_request(k_scale, b)),
            arithmetic.operand(v, _of_request(v_scale, b)),
            True,
            exists,
            **rules,
        )
    return o, lse


def gqa_prefill_paged(
    q: Array,
    k: Array,
    v: Array,
    k_pages: Array,
    v_pages: Array,
    page_table: Array,
    cu_seqlens_q: Array,
    cache_lengths: Array,
    *,
    is_causal: bool = True,
    rope: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    **rules: Unpack[Rules],
) -> tuple[Array, Array, Array, Array]:
    """Paged prefill: o (T, Hq, Dv), lse (T, Hq), and the pages with the chunk appended."""
    arithmetic = rules.get("arithmetic", EXACT)
    batch = len(cu_seqlens_q) - 1
    cu = clamped_cu_seqlens(cu_seqlens_q, len(q))
    lengths = _lengths(cache_lengths, batch, page_table.shape[1] * k_pages.shape[1])
    k_heads, v_heads = (per_kv_head(x, batch, k.shape[1]) for x in (k_scale, v_scale))
    o, lse = _empty_rows(q.shape[:2], v.shape[-1], rules)
    for b, length in enumerate(lengths):
        chunk = slice(cu[b], cu[b + 1])
        old_k, exists = read_pages(k_pages, page_table[b], length)
        old_v, _ = read_pages(v_pages, page_table[b], length)
        o[chunk], lse[chunk] = _attend_request(
            _rotated(q[chunk], length, rope, arithmetic),
            np.concatenate([arithmetic.operand(old_k, _of_request(k_heads, b)), _rotated(k[chunk], length, rope, arithmetic)]),
            np.concatenate([arithmetic.operand(old_v, _of_request(v_heads, b)), arithmetic.operand(v[chunk])]),
            is_causal,
            np.concatenate([exists, np.ones(len(k[chunk]), bool)]),
            **rules,
        )
    pages = append_paged(
        k, v, k_pages, v_pages, page_table, lengths, cu_seqlens=cu, rope=rope, k_scale=k_scale, v_scale=v_scale
    )
    return o, lse, *pages


def append_paged(
    k: Array,
    v: Array,
    k_pages: Array,
    v_pages: Array,
    page_table: Array,
    lengths: Array,
    *,
    cu_seqlens: Array | None = None,
    rope: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
) -> tuple[Array, Array]:
    """Copies of the pages with new tokens appended: one per sequence, or packed with cu_seqlens."""
    batch, page_size, kv_heads = len(page_table), k_pages.shape[1], k_pages.shape[2]
    cu = clamped_cu_seqlens(np.arange(batch + 1) if cu_seqlens is None else cu_seqlens, len(k))
    lengths = _lengths(lengths, batch, page_table.shape[1] * page_size)
    k_scale, v_scale = (per_kv_head(x, batch, kv_heads) for x in (k_scale, v_scale))
    k_pages, v_pages = k_pages.copy(), v_pages.copy()
    for b, start in enumerate(lengths):
        chunk = slice(cu[b], cu[b + 1])
        rows = k[chunk] if rope is None else rotate(k[chunk], start + np.arange(len(k[chunk])), rope).astype(k.dtype)
        write_pages(k_pages, page_table[b], start, stored(rows, k_pages.dtype, _of_request(k_scale, b)))
        write_pages(v_pages, page_table[b], start, stored(v[chunk], v_pages.dtype, _of_request(v_scale, b)))
    return k_pages, v_pages


def merge_attention(
    o_a: Array, lse_a: Array, o_b: Array, lse_b: Array, *, arithmetic: Arithmetic = EXACT
) -> tuple[Array, Array]:
    """Attention over the union of two disjoint sets of keys, from the partial results over each."""
    lse_a, lse_b = lse_a.astype(arithmetic.real), lse_b.astype(arithmetic.real)
    with np.errstate(all="ignore"):
        top = np.maximum(lse_a, lse_b)
        base = np.where(np.isneginf(top), arithmetic.real(0), top)
        weight_a, weight_b = np.exp(lse_a - base)[..., None], np.exp(lse_b - base)[..., None]
        total = weight_a + weight_b
        o = weight_a * o_a.astype(arithmetic.real) + weight_b * o_b.astype(arithmetic.real)
        return np.where(total == 0, arithmetic.real(0), o / total), base + np.log(total[..., 0])
