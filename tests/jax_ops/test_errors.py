"""Every message about a wrong call, provoked: the op, the argument, what came, what is accepted, and the remedy."""

from __future__ import annotations

import ast
import inspect
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ops
from dispatch_core import NoImplementationError
from jax_ops import Rope, checks, decode, devices, dispatch, options, paged, prefill, rope
from tests.calling import quick_compilation
from tests.wrong_calls import CASES, QKV8, TRACED, VALID, ints, zeros


@pytest.fixture(scope="module", autouse=True)
def _quickly_compiled():
    with quick_compilation():
        yield


def call(op, changes):
    return getattr(jax_ops, op)(**{**VALID[op], **changes})


def provoke_tracers():
    """Every static option, traced: (op, option, the error)."""
    for op, traced in TRACED.items():
        for option, value in traced:
            with pytest.raises(TypeError) as caught:
                jax.eval_shape(lambda x, op=op, option=option: call(op, {option: x}), value)
            yield op, option, str(caught.value)
    for field in ("theta", "max_position", "rotary_dim", "style"):
        append = lambda x, field=field: call("append_paged", {"rope": Rope(**{"max_position": 8, field: x})})  # noqa: E731
        with pytest.raises(TypeError) as caught:
            jax.eval_shape(append, 4)
        yield "append_paged", f"rope.{field}", str(caught.value)
    with pytest.raises(TypeError) as caught:
        jax.eval_shape(lambda x: call("gqa_prefill", {"window": (x, 0)}), 1)
    yield "gqa_prefill", "window", str(caught.value)


@pytest.mark.parametrize("op", VALID)
def test_the_calls_that_the_cases_change_are_valid(op):
    assert jax.eval_shape(lambda: call(op, {})) is not None


@pytest.mark.parametrize(("op", "changes", "error", "message"), CASES, ids=[f"{c[0]}: {c[3][:60]}" for c in CASES])
def test_message(op, changes, error, message):
    with pytest.raises(error) as caught:
        call(op, changes)
    assert str(caught.value) == f"{op}: {message}"
    assert type(caught.value) is error


def test_a_tracer_in_a_static_place_is_refused_by_name():
    for op, option, message in provoke_tracers():
        assert message.startswith(f"{op}: {option} ") and "tracer" in message and "static" in message and "lose over" in message


def test_every_message_is_provoked(monkeypatch):
    """Each place in these modules that makes an error is reached by one of the cases above."""
    reached = set()
    for name in ("fail", "wrong_type"):
        make = getattr(checks, name)

        def recording(*args, make=make):
            frame = sys._getframe(1)
            reached.add((frame.f_globals["__name__"], frame.f_lineno))
            return make(*args)

        monkeypatch.setattr(checks, name, recording)
    for op, changes, error, _ in CASES:
        with pytest.raises(error):
            call(op, changes)
    list(provoke_tracers())
    made = set()
    for module in (checks, options, rope, dispatch, devices, prefill, decode, paged):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "fail",
                "wrong_type",
                "checks.fail",
                "checks.wrong_type",
            ):
                made.add((module.__name__, node.lineno))
    assert made - reached == set()


def test_more_query_tokens_than_decode_serves():
    with pytest.raises(NoImplementationError, match="needs 2 to 16 query tokens a sequence, the call has 17"):
        call("gqa_decode", {"q": zeros(2, 17, 6, 8)})


@pytest.mark.parametrize(
    ("build", "reason"),
    [("sm99", "gqa_prefill_fwd_kernel .* has no sm99 build"), ("sm80", "sm80 build needs platform cuda, CPU has cpu")],
)
def test_a_named_build_that_cannot_serve_is_refused_with_its_reasons(build, reason):
    with pytest.raises(NoImplementationError, match=reason) as caught:
        call("gqa_prefill", {"build": build})
    assert f"build: {build}" in str(caught.value)


def test_explain_takes_public_ops_only():
    with pytest.raises(TypeError, match=r"explain: op is <built-in function len>; need a public op of jax_ops, such as"):
        jax_ops.explain(len, 1)


def test_fp8_inputs_have_no_derivative():
    loss = lambda s: call("gqa_prefill", QKV8 | {"q_scale": s}).astype(jnp.float32).sum()  # noqa: E731
    with pytest.raises(
        TypeError, match="gqa_prefill: q has element type float8_e4m3fn, which has no derivative; need 16-bit or float32"
    ):
        jax.grad(loss)(1.0)


@pytest.mark.parametrize("op", ["gqa_decode", "gqa_decode_paged", "gqa_prefill_paged", "append_paged"])
def test_an_op_without_derivative_names_the_one_that_has(op):
    name = "k" if op == "append_paged" else "q"
    loss = lambda x: jax.tree.leaves(call(op, {name: x}))[0].sum()  # noqa: E731
    with pytest.raises(
        TypeError, match=rf"{op}: has no derivative, and one was asked for; need an op that has \(gqa_prefill, "
    ):
        jax.grad(loss)(jnp.asarray(VALID[op][name]))


@pytest.mark.parametrize("lengths", [ints(2**40, -(2**40), dtype=np.int64), ints(5, 0)])
def test_wide_host_integers_are_clamped_and_do_not_wrap(lengths):
    np.testing.assert_array_equal(
        call("gqa_decode", {"kv_lengths": lengths, "v": np.ones((2, 5, 3, 8), np.float32)}),
        call("gqa_decode", {"kv_lengths": ints(5, 0), "v": np.ones((2, 5, 3, 8), np.float32)}),
    )


def test_scales_may_be_python_numbers():
    want = call("gqa_prefill", QKV8 | {"v_scale": np.float32(2)})
    np.testing.assert_array_equal(call("gqa_prefill", QKV8 | {"v_scale": 2}), want)


@pytest.mark.parametrize("dtype", [np.float16, jnp.float16, "float16", np.dtype(np.float16)])
def test_an_output_type_may_be_said_in_any_of_numpys_ways(dtype):
    assert jax.eval_shape(lambda: call("gqa_prefill", {"out_dtype": dtype})).dtype == np.float16
