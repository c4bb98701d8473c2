"""Prefill attention on Pallas-Triton: dense, padded, packed and windowed, one kernel.

o[t, h] = sum_j softmax_j(scale * q[t, h] . k[j, h // G]) v[j, h // G] over the keys j that token t sees, per request;
q (Tq, Hq, D), k (Tkv, Hkv, D), v (Tkv, Hkv, Dv); float32 sums, lse in natural logarithms. A dense batch is the packed
one whose requests start at multiples of the padded length.

What makes it fast:

- M-fold: the query heads of a group are rows of one tile, which then spans fewer tokens. Short requests fill a tile, and
  the keys that a causal or windowed tile reads for some of its rows only become fewer.
- The keys of a tile form one interval. Its edges, where some row sees part of a KV tile, run in one masked loop; the middle
  runs without a mask, and whatever lies outside is never visited.
- The scale and log2 e are folded into the exponent: an exponential is one multiply-add and one `ex2`.
- Programs that read the same keys are neighbours in the grid, in sets of KV heads that fit the L2 cache, longest first.

Rows beyond a length are zeroed as they are loaded. A value row that is not finite also reaches the rows of its edge tile
that do not see its key, as 0 * NaN.

FlashAttention-2 (Dao, 2023) for the order of work; the rest is this library's own.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from dispatch_core.calls import ELEMENT_BYTES, FLOAT8, AttentionCall
from dispatch_core.tiling import TileConfig
from pallas_kernels.common import softmax
from pallas_kernels.sm80 import instructions
from pallas_kernels.sm80.blocks import MIN_DOT, Chunk, div_mod, divided, dot, existing, head_chunks, iota, load_rows, place

FLOAT32_INNER = 32  # head elements of one float32 product; 64 spills on compute capability 8.0 and 9.0


@dataclass(frozen=True)
class Plan:
    """The static side of a launch.

    Attributes:
      call: the facts.
      tile: the tile.
      fold: heads of a group in one tile.
      tiles: query tiles of one lane: of a request and KV head when dense, of a KV head when packed.
      lanes: (request, KV head) pairs when dense, KV heads when packed.
      lanes_per_pass: how many lanes run side by side, all their query tiles before the next ones' first.
      q_rows, kv_rows: rows of a request when dense, of all requests when packed.
      interpret: whether Pallas' interpreter runs it.
    """

    call: AttentionCall
    tile: TileConfig
    fold: int
    tiles: int
    lanes: int
    lanes_per_pass: int
    q_rows: int
    kv_rows: int
    interpret: bool

    @property
    def tokens(self) -> int:
        """Query tokens a tile spans."""
        return self.tile.block_q // self.fold

    @property
    def bundles(self) -> int:
        """Tiles that cover a group's heads for the same tokens."""
        return self.call.group_size // self.fold

    @property
    def programs(self) -> int:
        """Programs of the grid."""
        return self.tiles * self.lanes * self.bundles

    @property
    def k_chunks(self) -> tuple[Chunk, ...]:
        """The blocks of a query or key row.

        A float32 product runs on the scalar units, whose operands sit in registers over its whole inner length.
        """
        return head_chunks(self.call.head_dim, FLOAT32_INNER if self.call.dtype == "float32" else None)

    @property
    def v_chunks(self) -> tuple[Chunk, ...]:
        """The blocks of a value row.

        Triton gives each warp whole rows of a product, so that P stays in registers, only where it is no wider than tall.
        """
        block_q = self.tile.block_q
        return head_chunks(self.call.v_dim, block_q if block_q >= MIN_DOT * self.tile.num_warps else None)

    @property
    def left(self) -> int | None:
        """Keys visible before a token's own, or None."""
        return self.call.window.left if self.call.window else None

    @property
    def right(self) -> int | None:
        """Keys visible after a token's own, or None."""
        if self.call.is_causal:
            return 0
        return self.call.window.right if self.call.window else None


def heads_per_tile(call: AttentionCall, block_q: int) -> int:
    """How many heads of a group share a tile: the divisor that visits the fewest keys, the largest of equals.

    A tile of T = block_q // fold tokens reads, for each bounded side of the mask, (T - 1) / 2 keys more than its tokens see
    on average; and the last of the ceil(max_seqlen_q / T) tiles may be partly empty. Causal 4 x 512 with a group of 4 and
    128 rows: 4 heads of 32 tokens visit 10 % fewer keys than one head of 128.
    """
    left = call.window.left if call.window else None
    right = 0 if call.is_causal else call.window.right if call.window else None
    seen = float(call.max_seqlen_kv) if right is None else max(1.0, call.max_seqlen_kv - (call.max_seqlen_q - 1) / 2)
    if left is not None:
        seen = min(seen, left + 1.0 + (right or 0))
    bounded_sides = (left is not None) + (right is not None)

    def visited(fold: int) -> float:
        tokens = block_q // fold
        return call.group_size // fold * math.ceil(call.max_seqlen_q / tokens) * (seen + bounded_sides * (tokens - 1) / 2)

    divisors = [f for f in range(1, min(call.group_size, block_q) + 1) if call.group_size % f == 0]
    return min(divisors, key=lambda fold: (visited(fold), -fold))


def _dense_plan(call: AttentionCall, tile: TileConfig, q_rows: int, kv_rows: int, interpret: bool = False) -> Plan:
    fold = heads_per_tile(call, tile.block_q)
    lanes = call.batch * call.kv_heads
    tiles = pl.cdiv(q_rows, tile.block_q // fold)
    return Plan(call, tile, fold, tiles, lanes, _lanes_per_pass(call, lanes, kv_rows), q_rows, kv_rows, interpret)


def _packed_plan(call: AttentionCall, tile: TileConfig, q_rows: int, kv_rows: int, interpret: bool = False) -> Plan:
    fold = heads_per_tile(call, tile.block_q)
    tokens = tile.block_q // fold
    # Every request, and the rows before the first and after the last one, may end in a partly empty tile.
    tiles = (q_rows + (call.batch + 2) * (tokens - 1)) // tokens
    sharing = _lanes_per_pass(call, call.kv_heads, kv_rows)
    return Plan(call, tile, fold, tiles, call.kv_heads, sharing, q_rows, kv_rows, interpret)


def _lanes_per_pass(call: AttentionCall, lanes: int, kv_rows: int) -> int:
    """The most lanes, a divisor of all, whose keys and values fit half of the L2 cache."""
    lane_bytes = kv_rows * (call.head_dim + call.v_dim) * max(2, ELEMENT_BYTES[call.dtype])
    return max((n for n in range(1, lanes + 1) if lanes % n == 0 and n * lane_bytes <= call.device.l2_bytes // 2), default=1)


class LaunchPlan(NamedTuple):
    """What a call launches.

    Attributes:
      grid: programs.
      tile: the tile.
      fold: heads of a group in one tile.
      bytes_read: bytes the programs ask for of each operand when every request is as long as it can be. Each query tile
        asks for the keys it visits, so that K and V count once per ceil(G * max_seqlen_q / block_q) tiles; what exceeds
        their own size comes from the L2 cache.
    """

    grid: int
    tile: TileConfig
    fold: int
    bytes_read: dict[str, int]


def launch_plan(call: AttentionCall, tile: TileConfig) -> LaunchPlan:
    """The launch of a dense call, or of a packed one without padding."""
    plan = _dense_plan(call, tile, call.max_seqlen_q, call.max_seqlen_kv)
    keys = 0
    for token in range(0, call.max_seqlen_q, plan.tokens):
        first = token + call.max_seqlen_kv - call.max_seqlen_q
        last = min(first + plan.tokens, call.max_seqlen_kv) - 1
        begin = 0 if plan.left is None else max(0, first - plan.left)
        end = call.max_seqlen_kv if plan.right is None else min(call.max_seqlen_kv, last + plan.right + 1)
        keys += max(0, end - begin)
    width = max(2, ELEMENT_BYTES[call.dtype])
    q = call.batch * call.max_seqlen_q * call.q_heads * call.head_dim * width
    kv = plan.lanes * plan.bundles * keys * width
    return LaunchPlan(plan.programs, tile, plan.fold, {"q": q, "k": kv * call.head_dim, "v": kv * call.v_dim})


class Request(NamedTuple):
    """Where a program works: int32 scalars.

    Attributes:
      index: of the request.
      q_row, kv_row: first row of the request in q and in k and v.
      q_len, kv_len: its live lengths.
      token: first query token of the tile.
      o_len: rows it owns in o.
    """

    index: jax.Array
    q_row: jax.Array
    kv_row: jax.Array
    q_len: jax.Array
    kv_len: jax.Array
    token: jax.Array
    o_len: jax.Array


def _packed_tiles(cu_seqlens_q: jax.Array, cu_seqlens_kv: jax.Array, plan: Plan) -> jax.Array:
    """The request of every query tile of a packed batch: index, q_row, kv_row, q_len, kv_len, token; int32 (6, tiles).

    The rows before the first request and after the last one are requests without keys, so that every row is written.
    """
    edge = jnp.zeros((1,), jnp.int32)
    q_start = jnp.concatenate([edge, cu_seqlens_q.astype(jnp.int32)])
    q_len = jnp.concatenate([q_start[1:], edge + plan.q_rows]) - q_start
    kv_start = jnp.concatenate([edge, cu_seqlens_kv.astype(jnp.int32)])
    kv_len = jnp.concatenate([edge, kv_start[2:] - kv_start[1:-1], edge])
    ends = jnp.cumsum((q_len + (plan.tokens - 1)) // plan.tokens, dtype=jnp.int32)
    tile = jnp.arange(plan.tiles, dtype=jnp.int32)
    owner = jnp.sum(ends[None, :] <= tile[:, None], axis=1, dtype=jnp.int32)
    is_idle = owner == len(q_start)
    owner = jnp.minimum(owner, len(q_start) - 1)
    token = (ends[owner] - 1 - tile) * plan.tokens  # a request's last tile, which sees the most keys, comes first
    index = jnp.clip(owner - 1, 0, plan.call.batch - 1)
    live = (jnp.where(is_idle, 0, x) for x in (q_len[owner], kv_len[owner], token))
    return jnp.stack([index, q_start[owner], kv_start[owner], *live])


def _request(refs: dict[str, Any], plan: Plan, tile: jax.Array, batch: jax.Array) -> Request:
    """The request of a query tile; `batch` is read when dense."""
    if "tiles" in refs:
        index, q_row, kv_row, q_len, kv_len, token = (plt.load(refs["tiles"].at[jnp.int32(i), tile]) for i in range(6))
        return Request(index, q_row, kv_row, q_len, kv_len, token, q_len)
    q_rows, kv_rows = jnp.int32(plan.q_rows), jnp.int32(plan.kv_rows)
    q_len = plt.load(refs["q_lengths"].at[batch]) if "q_lengths" in refs else q_rows
    kv_len = plt.load(refs["kv_lengths"].at[batch]) if "kv_lengths" in refs else kv_rows
    token = (plan.tiles - 1 - tile) * plan.tokens
    return Request(batch, batch * q_rows, batch * kv_rows, q_len, kv_len, token, q_rows)


class KeyRange(NamedTuple):
    """The keys a program visits, int32: `count` KV tiles from key `begin` on, of which [full_from, full_to) need no mask.

    Row r sees the keys of [row_begin[r], row_end[r]); row_begin is None without a left bound, row_end one scalar without a
    right one.
    """

    begin: jax.Array
    count: jax.Array
    full_from: jax.Array
    full_to: jax.Array
    row_begin: jax.Array | None
    row_end: jax.Array

    def visible(self, key: jax.Array) -> jax.Array:
        """Which of the keys each row sees, (rows, keys) or (1, keys)."""
        seen = key[None, :] < (self.row_end[:, None] if self.row_end.ndim else self.row_end)
        return seen if self.row_begin is None else seen & (key[None, :] >= self.row_begin[:, None])


def _key_range(request: Request, plan: Plan, token: jax.Array) -> KeyRange:
    """The keys of a tile whose rows are the given tokens of the request."""
    block_kv, left, right = plan.tile.block_kv, plan.left, plan.right
    shift = request.kv_len - request.q_len
    first = request.token + shift
    last = jnp.minimum(first + plan.tokens, request.kv_len) - 1

    def end_of(position: jax.Array) -> jax.Array:
        return request.kv_len if right is None else jnp.minimum(request.kv_len, position + (right + 1))

    def tiles_in(keys: jax.Array) -> jax.Array:
        return divided(jnp.maximum(keys, 0), block_kv)

    begin = jnp.int32(0) if left is None else jnp.maximum(first - left, 0)
    end = jnp.where(request.token < request.q_len, end_of(last), 0)
    count = tiles_in(end - begin + (block_kv - 1))
    full_from = jnp.int32(0) if left is None else jnp.minimum(tiles_in(last - left - begin + (block_kv - 1)), count)
    full_to = jnp.clip(tiles_in(end_of(first) - begin), full_from, count)
    row_begin = None if left is None else token + (shift - left)
    return KeyRange(begin, count, full_from, full_to, row_begin, end_of(token + shift))


def _scaled_queries(
    refs: dict[str, Any], call: AttentionCall, q: list[jax.Array], request: Request, kv_head: jax.Array
) -> tuple[list[jax.Array], jax.Array | float]:
    """The query blocks and the positive factor on their dots that together scale the scores.

    The factor multiplies maxima and masked scores too, so that its sign, or its being 0, has to sit in q.
    """
    factor = call.softmax_scale
    given = [plt.load(refs[name].at[request.index, kv_head]) for name in ("q_scale", "k_scale") if name in refs]
    if not given:
        sign = (factor > 0) - (factor < 0)
        return q if sign == 1 else [part * sign for part in q], abs(factor) or 1.0
    factor = functools.reduce(jnp.multiply, given, factor)
    sign = jnp.sign(factor)
    return [part * sign.astype(part.dtype) for part in q], jnp.where(sign == 0, 1.0, jnp.abs(factor))


def _attended(
    refs: dict[str, Any], plan: Plan, request: Request, keys: KeyRange, kv_head: jax.Array, q: list[jax.Array]
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]:
    """Running maxima in base 2, sums of weights, and weighted sums of v (a block per chunk) over a program's keys."""
    call, block_q, block_kv = plan.call, plan.tile.block_q, plan.tile.block_kv
    q, factor = _scaled_queries(refs, call, q, request, kv_head)
    scale = factor * softmax.LOG2_E if call.softcap is None else 1.0

    def scores_of(rows: jax.Array, exists: jax.Array | None) -> jax.Array:
        """Scores of a KV tile: their product with `scale` is in base 2."""
        k = [load_rows(refs["k"], rows, kv_head, chunk, exists) for chunk in plan.k_chunks]
        dots = functools.reduce(jnp.add, (dot(a, b, b_is_transposed=True) for a, b in zip(q, k, strict=True)))
        if call.softcap is None:
            return dots
        return instructions.softcapped(dots, factor, call.softcap, interpret=plan.interpret)

    def visit(index: jax.Array, carry: Any, is_edge: bool) -> Any:
        top, total, sums = carry
        key = keys.begin + index * block_kv + iota(block_kv)
        rows, exists = request.kv_row + key, key < request.kv_len if is_edge else None
        scores = scores_of(rows, exists)
        if is_edge:
            scores = jnp.where(keys.visible(key), scores, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        base = softmax.finite_base(new_top)
        rate = instructions.steepest_rate(base, scale, interpret=plan.interpret)
        p = instructions.exp2_scaled(scores, rate[:, None], (base * rate)[:, None], interpret=plan.interpret)
        kept = instructions.exp2_scaled(top - base, rate, 0.0, interpret=plan.interpret)
        total = total * kept + jnp.sum(p, axis=1)
        v = [load_rows(refs["v"], rows, kv_head, chunk, exists) for chunk in plan.v_chunks]
        sums = tuple(part * kept[:, None] + dot(p.astype(b.dtype), b) for part, b in zip(sums, v, strict=True))
        return new_top, total, sums

    full = keys.full_to - keys.full_from

    def visit_edge(index: jax.Array, carry: Any) -> Any:
        return visit(jnp.where(index < keys.full_from, index, index + full), carry, is_edge=True)

    carry = (
        jnp.full((block_q,), -jnp.inf, jnp.float32),
        jnp.zeros((block_q,), jnp.float32),
        tuple(jnp.zeros((block_q, chunk.width), jnp.float32) for chunk in plan.v_chunks),
    )
    carry = lax.fori_loop(keys.full_from, keys.full_to, functools.partial(visit, is_edge=False), carry)
    top, total, sums = lax.fori_loop(jnp.int32(0), keys.count - full, visit_edge, carry)
    return top * scale, total, sums


def _kernel(refs: dict[str, Any], out: dict[str, Any], *, plan: Plan) -> None:
    call, block_q = plan.call, plan.tile.block_q
    turn, rest = div_mod(pl.program_id(0), plan.tiles * plan.lanes_per_pass * plan.bundles)
    tile, rest = div_mod(rest, plan.lanes_per_pass * plan.bundles)
    lane, bundle = div_mod(rest, plan.bundles)
    batch, kv_head = div_mod(turn * plan.lanes_per_pass + lane, call.kv_heads)
    request = _request(refs, plan, tile, batch)

    row = iota(block_q)
    row_token, member = div_mod(row, plan.fold)
    token = request.token + row_token
    q_head = kv_head * call.group_size + bundle * plan.fold
    q_head = q_head if plan.fold == 1 else q_head + member
    is_used = row < plan.tokens * plan.fold
    live = is_used & (token < request.q_len)

    q_rows = request.q_row + token
    q = [load_rows(refs["q"], q_rows, q_head, chunk, live) for chunk in plan.k_chunks]
    top, total, sums = _attended(refs, plan, request, _key_range(request, plan, token), kv_head, q)
    top, total = jnp.where(live, top, -jnp.inf), jnp.where(live, total, 0.0)

    weight, lse = softmax.finished_rows(top, total, plt.load(refs["sinks"].at[q_head]) if "sinks" in refs else None)
    if "v_scale" in refs:
        weight = weight * plt.load(refs["v_scale"].at[request.index, kv_head])
    owned = is_used & (token < request.o_len)
    for part, chunk in zip(sums, plan.v_chunks, strict=True):
        o = jnp.where((total == 0)[:, None], 0.0, part * weight[:, None]).astype(out["o"].dtype)
        plt.store(out["o"].at[place(q_rows, q_head, chunk)], o, mask=existing(owned, block_q, chunk))
    if "lse" in out:
        plt.store(out["lse"].at[q_rows, q_head], lse, mask=owned)


def _launch(plan: Plan, o_shape: tuple[int, ...], arrays: dict[str, jax.Array | None]) -> tuple[jax.Array, jax.Array | None]:
    """Runs the plan; o_shape is o's."""
    call, tile = plan.call, plan.tile
    given = {name: array for name, array in arrays.items() if array is not None}
    for name in ("q", "k", "v"):
        if given[name].dtype == jnp.float8_e4m3fn:
            # Exact; one pass over memory that every target can do, after which the kernel's copies are asynchronous.
            given[name] = given[name].astype(jnp.float16)
        given[name] = given[name].reshape(-1, *given[name].shape[-2:])
    rows = given["q"].shape[:2]
    # An FP8 result is rounded outside the kernel: compute capabilities 8.0 and 8.6 cannot.
    o_dtype = jnp.float32 if call.o_dtype == FLOAT8 else jnp.dtype(call.o_dtype)
    out_shape = {"o": jax.ShapeDtypeStruct((*rows, call.v_dim), o_dtype)}
    if call.return_lse:
        out_shape["lse"] = jax.ShapeDtypeStruct(rows, jnp.float32)
    out = pl.pallas_call(
        functools.partial(_kernel, plan=plan),
        out_shape=out_shape,
        grid=(plan.programs,),
        compiler_params=plt.CompilerParams(num_warps=tile.num_warps, num_stages=tile.num_stages),
        interpret=plan.interpret,
        name="gqa_prefill",
    )(given)
    o = out["o"].astype(call.o_dtype).reshape(o_shape)
    return o, out["lse"].reshape(o_shape[:-1]) if call.return_lse else None


def dense_prefill(
    call: AttentionCall,
    tile: TileConfig,
    *,
    interpret: bool = False,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_lengths: jax.Array | None,
    kv_lengths: jax.Array | None,
    q_scale: jax.Array | None,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    sinks: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
    """Attention of q (B, Sq, Hq, D) over k (B, Skv, Hkv, D) and v (B, Skv, Hkv, Dv); lengths int32 (B,) or None.

    Returns:
      o (B, Sq, Hq, Dv), and lse (B, Sq, Hq) float32 or None; rows past a length are 0 and -inf (or the sink).
    """
    arrays = {"q": q, "k": k, "v": v, "q_lengths": q_lengths, "kv_lengths": kv_lengths}
    arrays |= {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale, "sinks": sinks}
    plan = _dense_plan(call, tile, q.shape[1], k.shape[1], interpret)
    return _launch(plan, (*q.shape[:-1], v.shape[-1]), arrays)


def packed_prefill(
    call: AttentionCall,
    tile: TileConfig,
    *,
    interpret: bool = False,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cu_seqlens_q: jax.Array,
    cu_seqlens_kv: jax.Array,
    q_scale: jax.Array | None,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    sinks: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
    """Attention of packed requests: q (Tq, Hq, D), k (Tkv, Hkv, D), v (Tkv, Hkv, Dv), cu_seqlens int32 (B + 1,).

    Returns:
      o (Tq, Hq, Dv), and lse (Tq, Hq) float32 or None; rows of no request are 0 and -inf (or the sink).
    """
    plan = _packed_plan(call, tile, q.shape[0], k.shape[0], interpret)
    arrays = {"q": q, "k": k, "v": v, "tiles": _packed_tiles(cu_seqlens_q, cu_seqlens_kv, plan)}
    arrays |= {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale, "sinks": sinks}
    return _launch(plan, (*q.shape[:-1], v.shape[-1]), arrays)
