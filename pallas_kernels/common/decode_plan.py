"""What a decode launch consists of: its sizes, its programs, and the bytes they read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from dispatch_core.calls import ELEMENT_BYTES, AttentionCall
from dispatch_core.tiling import TileConfig


class LaunchPlan(NamedTuple):
    """What a call launches.

    Attributes:
      grid: programs of the attention kernel.
      merge_grid: programs of the merge; 0 where one split writes the result itself.
      tile: the tile.
      bytes_read: bytes the attention kernel reads of each operand when every sequence is as long as it can be.
    """

    grid: int
    merge_grid: int
    tile: TileConfig
    bytes_read: dict[str, int]


@dataclass(frozen=True)
class Problem:
    """What a launch computes, all static.

    Attributes:
      call: the facts.
      tile: the tile.
      batch, tokens, kv_heads, group: sizes of q (batch, tokens, kv_heads * group, head_dim).
      page_size, num_pages: of the pools; a contiguous cache is one page for each sequence.
      pack: FP8 elements in a word of the cache; 1 where a word is an element.
    """

    call: AttentionCall
    tile: TileConfig
    batch: int
    tokens: int
    kv_heads: int
    group: int
    page_size: int
    num_pages: int
    pack: int = 1

    @property
    def rows(self) -> int:
        """Query rows of a KV head."""
        return self.tokens * self.group

    @property
    def row_blocks(self) -> int:
        """Blocks of query rows; each reads the keys."""
        return -(-self.rows // self.tile.block_q)

    @property
    def programs(self) -> int:
        """Programs of the attention kernel."""
        return self.batch * self.tile.num_splits * self.kv_heads * self.row_blocks

    @property
    def tile_in_page(self) -> bool:
        """Whether no KV tile crosses a page."""
        return self.page_size % self.tile.block_kv == 0


def launch_plan(call: AttentionCall, tile: TileConfig) -> LaunchPlan:
    """Grid, tile and bytes read of a decode call, contiguous or paged."""
    p = Problem(call, tile, call.batch, call.max_seqlen_q, call.kv_heads, call.group_size, call.max_seqlen_kv, call.batch)
    readers = p.batch * p.kv_heads * p.row_blocks
    keys = readers * call.max_seqlen_kv * ELEMENT_BYTES[call.cache_dtype]
    bytes_read = {
        "q": p.batch * p.kv_heads * p.rows * tile.num_splits * call.head_dim * ELEMENT_BYTES[call.dtype],
        "k": keys * call.head_dim,
        "v": keys * call.v_dim,
    }
    if call.paging is not None:
        bytes_read["page_table"] = readers * call.paging.max_pages * 4
    return LaunchPlan(p.programs, p.batch * p.kv_heads * p.rows if tile.num_splits > 1 else 0, tile, bytes_read)
