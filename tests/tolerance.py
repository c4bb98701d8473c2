"""How close a result must come to the oracle: the one statement of every numerical tolerance of the tests.

A result may have at most twice the error of the *plain computation* (operands and P in the inputs' element type, float32
sums; `oracle.plain`), by two measures: the largest absolute error and the relative Frobenius error. Where the plain
computation happens to be (nearly) exact, the error that its roundings may have at worst is allowed instead:

- largest error of o: max|v| times u = (eps(inputs) + eps(output)) / 2 + 16 eps(float32). Each weight P is off by half an eps
  of its type at most, and the weights sum to 1; the output is rounded once more; the rest is float32 arithmetic, whose
  scores, a few times 1 in size, are rounded at each of product, scale, base-2 exponent and sum.
- relative Frobenius error of o: the same with (eps(inputs) + eps(output)) / 4: roundings of many elements do not all go
  to their worst.
- lse: 16 eps(float32) of max(1, max|lse|): float32 scores as large as the lse, rounded by the same few steps (products of
  16-bit inputs are exact in float32). FP8 matrix units keep about 14 bits while they sum, so eps is 2^-13 there.

What is no number is compared exactly: NaN and infinities lie where the truth has them (an lse that the truth has as NaN
may be +inf: that is its limit), and a row whose true output is all zeros (one that sees no key) is all zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from tests import oracle
from tests.inputs import Case

Array = np.ndarray
TIMES_PLAIN = 2.0
EPS32 = float(np.finfo(np.float32).eps)
FLOAT8_SUM_EPS = 2.0**-13
SUM_STEPS = 16


def eps(dtype: Any) -> float:
    """Distance from 1 to the next number of an element type."""
    return float(ml_dtypes.finfo(dtype).eps)


def check_output(o: Any, truth: Array, plain: Array, *, dtype: Any, v_max: float, name: str = "o") -> None:
    """Hold an output to the tolerance.

    Args:
      o: the result; its element type is the output's.
      truth: the oracle's, float64.
      plain: the plain computation's, before it is rounded to the output's type.
      dtype: element type of the inputs, and of P.
      v_max: largest |v| that counts, FP8 scale included.
      name: what to call it in the message.
    """
    o = np.asarray(o)
    roundings, sums = (eps(dtype) + eps(o.dtype)) / 2, SUM_STEPS * EPS32
    plain = plain.astype(o.dtype)
    finite = _check_not_numbers(name, o, truth)
    empty = (truth == 0).all(-1)
    if (o[empty] != 0).any():
        raise AssertionError(f"{name}: {int((o[empty] != 0).any(-1).sum())} rows that see no key are not 0.")
    got, want, low = (np.where(finite & np.isfinite(plain), x.astype(np.float64), 0) for x in (o, truth, plain))
    _check_largest(name, got, want, low, (roundings + sums) * v_max)
    error, norm = np.linalg.norm(got - want), np.linalg.norm(want)
    allowed = max(TIMES_PLAIN * np.linalg.norm(low - want), (roundings / 2 + sums) * norm)
    if error > allowed:
        raise AssertionError(f"{name}: relative Frobenius error {error / norm:.3e}, allowed {allowed / norm:.3e}.")


def check_lse(lse: Any, truth: Array, plain: Array, *, dtype: Any) -> None:
    """Hold a float32 log-sum-exp to the tolerance; arguments as in check_output."""
    lse = np.asarray(lse)
    if lse.dtype != np.float32:
        raise AssertionError(f"lse: element type {lse.dtype}; need float32.")
    finite = _check_not_numbers("lse", np.where(np.isnan(truth) & (lse == np.inf), np.nan, lse), truth)
    got, want, low = (np.where(finite & np.isfinite(plain), x.astype(np.float64), 0) for x in (lse, truth, plain))
    unit = FLOAT8_SUM_EPS if np.dtype(dtype) == oracle.FLOAT8 else EPS32
    _check_largest("lse", got, want, low, SUM_STEPS * unit * max(1.0, float(np.abs(want).max(initial=0))))


def check_pages(pages: Any, truth: Array, *, rotated: bool = False, k_max: float = 0.0, name: str = "pages") -> None:
    """Hold pages to the oracle's: the same bits, unless the keys were rotated before they were stored.

    Rotated keys may differ by one step of their element type, and by a float32 rounding of the larger of the rotated
    pair where the two terms cancel; `k_max` is the largest |key| that was stored, over its FP8 scale.
    """
    pages = np.asarray(pages)
    if not rotated:
        assert_same_bits(pages, truth, name)
        return
    if pages.dtype != truth.dtype or pages.shape != truth.shape:
        raise AssertionError(f"{name}: {pages.dtype}{list(pages.shape)}; need {truth.dtype}{list(truth.shape)}.")
    finite = _check_not_numbers(name, pages, truth)
    got, want = (np.where(finite, x.astype(np.float64), 0) for x in (pages, truth))
    step = np.maximum(eps(truth.dtype) * np.abs(want), float(ml_dtypes.finfo(truth.dtype).smallest_subnormal))
    excess = np.abs(got - want) - step - 4 * EPS32 * k_max
    if (excess > 0).any():
        at = _worst(excess)
        raise AssertionError(f"{name}: {got[at]!r} at {at}, need {want[at]!r} to one step; {int((excess > 0).sum())} such.")


def assert_same_bits(a: Any, b: Any, name: str = "result") -> None:
    """Two arrays of one type and shape hold the same bits, except that any NaN equals any NaN and 0 equals -0."""
    a, b = np.asarray(a), np.asarray(b)
    if a.dtype != b.dtype or a.shape != b.shape:
        raise AssertionError(f"{name}: {a.dtype}{list(a.shape)}; need {b.dtype}{list(b.shape)}.")
    differ = (a != b) & ~(np.isnan(a) & np.isnan(b)) if np.dtype(a.dtype).kind not in "iub" else a != b
    if differ.any():
        at = tuple(int(i) for i in np.argwhere(differ)[0])
        raise AssertionError(f"{name}: {int(differ.sum())} of {a.size} elements differ, first at {at}: {a[at]!r}, {b[at]!r}.")


def _worst(excess: Array) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(np.argmax(excess), excess.shape))


def _check_not_numbers(name: str, got: Array, want: Array) -> Array:
    """The shapes, and what is NaN or infinite, agree; returns where the truth is finite."""
    if got.shape != want.shape:
        raise AssertionError(f"{name}: shape {got.shape}; need {want.shape}.")
    got, want = got.astype(np.float64), want.astype(np.float64)
    finite = np.isfinite(want)
    wrong = np.where(finite, ~np.isfinite(got), (got != want) & ~(np.isnan(got) & np.isnan(want)))
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise AssertionError(f"{name}: {got[at]} at {at}, need {want[at]}; {int(wrong.sum())} such elements.")
    return finite


def _check_largest(name: str, got: Array, want: Array, plain: Array, floor: float) -> None:
    if not want.size:
        return
    error = np.abs(got - want)
    allowed = max(TIMES_PLAIN * float(np.abs(plain - want).max()), floor)
    if error.max() > allowed:
        at = _worst(error)
        raise AssertionError(f"{name}: error {error[at]:.3e} at {at}, {got[at]} for {want[at]}; allowed {allowed:.3e}.")


@dataclass(frozen=True)
class Expected:
    """What a case must give: the oracle's results, and the plain computation's."""

    truth: tuple[Array, ...]
    plain: tuple[Array, ...]


def expected(case: Case, p_dtype: Any = None) -> Expected:
    """The oracle's and the plain computation's results of a case; `p_dtype` asks for a finer P than the inputs' type."""
    op = getattr(oracle, case.op)
    if case.op == "append_paged":
        truth = op(**case.arrays, **case.options)
        return Expected(truth, truth)
    if case.op == "merge_attention":
        truth = op(**case.arrays)
        return Expected(truth, op(**case.arrays, arithmetic=oracle.plain(case.dtype)))
    return Expected(
        op(**case.arrays, **case.options),
        op(**case.arrays, **case.options, arithmetic=oracle.plain(case.dtype if p_dtype is None else p_dtype)),
    )


def _largest(*arrays: Array) -> float:
    return max((float(np.abs(x.astype(np.float64)[np.isfinite(x)]).max(initial=0)) for x in arrays), default=0.0)


def _largest_value(case: Case) -> float:
    """Largest |v|, scale included."""
    arrays = case.arrays
    if case.op == "merge_attention":
        return _largest(arrays["o_a"], arrays["o_b"])
    values = [arrays[name] for name in ("v", "v_new", "v_pages") if name in arrays]
    quantised = [v for v in values if v.dtype == oracle.FLOAT8]
    scale = _largest(arrays["v_scale"]) if "v_scale" in arrays else 1.0
    return max(_largest(*(v for v in values if v.dtype != oracle.FLOAT8)), scale * _largest(*quantised))


def check_case(case: Case, *results: Any, p_dtype: Any = None) -> None:
    """Hold all results of a case, in the order the op returns them with `return_lse=True`, to the oracle."""
    want = expected(case, p_dtype)
    if len(results) != len(want.truth):
        raise AssertionError(f"{case}: {len(results)} results; need {len(want.truth)}.")
    try:
        if case.op != "append_paged":
            dtype = case.dtype if p_dtype is None else p_dtype
            if np.asarray(results[0]).dtype != case.out_dtype:
                raise AssertionError(f"o: element type {np.asarray(results[0]).dtype}; need {case.out_dtype}.")
            check_output(results[0], want.truth[0], want.plain[0], dtype=dtype, v_max=_largest_value(case))
            check_lse(results[1], want.truth[1], want.plain[1], dtype=dtype)
        if case.op != "merge_attention" and len(results) in (2, 4) and "k_pages" in case.arrays:
            _check_case_pages(case, results[-2:], want.truth[-2:])
    except AssertionError as error:
        raise AssertionError(f"{error}\n  {case}") from None


def _check_case_pages(case: Case, pages: tuple[Any, ...], truth: tuple[Array, ...]) -> None:
    if case.op == "gqa_decode_paged" and "k_new" not in case.arrays:
        return
    new = case.arrays["k_new" if "k_new" in case.arrays else "k"]
    smallest = float(np.min(case.arrays["k_scale"])) if "k_scale" in case.arrays else 1.0
    check_pages(pages[0], truth[0], rotated="rope" in case.options, k_max=_largest(new) / smallest, name="k_pages")
    check_pages(pages[1], truth[1], name="v_pages")
