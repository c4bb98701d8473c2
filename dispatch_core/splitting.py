"""Split-KV plans of decode: into how many programs the keys of one sequence and KV head are cut.

A decode call has few query rows and many keys, so its programs are cut along the keys until they fill the device; each
split writes a float32 partial with its log-sum-exp, and a merge joins them. Plans come from static facts: the capacity,
never a live length. The kernel reads the live length, and a split it leaves empty contributes a neutral element.

Batch invariance: the static batch size steers the number of splits, and with it the order of summation, as it steers the
launch grid. The *contents* of a batch do not: no length, table or value of another sequence enters a plan, so a row of one
traced call has the same bits whoever its batch mates are.
"""

from __future__ import annotations

from dataclasses import dataclass

from dispatch_core.calls import ELEMENT_BYTES, AttentionCall

MERGE_SECONDS = 3e-6  # the merge: 2 to 3 us on an H200, its launch included
START_SECONDS = 0.5e-6  # until a program's first keys arrive
MAX_SPLITS = 256  # more than the SMs of any device named here: one KV head's splits alone fill each of them


@dataclass(frozen=True)
class SplitPlan:
    """How the keys of one sequence and KV head are divided.

    Attributes:
      num_splits: programs per sequence, KV head and block of query rows.
      tiles: KV tiles to divide, by capacity.
      programs: programs of the launch.
      waves: rounds in which sm_count programs at a time run them all.
    """

    num_splits: int
    tiles: int
    programs: int
    waves: int

    @property
    def longest(self) -> int:
        """KV tiles of the longest split; the shortest has at most one fewer."""
        return -(-self.tiles // self.num_splits)

    def __str__(self) -> str:
        shape = f"{self.num_splits} of up to {self.longest} KV tiles" if self.num_splits > 1 else f"none, {self.tiles} KV tiles"
        return f"{shape}; {self.programs} programs in {self.waves} wave{'s' if self.waves > 1 else ''}"


def tiles_of_split(split: int, num_splits: int, tiles: int) -> tuple[int, int]:
    """First tile and end tile of a split: every tile once, splits equal to within one tile.

    Plain integer arithmetic, so that a kernel may call it on traced values. Ten tiles in four splits are (0, 2), (2, 5),
    (5, 7), (7, 10): two or three tiles each, where a quotient with the remainder on the last split would give 2, 2, 2, 4.
    """
    return split * tiles // num_splits, (split + 1) * tiles // num_splits


def reachable_keys(call: AttentionCall) -> int:
    """Most keys that a sequence's queries can see: all, or what a left bound leaves (the last query sits on the last key)."""
    if call.window is None or call.window.left is None:
        return call.max_seqlen_kv
    return min(call.max_seqlen_kv, call.window.left + call.max_seqlen_q)


def split_plan(call: AttentionCall, block_q: int, block_kv: int, max_splits: int = MAX_SPLITS, partition: int = 1) -> SplitPlan:
    """The plan with the least estimated bytes of one SM's time; of equals, the one with the fewest splits.

    Fewer programs than SMs, before splitting: the device runs ceil(P s / sm_count) waves for P programs and s splits, each
    as long as the longest split. From one program per SM on, programs follow each other without waves, and sequences of
    one length are never split: on an H200 32 of 8192 keys took 237 us in one split, 267 in two, 247 in four. Pages hold
    sequences of different lengths, so that the last program still running is what splits shorten: half the longest split
    is charged, and ragged 1K to 8K keys took 138 us in four splits, 135 in eight, 137 in sixteen. Every program costs a
    start, every split a float32 partial, written and read, and splitting at all the launch of a merge.

    Batch 1, 4 KV heads of 8 query heads, 8192 keys of head_dim 128 in float16, tiles of 64 keys, on 132 SMs: P = 4 and 128
    tiles. 33 splits fill the device (132 programs, one wave) with at most 4 tiles each; 32 splits also need one wave of 4
    tiles, so the plan has 32 splits of exactly 4 tiles.

    Args:
      call: the facts.
      block_q: query rows (query tokens times heads of one group) of a program.
      block_kv: keys of a tile.
      max_splits: the most splits allowed.
      partition: the fewest keys worth a split.
    """
    keys = reachable_keys(call)
    tiles = -(-keys // block_kv)
    rows = call.group_size * call.max_seqlen_q
    programs = call.batch * call.kv_heads * -(-rows // block_q)
    sm_count = call.device.sm_count
    tile_bytes = block_kv * (call.head_dim + call.v_dim) * ELEMENT_BYTES[call.cache_dtype]
    partial_bytes = min(rows, block_q) * (call.v_dim + 1) * 4
    bytes_per_second = call.device.memory_bandwidth / sm_count
    merge_bytes, start_bytes = MERGE_SECONDS * bytes_per_second, START_SECONDS * bytes_per_second
    is_ragged = call.paging is not None and call.batch > 1

    def cost(splits: int) -> float:
        longest = -(-tiles // splits) * tile_bytes
        launched = programs * splits / sm_count
        overhead = 0.0 if splits == 1 else merge_bytes + 2 * launched * partial_bytes
        if programs < sm_count and not is_ragged:
            return -(-programs * splits // sm_count) * (longest + start_bytes) + overhead
        tail = longest / 2 if is_ragged else 0.0
        return launched * start_bytes + tail + overhead

    most = max(1, min(tiles, max_splits, -(-keys // partition)))
    shortening = (s for s in range(1, most + 1) if s == 1 or -(-tiles // s) < -(-tiles // (s - 1)))
    splits = min(shortening, key=lambda s: (cost(s), s))
    return SplitPlan(splits, tiles, programs * splits, -(-programs * splits // sm_count))
