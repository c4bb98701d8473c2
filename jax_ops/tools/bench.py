"""python -m jax_ops bench: this library beside the other attention implementations, on whatever device is here."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from dispatch_core import Device
from jax_ops.devices import device_from_jax
from jax_ops.dispatch import explain
from jax_ops.tools import rivals, rows, timing
from jax_ops.tools.workloads import Workload

CPU_LIMIT_FLOPS = 2e10  # about a second of a laptop's cores: rows above it need --all off a GPU


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    rows.add_arguments(parser)
    parser.add_argument("--all", action="store_true", help="also run rows that would take minutes off a GPU")
    parser.add_argument("--rivals", default=None, help="comma-separated names; default: all that can be imported; none: ''")
    parser.add_argument("--build", default=None, help="time this build (sm90, sm80, xla) instead of the chosen one")
    parser.add_argument("--json", action="store_true", help="one JSON object a row on standard output")


def run(args: argparse.Namespace) -> int:
    """Times the chosen rows and prints a line each."""
    device = device_from_jax(jax.devices()[0])
    try:
        works = rows.chosen(args)
    except rows.NoRowError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    if args.list:
        print("\n".join(work.name for work in works))
        return 0
    peers = rivals.rivals()
    if args.rivals is not None:
        wanted = [name.strip() for name in args.rivals.split(",") if name.strip()]
        unknown = [name for name in wanted if name not in peers]
        if unknown:
            print(f"bench: --rivals {unknown[0]!r} is not here; need some of {', '.join(peers)}.", file=sys.stderr)
            return 2
        peers = {name: peers[name] for name in wanted}
    for number, work in enumerate(works, 1):
        print(f"[{number}/{len(works)}] {work.name}", file=sys.stderr, flush=True)
        if device.platform == "cpu" and work.flops > CPU_LIMIT_FLOPS and not (args.all or args.op):
            print(f"  skipped: {work.flops / 1e9:.0f} GFLOP on a CPU; --all runs it", file=sys.stderr)
            continue
        row = measure(work, device, peers, args.build)
        print(json.dumps(row) if args.json else _line(row), flush=True)
    for name, why in rivals.missing().items():
        print(f"not measured: {name} {why}", file=sys.stderr)
    return 0


def measure(work: Workload, device: Device, peers: dict[str, rivals.Rival], build: str | None = None) -> dict[str, Any]:
    """Times one workload here and by each peer, interleaved in this process on the same inputs.

    Returns:
      The row: seconds, TFLOP/s, GB/s and percent of roofline of this library, its kernel and build, and by peer the seconds
      and this library's speed relative to it, or why the peer has none.
    """
    sets = work.input_sets()
    choice = explain_workload(work, sets[0], build)
    seconds = timed(partial(work.call, build=build), work, sets)
    row: dict[str, Any] = {
        "name": work.name,
        "device": device.name,
        "kernel": choice.key,
        "build": choice.build,
        "seconds": seconds,
        "tflops": work.flops / seconds / 1e12,
        "gb_per_s": work.kv_bytes / seconds / 1e9,
        "roofline_percent": 100 * work.roofline_seconds(device) / seconds,
        "rivals": {},
    }
    for name, make in peers.items():
        try:
            with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # what rivals are written for
                run = make(work)
                rival = timed(run.call, work, [jax.jit(run.layout)(arrays) for arrays in sets])
            row["rivals"][name] = {"seconds": rival, "speedup": rival / seconds}
        except rivals.Refused as why:
            row["rivals"][name] = {"refused": str(why)}
        except Exception as error:  # a rival may fail in any way; the row says so and the run goes on
            row["rivals"][name] = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
    return row


def explain_workload(work: Workload, arrays: dict[str, Any], build: str | None = None) -> Any:
    """The Explanation of a workload's call."""
    import jax_ops

    options: dict[str, Any] = {} if work.is_decode else {"is_causal": work.is_causal}
    return explain(getattr(jax_ops, f"gqa_{work.op}"), **arrays, window=work.window, build=build, **options)


def timed(call: Callable[[dict[str, Any]], Any], work: Workload, sets: list[dict[str, Any]]) -> float:
    """Device seconds of one call, the sets called in turn."""
    program = jax.jit(call)
    warm = timing.WARM_SECONDS["memory" if work.is_decode else "compute"]
    return timing.device_seconds(lambda: [program(arrays) for arrays in sets], warm_seconds=warm, calls=len(sets))


def _line(row: dict[str, Any]) -> str:
    rates = f"{row['tflops']:7.1f} TFLOP/s {row['gb_per_s']:7.0f} GB/s {row['roofline_percent']:5.1f} %"
    ours = f"{row['seconds'] * 1e6:10.1f} us {rates}"
    parts = []
    for name, rival in row["rivals"].items():
        if "seconds" in rival:
            parts.append(f"{rival['speedup']:.2f}x {name} ({rival['seconds'] * 1e6:.1f} us)")
        else:
            parts.append(f"{name}: {rival.get('refused') or rival['failed']}")
    beside = "; ".join(parts)
    return f"{row['name']:36} {ours}  {row['kernel']} ({row['build']})" + (f"\n{'':36} {beside}" if beside else "")
