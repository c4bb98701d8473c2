"""`python -m jax_ops demo`: SmolLM2-135M-Instruct answers prompts through the paged ops."""

import argparse
import importlib
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import TextIO

import jax
import jax.numpy as jnp

from dispatch_core import Explanation
from jax_ops import explain, gqa_decode_paged, gqa_prefill_paged
from jax_ops.demo.errors import DemoError
from jax_ops.demo.generate import Generation

DEFAULT_PROMPT = "Why is the sky blue?"
DTYPES = ("float32", "bfloat16")
EXTRA = ("gguf", "tokenizers", "jinja2")
LINE_WIDTH = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the demo's arguments."""
    parser.add_argument(
        "--prompt", action="append", metavar="TEXT", help=f"what to ask; several are answered as one batch ({DEFAULT_PROMPT!r})"
    )
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help="the longest answer in tokens (%(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="of weights and cache (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Runs the demo; what the user can mend is one line on stderr and exit status 1."""
    try:
        _demo(args.prompt or [DEFAULT_PROMPT], args.tokens, jnp.dtype(args.dtype))
    except DemoError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _demo(prompts: Sequence[str], max_tokens: int, dtype: jnp.dtype) -> None:
    for package in EXTRA:
        _require(package)
    from gguf import GGUFReader

    from jax_ops.demo.gguf_model import find_model, load_config, load_params
    from jax_ops.demo.tokenizer import Tokenizer

    progress = Progress(sys.stderr)
    path = find_model()
    progress.show(f"reading {path.name} ...")
    reader = GGUFReader(path)
    ...
