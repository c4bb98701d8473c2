"""How a prefill call is cut into items of work, whatever executes them: heads folded into tiles, tiles in an order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dispatch_core.calls import ELEMENT_BYTES, AttentionCall
from dispatch_core.tiling import TileConfig


@dataclass(frozen=True)
class Plan:
    """The static side of a launch.

    An item is a query tile of one KV head and of `fold` heads of its group. Items are numbered so that those that read the
    same keys are neighbours, in sets of KV heads that fit the L2 cache, the ones with the most keys first.

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
    def items(self) -> int:
        """Items of work."""
        return self.tiles * self.lanes * self.bundles

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


def lanes_per_pass(call: AttentionCall, lanes: int, kv_rows: int) -> int:
    """The most lanes, a divisor of all, whose keys and values fit half of the L2 cache."""
    lane_bytes = kv_rows * (call.head_dim + call.v_dim) * max(2, ELEMENT_BYTES[call.dtype])
    return max((n for n in range(1, lanes + 1) if lanes % n == 0 and n * lane_bytes <= call.device.l2_bytes // 2), default=1)


class Requests(NamedTuple):
    """First rows and lengths of packed requests, int32 (batch + 2,).

    The rows before the first request and after the last one are requests without keys, so that every row is written.
    """

    q_row: jax.Array
    q_len: jax.Array
    kv_row: jax.Array
    kv_len: jax.Array


def packed_requests(cu_seqlens_q: jax.Array, cu_seqlens_kv: jax.Array, q_rows: int) -> Requests:
    """The requests of a packed batch; cu_seqlens int32 (batch + 1,)."""
    edge = jnp.zeros((1,), jnp.int32)
    q_row = jnp.concatenate([edge, cu_seqlens_q.astype(jnp.int32)])
    q_len = jnp.concatenate([q_row[1:], edge + q_rows]) - q_row
    kv_row = jnp.concatenate([edge, cu_seqlens_kv.astype(jnp.int32)])
    kv_len = jnp.concatenate([edge, kv_row[2:] - kv_row[1:-1], edge])
    return Requests(q_row, q_len, kv_row, kv_len)


def tile_owners(plan: Plan, q_len: jax.Array, seen: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Which request each query tile of a packed plan belongs to, at which of its tokens, and whether it belongs to none.

    The requests that see the most keys come first, the last tokens of each before its first: whatever begins late is short.

    Args:
      plan: how many tiles there are.
      q_len: int32 (requests,), the tokens of each.
      seen: int32 (requests,), the keys that its last token sees.

    Returns:
      The request, the first token, and whether the tile is idle, each (tiles,).
    """
    request = jnp.arange(len(q_len), dtype=jnp.int32)
    is_not_after = (seen[None, :] > seen[:, None]) | ((seen[None, :] == seen[:, None]) & (request[None, :] <= request[:, None]))
    tiles = (q_len + (plan.tokens - 1)) // plan.tokens
    end = jnp.sum(jnp.where(is_not_after, tiles[None, :], 0), axis=1, dtype=jnp.int32)
    tile = jnp.arange(plan.tiles, dtype=jnp.int32)
    is_owner = ((end - tiles)[None, :] <= tile[:, None]) & (tile[:, None] < end[None, :])
    owner = jnp.sum(jnp.where(is_owner, request[None, :], 0), axis=1, dtype=jnp.int32)
    return owner, (end[owner] - 1 - tile) * plan.tokens, ~jnp.any(is_owner, axis=1)
