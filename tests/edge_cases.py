"""Named cases of every attention op: lengths, shapes, layouts and values that have broken attention libraries before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from tests.inputs import Case, random_case
from tests.oracle import Rope

# Lengths (q, kv) that are odd, lopsided or one off a block.
LENGTH_PAIRS = (
    (1, 1), (1, 17), (5, 17), (17, 5), (3, 8), (8, 3), (113, 203), (239, 1), (799, 3), (192, 192), (65, 129), (0, 9), (9, 0),
)  # fmt: skip
ODD_HEAD_DIMS = (72, 80, 88, 96, 192, 224)
ODD_HEADS = ((9, 3), (10, 2), (12, 2), (14, 2), (24, 2), (96, 1))
# (length before, new tokens, page size): a chunk inside, up to and across page edges.
APPENDS = ((15, 3, 16), (16, 1, 16), (0, 33, 16), (37, 5, 16), (0, 1, 1), (5, 2, 1), (129, 1, 3), (4, 1, 256), (0, 0, 16))
SMALL = {"kv_heads": 2, "group": 2, "head_dim": 16, "dtype": "float16", "amplitude": 1.0}


def edge_cases(op: str, **changes: Any) -> dict[str, Case]:
    """The named cases of an op, `SMALL` with the changes; a name says what is special about the case."""
    return {name: make(op, SMALL | changes) for makers in _MAKERS for name, make in makers(op).items()}


Maker = Callable[[str, dict[str, Any]], Case]
Makers = dict[str, Maker]


def _case(features: tuple[str, ...] = (), options: dict[str, Any] | None = None, **pinned: Any) -> Maker:
    def make(op: str, small: dict[str, Any]) -> Case:
        case = random_case(op, 0, features, **(small | pinned))
        return replace(case, options=case.options | (options or {}))

    return make


def _lengths(op: str) -> Makers:
    if op in ("gqa_prefill", "gqa_prefill_packed"):
        full = {"is_causal": False}
        names: dict[str, dict[str, Any]] = {f"{q}x{kv}": {"q_lens": (q,), "kv_lens": (kv,)} for q, kv in LENGTH_PAIRS}
        makers = {name: _case(**lens) for name, lens in names.items()}
        makers |= {f"{name}_full": _case(options=full, **lens) for name, lens in names.items()}
        makers["three_lengths"] = _case(q_lens=(113, 1, 40), kv_lens=(203, 1, 17))
        makers["no_keys_in_some"] = _case(q_lens=(2, 3, 4, 1), kv_lens=(0, 5, 0, 4))
        makers["no_keys_at_all"] = _case(q_lens=(3, 2), kv_lens=(0, 0))
        makers["no_tokens_at_all"] = _case(q_lens=(0, 0), kv_lens=(0, 0))
        makers["1025_tokens"] = _case(q_lens=(1025,), kv_lens=(1025,), kv_heads=1, group=1)
        if op == "gqa_prefill_packed":
            makers["documents_5_0_27"] = _case(("tail",), q_lens=(5, 0, 27), kv_lens=(5, 0, 27))
            makers["padded_past_the_last_offset"] = _case(("tail",), q_lens=(20, 30), kv_lens=(20, 30))
        return makers
    if op == "gqa_decode":
        lens = {f"kv_{n}": _case(("kv_lengths",), kv_lens=(n,)) for n in (0, 1, 130, 1025)}
        return lens | {
            "kv_130_of_256": lambda op, small: _shortened(random_case(op, 0, (), **small, kv_lens=(256, 256)), (130, 1)),
            "more_queries_than_keys": _case(("kv_lengths", "tokens"), q_lens=(5, 5), kv_lens=(3, 0)),
        }
    if op == "merge_attention":
        return {"both_empty": _case(("empty",), q_lens=(3,)), "nothing": _case(("packed",), q_lens=(0,))}
    return {}


def _shortened(case: Case, lengths: tuple[int, ...]) -> Case:
    return replace(case, arrays=case.arrays | {"kv_lengths": np.asarray(lengths, np.int32)})


def _shapes(op: str) -> Makers:
    if op in ("append_paged", "merge_attention"):
        return {}
    tokens = 1 if op in ("gqa_decode", "gqa_decode_paged") else 19
    lens: dict[str, Any] = {"q_lens": (tokens, tokens), "kv_lens": (33, 33)}
    dims = {f"head_dim_{d}": _case(**lens, head_dim=d) for d in ODD_HEAD_DIMS}
    heads = {f"heads_{hq}_{hkv}": _case(**lens, kv_heads=hkv, group=hq // hkv) for hq, hkv in ODD_HEADS}
    return dims | heads | {"head_dims_192_128": _case(**lens, head_dim=192, head_dim_v=128)}


def _windows(op: str) -> Makers:
    if op in ("append_paged", "merge_attention"):
        return {}
    tokens = 1 if op in ("gqa_decode", "gqa_decode_paged") else 50
    lens: dict[str, Any] = {"q_lens": (tokens,), "kv_lens": (50,)}
    windows = ((0, 0), (1, 0), (2, None), (49, -1), (50, 0), (64, 0), (None, 0), (-1, 3), (-1, -1))
    makers = {f"window_{left}_{right}": _case(options={"window": (left, right)}, **lens) for left, right in windows}
    if op.startswith("gqa_prefill"):
        makers["window_64_0_full_200"] = _case(
            options={"window": (64, 0), "is_causal": False}, q_lens=(200,), kv_lens=(0 if op == "gqa_prefill_paged" else 200,)
        )
    else:
        makers["window_128_of_400"] = _case(options={"window": (127, 0)}, q_lens=(1,), kv_lens=(400,))
    return makers


def _paging(op: str) -> Makers:
    if op not in ("gqa_decode_paged", "gqa_prefill_paged", "append_paged"):
        return {}
    features = {"gqa_decode_paged": ("append", "tokens"), "append_paged": ("packed",), "gqa_prefill_paged": ()}[op]
    appends = [(n, new, page) for n, new, page in APPENDS if op != "gqa_decode_paged" or 1 <= new <= 16]
    makers = {
        f"{n}_plus_{new}_page_{page}": _case(features, q_lens=(new,), kv_lens=(n,), page_size=page) for n, new, page in appends
    }
    new = 3 if op == "gqa_decode_paged" else 20
    for rotary_dim in (32, 64, 96, 128):
        for style in ("half", "interleaved"):
            options = {"rope": Rope(rotary_dim=rotary_dim, max_position=64, style=style)}
            makers[f"rotary_{rotary_dim}_of_128_{style}"] = _case(
                features, options, q_lens=(new,), kv_lens=(37,), head_dim=128, page_size=16
            )
    makers["inactive_slots"] = lambda op, small: _inactive(
        random_case(op, 0, features, **small, q_lens=(1,) * 8, kv_lens=(9, 0, 0, 40, 0, 0, 0, 16), page_size=16)
    )
    if op == "gqa_decode_paged":
        makers |= {f"page_{p}": _case(q_lens=(1, 1), kv_lens=(130, 7), page_size=p) for p in (1, 3, 19, 48, 64, 256)}
        makers["inactive_slots_without_append"] = lambda op, small: _inactive(
            random_case(op, 0, (), **small, q_lens=(1,) * 8, kv_lens=(9, 0, 0, 40, 0, 0, 0, 16), page_size=16)
        )
    return makers


def _inactive(case: Case) -> Case:
    """Slots of length 0 get a page-table row of -1."""
    lengths = next(case.arrays[name] for name in ("kv_lengths", "cache_lengths", "lengths") if name in case.arrays)
    table = np.where((lengths == 0)[:, None], -1, case.arrays["page_table"]).astype(np.int32)
    return replace(case, arrays=case.arrays | {"page_table": table})


def _values(op: str) -> Makers:
    if op in ("append_paged", "merge_attention"):
        return {}
    tokens = 1 if op in ("gqa_decode", "gqa_decode_paged") else 20
    lens: dict[str, Any] = {"q_lens": (tokens,) * 3, "kv_lens": (20,) * 3}
    with_empty: dict[str, Any] = lens | {"kv_lens": (0, 3, 20)}
    makers = {
        "softcap_of_large_scores": _case(options={"softcap": 30.0, "scale": 4.0}, **lens, dtype="bfloat16", amplitude=3.0),
        "large_float16": _case(**lens, head_dim=128, amplitude=100.0),
        "large_bfloat16": _case(**lens, dtype="bfloat16", amplitude=133120.0),
        "sink_against_equal_scores": lambda op, small: _equal_scores(_case(**lens)(op, small)),
        "huge_sink": lambda op, small: _with_sinks(_case(**lens)(op, small), 1e30),
        "sink_of_empty_rows": lambda op, small: _with_sinks(_case(**with_empty)(op, small), 0.5),
        "sink_of_minus_infinity": lambda op, small: _with_sinks(_case(**lens)(op, small), -np.inf),
    }
    if op in ("gqa_prefill", "gqa_prefill_packed", "gqa_decode"):
        makers["not_finite_in_valid_keys"] = lambda op, small: _contaminated(_case(**lens)(op, small))
    if op in ("gqa_prefill", "gqa_prefill_packed"):
        makers["scales_half_three_eighth"] = lambda op, small: _scaled(_case(("fp8",), **lens)(op, small), "q_scale")
    else:
        makers["scales_half_three_eighth"] = lambda op, small: _scaled(_case(("fp8_cache",), **lens)(op, small))
    return makers


def _with_sinks(case: Case, value: float) -> Case:
    sinks = np.full(case.arrays["q"].shape[-2], value, np.float32)
    return replace(case, arrays=case.arrays | {"sinks": sinks})


def _equal_scores(case: Case) -> Case:
    """Every score 0 and every value 1: the output is the weight that the sink leaves to the keys."""
    ones = {name: np.ones_like(case.arrays[name]) for name in ("v", "v_pages") if name in case.arrays}
    case = _with_sinks(case, 1.5)
    return replace(case, arrays=case.arrays | ones | {"q": np.zeros_like(case.arrays["q"])})


def _contaminated(case: Case) -> Case:
    """NaN in a valid key of the first of three requests and -inf in one of the last: the second must not notice."""
    k = case.arrays["k"].copy()
    first, last = (k[0], k[2]) if k.ndim == 4 else (k[:20], k[40:])
    first[4, 0, 1], last[7, 1, 2] = np.nan, -np.inf
    return replace(case, arrays=case.arrays | {"k": k})


def _scaled(case: Case, *also: str) -> Case:
    values = {"k_scale": 3.0, "v_scale": 0.125} | dict.fromkeys(also, 0.5)
    return replace(case, arrays=case.arrays | {name: np.asarray(x, np.float32) for name, x in values.items()})


_MAKERS = (_lengths, _shapes, _windows, _paging, _values)
