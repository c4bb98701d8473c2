"""The commands: explain, bench, tune, doctor. What they print, what they refuse, and the list of workloads they share."""

import argparse
import json
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dispatch_core import DEVICES, TileConfig
from jax_ops import __main__ as commands
from jax_ops.tools import bench, doctor, rivals, timing, tune
from jax_ops.tools.step import Step
from jax_ops.tools.workloads import OPS, WORKLOADS, Workload

TINY = ["--op", "prefill", "--q-len", "32", "--kv-len", "32", "--q-heads", "4", "--kv-heads", "2", "--head-dim", "16"]
SMALL = Workload("small", "prefill", 1, 32, 32, 4, 2, 16)


@pytest.fixture(autouse=True)
def _short_measurements(monkeypatch):
    monkeypatch.setattr(timing, "WARM_SECONDS", {"compute": 0.001, "memory": 0.001})
    monkeypatch.setattr(timing, "MIN_RUNS", 2)


def run(*argv: str) -> int:
    return commands.main(list(argv))


# ---- workloads


def test_rows_have_distinct_names_and_cover_the_record():
    assert len({w.name for w in WORKLOADS}) == len(WORKLOADS) == 35
    assert {w.op for w in WORKLOADS} == set(OPS)


@pytest.mark.parametrize("work", WORKLOADS, ids=lambda w: w.name)
def test_a_rows_operations_and_bytes_are_those_of_its_pairs_and_keys(work):
    if work.lengths or work.window or not work.is_causal:
        pairs = None
    elif work.q_len == work.kv_len:
        pairs = work.batch * work.kv_len * (work.kv_len + 1) // 2
    else:
        pairs = work.batch * sum(work.kv_len - i for i in range(work.q_len))
    if pairs:
        assert work.flops == 4 * work.head_dim * work.q_heads * pairs
    element = jnp.dtype(work.kv_dtype or work.dtype).itemsize
    assert work.kv_bytes == 2 * sum(work.kv_lengths) * work.kv_heads * work.head_dim * element
    assert work.roofline_seconds(DEVICES["H200"]) > 0


@pytest.mark.parametrize("op", OPS)
def test_inputs_are_what_the_op_takes_and_pages_are_used_once(op):
    work = replace(SMALL, op=op, batch=2, q_len=8, lengths=(32, 17) if op != "prefill" else ())
    work = replace(work, page_size=8 if "paged" in op else 0, q_len=1 if "decode" in op else 8)
    if op == "decode":
        work = replace(work, lengths=())
    sets = work.input_sets()
    assert len(sets) == (16 if work.is_decode else 1)
    assert work.call(sets[0]).shape[-2:] == (4, 16)
    if "page_table" in sets[0]:
        used = sets[0]["page_table"][sets[0]["page_table"] >= 0]
        assert sorted(used.tolist()) == list(range(4 + 3))
    assert float(jnp.std(sets[0]["q"].astype(jnp.float32))) > 0.8


# ---- explain


def test_explain_prints_a_table_or_json(capsys):
    assert run("explain", "prefill", "--device", "A100-80", "--kv-len", "512") == 0
    assert "gqa_prefill_fwd_kernel" in capsys.readouterr().out
    assert run("explain", "decode_paged", "--batch", "4", "--lse", "--softcap", "30", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["key"] == "gqa_decode_paged_kernel"


def test_explain_says_why_nothing_serves_and_what_contradicts(capsys):
    assert run("explain", "prefill", "--device", "V100") == 1
    assert 'serves a CUDA device only when named: build="xla"' in capsys.readouterr().out
    assert run("explain", "prefill", "--q-heads", "6", "--kv-heads", "4") == 2
    assert "explain: " in (said := capsys.readouterr().err) and "6" in said
    assert run("explain", "prefill", "--device", "H2000") == 2
    assert "H2000" in capsys.readouterr().err


# ---- bench


def test_bench_lists_its_rows(capsys):
    assert run("bench", "--list", "--rows", "causal 4x") == 0
    assert capsys.readouterr().out.splitlines() == ["causal 4x512", "causal 4x2048"]


@pytest.mark.parametrize(
    "argv, message",
    [
        (("--rows", "nothing of the kind"), "bench: --rows 'nothing of the kind' matches no row; --list prints them."),
        (("--rivals", "flash", *TINY), "bench: --rivals 'flash' is not here; need some of jax xla."),
    ],
)
def test_bench_refuses(argv, message, capsys):
    assert run("bench", *argv) == 2
    assert message in capsys.readouterr().err


def test_bench_times_a_workload_beside_jax(capsys):
    assert run("bench", "--json", *TINY) == 0
    out, err = capsys.readouterr()
    row = json.loads(out)
    assert row["kernel"] == "gqa_prefill_fwd_kernel" and row["build"] == "xla"
    assert row["seconds"] > 0 and row["rivals"]["jax xla"]["seconds"] > 0
    assert row["tflops"] == pytest.approx(4 * 16 * 4 * (32 * 33 // 2) / row["seconds"] / 1e12)
    assert "[1/1] your workload" in err and "not measured: tokamax needs a GPU" in err


def test_bench_prints_a_line_with_the_ratio(capsys):
    assert run("bench", *TINY) == 0
    assert "TFLOP/s" in (line := capsys.readouterr().out) and "x jax xla (" in line


def test_bench_says_what_a_rival_refuses_or_how_it_fails(capsys):
    assert run("bench", "--op", "decode_paged", "--kv-len", "64", "--q-heads", "4", "--kv-heads", "2", "--head-dim", "16") == 0
    assert "jax xla: jax.nn has neither packed sequences nor pages" in capsys.readouterr().out

    def broken(work: Workload) -> Any:
        raise OSError("no library\nmore")

    row = bench.measure(SMALL, DEVICES["CPU"], {"broken": broken})
    assert row["rivals"]["broken"] == {"failed": "OSError: no library"}


@pytest.mark.parametrize(
    "work, why",
    [
        (replace(SMALL, op="prefill_packed"), "jax.nn has neither packed sequences nor pages"),
        (replace(SMALL, dtype="float8_e4m3fn"), "jax.nn takes no FP8"),
        (replace(SMALL, q_len=16), "its causal mask is top-left"),
        (replace(SMALL, q_len=2**17, kv_len=2**17), "its score matrix passes 8 GB"),
    ],
)
def test_what_jax_nn_is_not_asked(work, why):
    with pytest.raises(rivals.Refused, match=why):
        rivals.rivals()["jax xla"](work)


@pytest.mark.parametrize(
    "work",
    [
        replace(SMALL, q_len=128, kv_len=128, head_dim=64),
        replace(SMALL, op="decode", q_len=1, kv_len=4096, head_dim=64),
        replace(SMALL, op="decode_paged", q_len=1, batch=2, lengths=(512, 300), kv_len=512, page_size=16, head_dim=64),
    ],
    ids=lambda work: work.op,
)
def test_jax_pallas_samples_trace_on_a_workloads_arrays(work):
    arrays = jax.eval_shape(lambda: work.arrays(0))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        run = rivals._jax_pallas(work)
        o = jax.eval_shape(run.call, jax.eval_shape(run.layout, arrays))
    assert o.shape == jax.eval_shape(work.call, arrays).shape


@pytest.mark.parametrize(
    "work, why",
    [
        (replace(SMALL, kv_dtype="float8_e4m3fn"), "its samples take no FP8"),
        (replace(SMALL, q_len=16), "its prefill sample is square or full, without a window, packs or pages"),
        (replace(SMALL, op="prefill_packed"), "its prefill sample is square or full"),
    ],
)
def test_what_jax_pallas_is_not_asked(work, why):
    with pytest.raises(rivals.Refused, match=why):
        rivals._jax_pallas(work)


def test_uneven_chunks_append_to_what_is_cached():
    work = replace(SMALL, op="prefill_paged", batch=2, chunks=(8, 3), lengths=(32, 17), page_size=8)
    arrays = work.arrays(0)
    assert arrays["cu_seqlens_q"].tolist() == [0, 8, 11] and arrays["cache_lengths"].tolist() == [24, 14]
    assert work.call(arrays).shape == (11, 4, 16)


def test_bench_skips_what_would_take_minutes_without_a_gpu(capsys):
    assert run("bench", "--rows", "causal 1x16384") == 0
    assert "skipped: 2199 GFLOP on a CPU; --all runs it" in capsys.readouterr().err


# ---- step

TINY_STEP = Step(layers=3, batch=2, kv_len=24, q_heads=4, kv_heads=2, head_dim=16, page_size=8, dtype="float32")


def test_step_times_a_chain_for_each_size_of_the_pool(capsys):
    flags = "--layers 2 --batch 2 --kv-len 32 --q-heads 4 --kv-heads 2 --head-dim 16 --page-size 8 --steps 2 --runs 2"
    assert run("step", "--json", "--pools", "1", "3", *flags.split()) == 0
    one, three = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert one["pool_bytes"] == 2 * 2 * 2 * 32 * 2 * 16 * 2 and three["pool_bytes"] == 3 * one["pool_bytes"]
    assert all(row[name] > 0 for row in (one, three) for name in ("chained_seconds", "kernel_seconds"))
    assert run("step", "--pools", "1", *flags.split()) == 0
    assert "2 layers, pool of 0 MiB: " in (line := capsys.readouterr().out) and "us in its kernels (" in line


def test_step_refuses_a_chain_past_its_keys(capsys):
    assert run("step", "--steps", "8", "--kv-len", "8") == 2
    assert "step: --steps 8 with --kv-len 8; need more keys than steps." in capsys.readouterr().err


def test_a_chain_appends_each_layers_token_to_its_own_pages():
    pools, rest = TINY_STEP.arrays()
    after, q = jax.jit(TINY_STEP.chain(4))(pools, rest)
    assert jnp.isfinite(q).all() and float(jnp.std(q)) > 0.1
    for name in pools:
        changed = np.asarray((after[name] != pools[name]).any(axis=(2, 3)))
        expected = np.zeros_like(changed)
        for layer in range(TINY_STEP.layers):
            for row in np.asarray(rest["page_table"]) + layer * TINY_STEP.pages_per_layer:
                expected[row[2], 4:8] = True  # tokens 20 to 23
        assert (changed == expected).all(), name


# ---- timing


def test_a_measurement_runs_at_least_as_often_as_asked():
    runs = []
    seconds = timing.device_seconds(lambda: runs.append(1) or jnp.zeros(()), warm_seconds=0.0, min_runs=7, seconds=0.0)
    assert seconds > 0
    assert len(runs) >= 7


@dataclass
class Event:
    start_ns: float
    duration_ns: float


def trace_of(streams: dict[str, list[Event]]):
    """A trace as the profiler reads it back, its GPU's plane with these lines."""
    lines = [SimpleNamespace(name=name, events=events) for name, events in streams.items()]
    host = SimpleNamespace(name="/host:CPU", lines=[SimpleNamespace(name="Stream of the host", events=[Event(0, 9e9)])])
    return SimpleNamespace(planes=[host, SimpleNamespace(name="/device:GPU:0", lines=lines)])


def test_the_kernels_of_a_trace_are_what_the_gpus_streams_ran(monkeypatch):
    streams = {
        "Stream #14(Compute)": [Event(4000, 1000), Event(1000, 2000)],
        "Stream #15": [Event(2000, 500)],
        "XLA Ops": [Event(0, 9000)],
    }
    monkeypatch.setattr(jax.profiler.ProfileData, "from_file", lambda path: trace_of(streams))
    runs = []
    kernels = timing.kernels(lambda: runs.append(1) or jnp.zeros(()), 3)
    assert len(runs) == 3
    np.testing.assert_allclose(kernels, [(1e-6, 3e-6), (2e-6, 2.5e-6), (4e-6, 5e-6)])


def test_a_span_goes_from_the_first_start_to_the_last_end():
    overlapped, apart = [(0.0, 5.0), (1.0, 4.0)], [(10.0, 11.0), (13.0, 14.0)]
    assert timing.spans(overlapped + apart, 2) == [5.0, 4.0]
    assert timing.busy(overlapped + apart) == 7.0
    assert timing.busy([(0.0, 2.0), (1.0, 4.0), (3.0, 3.5)]) == 4.0


@pytest.mark.parametrize("seen", [0, 3])
def test_a_trace_that_does_not_divide_into_calls_is_an_error(seen):
    message = rf"timing: the profiler saw {seen} kernels in 2 calls; need the same number, one or more, in each"
    with pytest.raises(RuntimeError, match=message):
        timing.spans([(float(n), n + 1.0) for n in range(seen)], 2)


# ---- tune


def test_tune_times_the_tiles_given_best_first(capsys):
    assert run("tune", "--json", "--tiles", "512x1024", "16x16", *TINY) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["tile"] for row in rows} == {"512x1024x4wx1gx1s", "16x16x4wx1gx1s"}
    assert [row["is_chosen"] for row in rows].count(True) == 1
    assert [row["seconds"] for row in rows] == sorted(row["seconds"] for row in rows)


def test_tune_prints_the_policys_tile_and_lists_rows(capsys):
    assert run("tune", *TINY) == 0
    assert "<- policy" in capsys.readouterr().out
    assert run("tune", "--list", "--rows", "chunk 2x") == 0
    assert capsys.readouterr().out == "chunk 2x512 of 4096\n"


@pytest.mark.parametrize(
    "argv, message",
    [
        (("--tiles", "128"), "tune: --tiles '128' is no tile; need query rows x keys, as 128x64 or 128x64x4wx2gx2s."),
        (("--rows", "none such"), "tune: --rows 'none such' matches no row; --list prints them."),
        ((*TINY, "--build", "sm90"), "tune: no implementation serves this call"),
    ],
)
def test_tune_refuses(argv, message, capsys):
    assert run("tune", *argv) == 2
    assert message in capsys.readouterr().err


def test_a_tile_that_fails_is_a_row_of_its_own(monkeypatch, capsys):
    def failing(*args: Any) -> float:
        raise MemoryError("too large\nmore")

    monkeypatch.setattr(bench, "timed", failing)
    assert run("tune", *TINY) == 0
    assert "MemoryError: too large" in capsys.readouterr().out


def test_candidates_fit_the_device_and_carry_their_splits():
    work = replace(SMALL, op="decode", q_len=1, kv_len=8192, head_dim=128)
    told = bench.explain_workload(work, jax.eval_shape(lambda: work.arrays(0)), None)
    call = replace(told.call, device=DEVICES["L4"])
    shipped = next(b for b in tune.CATALOGUE[told.key].builds if b.name == "sm80")
    tiles = tune.candidates(call, shipped)
    assert tiles and all(tile.num_splits > 1 for tile in tiles)
    assert tune.candidates(call, shipped, [TileConfig(128, 1024, num_stages=4)]) == []
    assert tune.text_of(tune.parsed("128x64x8wx2gx3s")) == "128x64x8wx2gx3s"


# ---- doctor


def test_doctor_prints_a_block_and_every_op_agrees(capsys):
    assert run("doctor") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == lines[-1] == "```"
    ran = [line for line in lines if line.endswith("runs and agrees with xla")]
    assert [line.split(":")[0] for line in ran] == [f"gqa_{op}" for op in doctor.SMALL]
    assert any(line.startswith("  sm80  no: ") for line in lines)


def test_doctor_reports_what_is_broken(monkeypatch, capsys):
    def broken(self: Workload, arrays: Any, **options: Any) -> Any:
        raise RuntimeError("libdevice not found\nmore")

    monkeypatch.setattr(Workload, "call", broken)
    assert doctor.run(argparse.Namespace(json=True)) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ops"]["decode"]["error"] == "RuntimeError: libdevice not found"
    assert "FAILS: RuntimeError: libdevice not found" in "\n".join(doctor._lines(report))
