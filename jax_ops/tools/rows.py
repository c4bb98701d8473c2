"""The flags that say which workloads a command times: rows of the list, or one of the caller's own."""

from __future__ import annotations

import argparse
from dataclasses import replace

from jax_ops.tools.workloads import OPS, WORKLOADS, Workload


class NoRowError(ValueError):
    """--rows that match nothing."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the rows, and of a workload of one's own."""
    parser.add_argument("--rows", default="", help="only rows whose name contains one of these comma-separated words")
    parser.add_argument("--list", action="store_true", help="print the rows and stop")
    own = parser.add_argument_group("a workload of your own (instead of the rows)")
    own.add_argument("--op", choices=OPS)
    for flag, default in (("batch", 1), ("q-len", 1), ("kv-len", 1024), ("q-heads", 32), ("kv-heads", 8), ("head-dim", 128)):
        own.add_argument(f"--{flag}", type=int, default=default)
    own.add_argument("--dtype", default="bfloat16")
    own.add_argument("--full", action="store_true", help="no causal mask")
    own.add_argument("--window", type=int, nargs=2, metavar=("LEFT", "RIGHT"), help="-1: unbounded")
    own.add_argument("--page-size", type=int, default=64)


def chosen(args: argparse.Namespace) -> list[Workload]:
    """The workloads that the flags name.

    Raises:
      NoRowError: no row's name contains any of the words.
    """
    if args.op:
        return [_own(args)]
    words = [word.strip() for word in args.rows.split(",") if word.strip()]
    found = [w for w in WORKLOADS if not words or any(word in w.name for word in words)]
    if not found:
        raise NoRowError(f"--rows {args.rows!r} matches no row; --list prints them.")
    return found


def _own(args: argparse.Namespace) -> Workload:
    work = Workload("your workload", args.op, args.batch, args.q_len, args.kv_len, args.q_heads, args.kv_heads, args.head_dim)
    window = None if args.window is None else tuple(None if n < 0 else n for n in args.window)
    work = replace(work, dtype=args.dtype, is_causal=not args.full, window=window)
    if args.op in ("decode_paged", "prefill_paged"):
        work = replace(work, page_size=args.page_size, lengths=(args.kv_len,) * args.batch)
    return work
