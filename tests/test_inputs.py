"""What inputs.py and edge_cases.py promise of their cases, seen through the oracle."""

import numpy as np
import pytest

from tests import inputs, oracle, tolerance
from tests.edge_cases import edge_cases


@pytest.mark.parametrize("op", inputs.OPS)
def test_twins_have_the_result_of_their_case(op):
    def run(case):
        return getattr(oracle, op)(**case.arrays, **case.options)

    for seed in range(25):
        case = inputs.random_case(op, seed)
        results = run(case)
        assert not any(np.isnan(x.astype(np.float32)).any() for x in results)
        for x, y in zip(results, run(inputs.unclamped(case)), strict=True):
            tolerance.assert_same_bits(x, y)
        if op != "append_paged":
            for x, y in zip(results[:2], run(inputs.poisoned(case))[:2], strict=True):
                tolerance.assert_same_bits(x, y)


@pytest.mark.parametrize("op", inputs.OPS)
def test_cases_are_reproducible(op):
    a, b = (inputs.poisoned(inputs.random_case(op, 7)) for _ in range(2))
    assert str(a) == str(b)
    for name in a.arrays:
        tolerance.assert_same_bits(a.arrays[name], b.arrays[name])


@pytest.mark.parametrize("op", inputs.OPS)
def test_every_feature_is_drawn_and_every_edge_case_can_be_made(op):
    drawn = set().union(*(inputs.random_case(op, seed).features for seed in range(40)))
    assert drawn == set(inputs.FEATURES[op])
    assert all(case.op == op for case in edge_cases(op).values())


def test_unknown_feature_is_refused():
    with pytest.raises(ValueError, match=r"merge_attention has no feature \['rope'\]; need some of"):
        inputs.random_case("merge_attention", 0, ("rope",))


def test_poison_is_everywhere_it_may_be():
    case = inputs.poisoned(
        inputs.random_case("gqa_prefill_packed", 0, ("tail",), q_lens=(3, 4), kv_lens=(5, 6), dtype="float16")
    )
    assert not np.isfinite(case.arrays["q"][7:]).any()
    assert not np.isfinite(case.arrays["k"][11:]).any()
    assert np.isfinite(case.arrays["k"][:11]).all()
    case = inputs.poisoned(inputs.random_case("gqa_decode_paged", 0, (), kv_lens=(20, 1), page_size=16, dtype="bfloat16"))
    live = np.isfinite(case.arrays["v_pages"].astype(np.float32)).all((2, 3))
    assert live.sum() == 21
    assert not (np.unique(case.arrays["page_table"][1, 1:]) == 0).any()
