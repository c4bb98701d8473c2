"""How a prefill call is cut into programs: heads folded into tiles, tiles into a grid, and what the programs ask for."""

from __future__ import annotations

import math
from typing import NamedTuple

from jax.experimental import pallas as pl

from dispatch_core.calls import ELEMENT_BYTES, AttentionCall
from dispatch_core.tiling import TileConfig
from pallas_kernels.common import prefill_plan
from pallas_kernels.common.prefill_plan import lanes_per_pass
from pallas_kernels.sm80.blocks import MIN_DOT, Chunk, head_chunks

FLOAT32_INNER = 32  # head elements of one float32 product; 64 spills on compute capability 8.0 and 9.0
ACCUMULATORS = 64  # of one 16-bit product, registers a thread
MMA_SYNC_INNER = 64  # and of one 16-bit product where they are synchronous; 128 and more spill at head_dim 192


def has_asynchronous_products(arch: int, block_q: int) -> bool:
    """Whether Triton multiplies 16-bit matrices asynchronously: `wgmma` and `tcgen05.mma`, of 64 rows, not `mma.sync`."""
    return 90 <= arch < 120 and block_q >= 64


class Plan(prefill_plan.Plan):
    """A launch of Triton programs, one per item."""

    @property
    def has_shared_rows(self) -> bool:
        """Whether there are too few rows for each warp to have its own."""
        return self.tile.block_q < MIN_DOT * self.tile.num_warps

    @property
    def k_chunks(self) -> tuple[Chunk, ...]:
        """The blocks of a query or key row.

        A float32 product runs on the scalar units, whose operands sit in registers over its whole inner length. Where 16-bit
        products are asynchronous a row stays whole, because one of them waits for the one before.
        """
        if self.call.dtype == "float32":
            return head_chunks(self.call.head_dim, FLOAT32_INNER)
        return head_chunks(
            self.call.head_dim, None if has_asynchronous_products(self.call.arch, self.tile.block_q) else MMA_SYNC_INNER
        )

    @property
    def v_chunks(self) -> tuple[Chunk, ...]:
        """The blocks of a value row.

        Triton gives each warp whole rows of a product, so that P stays in registers, only where it is no wider than tall. And
        where products are synchronous, their operands need registers too: 64 accumulators a thread leave room, 128 spill.
        """
        block_q, num_warps = self.tile.block_q, self.tile.num_warps
        if self.has_shared_rows:
            return head_chunks(self.call.v_dim)
        if has_asynchronous_products(self.call.arch, block_q):
            return head_chunks(self.call.v_dim, block_q)
        return head_chunks(self.call.v_dim, min(block_q, ACCUMULATORS * 32 * num_warps // block_q))


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


def dense_plan(call: AttentionCall, tile: TileConfig, q_rows: int, kv_rows: int, interpret: bool = False) -> Plan:
    """The plan of requests of q_rows queries and kv_rows keys each."""
    fold = heads_per_tile(call, tile.block_q)
    lanes = call.batch * call.kv_heads
    tiles = pl.cdiv(q_rows, tile.block_q // fold)
    return Plan(call, tile, fold, tiles, lanes, lanes_per_pass(call, lanes, kv_rows), q_rows, kv_rows, interpret)


def packed_plan(call: AttentionCall, tile: TileConfig, q_rows: int, kv_rows: int, interpret: bool = False) -> Plan:
    """The plan of q_rows queries and kv_rows keys of all requests together."""
    fold = heads_per_tile(call, tile.block_q)
    tokens = tile.block_q // fold
    # Every request, and the rows before the first and after the last one, may end in a partly empty tile.
    tiles = (q_rows + (call.batch + 2) * (tokens - 1)) // tokens
    sharing = lanes_per_pass(call, call.kv_heads, kv_rows)
    return Plan(call, tile, fold, tiles, call.kv_heads, sharing, q_rows, kv_rows, interpret)


def shared_memory_bytes(call: AttentionCall, tile: TileConfig) -> int:
    """Shared memory of a program: Q once, and the K and V tiles in flight.

    Triton keeps num_stages of them where products are asynchronous, one fewer elsewhere, and half of one without a
    pipeline, where V takes the place of K. P is in shared memory where warps share rows, as they do in float32.
    """
    plan = dense_plan(call, tile, call.max_seqlen_q, call.max_seqlen_kv)
    width = max(2, ELEMENT_BYTES[call.dtype])
    k, v = (sum(chunk.width for chunk in chunks) for chunks in (plan.k_chunks, plan.v_chunks))
    ahead = tile.num_stages if has_asynchronous_products(call.arch, tile.block_q) and width == 2 else tile.num_stages - 1
    ring = tile.block_kv * (ahead * (k + v) if tile.num_stages > 1 else max(k, v))
    p = tile.block_q * tile.block_kv if width == 4 or plan.has_shared_rows else 0
    return max((tile.block_q * k + ring + p) * width, tile.block_q * v * width)


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
    plan = dense_plan(call, tile, call.max_seqlen_q, call.max_seqlen_kv)
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
    return LaunchPlan(plan.items, tile, plan.fold, {"q": q, "k": kv * call.head_dim, "v": kv * call.v_dim})
