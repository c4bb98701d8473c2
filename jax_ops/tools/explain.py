"""python -m jax_ops explain: which kernel serves a call, from its facts alone; no arrays, no GPU."""

from __future__ import annotations

import argparse
import json
import sys

from dispatch_core import DEVICES, SLOTS, AttentionCall, Paging, RopeFacts, Window, device_named, explain


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags: a slot and the facts of a call."""
    parser.add_argument("slot", choices=sorted(SLOTS), help="the op, without its gqa_ prefix")
    parser.add_argument("--device", default="H200", help=f"one of {', '.join(sorted(DEVICES))}")
    parser.add_argument("--dtype", default="bfloat16")
    for flag, default in (("batch", 1), ("q-heads", 32), ("kv-heads", 8), ("head-dim", 128)):
        parser.add_argument(f"--{flag}", type=int, default=default)
    parser.add_argument("--head-dim-v", type=int)
    parser.add_argument("--q-len", type=int, help="query tokens a sequence; default 1 in decode, else the keys")
    parser.add_argument("--kv-len", type=int, default=4096, help="keys a sequence, or the capacity in decode")
    parser.add_argument("--full", action="store_true", help="no causal mask")
    parser.add_argument("--ragged", action="store_true", help="sequences of different lengths")
    parser.add_argument("--scale", type=float)
    parser.add_argument("--softcap", type=float)
    parser.add_argument(
        "--window", type=int, nargs=2, metavar=("LEFT", "RIGHT"), help="keys beside the query's own; -1: unbounded"
    )
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--page-size", type=int, default=64, help="in the paged slots")
    parser.add_argument("--kv-dtype", help="element type of the cache")
    parser.add_argument("--out-dtype")
    parser.add_argument("--rotary-dim", type=int, help="fused RoPE over this many dims")
    parser.add_argument("--max-position", type=int, default=131072, help="positions allowed for, with --rotary-dim")
    parser.add_argument("--sinks", action="store_true")
    parser.add_argument("--lse", action="store_true")
    parser.add_argument("--build", help="name a build: sm90, sm80 or xla")
    parser.add_argument("--json", action="store_true")


def run(args: argparse.Namespace) -> int:
    """Prints the explanation; 0 when a kernel serves the call, 1 when none does, 2 when the facts contradict each other."""
    try:
        call = _call(args)
    except ValueError as error:
        print(f"explain: {error}", file=sys.stderr)
        return 2
    explanation = explain(SLOTS[args.slot], call, build=args.build)
    print(json.dumps(explanation.to_dict()) if args.json else explanation)
    return 0 if explanation.key else 1


def _call(args: argparse.Namespace) -> AttentionCall:
    decodes, paged = args.slot.startswith("decode"), args.slot.endswith("paged")
    return AttentionCall(
        device=device_named(args.device),
        dtype=args.dtype,
        batch=args.batch,
        q_heads=args.q_heads,
        kv_heads=args.kv_heads,
        head_dim=args.head_dim,
        head_dim_v=args.head_dim_v,
        max_seqlen_q=args.q_len or (1 if decodes else args.kv_len),
        max_seqlen_kv=args.kv_len,
        is_causal=not args.full,
        scale=args.scale,
        softcap=args.softcap,
        window=None if args.window is None else Window(*args.window),
        backend=args.backend,
        is_uniform=not args.ragged,
        paging=Paging(args.page_size, -(-args.kv_len // args.page_size)) if paged else None,
        kv_dtype=args.kv_dtype,
        out_dtype=args.out_dtype,
        rope=None if args.rotary_dim is None else RopeFacts(args.rotary_dim, args.max_position),
        has_sinks=args.sinks,
        return_lse=args.lse,
    )
