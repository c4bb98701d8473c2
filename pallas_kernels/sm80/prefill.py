"""Prefill attention on Pallas-Triton: dense, padded, packed and windowed, one kernel.

o[t, h] = sum_j softmax_j(scale * q[t, h] . k[j, h // G]) v[j, h // G] over the keys j that token t sees, per request;
q (Tq, Hq, D), k (Tkv, Hkv, D), v (Tkv, Hkv, Dv); float32 sums, lse in natural logarithms. A dense batch is the packed
one whose requests start at multiples of the padded length.

What makes it fast:

- M-fold: the query heads of a group are rows of one tile, which then spans fewer tokens. Short requests fill a tile, and
  the keys a causal or windowed tile reads for some of its rows only become fewer.
- The keys of a tile form one interval. Its edges, where some row sees only part of a KV tile, run in one masked loop; the
  middle runs without a mask, and whatever lies outside is never visited.
- Running maxima live in base 2 with the scale folded in, so that an exponential costs one multiply-add and one `ex2`.
- Programs that read the same keys are neighbours in the grid, in sets of KV heads that fit the L2 cache, longest first.

Head sizes that are no power of two are cut into two powers of two (96 = 64 + 32), the rest of the second masked.

FlashAttention-2 (Dao, 2023) for the order of work; the rest is this library's own.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from dispatch_core.calls import FLOAT8, AttentionCall
from dispatch_core.tiling import TileConfig
from pallas_kernels.common import softmax
from pallas_kernels.sm80 import instructions

MIN_DOT = 16  # the smallest edge of a Triton dot
FLOAT32_INNER = 32  # head elements of one float32 product: 64 spills on compute capability 8.0 and 9.0
INT32_ELEMENTS = 2**31  # Pallas addresses an array of up to 2**32 bytes with signed 32-bit element offsets


class Chunk(NamedTuple):
    """Part of a head: first element, elements in the block (a power of two), and how many of them exist."""

    start: int
    width: int
    used: int


def head_chunks(dim: int, widest: int | None = None) -> tuple[Chunk, ...]:
    """A head size as power-of-two blocks no wider than `widest`, the last of them partly used where need be."""
    chunks, start = [], 0
    while start < dim:
        whole = max(MIN_DOT, pl.next_power_of_2(dim - start))
        half = whole // 2
        wastes = half >= MIN_DOT and half + max(MIN_DOT, pl.next_power_of_2(dim - start - half)) < whole
        width = min(half if wastes else whole, widest or whole)
        chunks.append(Chunk(start, width, min(width, dim - start)))
        start += width
    return tuple(chunks)


class Request(NamedTuple):
    """Where a program works: int32 scalars.

    Attributes:
      index: of the request.
      q_row, kv_row: first row of the request in q and in k and v.
      q_len, kv_len: its live lengths.
      o_len: rows it owns in o.
      token: first query token of the tile.
    """

    index: jax.Array
    q_row: jax.Array
    kv_row: jax.Array
    q_len: jax.Array
    kv_len: jax.Array
    o_len: jax.Array
    token: jax.Array


def _iota(n: int) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, (n,), 0)


def _divided(a: jax.Array, b: int) -> jax.Array:
    """A // b for a >= 0."""
    return lax.div(a, jnp.int32(b))


def _ceil_div(a: jax.Array, b: int) -> jax.Array:
    return _divided(a + (b - 1), b)


def _div_mod(a: jax.Array, b: int) -> tuple[jax.Array, jax.Array]:
    return _divided(a, b), lax.rem(a, jnp.int32(b))


def _place(rows: jax.Array, head: jax.Array, chunk: Chunk) -> tuple[jax.Array, ...]:
    """Indices (rows, chunk.width) of a chunk of a head (one, or one per row)."""
    shape = (rows.shape[0], chunk.width)
    head = lax.broadcast_in_dim(head, shape, (0,)) if head.ndim else head
    column = chunk.start + _iota(chunk.width)
    return lax.broadcast_in_dim(rows, shape, (0,)), head, lax.broadcast_in_dim(column, shape, (1,))


def _existing(live: jax.Array | None, rows: int, chunk: Chunk) -> jax.Array | None:
    """Which elements of a block exist: those of live rows (None: all of them) within the head; None: all."""
    shape = (rows, chunk.width)
    mask = None if live is None else lax.broadcast_in_dim(live, shape, (0,))
    if chunk.used == chunk.width:
        return mask
    within = lax.broadcast_in_dim(_iota(chunk.width) < chunk.used, shape, (1,))
    return within if mask is None else mask & within


def _load_rows(ref, rows: jax.Array, head: jax.Array, chunk: Chunk, live: jax.Array | None) -> jax.Array:
    """A chunk of a head (one, or one per row) in the given rows; 0 where a row is not live."""
    mask = _existing(live, rows.shape[0], chunk)
    return plt.load(ref.at[_place(rows, head, chunk)], mask=mask, other=None if mask is None else 0)


def _dot(a: jax.Array, b: jax.Array, *, b_is_transposed: bool = False) -> jax.Array:
    """The matrix product in float32 sums; float32 operands are not rounded."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dimensions = (((1,), (1 if b_is_transposed else 0,)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)


@dataclass(frozen=True)
class Plan:
    """The static side of a launch.

    Attributes:
      call: the facts.
      tile: the tile.
      fold: heads of a group in one tile.
      tiles: query tiles of one KV head: of one request when dense, of all of them when packed.
      kv_lanes: (request, KV head) pairs when dense, KV heads when packed.
      lanes_per_pass: how many of them run side by side, all their query tiles before the next ones' first.
      interpret: whether Pallas' interpreter runs it.
    """

    call: AttentionCall
    tile: TileConfig
    fold: int
    tiles: int
    kv_lanes: int
    lanes_per_pass: int
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
        return self.tiles * self.kv_lanes * self.bundles

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
    on average, and ceil(max_seqlen_q / T) of them leave part of the last one unused.
    """
    group, sides = call.group_size, 0
    keys = float(call.max_seqlen_kv)
    if call.is_causal:
        sides, keys = 1, max(1.0, keys - (call.max_seqlen_q - 1) / 2)
    if call.window is not None:
        sides = 1 if (call.window.left is None or call.window.right is None) and not call.is_causal else 2
        keys = min(keys, sum(side or 0 for side in (call.window.left, call.window.right)) + 1.0)

    def visited(fold: int) -> float:
        tokens = block_q // fold
        return group // fold * math.ceil(call.max_seqlen_q / tokens) * (keys + sides * (tokens - 1) / 2)

    return min((f for f in range(1, min(group, block_q) + 1) if group % f == 0), key=lambda f: (visited(f), -f))


def _plan(call: AttentionCall, tile: TileConfig, q_rows: int | None, kv_rows: int, interpret: bool) -> Plan:
    """The plan of a dense launch, or of a packed one with q_rows in all; kv_rows per lane."""
    fold = heads_per_tile(call, tile.block_q)
    tokens = tile.block_q // fold
    if q_rows is None:
        tiles, lanes = math.ceil(call.max_seqlen_q / tokens), call.batch * call.kv_heads
    else:
        # Every request, and the rows before the first and after the last one, may end in a partial tile.
        tiles, lanes = (q_rows + (call.batch + 2) * (tokens - 1)) // tokens, call.kv_heads
    lane_bytes = kv_rows * (call.head_dim + call.v_dim) * max(2, jnp.dtype(call.dtype).itemsize)
    fitting = [n for n in range(1, lanes + 1) if lanes % n == 0 and n * lane_bytes <= call.device.l2_bytes // 2]
    return Plan(call, tile, fold, tiles, lanes, max(fitting, default=1), interpret)


def packed_tiles(cu_seqlens_q: jax.Array, cu_seqlens_kv: jax.Array, q_rows: int, plan: Plan) -> jax.Array:
    """The request of each query tile of a packed batch, int32 (len(Request._fields) - 1, tiles); o_len is q_len.

    The rows before the first request and after the last one are requests without keys, so that every row is written.
    """
    zero, end = jnp.zeros((1,), jnp.int32), jnp.full((1,), q_rows, jnp.int32)
    q_start = jnp.concatenate([zero, cu_seqlens_q.astype(jnp.int32)])
    q_len = jnp.concatenate([cu_seqlens_q.astype(jnp.int32), end]) - q_start
    kv_start = jnp.concatenate([zero, cu_seqlens_kv.astype(jnp.int32)])
    kv_len = jnp.concatenate([zero, kv_start[2:] - kv_start[1:-1], zero])
    tiles = (q_len + (plan.tokens - 1)) // plan.tokens
    ends = jnp.cumsum(tiles, dtype=jnp.int32)
    place = jnp.arange(plan.tiles, dtype=jnp.int32)
    owner = jnp.sum(ends[None, :] <= place[:, None], axis=1, dtype=jnp.int32)
    is_idle = owner == tiles.shape[0]
    owner = jnp.minimum(owner, tiles.shape[0] - 1)
    index = jnp.clip(owner - 1, 0, plan.call.batch - 1)
    token = (ends[owner] - 1 - place) * plan.tokens  # a request's last tile, which sees the most keys, comes first
    live_q, live_kv = jnp.where(is_idle, 0, q_len[owner]), jnp.where(is_idle, 0, kv_len[owner])
    return jnp.stack([index, q_start[owner], kv_start[owner], live_q, live_kv, jnp.where(is_idle, 0, token)])


def _request(refs, plan: Plan, tile: jax.Array, batch: jax.Array) -> Request:
    if "tiles" in refs:
        index, q_row, kv_row, q_len, kv_len, token = (plt.load(refs["tiles"].at[i, tile]) for i in range(6))
        return Request(index, q_row, kv_row, q_len, kv_len, q_len, token)
    q_rows, kv_rows = jnp.int32(plan.call.max_seqlen_q), jnp.int32(plan.call.max_seqlen_kv)
    q_len, kv_len = (
        plt.load(refs[name].at[batch]) if name in refs else rows
        for name, rows in (("q_lengths", q_rows), ("kv_lengths", kv_rows))
    )
    token = (plan.tiles - 1 - tile) * plan.tokens
    return Request(batch, batch * q_rows, batch * kv_rows, q_len, kv_len, q_rows, token)


class KeyRange(NamedTuple):
    """The keys a program visits, int32: `count` KV tiles from key `begin` on, of which [full_from, full_to) need no mask.

    Row r sees the keys of [row_begin[r], row_end[r]); row_begin is None where no left bound is, row_end one scalar where no
    right bound is.
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

    def bounded(position: jax.Array) -> jax.Array:
        return request.kv_len if right is None else jnp.minimum(request.kv_len, position + (right + 1))

    begin = jnp.int32(0) if left is None else jnp.maximum(first - left, 0)
    end = jnp.where(request.token < request.q_len, bounded(last), 0)
    count = _ceil_div(jnp.maximum(end - begin, 0), block_kv)
    full_from = jnp.int32(0)
    if left is not None:
        full_from = jnp.minimum(_ceil_div(jnp.maximum(last - left - begin, 0), block_kv), count)
    full_to = jnp.clip(_divided(jnp.maximum(bounded(first) - begin, 0), block_kv), full_from, count)
    row_begin = None if left is None else token + (shift - left)
    return KeyRange(begin, count, full_from, full_to, row_begin, bounded(token + shift))


def _scaled_queries(refs, call: AttentionCall, q: list[jax.Array], request: Request, kv_head: jax.Array):
    """The query blocks and the positive factor on their dots that together scale the scores.

    The factor multiplies maxima too, so that its sign (or its being 0) has to sit in q.
    """
    factor = call.softmax_scale
    if "q_scale" not in refs and "k_scale" not in refs:
        sign = (factor > 0) - (factor < 0)
        return q if sign == 1 else [part * sign for part in q], abs(factor) or 1.0
    for name in ("q_scale", "k_scale"):
        if name in refs:
            factor = factor * plt.load(refs[name].at[request.index, kv_head])
    sign = jnp.sign(factor)
    return [part * sign.astype(part.dtype) for part in q], jnp.where(sign == 0, 1.0, jnp.abs(factor))


def _attended(refs, plan: Plan, request: Request, keys: KeyRange, kv_head: jax.Array, q: list[jax.Array]):
    """Running maxima in base 2, sums of weights, and weighted sums of v (a block per chunk) over a program's keys."""
    call, block_q, block_kv = plan.call, plan.tile.block_q, plan.tile.block_kv
    q, factor = _scaled_queries(refs, call, q, request, kv_head)

    def scores_of(rows: jax.Array, exists: jax.Array | None) -> tuple[jax.Array, jax.Array | float]:
        """Scores of a KV tile, and the factor that makes them base 2."""
        k = [_load_rows(refs["k"], rows, kv_head, chunk, exists) for chunk in plan.k_chunks]
        dots = functools.reduce(jnp.add, (_dot(a, b, b_is_transposed=True) for a, b in zip(q, k, strict=True)))
        if call.softcap is None:
            return dots, factor * softmax.LOG2_E
        return instructions.softcapped(dots, factor, call.softcap, interpret=plan.interpret), 1.0

    def visit(index: jax.Array, carry, is_edge: bool):
        top, total, sums = carry
        key = keys.begin + index * block_kv + _iota(block_kv)
        rows, exists = request.kv_row + key, key < request.kv_len if is_edge else None
        scores, scale = scores_of(rows, exists)
        if is_edge:
            scores = jnp.where(keys.visible(key), scores, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1) * scale)
        base = softmax.finite_base(new_top)
        p = instructions.exp2_scaled(scores, scale, base[:, None], interpret=plan.interpret)
        kept = instructions.exp2_scaled(top, 1.0, base, interpret=plan.interpret)
        total = total * kept + jnp.sum(p, axis=1)
        v = [_load_rows(refs["v"], rows, kv_head, chunk, exists) for chunk in plan.v_chunks]
        sums = tuple(part * kept[:, None] + _dot(p.astype(b.dtype), b) for part, b in zip(sums, v, strict=True))
        return new_top, total, sums

    full = keys.full_to - keys.full_from

    def visit_edge(index: jax.Array, carry):
        return visit(jnp.where(index < keys.full_from, index, index + full), carry, is_edge=True)

    carry = (
        jnp.full((block_q,), -jnp.inf, jnp.float32),
        jnp.zeros((block_q,), jnp.float32),
        tuple(jnp.zeros((block_q, chunk.width), jnp.float32) for chunk in plan.v_chunks),
    )
    carry = lax.fori_loop(keys.full_from, keys.full_to, functools.partial(visit, is_edge=False), carry)
    return lax.fori_loop(jnp.int32(0), keys.count - full, visit_edge, carry)


def _kernel(refs, out, *, plan: Plan) -> None:
    call, block_q = plan.call, plan.tile.block_q
    pass_index, rest = _div_mod(pl.program_id(0), plan.tiles * plan.lanes_per_pass * plan.bundles)
    tile, rest = _div_mod(rest, plan.lanes_per_pass * plan.bundles)
    lane, bundle = _div_mod(rest, plan.bundles)
    batch, kv_head = _div_mod(pass_index * plan.lanes_per_pass + lane, call.kv_heads)
    request = _request(refs, plan, tile, batch)

    row = _iota(block_q)
    row_token, member = _div_mod(row, plan.fold)
    token = request.token + row_token
    q_head = kv_head * call.group_size + bundle * plan.fold
    q_head = q_head if plan.fold == 1 else q_head + member
    mine = row < plan.tokens * plan.fold
    live = mine & (token < request.q_len)

    q_rows = request.q_row + token
    q = [_load_rows(refs["q"], q_rows, q_head, chunk, live) for chunk in plan.k_chunks]
    top, total, sums = _attended(refs, plan, request, _key_range(request, plan, token), kv_head, q)
    top, total = jnp.where(live, top, -jnp.inf), jnp.where(live, total, 0.0)

    sink = None
    if "sinks" in refs:
        sink = plt.load(refs["sinks"].at[jnp.minimum(q_head, call.q_heads - 1)])
    weight, lse = softmax.finished_rows(top, total, sink)
    if "v_scale" in refs:
        weight = weight * plt.load(refs["v_scale"].at[request.index, kv_head])
    owned = mine & (token < request.o_len)
    for part, chunk in zip(sums, plan.v_chunks, strict=True):
        o = jnp.where((total == 0)[:, None], 0.0, part * weight[:, None]).astype(out["o"].dtype)
        plt.store(out["o"].at[_place(q_rows, q_head, chunk)], o, mask=_existing(owned, block_q, chunk))
    if "lse" in out:
        plt.store(out["lse"].at[q_rows, q_head], lse, mask=owned)


def _launch(plan: Plan, o_shape: tuple[int, ...], arrays: dict[str, jax.Array | None]):
    """Runs the plan on rows (T, heads, dim); o_shape is o's."""
    call, tile = plan.call, plan.tile
    given = {name: array for name, array in arrays.items() if array is not None}
    for name in ("q", "k", "v"):
        if given[name].dtype == jnp.float8_e4m3fn:
            # Exact, one pass over memory, and the kernel's copies stay asynchronous.
            given[name] = given[name].astype(jnp.float16)
        given[name] = given[name].reshape(-1, *given[name].shape[-2:])
    q_rows, q_heads, _ = given["q"].shape
    # An FP8 result is rounded outside the kernel: compute capability 8.0 and 8.6 cannot.
    o_dtype = jnp.float32 if call.o_dtype == FLOAT8 else jnp.dtype(call.o_dtype)
    out_shape = {"o": jax.ShapeDtypeStruct((q_rows, q_heads, call.v_dim), o_dtype)}
    if call.return_lse:
        out_shape["lse"] = jax.ShapeDtypeStruct((q_rows, q_heads), jnp.float32)
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
      o (B, Sq, Hq, Dv), and lse (B, Sq, Hq) float32 or None.
    """
    plan = _plan(call, tile, None, k.shape[1], interpret)
    arrays = {"q": q, "k": k, "v": v, "q_lengths": q_lengths, "kv_lengths": kv_lengths}
    scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale, "sinks": sinks}
    return _launch(plan, (*q.shape[:-1], v.shape[-1]), arrays | scales)


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
      o (Tq, Hq, Dv), and lse (Tq, Hq) float32 or None; rows of no request are 0 and -inf.
    """
    plan = _plan(call, tile, q.shape[0], k.shape[0], interpret)
    arrays = {"q": q, "k": k, "v": v, "tiles": packed_tiles(cu_seqlens_q, cu_seqlens_kv, q.shape[0], plan)}
    scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale, "sinks": sinks}
    return _launch(plan, (*q.shape[:-1], v.shape[-1]), arrays | scales)
