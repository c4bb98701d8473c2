"""python -m jax_ops tune: the tiles of a build, timed on whatever device is here, beside the one its policy picks."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from dispatch_core import (
    CATALOGUE,
    POLICIES,
    AttentionCall,
    Build,
    NoImplementationError,
    TileConfig,
    shape_of,
    with_splits,
)
from jax_ops.tools import bench, rows
from jax_ops.tools.workloads import Workload
from pallas_kernels.builds import launch_function

TILE = re.compile(r"(\d+)x(\d+)(?:x(\d+)w)?(?:x(\d+)g)?(?:x(\d+)s)?")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    rows.add_arguments(parser)
    parser.add_argument("--build", default=None, help="time this build's tiles (sm90, sm80, xla) instead of the chosen one's")
    parser.add_argument(
        "--tiles",
        nargs="+",
        metavar="TILE",
        help="query rows x keys [x warps w] [x warpgroups g] [x stages s], as 128x64x4wx2s; default: every tile of the policy",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a tile on standard output")


def run(args: argparse.Namespace) -> int:
    """Times each tile on each workload, best first."""
    try:
        works = rows.chosen(args)
        tiles = None if args.tiles is None else [parsed(text) for text in args.tiles]
    except ValueError as error:
        print(f"tune: {error}", file=sys.stderr)
        return 2
    if args.list:
        print("\n".join(work.name for work in works))
        return 0
    for number, work in enumerate(works, 1):
        print(f"[{number}/{len(works)}] {work.name}", file=sys.stderr, flush=True)
        try:
            timed = tuned(work, args.build, tiles)
        except NoImplementationError as error:
            print(f"tune: {error}", file=sys.stderr)
            return 2
        for row in sorted(timed, key=lambda row: row["seconds"] or float("inf")):
            print(json.dumps(row) if args.json else _line(row), flush=True)
    return 0


def parsed(text: str) -> TileConfig:
    """A tile from its text.

    Raises:
      ValueError: it is not one.
    """
    found = TILE.fullmatch(text)
    if found is None:
        raise ValueError(f"--tiles {text!r} is no tile; need query rows x keys, as 128x64 or 128x64x4wx2gx2s.")
    block_q, block_kv, warps, warpgroups, stages = (int(n or 0) for n in found.groups())
    return TileConfig(block_q, block_kv, warps or 4, num_warpgroups=warpgroups or 1, num_stages=stages or 1)


def tuned(work: Workload, build: str | None, tiles: Iterable[TileConfig] | None = None) -> list[dict[str, Any]]:
    """A workload's time with each tile that fits the device.

    Returns:
      For each tile its text, seconds or None with the error that it met, TFLOP/s, and whether the policy picks it.

    Raises:
      NoImplementationError: no kernel serves the workload here.
    """
    sets = work.input_sets()
    choice = bench.explain_workload(work, sets[0], build)
    if choice.key is None:
        raise NoImplementationError(choice.reason)
    shipped = next(b for b in CATALOGUE[choice.key].builds if b.name == choice.build)
    found = []
    for tile in candidates(choice.call, shipped, tiles):
        replaced = replace(shipped, launch=partial(_launch_with, tile, launch_function(choice.key, shipped)))
        kernels = {choice.key: replace(CATALOGUE[choice.key], builds=(replaced,))}
        row: dict[str, Any] = {"name": work.name, "kernel": choice.key, "build": choice.build, "tile": text_of(tile)}
        row |= {"is_chosen": tile == choice.tile, "seconds": None, "tflops": None, "error": None}
        try:
            row["seconds"] = bench.timed(partial(work.call, build=build, kernel_map=kernels), work, sets)
            row["tflops"] = work.flops / row["seconds"] / 1e12
        except Exception as error:  # a tile may fail in any way; its row says so and the run goes on
            row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        found.append(row)
    return found


def candidates(call: AttentionCall, build: Build, tiles: Iterable[TileConfig] | None = None) -> list[TileConfig]:
    """The tiles given, or all of the build's policy, that fit the call's device; each with the splits it would be given."""
    if build.tiles is None:
        return []
    policy, shape = POLICIES[build.tiles], shape_of(call)
    if tiles is None:
        tiles = (*(row.tile for table in policy.tables for row in table.rows), *policy.safe_tiles)
    fitting = (t for t in tiles if policy.shared_bytes(t, shape) <= call.device.shared_memory_per_block)
    return list(dict.fromkeys(with_splits(call, build.tiles, tile) for tile in fitting))


def _launch_with(tile: TileConfig, launch: Any, call: AttentionCall, policy_tile: TileConfig, **arrays: Any) -> Any:
    del policy_tile
    return launch(call, tile, **arrays)


def text_of(tile: TileConfig) -> str:
    """The tile as `--tiles` takes it."""
    return f"{tile.block_q}x{tile.block_kv}x{tile.num_warps}wx{tile.num_warpgroups}gx{tile.num_stages}s"


def _line(row: dict[str, Any]) -> str:
    if row["seconds"] is None:
        return f"{row['tile']:22} {row['error']}"
    mark = "  <- policy" if row["is_chosen"] else ""
    return f"{row['tile']:22} {row['seconds'] * 1e6:10.1f} us {row['tflops']:7.1f} TFLOP/s{mark}"
