"""Regions: what a kernel serves, as conjunctions of conditions that can each say why a call is outside.

A region is positive: it states what its kernel serves and never what a sibling serves. The one recorded exception is
`CAUSAL`, which is the causal region minus `SQUARE`, so that both never apply.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dispatch_core.calls import FLOAT8, HALF_TYPES, AttentionCall

MAX_DECODE_TOKENS = 16


@dataclass(frozen=True, eq=False)
class Condition:
    """One fact a kernel needs. Conditions are equal to themselves alone, which also makes looking up decisions fast.

    Attributes:
      text: the rule, read after "needs" ("head_dim 128").
      test: whether a call satisfies it.
      value: what the call has instead, read after "the call has" ("64").
    """

    text: str
    test: Callable[[AttentionCall], bool]
    value: Callable[[AttentionCall], Any]

    def refusal(self, call: AttentionCall) -> str | None:
        """Why the call fails the condition, or None."""
        return None if self.test(call) else f"needs {self.text}, the call has {self.value(call)}"


@dataclass(frozen=True)
class Region:
    """A conjunction of conditions. `a & b` serves what both serve."""

    name: str
    conditions: tuple[Condition, ...] = ()

    def refusals(self, call: AttentionCall) -> tuple[str, ...]:
        """Every failing condition with the call's value; empty when the region serves the call."""
        return tuple(reason for c in self.conditions if (reason := c.refusal(call)) is not None)

    def serves(self, call: AttentionCall) -> bool:
        """Whether every condition holds."""
        return all(c.test(call) for c in self.conditions)

    def __and__(self, other: Region) -> Region:
        extra = tuple(c for c in other.conditions if c not in self.conditions)
        return Region(f"{self.name} and {other.name}", self.conditions + extra)

    def named(self, name: str) -> Region:
        """The same region under another name."""
        return Region(name, self.conditions)


def one_of(fact: str, values: tuple[Any, ...]) -> Condition:
    """The fact is one of the values."""
    text = f"{fact} {' or '.join(map(str, values))}"
    return Condition(text, lambda call: getattr(call, fact) in values, lambda call: getattr(call, fact))


def absent(fact: str, name: str) -> Condition:
    """A fact that is None when not asked for is None."""
    return Condition(
        f"no {name}", lambda call: getattr(call, fact) is None, lambda call: f"{name} {_plain(getattr(call, fact))}"
    )


def _plain(value: Any) -> Any:
    return (value.left, value.right) if hasattr(value, "left") else value


def _flag(text: str, fact: str, wanted: bool, when_not: str) -> Condition:
    return Condition(text, lambda call: getattr(call, fact) == wanted, lambda call: when_not)


NOT_FP8 = Condition("16-bit or float32 inputs", lambda call: not call.is_fp8, lambda call: call.dtype)
FP8 = one_of("dtype", (FLOAT8,))
HALF = one_of("dtype", HALF_TYPES)
NO_WINDOW = absent("window", "window")
HAS_WINDOW = Condition("a window that hides keys", lambda call: call.window is not None, lambda call: "none")
UNIFORM = _flag("sequences of one length", "is_uniform", True, "ragged ones")
CAUSAL_MASK = _flag("a causal mask", "is_causal", True, "none")
NO_CAUSAL_MASK = _flag("no causal mask", "is_causal", False, "one")
AS_MANY_KEYS = Condition(
    "max_seqlen_q == max_seqlen_kv",
    lambda call: call.max_seqlen_q == call.max_seqlen_kv,
    lambda call: f"{call.max_seqlen_q} and {call.max_seqlen_kv}",
)
TILE_PAIRS = Condition(
    "a length in whole pairs of 128-row tiles", lambda call: call.max_seqlen_q % 256 == 0, lambda call: call.max_seqlen_q
)
FILLS_THE_DEVICE = Condition(
    "batch * q_heads * length / 256 of at least the device's sm_count",
    lambda call: call.batch * call.q_heads * (call.max_seqlen_q // 256) >= call.device.sm_count,
    lambda call: f"{call.batch * call.q_heads * (call.max_seqlen_q // 256)} on {call.device.sm_count} SMs",
)
SAME_CACHE_TYPE = Condition(
    "k and v of q's element type",
    lambda call: call.cache_dtype == call.dtype,
    lambda call: f"{call.cache_dtype} for {call.dtype}",
)
FP8_CACHE = Condition(f"a {FLOAT8} cache", lambda call: call.cache_dtype == FLOAT8, lambda call: call.cache_dtype)
ONE_TOKEN = one_of("max_seqlen_q", (1,))
SEVERAL_TOKENS = Condition(
    f"2 to {MAX_DECODE_TOKENS} query tokens a sequence",
    lambda call: 2 <= call.max_seqlen_q <= MAX_DECODE_TOKENS,
    lambda call: call.max_seqlen_q,
)
FEW_TOKENS = Condition(
    f"1 to {MAX_DECODE_TOKENS} query tokens a sequence",
    lambda call: call.max_seqlen_q <= MAX_DECODE_TOKENS,
    lambda call: call.max_seqlen_q,
)
NO_SINKS = _flag("no sinks", "has_sinks", False, "some")
GROUP_TO_64 = Condition("1 to 64 query heads per KV head", lambda call: call.group_size <= 64, lambda call: call.group_size)
FULL_PAGES = Condition(
    "page_size 64 or a multiple of 128",
    lambda call: call.paging is not None and (call.paging.page_size == 64 or call.paging.page_size % 128 == 0),
    lambda call: "no pages" if call.paging is None else call.paging.page_size,
)
MOSAIC_HEADS = {(32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256)}
HEADS_IN_SWIZZLES = Condition(
    "head_dim 32, 64, 96, 128 or 256 and the same head_dim_v, or 192 and 128",
    lambda call: (call.head_dim, call.v_dim) in MOSAIC_HEADS,
    lambda call: f"{call.head_dim} and {call.v_dim}",
)
ROWS_ALONE = Condition(
    "head_dim_v 64 or 128 for ragged sequences or pages",
    lambda call: (call.is_uniform and call.paging is None) or call.v_dim in (64, 128),
    lambda call: call.v_dim,
)
OUT_AS_IN = Condition(
    "o of q's element type", lambda call: call.o_dtype == call.dtype, lambda call: f"{call.o_dtype} for {call.dtype}"
)
PAGES_IN_TILES = Condition(
    "page_size 8, 16, 32, 64 or a multiple of 128",
    lambda call: call.paging is None or call.paging.page_size in (8, 16, 32, 64) or call.paging.page_size % 128 == 0,
    lambda call: "no pages" if call.paging is None else call.paging.page_size,
)
NO_ROPE = absent("rope", "rope")
ROPE = Condition("rope", lambda call: call.rope is not None, lambda call: "none")

ANYTHING = Region("anything")

DENSE = Region("dense", (NOT_FP8, NO_WINDOW, UNIFORM, one_of("backend", ("auto", "dense"))))
_CAUSAL_128 = DENSE & Region("causal 128", (HALF, CAUSAL_MASK, one_of("head_dim", (128,))))
SQUARE = (_CAUSAL_128 & Region("square", (AS_MANY_KEYS, TILE_PAIRS, FILLS_THE_DEVICE))).named("square")
NOT_SQUARE = Condition("a call outside the square region", lambda call: not SQUARE.serves(call), lambda call: "one inside it")
CAUSAL = (_CAUSAL_128 & Region("not square", (NOT_SQUARE,))).named("causal")


def _ragged_or_varlen(call: AttentionCall) -> bool:
    return call.backend == "varlen" or (call.backend == "auto" and not call.is_uniform)


VARLEN = Region(
    "varlen",
    (
        NOT_FP8,
        NO_WINDOW,
        Condition(
            "backend varlen, or auto and ragged sequences",
            _ragged_or_varlen,
            lambda call: f"backend {call.backend} and {'uniform' if call.is_uniform else 'ragged'} sequences",
        ),
    ),
)
SLIDING_WINDOW = Region("sliding window", (HAS_WINDOW, NOT_FP8, one_of("backend", ("auto", "sliding_window"))))
_FP8_REQUEST = Region("FP8", (FP8, one_of("backend", ("auto", "fp8"))))
FP8_SQUARE = (
    _FP8_REQUEST & Region("square", (NO_CAUSAL_MASK, NO_WINDOW, UNIFORM, AS_MANY_KEYS, one_of("head_dim", (64, 128, 256))))
).named("FP8 square")
FP8_ANY = _FP8_REQUEST.named("FP8")

DECODE = Region("decode", (NOT_FP8, SAME_CACHE_TYPE, ONE_TOKEN))
DECODE_BS1 = Region(
    "batch-1 decode",
    (
        one_of("batch", (1,)),
        one_of("dtype", ("float16",)),
        SAME_CACHE_TYPE,
        ONE_TOKEN,
        one_of("head_dim", (128,)),
        absent("softcap", "softcap"),
        NO_WINDOW,
        NO_SINKS,
        GROUP_TO_64,
    ),
)
DECODE_PAGED_BS1 = (DECODE_BS1 & Region("full pages", (FULL_PAGES,))).named("paged batch-1 decode")
DECODE_FP8_CACHE = Region("FP8-cache decode", (NOT_FP8, FP8_CACHE, FEW_TOKENS))
DECODE_SEVERAL = Region("multi-token decode", (NOT_FP8, SAME_CACHE_TYPE, SEVERAL_TOKENS))

PAGED = Region("paged prefill", (NOT_FP8, NO_ROPE, SAME_CACHE_TYPE))
PAGED_ROPE = Region("paged prefill with rope", (NOT_FP8, ROPE, SAME_CACHE_TYPE))
PAGED_FP8 = Region("paged prefill, FP8 cache", (NOT_FP8, NO_ROPE, FP8_CACHE))
PAGED_FP8_ROPE = Region("paged prefill with rope, FP8 cache", (NOT_FP8, ROPE, FP8_CACHE))

MOSAIC_PREFILL = Region("Mosaic prefill", (HALF, OUT_AS_IN, HEADS_IN_SWIZZLES, ROWS_ALONE, PAGES_IN_TILES))

ROWS_OF_A_TILE = Condition(
    "at most 64 query rows (tokens times query heads) per KV head",
    lambda call: call.group_size * call.max_seqlen_q <= 64,
    lambda call: call.group_size * call.max_seqlen_q,
)
HEADS_OF_64_OR_128 = Condition(
    "head_dim and head_dim_v 128, or 64 and an even number of query heads per KV head",
    lambda call: call.head_dim == call.v_dim and (call.head_dim == 128 or (call.head_dim == 64 and call.group_size % 2 == 0)),
    lambda call: f"{call.head_dim} and {call.v_dim}, {call.group_size} query heads",
)
CAPACITY_IN_OCTETS = Condition(
    "pages, or a capacity in multiples of 8",
    lambda call: call.paging is not None or call.max_seqlen_kv % 8 == 0,
    lambda call: call.max_seqlen_kv,
)
MOSAIC_DECODE = Region(
    "Mosaic decode", (HALF, OUT_AS_IN, HEADS_OF_64_OR_128, ROWS_OF_A_TILE, CAPACITY_IN_OCTETS, PAGES_IN_TILES)
)
