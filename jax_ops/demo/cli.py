"""`python -m jax_ops demo`: a small language model answers prompts through the paged ops."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

import jax
from jax import ShapeDtypeStruct

from dispatch_core import Explanation
from jax_ops import explain, gqa_decode_paged, gqa_prefill_paged
from jax_ops.demo.errors import DemoError
from jax_ops.demo.generate import Generation
from jax_ops.demo.model import Config, Params
from jax_ops.demo.terminal import Progress, Transcript

if TYPE_CHECKING:
    from jax_ops.demo.tokenizer import Tokenizer

DEFAULT_PROMPT = "Why is the sky blue?"
EXTRA_PACKAGES = ("gguf", "tokenizers", "jinja2")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the demo's arguments."""
    parser.add_argument(
        "--prompt", action="append", metavar="TEXT", help=f"what to ask; several are answered as a batch ({DEFAULT_PROMPT!r})"
    )
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help="length of the longest answer (%(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights, cache (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Runs the demo and returns the exit status: 1, with a line on stderr, for what the user can mend."""
    try:
        _demo(args.prompt or [DEFAULT_PROMPT], args.tokens, args.dtype)
    except DemoError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _demo(prompts: Sequence[str], max_tokens: int, dtype: str) -> None:
    _check(prompts, max_tokens)
    progress = Progress()
    progress.phase("reading the model ...")
    params, config, tokenizer = _load(dtype)
    token_ids = [tokenizer.encode_chat(prompt) for prompt in prompts]

    progress.phase("compiling prefill and decode ...")
    for _ in islice(Generation(params, config, token_ids, max_tokens), 2):
        pass

    progress.phase(f"answering on {jax.devices()[0].device_kind} ...")
    transcript = Transcript(len(prompts), progress)
    for row, prompt in enumerate(prompts):
        transcript.prompt(row, prompt)
    generation = Generation(params, config, token_ids, max_tokens)
    speeds = _answer(generation, tokenizer, transcript, progress)

    cache = generation.cache
    used = cache.num_pages - int(cache.num_free_pages)
    print(f"\n{speeds}")
    print(f"cache    {used} of {cache.num_pages} pages of {cache.page_size} tokens used, in each of {config.num_layers} layers")
    for explanation in _kernels(generation):
        print(f"\n{explanation}")


def _check(prompts: Sequence[str], max_tokens: int) -> None:
    for prompt in prompts:
        if not prompt.strip():
            raise DemoError(f"demo: --prompt is {prompt!r}; need some text.")
    if max_tokens < 1:
        raise DemoError(f"demo: --tokens is {max_tokens}; need 1 or more.")


def _load(dtype: str) -> tuple[Params, Config, Tokenizer]:
    try:
        from gguf import GGUFReader

        from jax_ops.demo.gguf_model import find_model, load_config, load_params
        from jax_ops.demo.tokenizer import Tokenizer
    except ModuleNotFoundError as error:
        if error.name not in EXTRA_PACKAGES:
            raise
        raise DemoError(f"demo: no package {error.name}; need it. Get it with: pip install 'pallas-gqa[demo]'") from error
    reader = GGUFReader(find_model())
    config = load_config(reader)
    return load_params(reader, config, dtype), config, Tokenizer.from_gguf(reader)


def _answer(generation: Generation, tokenizer: Tokenizer, transcript: Transcript, progress: Progress) -> str:
    """Prints the answers as they come, each up to the end of its turn; returns the lines on speed."""
    texts = dict(enumerate(tokenizer.stream() for _ in range(generation.cache.batch)))
    show_ticks = generation.cache.batch > 1 or not sys.stdout.isatty()
    new_tokens = 0
    begin = first = now = time.perf_counter()
    for step, tokens in enumerate(generation, start=1):
        now = time.perf_counter()
        if step == 1:
            first = now
        new_tokens += len(texts)
        for row in list(texts):
            transcript.add(row, texts[row].feed(tokens[row]))
            if tokens[row] == tokenizer.eos_id:
                transcript.add(row, texts.pop(row).finish() + "\n")
        if not texts:
            break
        if show_ticks:
            progress.tick(f"{step} of {generation.max_tokens} tokens, {new_tokens / (now - begin):.1f} tokens/s")
    for row, text in texts.items():
        transcript.add(row, text.finish() + "\n")
    progress.clear()
    lines = [_speed("prefill", generation.prompt_tokens, first - begin)]
    if now > first:
        lines.append(_speed("decode", new_tokens - generation.cache.batch, now - first))
    return "\n".join(lines)


def _speed(what: str, tokens: int, seconds: float) -> str:
    return f"{what:<7}  {tokens} tokens in {seconds:.2f} s, {tokens / seconds:.1f} tokens/s"


def _kernels(generation: Generation) -> tuple[Explanation, Explanation]:
    """Which kernel each op of the model runs, and why."""
    config, cache = generation.config, generation.cache

    def heads(rows: int, count: int) -> ShapeDtypeStruct:
        return ShapeDtypeStruct((rows, count, config.head_dim), cache.k_pages.dtype)

    pool = (cache.k_pages, cache.v_pages, cache.page_table)
    packed, batch = len(generation.tokens), generation.cache.batch
    q, k, v = heads(packed, config.q_heads), heads(packed, config.kv_heads), heads(packed, config.kv_heads)
    q_new, k_new, v_new = heads(batch, config.q_heads), heads(batch, config.kv_heads), heads(batch, config.kv_heads)
    return (
        explain(gqa_prefill_paged, q, k, v, *pool, generation.cu_seqlens, cache.lengths, rope=config.rope),
        explain(gqa_decode_paged, q_new, *pool, cache.lengths, k_new=k_new, v_new=v_new, rope=config.rope),
    )
