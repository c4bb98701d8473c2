"""Tiles from hardware capability: policy tables, shared-memory budgets, and the look-up between them.

A policy family is data: rows by compute capability and shared memory, element width, head_dim and query rows, each with the
cause of its tile, checked at import against the shared memory it is written for. A look-up takes the first row from the
newest capability down that the device can hold; past the last row the safe tiles follow, largest first; and past those the
call is refused with the bytes needed and available. Nothing here reads a device's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from dispatch_core.calls import ELEMENT_BYTES, AttentionCall
from dispatch_core.hardware import DEVICES, KIB, Device
from dispatch_core.splitting import MAX_SPLITS, SplitPlan, split_plan

if TYPE_CHECKING:
    from dispatch_core.kernels import Build


class NoImplementationError(ValueError):
    """A valid call that nothing serves."""


@dataclass(frozen=True)
class TileConfig:
    """The shape of one program's work.

    Attributes:
      block_q: query rows of a tile (query tokens times the heads of a group where a kernel folds them).
      block_kv: keys of a tile.
      num_warps: warps of a program (of each consumer warpgroup's four where num_warpgroups says so).
      num_warpgroups: consumer warpgroups.
      num_stages: KV tiles in flight.
      num_splits: programs that share the keys of one sequence.
    """

    block_q: int
    block_kv: int
    num_warps: int = 4
    num_warpgroups: int = 1
    num_stages: int = 1
    num_splits: int = 1


class Shape(NamedTuple):
    """What a policy sees of a call: bytes of a q and of a cache element, the head sizes, and query rows per KV head."""

    q_bytes: int
    kv_bytes: int
    head_dim: int
    v_dim: int
    rows: int


class Row(NamedTuple):
    """One entry: the tile of shapes up to a head_dim, for q elements of one width; `cause` is a measurement or a derivation.

    `kv_bytes` limits it to caches of one width; None: any, where no row names the cache's own. Of rows for one head_dim, a
    call takes the lowest tile that holds its query rows.
    """

    q_bytes: int
    max_head_dim: int
    tile: TileConfig
    cause: str
    kv_bytes: int | None = None


class Table(NamedTuple):
    """The rows for devices of at least a compute capability and at least so many bytes of shared memory per block."""

    min_arch: int
    shared_memory: int
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Policy:
    """A policy family.

    Attributes:
      shared_bytes: shared memory of a tile.
      tables: newest capability and largest memory first.
      safe_tiles: tried, largest first, where no row applies.
      clips_rows: whether block_q shrinks to the call's rows.
      max_splits: the most programs that share one sequence's keys.
      partition: the fewest keys worth a split.
    """

    shared_bytes: Callable[[TileConfig, Shape], int]
    tables: tuple[Table, ...]
    safe_tiles: tuple[TileConfig, ...]
    clips_rows: bool = False
    max_splits: int = 1
    partition: int = 1

    def __post_init__(self) -> None:
        for table in self.tables:
            for row in table.rows:
                shape = Shape(row.q_bytes, row.kv_bytes or row.q_bytes, row.max_head_dim, row.max_head_dim, row.tile.block_q)
                needed = self.shared_bytes(row.tile, shape)
                if needed > table.shared_memory:
                    raise ValueError(f"{row} needs {needed} bytes of shared memory, its table has {table.shared_memory}")


def padded(size: int) -> int:
    """The power of two, 16 or more, that holds a size: what a Triton block of it occupies."""
    return max(16, 1 << (size - 1).bit_length())


def head_elements(dim: int) -> int:
    """What a Triton kernel keeps of a head: one power of two, or two where that wastes less (96 is 64 + 32)."""
    whole = padded(dim)
    return min(whole, whole // 2 + padded(dim - whole // 2)) if dim > 16 else whole


def _nothing_shared(tile: TileConfig, shape: Shape) -> int:
    return 0


def triton_bytes(tile: TileConfig, shape: Shape) -> int:
    """Q once, and K and V for each stage; FP8 is charged as the 16-bit values it is decoded to, an FP8 cache's tile as both."""
    q_bytes, kv_bytes = max(2, shape.q_bytes), max(2, shape.q_bytes, shape.kv_bytes)
    head_dim, v_dim = head_elements(shape.head_dim), head_elements(shape.v_dim)
    key_elements = tile.block_kv * (head_dim + v_dim)
    undecoded = key_elements if shape.kv_bytes == 1 < shape.q_bytes else 0
    return tile.block_q * head_dim * q_bytes + tile.num_stages * key_elements * kv_bytes + undecoded


def triton_decode_bytes(tile: TileConfig, shape: Shape) -> int:
    """As `triton_bytes`, but FP8 waits in the ring as it is, and one tile of it is decoded to the queries' type at a time."""
    head_dim, v_dim = head_elements(shape.head_dim), head_elements(shape.v_dim)
    key_elements = tile.block_kv * (head_dim + v_dim)
    q_bytes = max(2, shape.q_bytes)
    decoded = q_bytes * key_elements if shape.kv_bytes == 1 else 0
    return tile.block_q * head_dim * q_bytes + tile.num_stages * key_elements * shape.kv_bytes + decoded


def mosaic_prefill_bytes(tile: TileConfig, shape: Shape) -> int:
    """Q and O once, O in Q's place where the head is wide, a ring of K and V tiles, and 4 KiB for barriers, lse and Mosaic."""
    o_dim = 0 if shape.head_dim == shape.v_dim > 192 else shape.v_dim
    elements = tile.block_q * (shape.head_dim + o_dim) + tile.num_stages * tile.block_kv * (shape.head_dim + shape.v_dim)
    return elements * shape.q_bytes + 4 * KIB


def mosaic_decode_bytes(tile: TileConfig, shape: Shape) -> int:
    """Q once, a float32 O of each consumer, a ring of K and V tiles, and 4 KiB for barriers, lse and Mosaic."""
    ring = tile.num_stages * tile.block_kv * (shape.head_dim + shape.v_dim)
    o = tile.num_warpgroups * tile.block_q * shape.v_dim
    return (tile.block_q * shape.head_dim + ring) * shape.q_bytes + o * 4 + 4 * KIB


def staged_bytes(tile: TileConfig, shape: Shape) -> int:
    """One K and one V tile."""
    return tile.block_kv * (shape.head_dim + shape.v_dim) * shape.kv_bytes


def _rows(*entries: tuple[tuple[int, ...], int, TileConfig, str]) -> tuple[Row, ...]:
    return tuple(Row(q_bytes, head_dim, tile, cause) for widths, head_dim, tile, cause in entries for q_bytes in widths)


def _tile(block_q: int, block_kv: int, num_warps: int, num_stages: int) -> TileConfig:
    return TileConfig(block_q, block_kv, num_warps, num_stages=num_stages)


_ACC = "derived: float32 accumulator and scores within 128 registers a thread"
_RING = "derived: as the wider part's, with the ring that 99 KiB hold"
_DECODED = "derived: an FP8 cache's decoded keys and values beside the accumulator within 255 registers a thread"
_NARROW = (1, 2)

_SM80_PREFILL = Policy(
    shared_bytes=triton_bytes,
    tables=(
        Table(
            90,
            227 * KIB,
            (
                Row(2, 128, _tile(128, 64, 8, 2), _DECODED, kv_bytes=1),
                Row(2, 256, _tile(64, 64, 8, 2), _DECODED, kv_bytes=1),
                *_rows(
                    (_NARROW, 64, _tile(128, 64, 4, 3), "measured: H200, causal 2x4096 407 TFLOP/s, 8 warps 401"),
                    (_NARROW, 128, _tile(128, 64, 4, 2), "measured: H200, causal 2x4096 482 TFLOP/s, 8 warps in 3 stages 443"),
                    (_NARROW, 192, _tile(128, 64, 8, 3), "measured: H200, 192/128 causal 2x4096 441 TFLOP/s, 2 stages 372"),
                    (_NARROW, 256, _tile(128, 64, 8, 2), "measured: H200, causal 1x8192 468 TFLOP/s, 32 keys in 3 stages 446"),
                ),
            ),
        ),
        Table(
            80,
            163 * KIB,
            (
                Row(2, 64, _tile(64, 64, 4, 3), _DECODED, kv_bytes=1),
                Row(2, 128, _tile(64, 32, 4, 3), _DECODED, kv_bytes=1),
                Row(2, 256, _tile(64, 16, 8, 2), _DECODED, kv_bytes=1),
                Row(4, 128, _tile(32, 32, 4, 2), _DECODED, kv_bytes=1),
                *_rows(
                    (_NARROW, 64, _tile(128, 64, 4, 3), _ACC),
                    (_NARROW, 128, _tile(128, 64, 8, 3), _ACC),
                    (_NARROW, 256, _tile(64, 32, 8, 3), _ACC),
                    (_NARROW, 512, _tile(32, 16, 8, 2), _ACC),
                    ((4,), 64, _tile(64, 32, 4, 2), _ACC),
                    ((4,), 128, _tile(64, 32, 8, 2), _ACC),
                    ((4,), 256, _tile(32, 16, 8, 2), _ACC),
                ),
            ),
        ),
        Table(
            80,
            99 * KIB,
            (
                Row(2, 64, _tile(64, 64, 4, 3), _DECODED, kv_bytes=1),
                Row(2, 128, _tile(64, 32, 4, 3), _DECODED, kv_bytes=1),
                Row(2, 256, _tile(64, 16, 8, 2), _DECODED, kv_bytes=1),
                *_rows(
                    (_NARROW, 64, _tile(128, 64, 4, 3), _RING),
                    (_NARROW, 128, _tile(128, 32, 8, 3), _RING),
                    (_NARROW, 256, _tile(64, 32, 8, 2), _RING),
                    ((4,), 64, _tile(64, 32, 4, 2), _RING),
                ),
            ),
        ),
    ),
    safe_tiles=(_tile(32, 32, 4, 2), _tile(16, 32, 4, 2), _tile(16, 16, 4, 2), _tile(16, 16, 4, 1)),
    clips_rows=True,
)

_OCCUPANCY = "derived: one program an SM, 64 rows a warpgroup, accumulators, scores and weights within its registers"

_SM90_PREFILL = Policy(
    shared_bytes=mosaic_prefill_bytes,
    tables=(
        Table(
            90,
            227 * KIB,
            (
                Row(
                    2,
                    64,
                    TileConfig(256, 64, num_warpgroups=4, num_stages=4),
                    "measured: H200, causal 2x4096 442 TFLOP/s, 3 warpgroups and 128 keys 416",
                ),
                Row(
                    2,
                    128,
                    TileConfig(128, 128, num_warpgroups=2, num_stages=2),
                    "measured: H200, causal 2x4096 575 TFLOP/s, 3 warpgroups and 64 keys 566",
                ),
                Row(2, 192, TileConfig(128, 64, num_warpgroups=2, num_stages=2), _OCCUPANCY),
                Row(
                    2,
                    256,
                    TileConfig(128, 64, num_warpgroups=2, num_stages=2),
                    "measured: H200, causal 1x8192 700 TFLOP/s; no other tile of 64 keys a step fits",
                ),
            ),
        ),
    ),
    safe_tiles=(TileConfig(64, 64, num_warpgroups=1, num_stages=1),),
)

_FP8_CACHE = "measured: H200, 32 ragged FP8 sequences 94.6 us, with 64 keys 97.5"
_TALL = "derived: 128 query rows of one KV head, so that keys are read once up to groups of 128; 8 warps hold them"
_BYTES_IN_FLIGHT = "derived: 64 KiB or more of K and V in flight on each SM"

_SM80_DECODE = Policy(
    shared_bytes=triton_decode_bytes,
    tables=(
        Table(
            90,
            227 * KIB,
            (
                Row(2, 128, _tile(32, 128, 4, 3), _FP8_CACHE, kv_bytes=1),
                *_rows(
                    ((2,), 64, _tile(32, 64, 4, 4), "measured: H200, 32x8192 120.9 us, 128 keys in 3 stages 122.6"),
                    ((2,), 64, _tile(128, 64, 8, 3), _TALL),
                    ((2,), 128, _tile(32, 64, 4, 4), "measured: H200, 8x8192 63.3 us, 3 stages 65.0; 1x131072 120.9 and 124.2"),
                    ((2,), 128, _tile(128, 64, 8, 3), _TALL),
                    ((2,), 256, _tile(128, 32, 8, 3), _TALL),
                    ((2,), 256, _tile(32, 32, 4, 4), "measured: H200, 32x8192 234.8 us, 3 stages 241.3"),
                    ((4,), 64, _tile(64, 32, 4, 4), "derived: as head_dim 128"),
                    ((4,), 128, _tile(32, 16, 4, 4), "measured: H200, 8x8192 689 us, 32 keys 8 warps 3 stages 700"),
                ),
            ),
        ),
        Table(
            80,
            163 * KIB,
            _rows(
                ((2,), 64, _tile(32, 128, 4, 3), _BYTES_IN_FLIGHT),
                ((2,), 64, _tile(128, 64, 8, 3), _TALL),
                ((2,), 128, _tile(32, 64, 4, 3), _BYTES_IN_FLIGHT),
                ((2,), 128, _tile(128, 64, 8, 3), _TALL),
                ((2,), 256, _tile(32, 32, 4, 3), _BYTES_IN_FLIGHT),
                ((4,), 64, _tile(64, 64, 4, 3), _BYTES_IN_FLIGHT),
                ((4,), 128, _tile(32, 32, 4, 3), _BYTES_IN_FLIGHT),
            ),
        ),
        Table(
            80,
            99 * KIB,
            _rows(
                ((2,), 64, _tile(64, 64, 4, 4), _BYTES_IN_FLIGHT),
                ((2,), 128, _tile(64, 64, 4, 2), _BYTES_IN_FLIGHT),
                ((2,), 256, _tile(32, 32, 4, 2), _BYTES_IN_FLIGHT),
                ((4,), 64, _tile(64, 32, 4, 3), _BYTES_IN_FLIGHT),
            ),
        ),
    ),
    safe_tiles=(_tile(32, 32, 4, 2), _tile(16, 32, 4, 2), _tile(16, 16, 4, 2), _tile(16, 16, 4, 1)),
    clips_rows=True,
    max_splits=MAX_SPLITS,
)

_FULL_RING = "derived: the longest ring of 32 KiB tiles, an even number, beside the queries and the float32 outputs"

_SM90_DECODE = Policy(
    shared_bytes=mosaic_decode_bytes,
    tables=(
        Table(
            90,
            227 * KIB,
            (
                Row(2, 64, TileConfig(64, 128, num_warpgroups=2, num_stages=4), _FULL_RING),
                Row(2, 128, TileConfig(64, 64, num_warpgroups=2, num_stages=4), _FULL_RING),
            ),
        ),
    ),
    safe_tiles=(TileConfig(64, 64, num_stages=1),),
)

POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        "xla_prefill": Policy(_nothing_shared, (), (TileConfig(512, 1024),)),
        "xla_decode": Policy(_nothing_shared, (), (TileConfig(1, 512),)),
        "sm80_prefill": _SM80_PREFILL,
        "sm80_decode": _SM80_DECODE,
        "sm90_prefill": _SM90_PREFILL,
        "sm90_decode": _SM90_DECODE,
        "staged": Policy(staged_bytes, (), (TileConfig(64, 64), TileConfig(32, 32), TileConfig(16, 16)), partition=512),
    }
)
"""The policy families by name. "staged" is the recorded rule for parts without asynchronous copies: K and V staging
only, block_q = block_kv, decode partitions of 512 keys, and partitioned decode never chosen."""


def shape_of(call: AttentionCall) -> Shape:
    """What the policies see of a call."""
    return Shape(
        ELEMENT_BYTES[call.dtype],
        ELEMENT_BYTES[call.cache_dtype],
        call.head_dim,
        call.v_dim,
        call.group_size * call.max_seqlen_q,
    )


@lru_cache(maxsize=4096)
def fitting_tile(call: AttentionCall, family: str) -> TileConfig | str:
    """The family's tile for the call, or why none fits ("needs 65536 bytes of shared memory ...")."""
    policy, shape, device = POLICIES[family], shape_of(call), call.device
    tile = _largest_fitting(family, device.arch, device.shared_memory_per_block, shape)
    if tile is None:
        needed, available = policy.shared_bytes(policy.safe_tiles[-1], shape), device.shared_memory_per_block
        return f"needs {needed} bytes of shared memory for the smallest tile, {device.name} has {available}"
    return with_splits(call, family, tile)


def with_splits(call: AttentionCall, family: str, tile: TileConfig) -> TileConfig:
    """The tile with the splits that the family plans for the call."""
    plan = _plan(call, POLICIES[family], tile)
    return tile if plan is None else replace(tile, num_splits=plan.num_splits)


def _plan(call: AttentionCall, policy: Policy, tile: TileConfig) -> SplitPlan | None:
    if policy.max_splits == 1:
        return None
    return split_plan(call, tile.block_q, tile.block_kv, policy.max_splits, policy.partition)


def select_tile_config(call: AttentionCall, build: Build) -> TileConfig | None:
    """The tile of the build for the call; None for a build that takes no tile.

    Raises:
      NoImplementationError: no tile of the build's policy fits the device; the message gives the bytes.
    """
    if build.tiles is None:
        return None
    tile = fitting_tile(call, build.tiles)
    if isinstance(tile, str):
        raise NoImplementationError(f"{build.name} build {tile}.\n  call: {call}")
    return tile


def select_split_plan(call: AttentionCall, build: Build) -> SplitPlan | None:
    """The plan behind the tile's num_splits; None for a build that never splits."""
    tile = select_tile_config(call, build)
    return None if tile is None or build.tiles is None else _plan(call, POLICIES[build.tiles], tile)


def representatives(family: str, devices: Iterable[Device] = tuple(DEVICES.values())) -> dict[str, str]:
    """For each device's name, the name of the device that stands for it: the lowest arch whose policy is identical."""
    by_policy: dict[tuple[TileConfig | None, ...], str] = {}
    names = {}
    for device in sorted(devices, key=lambda d: d.arch):
        names[device.name] = by_policy.setdefault(_policy_of(family, device.arch, device.shared_memory_per_block), device.name)
    return names


@lru_cache(maxsize=256)
def _policy_of(family: str, arch: int, shared_memory: int) -> tuple[TileConfig | None, ...]:
    """Every decision of a family for a capability, over element widths and head sizes."""
    shapes = (Shape(width, width, head_dim, head_dim, 4096) for width in (1, 2, 4) for head_dim in range(16, 1040, 16))
    return tuple(_largest_fitting(family, arch, shared_memory, shape) for shape in shapes)


@lru_cache(maxsize=4096)
def _largest_fitting(family: str, arch: int, shared_memory: int, shape: Shape) -> TileConfig | None:
    policy = POLICIES[family]
    tiles = (_clipped(policy, tile, shape) for tile in (*_row_tiles(policy, arch, shared_memory, shape), *policy.safe_tiles))
    return next((tile for tile in tiles if policy.shared_bytes(tile, shape) <= shared_memory), None)


def _row_tiles(policy: Policy, arch: int, shared_memory: int, shape: Shape) -> Iterable[TileConfig]:
    """The tile that each table for the device's capability or an older one, and for its memory or less, has for the shape."""
    head_dim = max(shape.head_dim, shape.v_dim)
    for table in policy.tables:
        if table.min_arch <= arch and table.shared_memory <= shared_memory:
            rows = (r for r in table.rows if r.q_bytes == shape.q_bytes and head_dim <= r.max_head_dim)
            rows = (r for r in rows if r.kv_bytes in (None, shape.kv_bytes))
            row = min(rows, key=lambda r: (r.kv_bytes is None, r.max_head_dim, _height(r, shape)), default=None)
            if row is not None:
                yield row.tile


def _height(row: Row, shape: Shape) -> int:
    """Orders rows of one head_dim: the lowest tile that holds the query rows first, then the highest of the others."""
    return row.tile.block_q if row.tile.block_q >= shape.rows else 2**20 - row.tile.block_q


def _clipped(policy: Policy, tile: TileConfig, shape: Shape) -> TileConfig:
    if not policy.clips_rows or padded(shape.rows) >= tile.block_q:
        return tile
    return replace(tile, block_q=padded(shape.rows))
