"""python -m jax_ops {demo, explain, bench, step, tune, doctor}."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

COMMANDS = {
    "demo": ("jax_ops.demo.cli", "generate text with a real model through the paged ops"),
    "explain": ("jax_ops.tools.explain", "which kernel serves a call, and why"),
    "bench": ("jax_ops.tools.bench", "device times beside other implementations"),
    "step": ("jax_ops.tools.step", "decode steps of many layers in one program, beside their kernels' times"),
    "tune": ("jax_ops.tools.tune", "the tiles of a build, timed on this device"),
    "doctor": ("jax_ops.tools.doctor", "what runs here; a block for a bug report"),
}


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m jax_ops", description="Grouped-query attention for JAX on NVIDIA GPUs.")
    subparsers = parser.add_subparsers(dest="command", required=True)
    for name, (module, help_text) in COMMANDS.items():
        command = subparsers.add_parser(name, help=help_text)
        if name in argv[:1]:
            import_module(module).add_arguments(command)
    args = parser.parse_args(argv)
    return import_module(COMMANDS[args.command][0]).run(args)


if __name__ == "__main__":
    sys.exit(main())
