"""Which kernel a call gets, who decides it, what it is given, and what deciding costs."""

from __future__ import annotations

import logging
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ops
from dispatch_core import (
    ANYTHING,
    CATALOGUE,
    DEVICES,
    AmbiguousDispatchError,
    Build,
    Condition,
    Device,
    Kernel,
    NoImplementationError,
    Region,
    ReplacementRefusedError,
    TileConfig,
    select_tile_config,
)
from jax_ops import Rope, devices, dispatch, explain
from jax_ops.request import facts
from jax_ops.signature import SIGNATURES
from tests.calling import call, quick_compilation
from tests.inputs import random_case
from tests.tolerance import assert_same_bits, check_case

S = jax.ShapeDtypeStruct
NEVER = Region("never", (Condition("a call that never comes", lambda call: False, lambda call: "this one"),))


@pytest.fixture(scope="module", autouse=True)
def _quickly_compiled():
    with quick_compilation():
        yield


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32), dtype)


def qkv(batch=2, q_len=4, kv_len=5, heads=(6, 3), dim=8):
    return (
        normal(0, batch, q_len, heads[0], dim),
        normal(1, batch, kv_len, heads[1], dim),
        normal(2, batch, kv_len, heads[1], dim),
    )


def structs(batch=2, q_len=4, kv_len=5, heads=(6, 3), dim=8, dtype=jnp.float32):
    kv = S((batch, kv_len, heads[1], dim), dtype)
    return S((batch, q_len, heads[0], dim), dtype), kv, kv


class Recorder:
    """A launch function that keeps what it was given and returns ones."""

    def __init__(self):
        self.calls = []

    def __call__(self, call, tile, **arrays):
        self.calls.append((call, tile, arrays))
        q = arrays["q"]
        lse = jnp.zeros(q.shape[:-1], jnp.float32) if call.return_lse else None
        pools = (arrays["k_pages"], arrays["v_pages"]) if arrays.get("k_new") is not None or "cache_lengths" in arrays else ()
        return (jnp.ones((*q.shape[:-1], call.v_dim), call.o_dtype), lse, *pools)

    def kernel(self, key, region=ANYTHING, **build):
        return {key: Kernel(key, region, (Build("mine", launch=self, **build),))}


# ---- a caller's kernel


def test_a_replacement_is_launched_with_the_call_the_tile_and_every_array_of_the_slot():
    record = Recorder()
    q, k, v = qkv()
    replacement = record.kernel("gqa_prefill_varlen_fwd_kernel", tiles="xla_prefill")
    o = jax_ops.gqa_prefill(q, k, v, kv_lengths=jnp.asarray([9, -1]), softcap=5.0, kernel_map=replacement)
    assert o.shape == q.shape and bool((o == 1).all())
    ((facts, tile, arrays),) = record.calls
    assert list(arrays) == list(SIGNATURES["prefill"].inputs)
    assert {name for name, a in arrays.items() if a is None} == {"q_lengths", "q_scale", "k_scale", "v_scale", "sinks"}
    assert arrays["kv_lengths"].dtype == jnp.int32 and isinstance(tile, TileConfig)
    assert (facts.batch, facts.q_heads, facts.kv_heads, facts.softcap, facts.is_causal, facts.is_uniform) == (
        2,
        6,
        3,
        5.0,
        True,
        False,
    )


def test_a_replacement_of_decode_is_given_lengths_within_the_capacity():
    def launch(call, tile, *, q, kv_lengths, **arrays):
        return jnp.broadcast_to(kv_lengths[:, None, None, None], q.shape).astype(q.dtype), None

    kernel = {"gqa_decode_kernel": Kernel("gqa_decode_kernel", ANYTHING, (Build("mine", launch=launch),))}
    q, k, v = qkv()
    lengths = jnp.asarray([k.shape[1] + 3, -1], jnp.int32)
    o = jax_ops.gqa_decode(q[:, 0], k, v, lengths, kernel_map=kernel)
    assert o[:, 0, 0].tolist() == [k.shape[1], 0]


def test_a_replacement_without_a_tile_policy_gets_no_tile():
    record = Recorder()
    jax_ops.gqa_decode(*(x[:, 0] if i == 0 else x for i, x in enumerate(qkv())), kernel_map=record.kernel("gqa_decode_kernel"))
    ((_, tile, arrays),) = record.calls
    assert tile is None and arrays["q"].shape == (2, 1, 6, 8) and arrays["kv_lengths"].shape == (2,)


def test_a_paged_replacement_returns_its_pools():
    record = Recorder()
    pool = normal(3, 7, 4, 3, 8)
    new = normal(4, 2, 3, 8)
    returned = jax_ops.gqa_decode_paged(
        normal(0, 2, 6, 8), pool, pool, jnp.zeros((2, 3), jnp.int32), jnp.asarray([5, 3]), k_new=new, v_new=new,
        return_lse=True, rope=Rope(max_position=12), kernel_map=record.kernel("gqa_decode_paged_kernel"),
    )  # fmt: skip
    ((facts, _, arrays),) = record.calls
    assert [x.shape for x in returned] == [(2, 6, 8), (2, 6), pool.shape, pool.shape]
    assert arrays["inv_freq"].shape == (4,) and arrays["k_new"].shape == (2, 1, 3, 8)
    assert (facts.rope.rotary_dim, facts.rope.max_position, facts.rope.style) == (8, 12, "half")


def test_scales_reach_a_kernel_as_one_float32_per_sequence_and_head():
    record = Recorder()
    fp8 = [x.astype(jnp.float8_e4m3fn) for x in qkv()]
    key = "gqa_prefill_fp8_fwd_kernel"
    jax_ops.gqa_prefill(*fp8, q_scale=2.0, k_scale=jnp.ones(3), v_scale=jnp.ones((2, 3)), kernel_map=record.kernel(key))
    arrays = record.calls[0][2]
    assert all(arrays[name].shape == (2, 3) and arrays[name].dtype == jnp.float32 for name in ("q_scale", "k_scale", "v_scale"))


def test_a_replacement_that_refuses_is_not_stood_in_for():
    replacement = Recorder().kernel("gqa_prefill_fwd_kernel", NEVER)
    with pytest.raises(ReplacementRefusedError, match="the kernel supplied for gqa_prefill_fwd_kernel refuses this call"):
        jax_ops.gqa_prefill(*qkv(), kernel_map=replacement)


def test_a_refusing_replacement_yields_to_another_replacement():
    record = Recorder()
    maps = Recorder().kernel("gqa_prefill_causal_fwd_kernel", NEVER) | record.kernel("gqa_prefill_fwd_kernel")
    jax_ops.gqa_prefill(*qkv(), kernel_map=maps)
    assert len(record.calls) == 1


def test_two_replacements_that_claim_a_call_are_ambiguous():
    maps = Recorder().kernel("gqa_prefill_causal_fwd_kernel") | Recorder().kernel("gqa_prefill_square_fwd_kernel")
    with pytest.raises(AmbiguousDispatchError, match="gqa_prefill_square_fwd_kernel, gqa_prefill_causal_fwd_kernel all serve"):
        jax_ops.gqa_prefill(*qkv(), kernel_map=maps)


def test_a_replacement_has_the_derivative_of_the_op():
    record = Recorder()
    q, k, v = qkv()
    grad = jax.grad(lambda q: jax_ops.gqa_prefill(q, k, v, kernel_map=record.kernel("gqa_prefill_fwd_kernel")).sum())(q)
    assert grad.shape == q.shape and record.calls[-1][0].return_lse


def test_a_kernel_map_in_another_order_is_the_same_program():
    record = Recorder()
    maps = record.kernel("gqa_prefill_fwd_kernel") | Recorder().kernel("gqa_sliding_window_varlen_fwd_kernel", NEVER)
    for items in (list(maps.items()), list(reversed(maps.items()))):
        jax_ops.gqa_prefill(*qkv(q_len=3), kernel_map=dict(items))
    assert len(record.calls) == 1


# ---- named builds and devices


def test_a_named_build_serves_or_is_an_error():
    q, k, v = qkv()
    assert_same_bits(jax_ops.gqa_prefill(q, k, v, build="xla"), jax_ops.gqa_prefill(q, k, v))
    with pytest.raises(NoImplementationError, match="sm90 build needs platform cuda, CPU has cpu"):
        jax_ops.gqa_prefill(q, k, v, build="sm90")


@pytest.mark.parametrize(
    ("device", "build", "expected"),
    [
        ("H200", None, ("gqa_prefill_square_fwd_kernel", "sm90")),
        ("A100-80", None, ("gqa_prefill_fwd_kernel", "sm80")),
        ("CPU", None, ("gqa_prefill_fwd_kernel", "xla")),
        ("H200", "xla", ("gqa_prefill_fwd_kernel", "xla")),
        ("V100", "xla", ("gqa_prefill_fwd_kernel", "xla")),
        ("V100", None, (None, None)),
    ],
)
def test_a_device_by_name_or_record_decides(device, build, expected):
    call = structs(batch=4, q_len=512, kv_len=512, heads=(32, 8), dim=128, dtype=jnp.float16)
    by_name = explain(jax_ops.gqa_prefill, *call, device=device, build=build)
    assert (by_name.key, by_name.build) == expected
    assert by_name == explain(jax_ops.gqa_prefill, *call, device=DEVICES[device], build=build)


def test_a_device_nobody_knows_is_judged_by_what_it_reports():
    part = Device("next year's", "cuda", 90, 400, 32, 1024, 99 * 1024, 2**26, 9e12, (("float16", 1e15),))
    call = structs(batch=4, q_len=512, kv_len=512, heads=(32, 8), dim=128, dtype=jnp.float16)
    assert explain(jax_ops.gqa_prefill, *call, device=part).key == "gqa_prefill_causal_fwd_kernel"  # 256 tile pairs for 400 SMs


def test_an_xla_build_named_for_a_gpu_lowers_there():
    q, k, v = structs()
    step = jax.jit(lambda q, k, v: jax_ops.gqa_prefill(q, k, v, device="V100", build="xla"))
    assert jax.export.export(step, platforms=["cuda"])(q, k, v).platforms == ("cuda",)


class FakeGPU:
    """What the runtime reports of a GPU."""

    platform, device_kind, compute_capability = "gpu", "NVIDIA H200", "9.0"
    core_count, shared_memory_per_block_optin = 132, 227 * 1024


def test_inside_a_trace_the_default_gpu_is_the_target_and_eager_arrays_are_their_own(monkeypatch):
    monkeypatch.setattr(devices, "_first_gpu", FakeGPU)
    q, k, v = structs()
    assert explain(jax_ops.gqa_prefill, q, k, v).build == "sm80"
    assert explain(jax_ops.gqa_prefill, *qkv()).build == "xla"
    assert jax.jit(lambda *a: a[0] if explain(jax_ops.gqa_prefill, *a).build == "sm80" else None)(*qkv()) is not None


def test_a_traced_call_lowers_for_the_platform_it_lands_on(monkeypatch):
    """The default GPU's build for CUDA, the xla build for the CPU, from one trace; a named build is the GPU's affair."""
    q, k, v = qkv(q_len=7)
    want = jax_ops.gqa_prefill(q, k, v)
    monkeypatch.setattr(devices, "_first_gpu", FakeGPU)
    record = Recorder()
    replacement = record.kernel("gqa_prefill_fwd_kernel")
    got = jax.jit(lambda *a: jax_ops.gqa_prefill(*a, kernel_map=replacement))(q, k, v)
    assert_same_bits(got, want)
    assert record.calls[0][0].device.platform == "cuda"


# ---- explain and the log


EXPLAINED = {
    "prefill": (jax_ops.gqa_prefill, structs(q_len=11), {"window": (2, None), "is_causal": False}),
    "prefill_packed": (
        jax_ops.gqa_prefill_packed,
        (*(S((12, h, 8), jnp.float32) for h in (6, 3, 3)), *[S((4,), jnp.int32)] * 2),
        {"softcap": 2.0},
    ),
    "decode": (jax_ops.gqa_decode, (S((3, 6, 8), jnp.float32), *structs(batch=3, kv_len=9)[1:]), {}),
    "decode_paged": (
        jax_ops.gqa_decode_paged,
        (S((2, 2, 6, 8), jnp.float32), *[S((7, 4, 3, 8), jnp.float32)] * 2, S((2, 3), jnp.int32), S((2,), jnp.int32)),
        {"rope": Rope(max_position=16)},
    ),
    "prefill_paged": (
        jax_ops.gqa_prefill_paged,
        (
            *(S((9, h, 8), jnp.float32) for h in (6, 3, 3)),
            *[S((7, 4, 3, 8), jnp.float8_e4m3fn)] * 2,
            S((2, 3), jnp.int32),
            S((3,), jnp.int32),
            S((2,), jnp.int32),
        ),
        {"k_scale": S((3,), jnp.float32)},
    ),
    "append_paged": (
        jax_ops.append_paged,
        (*[S((2, 3, 8), jnp.float32)] * 2, *[S((7, 4, 3, 8), jnp.float32)] * 2, S((2, 3), jnp.int32), S((2,), jnp.int32)),
        {},
    ),
}


def filled(struct):
    return jnp.zeros(struct.shape, struct.dtype) if isinstance(struct, S) else struct


@pytest.mark.parametrize("name", EXPLAINED)
def test_explain_says_of_shapes_what_the_op_logs_of_arrays(name, caplog):
    op, args, options = EXPLAINED[name]
    dispatch._decide_once.cache_clear()
    told = explain(op, *args, **options)
    with caplog.at_level(logging.INFO, logger="jax_ops"):
        arrays, values = [filled(a) for a in args], {k: filled(v) for k, v in options.items()}
        assert explain(op, *arrays, **values) == told
        assert caplog.messages == []
        jax.eval_shape(lambda *a: op(*a, **values), *arrays)
    assert caplog.messages == [f"{name}: {told.key} ({told.build} build) serves {told.call}"]


def test_explain_runs_nothing():
    def launch(*args, **kwargs):
        raise AssertionError("launched")

    key = "gqa_prefill_fwd_kernel"
    told = explain(jax_ops.gqa_prefill, *qkv(), kernel_map={key: Kernel(key, ANYTHING, (Build("mine", launch=launch),))})
    assert (told.key, told.build, told.reason[:24]) == (key, "mine", "supplied by the caller; ")


def test_a_refused_call_is_explained_in_the_words_of_the_error():
    args = structs(heads=(6, 3))
    told = explain(jax_ops.gqa_prefill, *args, device="V100")
    assert told.key is None
    with pytest.raises(NoImplementationError) as caught:
        jax.eval_shape(lambda *a: jax_ops.gqa_prefill(*a, device="V100"), *args)
    assert told.reason == str(caught.value)
    for key, reasons in told.others:
        assert all(reason in str(caught.value) for reason in reasons) and key in str(caught.value)


def test_each_distinct_decision_is_logged_once(caplog):
    dispatch._decide_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="jax_ops"):
        for q_len in (13, 13, 14):
            for scale in (None, None, 8**-0.5):  # the default said aloud is the same call
                jax.eval_shape(lambda *a, scale=scale: jax_ops.gqa_prefill(*a, scale=scale), *structs(q_len=q_len))
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO"]
    assert all(
        message.startswith("prefill: gqa_prefill_fwd_kernel (xla build) serves AttentionCall(CPU")
        for message in caplog.messages
    )


def test_an_xla_build_on_a_gpu_is_told_in_one_line(caplog):
    dispatch._decide_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="jax_ops"):
        jax.eval_shape(lambda *a: jax_ops.gqa_prefill(*a, device="V100", build="xla"), *structs(q_len=15))
    (message,) = caplog.messages
    assert "(xla build) serves AttentionCall(V100" in message


# ---- what deciding costs


@pytest.mark.parametrize("device", ["CPU", "A100-80", "H200"])
def test_selection_and_planning_take_less_than_200_microseconds(device):
    """The median over fresh calls, in time of this thread; the best of five rounds, since the machine is shared."""
    op: Any = jax_ops.gqa_prefill
    medians = []
    for first in (100, 200, 300, 400, 500):
        times = []
        for length in range(first, first + 40):
            args = structs(q_len=length, kv_len=length + 3, heads=(8, 2), dim=128, dtype=jnp.float16)
            invocation = op.prepare(*args, device=device)
            start = time.thread_time()
            call = facts(invocation.request, invocation.arrays)
            choice = dispatch._decide(invocation.request, call)
            select_tile_config(call, choice.build)
            times.append(time.thread_time() - start)
        medians.append(np.median(times))
    assert min(medians) < 200e-6


def test_forty_equal_layers_trace_in_a_millisecond_each():
    q, k, v = qkv(q_len=16, kv_len=16)

    def model(q):
        for _ in range(40):
            q = q + jax_ops.gqa_prefill(q, k, v)
        return q

    jax.jit(lambda q: q + jax_ops.gqa_prefill(q, k, v)).trace(q)
    times = []
    for _ in range(3):
        jax.jit(lambda q: model(q)).trace(q)
        start = time.thread_time()
        jax.jit(lambda q: model(q)).trace(q)
        times.append(time.thread_time() - start)
    assert min(times) < 40e-3


LENGTHS = {
    "gqa_prefill": ("q_lengths", "kv_lengths"),
    "gqa_prefill_packed": ("tail",),
    "gqa_decode_paged": ("append", "inactive"),
    "gqa_prefill_paged": ("tail",),
    "append_paged": ("packed", "tail"),
}


@pytest.mark.parametrize("op", LENGTHS)
def test_fifty_length_vectors_trace_once(op):
    case = random_case(op, 3, LENGTHS[op], batch=3, kv_heads=1, group=2, head_dim=8, dtype="float32")
    arrays = {name: jnp.asarray(a) for name, a in case.arrays.items()}
    varied = [n for n in arrays if "lengths" in n or "seqlens" in n or n == "page_table"]
    traces = []

    @jax.jit
    def step(a):
        traces.append(1)
        return getattr(jax_ops, op)(**a)

    rng = np.random.default_rng(0)
    for _ in range(50):
        step({n: jnp.asarray(rng.integers(-1, 60, a.shape), jnp.int32) if n in varied else a for n, a in arrays.items()})
    assert len(traces) == 1


# ---- hints and uniform packs


@pytest.mark.parametrize("window", [None, (3, None), (None, 2), (3, 2)])
@pytest.mark.parametrize("op", ["gqa_prefill_packed", "gqa_prefill_paged"])
def test_lengths_beyond_the_hints_stay_correct(op, window):
    case = random_case(
        op, 1, ("full",), q_lens=(19, 3), kv_lens=(23, 40), kv_heads=1, group=2, head_dim=8, page_size=16, dtype="float32"
    )
    case.options["window"] = window
    hints = {"max_seqlen_q": 1} | ({"max_seqlen_kv": 2} if op == "gqa_prefill_packed" else {})
    check_case(case, *call(case, **hints))


def packed_structs():
    return tuple(S((12, heads, 8), jnp.float32) for heads in (6, 3, 3))


def test_numpy_bounds_of_one_length_land_on_the_dense_key():
    bounds = np.asarray([0, 4, 8, 12], np.int32)
    told = explain(jax_ops.gqa_prefill_packed, *packed_structs(), bounds, bounds)
    assert (told.key, told.call.is_uniform, told.call.max_seqlen_q) == ("gqa_prefill_fwd_kernel", True, 4)


@pytest.mark.parametrize(
    "bounds", [np.asarray([0, 4, 9, 12], np.int32), np.asarray([0, 4, 8, 11], np.int32), jnp.asarray([0, 4, 8, 12], jnp.int32)]
)
def test_ragged_or_device_bounds_land_on_the_varlen_key(bounds):
    with jax.transfer_guard("disallow"):
        told = explain(jax_ops.gqa_prefill_packed, *packed_structs(), bounds, bounds)
    assert (told.key, told.call.is_uniform) == ("gqa_prefill_varlen_fwd_kernel", False)


def test_a_promise_of_uniform_sequences_is_taken_and_a_false_one_is_harmless():
    q, k, v = normal(0, 12, 6, 8), normal(1, 12, 3, 8), normal(2, 12, 3, 8)
    even, ragged = jnp.asarray([0, 4, 8, 12], jnp.int32), jnp.asarray([0, 1, 8, 12], jnp.int32)
    promised = jax_ops.gqa_prefill_packed(q, k, v, even, even, is_uniform=True)
    np.testing.assert_allclose(promised, jax_ops.gqa_prefill_packed(q, k, v, even, even), rtol=2e-6, atol=2e-6)
    assert bool(jnp.isfinite(jax_ops.gqa_prefill_packed(q, k, v, ragged, ragged, is_uniform=True)).all())


def test_uniform_sequences_are_dense_to_the_bit():
    q, k, v = normal(0, 12, 6, 8), normal(1, 12, 3, 8), normal(2, 12, 3, 8)
    bounds = np.asarray([0, 4, 8, 12], np.int32)
    dense = jax_ops.gqa_prefill(*(x.reshape(3, 4, -1, 8) for x in (q, k, v)))
    assert_same_bits(jax_ops.gqa_prefill_packed(q, k, v, bounds, bounds), np.asarray(dense).reshape(12, 6, 8))


# ---- the window backend


def test_the_window_backend_takes_a_window_that_hides_nothing():
    q, k, v = qkv()
    told = explain(jax_ops.gqa_prefill, q, k, v, window=(100, 0), backend="sliding_window")
    assert told.key == "gqa_prefill_fwd_kernel" and told.call.window is None
    assert_same_bits(jax_ops.gqa_prefill(q, k, v, window=(100, 0), backend="sliding_window"), jax_ops.gqa_prefill(q, k, v))


def test_the_window_backend_takes_a_window_that_hides_something():
    told = explain(jax_ops.gqa_prefill, *qkv(), window=(1, 0), backend="sliding_window")
    assert told.key == "gqa_sliding_window_varlen_fwd_kernel"


# ---- the shapes a device really gets


def test_a_mapped_call_is_dispatched_for_the_folded_batch():
    record = Recorder()
    q, k, v = (jnp.stack([x] * 5) for x in qkv(kv_len=6))
    maps = record.kernel("gqa_prefill_fwd_kernel")
    o = jax.vmap(lambda *a: jax_ops.gqa_prefill(*a, kernel_map=maps))(q, k, v)
    assert o.shape == q.shape
    assert record.calls[-1][0].batch == 10 and record.calls[-1][2]["q"].shape == (10, 4, 6, 8)


def test_a_sharded_call_is_dispatched_for_its_local_batch_and_heads():
    record = Recorder()
    mesh = jax.make_mesh((2, 3), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    placed = [jax.device_put(x, NamedSharding(mesh, P("data", None, "model"))) for x in qkv(kv_len=7)]
    maps = record.kernel("gqa_prefill_fwd_kernel")
    jax.jit(lambda *a: jax_ops.gqa_prefill(*a, kernel_map=maps))(*placed)
    local = record.calls[-1][0]
    assert (local.batch, local.q_heads, local.kv_heads) == (1, 2, 1)


def test_every_slot_asks_keys_of_the_catalogue():
    assert {key for keys in dispatch.SLOTS.values() for key in keys} == set(CATALOGUE)
