"""check_*_inputs: right inputs pass, and each wrong value is named with its sequence and the rule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ops import check_decode_inputs, check_packed_inputs, check_paged_inputs
from tests.edge_cases import edge_cases
from tests.inputs import random_case


def _int32(*values):
    return np.asarray(values, np.int32)


def _packed(**change):
    q, kv = np.zeros((12, 4, 8), np.float32), np.zeros((20, 2, 8), np.float32)
    arrays = {"q": q, "k": kv, "v": kv, "cu_seqlens_q": _int32(0, 5, 5, 12), "cu_seqlens_kv": _int32(0, 0, 9, 18)}
    return arrays | change


def _decode(**change):
    cache = np.zeros((3, 16, 2, 8), np.float32)
    return {"q": np.zeros((3, 4, 8), np.float32), "k": cache, "v": cache, "kv_lengths": _int32(16, 0, 3)} | change


def _paged(**change):
    pool = np.zeros((9, 4, 2, 8), np.float32)
    table = _int32([8, 3, -1], [-7, 8, 99], [1, 0, 2])
    arrays = {"q": np.zeros((3, 4, 8), np.float32), "k_pages": pool, "v_pages": pool, "page_table": table}
    return arrays | {"kv_lengths": _int32(5, 0, 12)} | change


def _new(*rows):
    return {name: np.zeros((*rows, 2, 8), np.float32) for name in ("k_new", "v_new")}


@pytest.mark.parametrize("as_array", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_right_inputs_pass(as_array):
    check_packed_inputs(**{name: as_array(x) for name, x in _packed().items()})
    check_decode_inputs(**{name: as_array(x) for name, x in _decode().items()})
    check_decode_inputs(**{name: as_array(x) for name, x in _decode().items() if name != "kv_lengths"})
    check_paged_inputs(**{name: as_array(x) for name, x in _paged().items()})


def test_shapes_stand_for_arrays_whose_values_are_not_read():
    def shaped(arrays, *read):
        return {n: x if n in read else jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in arrays.items()}

    check_packed_inputs(**shaped(_packed(), "cu_seqlens_q", "cu_seqlens_kv"))
    check_decode_inputs(**shaped(_decode(), "kv_lengths"))
    check_paged_inputs(**shaped(_paged(), "page_table", "kv_lengths"))


@pytest.mark.parametrize("op", ["gqa_prefill_packed", "gqa_decode", "gqa_decode_paged", "gqa_prefill_paged", "append_paged"])
def test_what_the_ops_are_tested_with_passes(op):
    """Neither random nor named cases are wrong, but for those whose features say so."""
    wrong = {"holes", "overflow", "inactive"}
    cases = [random_case(op, seed) for seed in range(40)] + list(edge_cases(op).values())
    for case in cases:
        if wrong & case.features:
            continue
        a = dict(case.arrays)
        if op == "gqa_prefill_packed":
            check_packed_inputs(**{n: a[n] for n in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_kv")})
        elif op == "gqa_decode":
            check_decode_inputs(**{n: a[n] for n in ("q", "k", "v", "kv_lengths") if n in a})
        else:
            if np.any(a["page_table"] < 0):
                continue
            new = {"k_new": a.get("k_new", a.get("k")), "v_new": a.get("v_new", a.get("v"))}
            lengths = next(a[n] for n in ("kv_lengths", "cache_lengths", "lengths") if n in a)
            bounds = a.get("cu_seqlens_q", a.get("cu_seqlens"))
            check_paged_inputs(a.get("q"), a["k_pages"], a["v_pages"], a["page_table"], lengths, **new, cu_seqlens_q=bounds)


PACKED_ERRORS = [
    ({"cu_seqlens_q": _int32(1, 5, 5, 12)}, "cu_seqlens_q starts at 1; need 0, where sequence 0 begins"),
    ({"cu_seqlens_kv": _int32(-1, 5, 5, 12)}, "cu_seqlens_kv starts at -1; need 0"),
    ({"cu_seqlens_q": _int32(0, 7, 5, 12)}, "cu_seqlens_q of sequence 1 goes from 7 to 5; need a non-decreasing sequence"),
    ({"cu_seqlens_kv": _int32(0, 7, 9, 21)}, "cu_seqlens_kv of sequence 2 ends at 21; need at most 20, the tokens there are"),
    ({"cu_seqlens_q": _int32(0, 5, 12)}, r"gqa_prefill_packed: cu_seqlens_kv has shape \(4,\), so batch \+ 1 is 4; need 3"),
    ({"is_uniform": True}, "is_uniform is True, and sequence 0 of cu_seqlens_q has 5 tokens; need 12 / 3 in each"),
    (
        {"is_uniform": True, "cu_seqlens_q": _int32(0, 4, 8, 12)},
        "is_uniform is True, and sequence 0 of cu_seqlens_kv has 0 tokens; need 20 / 3 in each. Pass is_uniform=False",
    ),
]


@pytest.mark.parametrize("change, message", PACKED_ERRORS)
def test_wrong_bounds_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        check_packed_inputs(**_packed(**change))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"kv_lengths": _int32(16, -1, 3)}, "check_decode_inputs: kv_lengths of sequence 1 is -1; need 0 to 16, the capacity"),
        ({"kv_lengths": _int32(17, -1, 3)}, "kv_lengths of sequence 0 is 17; need 0 to 16"),
        ({"kv_lengths": np.int64([0, 0, 2**40])}, "kv_lengths of sequence 2 is 1099511627776"),
        ({"kv_lengths": _int32(16, 1)}, r"gqa_decode: kv_lengths has shape \(2,\), so batch is 2; need 3, as in q"),
    ],
)
def test_wrong_lengths_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        check_decode_inputs(**_decode(**change))


def test_new_tokens_need_room_and_pages():
    packed = {"q": np.zeros((4, 4, 8), np.float32), **_new(4)}
    lengths = {"kv_lengths": _int32(5, 0, 10)}
    check_paged_inputs(**_paged(**packed, **lengths, cu_seqlens_q=_int32(0, 3, 3, 4)))
    check_paged_inputs(**_paged(**packed, **lengths, cu_seqlens_q=_int32(0, 2, 2, 4)))
    check_paged_inputs(**_paged(q=None, **_new(4), **lengths, cu_seqlens_q=_int32(0, 3, 3, 4)))
    check_paged_inputs(
        **_paged(q=None, **_new(3), page_table=_int32([0, 1, 2], [3, 4, 5], [6, 7, 8]), kv_lengths=_int32(11, 0, 3))
    )
    check_paged_inputs(
        **_paged(
            q=np.zeros((3, 2, 4, 8), np.float32),
            **_new(3, 2),
            page_table=np.arange(9).reshape(3, 3),
            kv_lengths=_int32(10, 0, 3),
        )
    )


PAGED_ERRORS = [
    ({"kv_lengths": _int32(5, 0, 13)}, "check_paged_inputs: kv_lengths of sequence 2 is 13; need 0 to 12, the capacity"),
    ({"kv_lengths": _int32(5, -2, 12)}, "kv_lengths of sequence 1 is -2; need 0 to 12"),
    ({"kv_lengths": _int32(9, 0, 12)}, "page_table of sequence 0, entry 2, is -1; need 0 to 8, a page"),
    ({"kv_lengths": _int32(5, 1, 12)}, "page_table of sequence 1, entry 0, is -7; need 0 to 8, a page"),
    ({"page_table": _int32([8, 9, -1], [0] * 3, [1, 0, 2])}, "page_table of sequence 0, entry 1, is 9; need 0 to 8, a page"),
    (
        {"page_table": _int32([8, 3, -1], [0] * 3, [1, 3, 2])},
        "page_table of sequence 2, entry 1, is page 3, as of sequence 0, entry 1; need a page of its own",
    ),
    (
        {"page_table": _int32([8, 8, -1], [0] * 3, [1, 3, 2]), "allow_shared": True},
        "page_table of sequence 0, entry 1, is page 8, as of sequence 0, entry 0; need unshared pages",
    ),
    (_new(3), "kv_lengths of sequence 2 is 12, with 1 new tokens; need room in the 12 of the capacity"),
    (
        {**_new(3), "kv_lengths": _int32(8, 0, 3)},
        "page_table of sequence 0, entry 2, is -1; need 0 to 8, a page. It is written by this call",
    ),
    (
        {"q": np.zeros((4, 4, 8), np.float32), **_new(4), "cu_seqlens_q": _int32(0, 5, 4, 4)},
        "cu_seqlens_q of sequence 1 goes from 5 to 4",
    ),
    (
        {"q": np.zeros((4, 4, 8), np.float32), **_new(4), "cu_seqlens_q": _int32(0, 0, 0, 1)},
        "kv_lengths of sequence 2 is 12, with 1 new tokens",
    ),
    ({"k_new": _new(3)["k_new"]}, "v_new is None and the other is given; need both or neither"),
    ({"v_new": _new(3)["v_new"]}, "k_new is None and the other is given; need both or neither"),
    ({"q": None}, "k_new is None; need the new keys, k of append_paged"),
    ({"q": None, **_new(4)}, "k_new has 4 tokens for 3 sequences; need one a sequence, or cu_seqlens_q"),
    (
        {"v_pages": np.zeros((9, 5, 2, 8), np.float32)},
        r"gqa_decode_paged: v_pages has shape \(9, 5, 2, 8\), so page_size is 5; need 4",
    ),
]


@pytest.mark.parametrize("change, message", PAGED_ERRORS)
def test_wrong_tables_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        check_paged_inputs(**_paged(**change))


def test_a_shared_prefix_passes_when_it_is_allowed_and_not_written():
    table = {"page_table": _int32([8, 3, 4], [0] * 3, [8, 7, 2])}
    check_paged_inputs(**_paged(**table, allow_shared=True))
    new = {**_new(3), "kv_lengths": _int32(5, 0, 6), "allow_shared": True}
    check_paged_inputs(**_paged(**table, **new))
    shared_tail = {"page_table": _int32([8, 3, 4], [0] * 3, [8, 3, 2])}
    with pytest.raises(ValueError, match="sequence 2, entry 1, is page 3, as of sequence 0, entry 1"):
        check_paged_inputs(**_paged(**shared_tail, **new))


def test_wrong_types_are_named_as_by_the_op():
    with pytest.raises(TypeError, match="gqa_decode: kv_lengths has element type float32; need an integer type"):
        check_decode_inputs(**_decode(kv_lengths=np.zeros(3, np.float32)))
    with pytest.raises(TypeError, match="gqa_prefill_packed: v has element type float16; need float32, as q has"):
        check_packed_inputs(**_packed(v=np.zeros((20, 2, 8), np.float16)))
    with pytest.raises(TypeError, match="check_packed_inputs: is_uniform is 1; need True or False"):
        check_packed_inputs(**_packed(is_uniform=1))
    with pytest.raises(TypeError, match="check_paged_inputs: allow_shared is None; need True or False"):
        check_paged_inputs(**_paged(allow_shared=None))


@pytest.mark.parametrize(
    "check, arrays, name",
    [
        (check_packed_inputs, _packed(), "cu_seqlens_q"),
        (check_packed_inputs, _packed(), "cu_seqlens_kv"),
        (check_decode_inputs, _decode(), "kv_lengths"),
        (check_paged_inputs, _paged(), "kv_lengths"),
        (check_paged_inputs, _paged(), "page_table"),
        (
            check_paged_inputs,
            _paged(q=np.zeros((4, 4, 8), np.float32), **_new(4), cu_seqlens_q=_int32(0, 3, 3, 4)),
            "cu_seqlens_q",
        ),
    ],
)
def test_a_tracer_is_refused_by_name(check, arrays, name):
    with pytest.raises(
        TypeError, match=f"{check.__name__}: {name} is a tracer of type int32.*need a concrete array.*outside jit"
    ):
        jax.jit(lambda x: check(**(arrays | {name: x})))(arrays[name])
