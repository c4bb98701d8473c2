"""python -m jax_ops step: decode steps of many layers chained in one program, beside the time in which their kernels run.

A step is a `lax.scan` over layers with one pool of pages in its carry: each layer rotates and appends its token and attends
to its own pages. What a chain takes beyond its kernels is launch gaps, copies of the pool and trips to the host, of which
there should be none; and a pool twice as large should take no longer.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ops.paged import gqa_decode_paged
from jax_ops.rope import Rope
from jax_ops.tools import timing

Arrays = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """A decode step.

    Attributes:
      layers: of the model.
      batch, kv_len: sequences, and keys of each at the last step of a chain.
      q_heads, kv_heads, head_dim: sizes.
      page_size: tokens of a page.
      dtype: element type.
      pools: how many times as many pages there are as the sequences fill.
    """

    layers: int = 32
    batch: int = 8
    kv_len: int = 4096
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 64
    dtype: str = "bfloat16"
    pools: int = 1

    @property
    def pages_per_layer(self) -> int:
        """Pages that one layer's sequences fill."""
        return self.batch * -(-self.kv_len // self.page_size)

    def arrays(self) -> tuple[Arrays, Arrays]:
        """The pools, drawn from a normal distribution; queries and the first layer's page table in shuffled order."""
        q_key, *pool_keys = jax.random.split(jax.random.key(0), 3)
        pages = self.pools * self.layers * self.pages_per_layer
        shape = (pages, self.page_size, self.kv_heads, self.head_dim)
        draw = jax.jit(jax.random.normal, static_argnums=(1, 2))
        pools = {name: draw(key, shape, self.dtype) for name, key in zip(("k_pages", "v_pages"), pool_keys, strict=True)}
        table = np.random.default_rng(0).permutation(self.pages_per_layer).reshape(self.batch, -1)
        q = draw(q_key, (self.batch, self.q_heads, self.head_dim), self.dtype)
        return pools, {"q": q, "page_table": jnp.asarray(table, jnp.int32)}

    def chain(self, steps: int, **options: Any) -> Callable[[Arrays, Arrays], tuple[Arrays, Any]]:
        """A function of `arrays()` that runs the steps and returns the pools and the last layer's queries."""
        attend = partial(gqa_decode_paged, rope=Rope(max_position=self.kv_len), **options)

        def run(pools: Arrays, rest: Arrays) -> tuple[Arrays, Any]:
            def layer(lengths: Any, carry: tuple[Arrays, Any], index: Any) -> tuple[tuple[Arrays, Any], None]:
                pools, q = carry
                new = {"k_new": q[:, : self.kv_heads], "v_new": q[:, -self.kv_heads :]}
                table = rest["page_table"] + index * self.pages_per_layer
                o, *written = attend(q, **pools, page_table=table, kv_lengths=lengths, **new)
                return (dict(zip(pools, written, strict=True)), (q + o) * jnp.asarray(0.5**0.5, q.dtype)), None

            def step(number: Any, carry: tuple[Arrays, Any]) -> tuple[Arrays, Any]:
                lengths = jnp.full((self.batch,), self.kv_len - steps, jnp.int32) + number
                return lax.scan(partial(layer, lengths), carry, jnp.arange(self.layers, dtype=jnp.int32))[0]

            return lax.fori_loop(0, steps, step, (pools, rest["q"]))

        return run


def measure(step: Step, steps: int, runs: int) -> dict[str, Any]:
    """Seconds of one step: those in which a kernel runs, and those that pass in a chain (over `runs` chains)."""
    program = jax.jit(step.chain(steps), donate_argnums=0)
    pools, rest = step.arrays()

    def once() -> Any:
        nonlocal pools
        pools, q = program(pools, rest)
        return q

    chained = timing.elapsed_seconds(once, warm_seconds=timing.WARM_SECONDS["memory"], runs=runs) / steps
    kernels = timing.busy_seconds(once, runs=runs) / steps
    pool_bytes = sum(pool.nbytes for pool in pools.values())
    return {"layers": step.layers, "pool_bytes": pool_bytes, "chained_seconds": chained, "kernel_seconds": kernels}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    default = Step()
    for name in ("layers", "batch", "kv_len", "q_heads", "kv_heads", "head_dim", "page_size"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(default, name))
    parser.add_argument("--dtype", default=default.dtype)
    parser.add_argument("--pools", type=int, nargs="+", default=[1, 2], help="pools this many times what the sequences fill")
    parser.add_argument("--steps", type=int, default=8, help="steps of a chain")
    parser.add_argument("--runs", type=int, default=20, help="chains that are timed")
    parser.add_argument("--json", action="store_true", help="one JSON object a pool on standard output")


def run(args: argparse.Namespace) -> int:
    """Times a chain for each size of the pool and prints a line each."""
    if args.steps >= args.kv_len:
        print(f"step: --steps {args.steps} with --kv-len {args.kv_len}; need more keys than steps.", file=sys.stderr)
        return 2
    sizes = {name: getattr(args, name) for name in Step.__dataclass_fields__ if name != "pools"}
    for pools in args.pools:
        row = measure(Step(**sizes, pools=pools), args.steps, args.runs)
        print(json.dumps(row) if args.json else _line(row), flush=True)
    return 0


def _line(row: dict[str, Any]) -> str:
    chained, kernels = row["chained_seconds"], row["kernel_seconds"]
    return (
        f"{row['layers']} layers, pool of {row['pool_bytes'] / 2**20:.0f} MiB: {chained * 1e6:.0f} us a step in a chain, "
        f"{kernels * 1e6:.0f} us in its kernels ({100 * (chained / kernels - 1):+.1f} %)"
    )
