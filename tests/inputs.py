"""Seeded call cases of every attention op, shared by all op tests: NumPy arrays plus static keywords.

``random_case(op, seed)`` draws shapes that are multiples of nothing and a random set of the op's features;
``feature_cases(op)`` has every feature alone and in pairs; `tests.edge_cases` has named ones. ``poisoned`` and ``unclamped``
make a twin of a case whose result must not differ from its own.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np

from tests.oracle import Rope

Array = np.ndarray
Rng = np.random.Generator

OPS = (
    "gqa_prefill",
    "gqa_prefill_packed",
    "gqa_decode",
    "gqa_decode_paged",
    "gqa_prefill_paged",
    "append_paged",
    "merge_attention",
)
DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
}
GROUPS = (1, 2, 3, 4, 5, 7, 8, 9, 12)
HEAD_DIMS = (8, 16, 24, 32, 40, 64, 72, 80, 96)
PAGE_SIZES = (1, 3, 16, 19, 64)

_WINDOWS = ("window_left", "window_right", "window_both")
_RULES = ("scale", "softcap", *_WINDOWS, "sinks", "v_dim")
_PAGED = ("fp8_cache", "rope", "holes", "inactive", "overflow")
# What can be asked of each op beside its required arrays.
FEATURES: dict[str, tuple[str, ...]] = {
    "gqa_prefill": (*_RULES, "full", "q_lengths", "kv_lengths", "fp8", "out_dtype"),
    "gqa_prefill_packed": (*_RULES, "full", "tail", "uniform", "fp8", "out_dtype"),
    "gqa_decode": (*_RULES, "kv_lengths", "tokens", "fp8_cache"),
    "gqa_decode_paged": (*_RULES, "tokens", "append", *_PAGED),
    "gqa_prefill_paged": (*_RULES, "full", "tail", *_PAGED),
    "append_paged": ("v_dim", "packed", "tail", *_PAGED),
    "merge_attention": ("empty", "packed"),
}


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
      op: name of the op.
      arrays: its array arguments; None is never among them.
      options: the static keywords that decide the result (`rope` is an oracle.Rope); the oracle takes them too.
      hints: the static keywords that do not: steering, and the output's element type.
      features: what the case exercises.
    """

    op: str
    arrays: dict[str, Array]
    options: dict[str, Any] = field(default_factory=dict)
    hints: dict[str, Any] = field(default_factory=dict)
    features: frozenset[str] = frozenset()

    @property
    def dtype(self) -> np.dtype:
        """Element type of the queries (of the new keys or the partial results in the ops that have none)."""
        return self.arrays[{"append_paged": "k", "merge_attention": "o_a"}.get(self.op, "q")].dtype

    @property
    def out_dtype(self) -> np.dtype:
        """Element type the output must have."""
        default = "bfloat16" if self.dtype == DTYPES["float8_e4m3fn"] else str(self.dtype)
        return DTYPES[self.hints.get("out_dtype", default)]

    def __str__(self) -> str:
        shapes = ", ".join(f"{name} {x.dtype}{list(x.shape)}" for name, x in self.arrays.items())
        return f"{self.op}({shapes}, {self.options}, {self.hints})"


@dataclass(frozen=True)
class _Facts:
    """What a case is drawn from: sizes, types, the features, and the generator of everything else."""

    rng: Rng
    features: frozenset[str]
    dtype: np.dtype
    batch: int
    kv_heads: int
    group: int
    head_dim: int
    head_dim_v: int
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    page_size: int
    amplitude: float

    @property
    def q_heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def cache_dtype(self) -> np.dtype:
        return DTYPES["float8_e4m3fn"] if "fp8_cache" in self.features else self.dtype

    def normal(self, *shape: int, dtype: np.dtype | None = None) -> Array:
        return (self.rng.standard_normal(shape, np.float32) * self.amplitude).astype(dtype or self.dtype)

    def q(self, *rows: int) -> Array:
        return self.normal(*rows, self.q_heads, self.head_dim)

    def k(self, *rows: int, dtype: np.dtype | None = None) -> Array:
        return self.normal(*rows, self.kv_heads, self.head_dim, dtype=dtype)

    def v(self, *rows: int, dtype: np.dtype | None = None) -> Array:
        return self.normal(*rows, self.kv_heads, self.head_dim_v, dtype=dtype)

    def scales(self, *names: str) -> dict[str, Array]:
        """FP8 scales, each a scalar, (Hkv,) or (B, Hkv), and none of them 1."""
        shapes = ((), (self.kv_heads,), (self.batch, self.kv_heads))
        return {name: np.exp2(self.rng.uniform(-3, 1.5, shapes[self.rng.integers(3)])).astype(np.float32) for name in names}


def random_case(op: str, seed: int, features: tuple[str, ...] | None = None, **pinned: Any) -> Case:
    """A case of an op.

    Args:
      op: one of OPS.
      seed: everything that is not given is drawn from it.
      features: of FEATURES[op]; None: a random set.
      **pinned: facts to hold: dtype (a name), batch, kv_heads, group, head_dim, head_dim_v, q_lens, kv_lens (tuples of
        `batch` live lengths; before the append in the paged ops that write), page_size, amplitude.
    """
    rng = np.random.default_rng([zlib.crc32(op.encode()), seed])
    chosen = frozenset(name for name in FEATURES[op] if rng.random() < 0.25) if features is None else frozenset(features)
    if unknown := chosen - set(FEATURES[op]):
        raise ValueError(f"random_case: {op} has no feature {sorted(unknown)}; need some of {FEATURES[op]}.")
    facts = _draw(op, rng, chosen, pinned)
    case = _BUILDERS[op](facts)
    if op in ("append_paged", "merge_attention"):
        return case
    return replace(case, arrays=case.arrays | _sinks(facts), options=case.options | _rules(facts))


def _draw(op: str, rng: Rng, features: frozenset[str], pinned: dict[str, Any]) -> _Facts:
    lens = pinned.get("q_lens") or pinned.get("kv_lens")
    batch = len(lens) if lens is not None else int(pinned.get("batch", rng.integers(1, 5)))
    head_dim, group = int(rng.choice(HEAD_DIMS)), int(rng.choice(GROUPS))
    q_lens, kv_lens = _draw_lengths(op, rng, features, batch)
    drawn = {
        "dtype": ("float16", "bfloat16", "float32")[rng.integers(3)],
        "batch": batch,
        "kv_heads": int(rng.integers(1, 4 if group < 5 else 3)),
        "group": group,
        "head_dim": head_dim,
        "q_lens": q_lens,
        "kv_lens": kv_lens,
        "page_size": int(rng.choice(PAGE_SIZES)),
        "amplitude": float(rng.choice((0.5, 1.0, 2.0))),
    }
    other_dim = int(rng.choice([d for d in HEAD_DIMS if d != pinned.get("head_dim", head_dim)]))
    drawn |= pinned
    drawn.setdefault("head_dim_v", other_dim if "v_dim" in features else drawn["head_dim"])
    drawn["dtype"] = DTYPES["float8_e4m3fn" if "fp8" in features else drawn["dtype"]]
    return _Facts(rng=rng, features=features, **drawn)


def _draw_lengths(op: str, rng: Rng, features: frozenset[str], batch: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    def one(top: int) -> int:
        return int((0, 1, rng.integers(top + 1), rng.integers(top + 1))[rng.integers(4)])

    decode = op in ("gqa_decode", "gqa_decode_paged")
    ragged = (op == "gqa_prefill_packed" and "uniform" not in features) or op in ("gqa_prefill_paged", "append_paged")
    q_lens = tuple(one(40) for _ in range(batch))
    kv_lens = tuple(one(70) for _ in range(batch))
    if decode or (op == "append_paged" and "packed" not in features):
        tokens = int(rng.choice((2, 3, 5, 16))) if "tokens" in features else 1
        q_lens = (tokens,) * batch
    elif op == "gqa_prefill_packed" and ragged and rng.random() < 0.5:
        kv_lens = q_lens
    elif not ragged:
        top_q = int(rng.integers(1, 41))
        top_kv = top_q if rng.random() < 0.4 else int(rng.integers(1, 71))
        q_lens = tuple(one(top_q) for _ in range(batch)) if "q_lengths" in features else (top_q,) * batch
        kv_lens = tuple(one(top_kv) for _ in range(batch)) if "kv_lengths" in features else (top_kv,) * batch
    if op == "gqa_decode" and "kv_lengths" not in features:
        kv_lens = (int(rng.integers(1, 71)),) * batch
    return q_lens, kv_lens


def _sinks(facts: _Facts) -> dict[str, Array]:
    if "sinks" not in facts.features:
        return {}
    return {"sinks": (2 * facts.rng.standard_normal(facts.q_heads)).astype(np.float32)}


def _rules(facts: _Facts) -> dict[str, Any]:
    """The static keywords every attention op shares."""
    rng, features = facts.rng, facts.features
    options: dict[str, Any] = {}
    if "scale" in features:
        options["scale"] = float(rng.choice((0.03, 0.3, 1.0, 0.0, -0.2)))
    if "softcap" in features:
        options["softcap"] = float(rng.choice((0.5, 5.0, 30.0)))
    sides = [name in features or "window_both" in features for name in ("window_left", "window_right")]
    if any(sides):
        unbounded = (None, -1)[rng.integers(2)]
        widths = [int(rng.choice((0, 1, 3, 17, max(facts.kv_lens)))) for _ in sides]
        options["window"] = tuple(w if asked else unbounded for w, asked in zip(widths, sides, strict=True))
    return options


def _rope(facts: _Facts) -> dict[str, Any]:
    if "rope" not in facts.features:
        return {}
    rng = facts.rng
    rotary_dim = None if rng.random() < 0.4 else 2 * int(rng.integers(1, facts.head_dim // 2 + 1))
    rope = Rope(
        theta=float(rng.choice((500.0, 10000.0, 100000.0))),
        rotary_dim=rotary_dim,
        max_position=int(rng.choice((16, 4096))),
        style=("half", "interleaved")[rng.integers(2)],
    )
    if rng.random() < 0.3:
        half = (rotary_dim or facts.head_dim) // 2
        rope = replace(rope, inv_freq=np.exp(-rng.uniform(0, 6, half)).astype(np.float32))
    return {"rope": rope}


def _is_causal(facts: _Facts) -> dict[str, Any]:
    return {"is_causal": False} if "full" in facts.features else {}


def _out_dtype(facts: _Facts) -> dict[str, Any]:
    if "out_dtype" not in facts.features:
        return {}
    return {"out_dtype": ("float16", "bfloat16", "float32")[facts.rng.integers(3)]}


def _int32(x: Any) -> Array:
    return np.asarray(x, np.int32)


def _offsets(lens: tuple[int, ...]) -> Array:
    return _int32([0, *np.cumsum(lens)])


def _prefill(facts: _Facts) -> Case:
    """Dense: the capacity is the longest request, and one that is nobody's where lengths are given."""
    features = facts.features
    slack = {name: int(facts.rng.integers(3)) if name in features else 0 for name in ("q_lengths", "kv_lengths")}
    q_capacity = max(1, *facts.q_lens) + slack["q_lengths"]
    kv_capacity = max(1, *facts.kv_lens) + slack["kv_lengths"]
    arrays = {
        "q": facts.q(facts.batch, q_capacity),
        "k": facts.k(facts.batch, kv_capacity),
        "v": facts.v(facts.batch, kv_capacity),
    }
    if "q_lengths" in features or min(facts.q_lens) < q_capacity:
        arrays["q_lengths"] = _int32(facts.q_lens)
    if "kv_lengths" in features or min(facts.kv_lens) < kv_capacity:
        arrays["kv_lengths"] = _int32(facts.kv_lens)
    if "fp8" in features:
        arrays |= facts.scales("q_scale", "k_scale", "v_scale")
    return Case("gqa_prefill", arrays, _is_causal(facts), _out_dtype(facts), features)


def _packed(facts: _Facts) -> Case:
    features = facts.features
    tails = facts.rng.integers(1, 9, 2) if "tail" in features else (0, 0)
    cu_q, cu_kv = _offsets(facts.q_lens), _offsets(facts.kv_lens)
    total_kv = int(cu_kv[-1] + tails[1])
    arrays = {
        "q": facts.q(int(cu_q[-1] + tails[0])),
        "k": facts.k(total_kv),
        "v": facts.v(total_kv),
        "cu_seqlens_q": cu_q,
        "cu_seqlens_kv": cu_kv,
    }
    if "fp8" in features:
        arrays |= facts.scales("q_scale", "k_scale", "v_scale")
    return Case("gqa_prefill_packed", arrays, _is_causal(facts), _out_dtype(facts), features)


def _decode(facts: _Facts) -> Case:
    features = facts.features
    capacity = max(1, *facts.kv_lens) + (int(facts.rng.integers(4)) if "kv_lengths" in features else 0)
    rows = (facts.batch, facts.q_lens[0]) if "tokens" in features else (facts.batch,)
    arrays = {
        "q": facts.q(*rows),
        "k": facts.k(facts.batch, capacity, dtype=facts.cache_dtype),
        "v": facts.v(facts.batch, capacity, dtype=facts.cache_dtype),
    }
    if "kv_lengths" in features or min(facts.kv_lens) < capacity:
        arrays["kv_lengths"] = _int32(facts.kv_lens)
    if "fp8_cache" in features:
        arrays |= facts.scales("k_scale", "v_scale")
    return Case("gqa_decode", arrays, {}, {}, features)


def _cache(facts: _Facts, new: tuple[int, ...]) -> tuple[dict[str, Array], Array]:
    """Pages, page table and FP8 scales for `new` tokens after kv_lens, and the lengths (an overflow lengthens one).

    Every sequence has pages of its own, in shuffled order; unused table entries name page 0. Holes are entries inside a
    length that name no page.
    """
    rng, page_size, features = facts.rng, facts.page_size, facts.features
    lengths = np.array(facts.kv_lens)
    needed = -(-(lengths + np.array(new)) // page_size)
    max_pages = max(1, int(needed.max())) + int(rng.integers(2))
    if "overflow" in features:
        full = int(rng.integers(facts.batch))
        lengths[full] = max_pages * page_size - int(rng.integers(3)) % page_size
        needed[full] = max_pages
    pages = int(needed.sum()) + int(rng.integers(1, 4))
    table = np.zeros((facts.batch, max_pages), np.int32)
    free = iter(rng.permutation(pages))
    for b, count in enumerate(needed):
        table[b, :count] = list(itertools.islice(free, int(count)))
    if "inactive" in features:
        lengths[(idle := int(rng.integers(facts.batch)))] = 0
        table[idle] = -1
    if "holes" in features:
        used = np.argwhere(np.arange(max_pages) < needed[:, None])
        if len(used):
            b, entry = used[rng.integers(len(used))]
            table[b, entry] = rng.choice((-1, pages, 2**30, -(2**31)))
    arrays = {
        "k_pages": facts.k(pages, page_size, dtype=facts.cache_dtype),
        "v_pages": facts.v(pages, page_size, dtype=facts.cache_dtype),
        "page_table": table,
    }
    if "fp8_cache" in features:
        arrays |= facts.scales("k_scale", "v_scale")
    return arrays, lengths.astype(np.int32)


def _decode_paged(facts: _Facts) -> Case:
    append = "append" in facts.features
    rows = (facts.batch, facts.q_lens[0]) if "tokens" in facts.features else (facts.batch,)
    arrays, lengths = _cache(facts, facts.q_lens if append else (0,) * facts.batch)
    arrays |= {"q": facts.q(*rows), "kv_lengths": lengths}
    if append:
        arrays |= {"k_new": facts.k(*rows), "v_new": facts.v(*rows)}
    return Case("gqa_decode_paged", arrays, _rope(facts), {}, facts.features)


def _prefill_paged(facts: _Facts) -> Case:
    arrays, lengths = _cache(facts, facts.q_lens)
    cu = _offsets(facts.q_lens)
    total = int(cu[-1]) + (int(facts.rng.integers(1, 9)) if "tail" in facts.features else 0)
    arrays |= {"q": facts.q(total), "k": facts.k(total), "v": facts.v(total), "cu_seqlens_q": cu, "cache_lengths": lengths}
    return Case("gqa_prefill_paged", arrays, _is_causal(facts) | _rope(facts), {}, facts.features)


def _append(facts: _Facts) -> Case:
    arrays, lengths = _cache(facts, facts.q_lens)
    cu = _offsets(facts.q_lens)
    packed = "packed" in facts.features
    total = int(cu[-1]) + (int(facts.rng.integers(1, 9)) if packed and "tail" in facts.features else 0)
    arrays |= {"k": facts.k(total), "v": facts.v(total), "lengths": lengths}
    if packed:
        arrays["cu_seqlens"] = cu
    return Case("append_paged", arrays, _rope(facts), {}, facts.features)


def _merge(facts: _Facts) -> Case:
    """Two partial results; "empty": rows of either side, and of both, that saw no key."""
    rows = (sum(facts.q_lens),) if "packed" in facts.features else (facts.batch, max(facts.q_lens))
    arrays: dict[str, Array] = {}
    for side in "ab":
        o = facts.normal(*rows, facts.q_heads, facts.head_dim_v)
        lse = facts.normal(*rows, facts.q_heads, dtype=np.dtype(np.float32)) * 4
        if "empty" in facts.features:
            empty = facts.rng.random(lse.shape) < 0.4
            o[empty], lse[empty] = 0, -np.inf
        arrays |= {f"o_{side}": o, f"lse_{side}": lse}
    return Case("merge_attention", arrays, {}, {}, facts.features)


_BUILDERS = {
    "gqa_prefill": _prefill,
    "gqa_prefill_packed": _packed,
    "gqa_decode": _decode,
    "gqa_decode_paged": _decode_paged,
    "gqa_prefill_paged": _prefill_paged,
    "append_paged": _append,
    "merge_attention": _merge,
}


def feature_cases(op: str, **pinned: Any) -> Iterator[tuple[str, Case]]:
    """Every feature of an op alone, and every pair, each with a name to show; pinned as in `random_case`."""
    alone = [(name,) for name in FEATURES[op]]
    for features in [(), *alone, *itertools.combinations(FEATURES[op], 2)]:
        name = "+".join(features) or "nothing"
        yield name, random_case(op, zlib.crc32(name.encode()), features, **pinned)


def _unread(case: Case) -> tuple[dict[str, Array], Array | None]:
    """Which rows of each array nothing may read, and which page-table entries."""
    a = case.arrays
    if case.op == "merge_attention":
        return {}, None
    if case.op in ("gqa_prefill", "gqa_decode"):
        past = {}
        for name, lengths in (("q", "q_lengths"), ("k", "kv_lengths"), ("v", "kv_lengths")):
            if lengths in a:
                past[name] = np.arange(a[name].shape[1]) >= a[lengths][:, None]
        return past, None
    if case.op == "gqa_prefill_packed":
        rows = {"q": "cu_seqlens_q", "k": "cu_seqlens_kv", "v": "cu_seqlens_kv"}
        return {name: np.arange(len(a[name])) >= a[cu][-1] for name, cu in rows.items()}, None
    offsets = a.get("cu_seqlens_q", a.get("cu_seqlens"))
    past = {} if offsets is None else {name: np.arange(len(a[name])) >= offsets[-1] for name in ("q", "k", "v") if name in a}
    lengths = next(a[name] for name in ("kv_lengths", "cache_lengths", "lengths") if name in a)
    table, (pages, page_size) = a["page_table"], a["k_pages"].shape[:2]
    unread = np.ones((pages, page_size), bool)
    for b, length in enumerate(lengths):
        position = np.arange(length)
        page = table[b][position // page_size]
        real = (page >= 0) & (page < pages)
        unread[page[real], position[real] % page_size] = False
    if offsets is not None:
        written = np.diff(offsets)
    elif "k_new" in a:
        written = a["k_new"].shape[1] if a["k_new"].ndim == 4 else 1
    else:
        written = 1 if case.op == "append_paged" else 0
    entries = np.arange(table.shape[1]) >= -(-(lengths + written) // page_size)[:, None]
    return past | {"k_pages": unread, "v_pages": unread}, entries


def poisoned(case: Case) -> Case:
    """The twin with NaN and infinity in every row that nothing may read, and page ids that are no pages beyond lengths."""
    arrays = dict(case.arrays)
    rng = np.random.default_rng(zlib.crc32(str(case).encode()))
    rows, entries = _unread(case)
    for name, mask in rows.items():
        x = arrays[name] = arrays[name].copy()
        poison = [np.nan] if x.dtype == DTYPES["float8_e4m3fn"] else [np.nan, np.inf, -np.inf]
        x[mask] = rng.choice(poison, x[mask].shape).astype(x.dtype)
    if entries is not None:
        table = arrays["page_table"] = arrays["page_table"].copy()
        table[entries] = rng.choice((-1, 2**30, len(arrays["k_pages"]), -(2**31)), int(entries.sum()))
    return replace(case, arrays=arrays)


def unclamped(case: Case) -> Case:
    """The twin whose lengths and offsets are out of range wherever the clamped ones are what the case has."""
    a = dict(case.arrays)
    totals = {"cu_seqlens_q": "q", "cu_seqlens_kv": "k", "cu_seqlens": "k"}
    for name, rows in totals.items():
        if name in a:
            cu = a[name].astype(np.int64)
            empty = np.concatenate([[False], np.diff(cu) == 0])
            a[name] = np.where(empty, cu - 3, np.where(cu == len(a[rows]), cu + 5, cu)).astype(np.int32)
    capacities = {"q_lengths": ("q", 1), "kv_lengths": ("k", 1)}
    for name in ("q_lengths", "kv_lengths", "cache_lengths", "lengths"):
        if name in a:
            if "page_table" in a:
                capacity = a["page_table"].shape[1] * a["k_pages"].shape[1]
            else:
                rows, axis = capacities[name]
                capacity = a[rows].shape[axis]
            a[name] = np.where(a[name] == 0, -7, np.where(a[name] == capacity, capacity + 9, a[name])).astype(np.int32)
    return replace(case, arrays=a)
