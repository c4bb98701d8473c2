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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from dispatch_core.calls import FLOAT8, AttentionCall
from dispatch_core.tiling import TileConfig
from pallas_kernels.common import softmax
from pallas_kernels.common.prefill_plan import packed_requests, tile_owners
from pallas_kernels.sm80.blocks import div_mod, existing, iota, load_rows, place
from pallas_kernels.sm80.key_loop import Queries, Rows, Span, attended, key_range, nothing_seen, positively_scaled
from pallas_kernels.sm80.plan import Plan, dense_plan, packed_plan


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
    """The request of every query tile of a packed batch: index, q_row, kv_row, q_len, kv_len, token; int32 (6, tiles)."""
    requests = packed_requests(cu_seqlens_q, cu_seqlens_kv, plan.q_rows)
    owner, token, is_idle = tile_owners(plan, requests.q_len, requests.kv_len)
    index = jnp.clip(owner - 1, 0, plan.call.batch - 1)
    live = (jnp.where(is_idle, 0, x) for x in (requests.q_len[owner], requests.kv_len[owner], token))
    return jnp.stack([index, requests.q_row[owner], requests.kv_row[owner], *live])


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


def _queries(
    refs: dict[str, Any], call: AttentionCall, blocks: list[jax.Array], index: jax.Array, kv_head: jax.Array
) -> Queries:
    """The query blocks of a request and KV head, scaled."""
    given = [plt.load(refs[name].at[index, kv_head]) for name in ("q_scale", "k_scale") if name in refs]
    return positively_scaled(blocks, functools.reduce(jnp.multiply, given, float(call.softmax_scale)))


def _kernel(refs: dict[str, Any], out: dict[str, Any], *, plan: Plan) -> None:
    call, block_q = plan.call, plan.tile.block_q
    turn, rest = div_mod(pl.program_id(0), plan.tiles * plan.lanes_per_pass * plan.bundles)
    tile, rest = div_mod(rest, plan.lanes_per_pass * plan.bundles)
    lane, bundle = div_mod(rest, plan.bundles)
    batch, kv_head = div_mod(turn * plan.lanes_per_pass + lane, call.kv_heads)
    request = _request(refs, plan, tile, batch)

    row_token, member = div_mod(iota(block_q), plan.fold)
    token = request.token + row_token
    q_head = kv_head * call.group_size + bundle * plan.fold
    q_head = q_head if plan.fold == 1 else q_head + member
    is_used = row_token < plan.tokens
    live = is_used & (token < request.q_len)

    q_rows = request.q_row + token
    blocks = [load_rows(refs["q"], q_rows, q_head, chunk, live) for chunk in plan.k_chunks]
    q = _queries(refs, call, blocks, request.index, kv_head)
    span = Span(request.kv_len - request.q_len, request.kv_len, plan.right)
    keys = key_range(plan, span, token, request.token, request.q_len)
    columns = {"k": plan.k_chunks, "v": plan.v_chunks}
    source = Rows(refs, columns, request.kv_row, request.kv_len, kv_head, plan.tile.block_kv)
    top, total, sums = attended(plan, nothing_seen(block_q, plan.v_chunks), q, keys, source)
    top, total = jnp.where(live, top * q.raw_scale(call.softcap), -jnp.inf), jnp.where(live, total, 0.0)

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
        grid=(plan.items,),
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
    plan = dense_plan(call, tile, q.shape[1], k.shape[1], interpret)
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
    plan = packed_plan(call, tile, q.shape[0], k.shape[0], interpret)
    arrays = {"q": q, "k": k, "v": v, "tiles": _packed_tiles(cu_seqlens_q, cu_seqlens_kv, plan)}
    arrays |= {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale, "sinks": sinks}
    return _launch(plan, (*q.shape[:-1], v.shape[-1]), arrays)
