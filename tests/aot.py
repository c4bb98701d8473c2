"""Compiles kernels for NVIDIA GPUs on a machine without one, and reports what came out.

A test module lists its cases and asks for reports; both sides name the list, because a function cannot be sent to the
process that compiles it:

    def cases(target: aot.Target) -> dict[str, aot.Case]:          # or a plain dict, where the target does not matter
        q = jax.ShapeDtypeStruct((1, 128, 4, 64), jnp.bfloat16)
        return {"causal": aot.Case(functools.partial(launch, ...), (q, q, q))}

    def test_causal_does_not_spill():
        report = aot.compile_cases("h200", "tests.pallas_kernels.sm90.test_prefill:cases")["causal"].ok()
        assert report.kernel.spill_bytes == 0
        assert report.kernel.count("wgmma.mma_async") > 0

The cases of a list compile one after the other in one process that imports jax once; an instruction that the target lacks
aborts that process, so the case at fault is reported and a new process goes on with the next one. Reports are kept for the
life of the test run. `python -m tests.aot h200 module:cases [case ...]` prints a table.
"""

import dataclasses
import functools
import importlib
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dispatch_core.hardware import DEVICES, Device

ROOT = Path(__file__).parents[1]
SECONDS_PER_LIST = 900


@dataclass(frozen=True)
class Target:
    """What to compile for: the facts of a device, the name jax knows a part of its capability by, and how many of them."""

    device: Device
    part: str
    gpus: int = 1


TARGETS: dict[str, Target] = {
    "a100": Target(DEVICES["A100-80"], "NVIDIA A100-SXM4-80GB"),
    "a10": Target(DEVICES["A10"], "NVIDIA A10"),
    "l4": Target(DEVICES["L4"], "NVIDIA L4"),
    "h200": Target(DEVICES["H200"], "NVIDIA H200"),
    "h200x2": Target(DEVICES["H200"], "NVIDIA H200", gpus=2),
    "b200": Target(DEVICES["B200"], "NVIDIA B200"),
    "sm120": Target(
        dataclasses.replace(DEVICES["RTX4090"], name="RTX PRO 6000", arch=120, sm_count=188), "NVIDIA RTX PRO 6000 Blackwell"
    ),
}


def on(target: str, *rest: Any, is_on_both: bool = True) -> Any:
    """Parameters of a test that compiles for a target: on both ends of the jax range for the H200 and if said so."""
    marks = [] if target.startswith("h200") and is_on_both else pytest.mark.oldest_jax
    return pytest.param(target, *rest, marks=marks)


@dataclass(frozen=True)
class Case:
    """One thing to compile.

    Attributes:
      fn: a function of `args`.
      args: arrays or ShapeDtypeStructs, or pytrees of them.
      specs: one PartitionSpec per argument over the mesh axis "x" of the target's GPUs; None replicates all of them.
      donate: positions of donated arguments.
      axis_type: how the mesh axis "x" is handled; fn finds the mesh in its context.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    specs: tuple[PartitionSpec, ...] | None = None
    donate: tuple[int, ...] = ()
    axis_type: AxisType = AxisType.Auto


@dataclass(frozen=True)
class Kernel:
    """What the assembler made of one Pallas kernel.

    Attributes:
      name: the entry in the PTX.
      arch: the PTX target, such as "sm_90a".
      ptx: its text.
      registers: per thread.
      spill_bytes: stored plus loaded, per thread.
      stack_bytes: local memory per thread, spills included.
      shared_bytes: dynamic shared memory of a block.
      threads: of a block.
      log: what ptxas -v said.
    """

    name: str
    arch: str
    ptx: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    threads: int
    log: str

    def count(self, instruction: str) -> int:
        """How many instructions of the PTX begin with this text, such as "mma.sync"."""
        return len(re.findall(rf"(?<![\w.]){re.escape(instruction)}", self.ptx))

    @property
    def losses(self) -> list[str]:
        """Where the assembler says that it gave up speed: wgmma serialised, setmaxnreg ignored."""
        return [line for line in self.log.splitlines() if "Potential Performance Loss" in line]


@dataclass(frozen=True)
class Report:
    """What compiling a case gave.

    Attributes:
      name: of the case.
      error: None, or why there is no executable; the rest is empty then.
      hlo: the optimised HLO, its embedded kernel modules left out.
      kernels: the distinct Pallas kernels.
      temp_bytes: XLA's scratch memory.
      alias_bytes: outputs that live in donated inputs.
    """

    name: str
    error: str | None
    hlo: str = ""
    kernels: tuple[Kernel, ...] = ()
    temp_bytes: int = 0
    alias_bytes: int = 0

    def ok(self) -> "Report":
        """Itself, or an AssertionError with the error."""
        assert self.error is None, f"{self.name} does not compile: {self.error}"
        return self

    @property
    def kernel(self) -> Kernel:
        """The only Pallas kernel."""
        self.ok()
        assert len(self.kernels) == 1, f"{self.name} has the kernels {[k.name for k in self.kernels]}, not one"
        return self.kernels[0]


@functools.cache
def compile_cases(target: str, cases: str) -> Mapping[str, Report]:
    """Compiles every case of a list for a target, in processes of its own.

    Args:
      target: a key of TARGETS.
      cases: "module:name" of a mapping from names to cases, or of a function from a Target to one.

    Returns:
      A report for each case, whether it compiled or not.

    Raises:
      RuntimeError: the list could not be read.
    """
    if target not in TARGETS:
        raise ValueError(f"aot: target is {target!r}; need one of {', '.join(TARGETS)}.")
    reports: dict[str, Report] = {}
    with tempfile.TemporaryDirectory() as scratch:
        while True:
            results = Path(scratch, f"results-{len(reports)}.jsonl")
            process = subprocess.run(
                [sys.executable, "-m", "tests.aot", "--worker", target, cases, results, *reports],
                cwd=ROOT,
                env=_worker_environment(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=SECONDS_PER_LIST,
            )
            events = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
            reports |= {name: _report_from_json(report) for name, report in events if report}
            if process.returncode == 0:
                return reports
            unfinished = [name for name, _ in events if name not in reports]
            if not unfinished:
                raise RuntimeError(f"aot: {cases} for {target} gave no cases:\n{process.stderr[-4000:]}")
            reports[unfinished[0]] = Report(
                unfinished[0], f"the compiler ended with status {process.returncode}:\n{process.stderr[-4000:]}"
            )


def _worker_environment() -> dict[str, str]:
    quiet = {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    return {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"} | quiet


def _report_from_json(report: dict[str, Any]) -> Report:
    return Report(**report | {"kernels": tuple(Kernel(**kernel) for kernel in report["kernels"])})


# The compiling process.


def _worker(target: str, cases: str, results: str, *finished: str) -> None:
    """Compiles the cases not yet finished, noting in `results` each one's start and its report."""
    compiler = _Compiler(TARGETS[target])
    with open(results, "w", buffering=1) as out:
        for name, case in _load(cases, TARGETS[target]).items():
            if name in finished:
                continue
            print(json.dumps((name, None)), file=out)
            try:
                report = compiler.compile(name, case)
            except Exception as error:  # the report is where every failure of a case goes
                report = Report(name, "".join(traceback.format_exception(error))[-4000:])
            print(json.dumps((name, dataclasses.asdict(report))), file=out)


def _load(cases: str, target: Target) -> Mapping[str, Case]:
    module, _, attribute = cases.partition(":")
    found = getattr(importlib.import_module(module), attribute)
    return found if isinstance(found, Mapping) else found(target)


class _Compiler:
    def __init__(self, target: Target):
        self.devices = topologies.get_topology_desc(
            platform="cuda",
            topology_name=target.device.name,
            topology=f"1x1x{target.gpus}",
            target_config=_target_config(target),
        ).devices
        self.mosaic_kernels: dict[str, Kernel] = {}

    def compile(self, name: str, case: Case) -> Report:
        mesh = Mesh(np.array(self.devices), ("x",), axis_types=(case.axis_type,))
        specs = case.specs or (PartitionSpec(),) * len(case.args)
        args = [
            jax.tree.map(lambda a, s=spec: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, s)), arg)
            for arg, spec in zip(case.args, specs, strict=True)
        ]
        with tempfile.TemporaryDirectory() as dump:
            os.environ["MOSAIC_GPU_DUMP_TO"] = dump
            jax.clear_caches()  # what was lowered before would not be dumped again
            # Pallas reads the target from the abstract mesh; callbacks of custom_partitioning need it while compiling too.
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                lowered = jax.jit(case.fn, donate_argnums=case.donate).trace(*args).lower(lowering_platforms=("cuda",))
                executable = lowered.compile(compiler_options={"xla_dump_to": dump, "xla_dump_emitter_re": "ptx"})
            hlo = executable.as_text() or ""
            kernels = [*self._mosaic_kernels(Path(dump)), *_triton_kernels(Path(dump), hlo)]
        memory = executable.memory_analysis()
        assert memory is not None
        return Report(
            name=name,
            error=None,
            hlo=re.sub(r'\b(ir|module) = "[^"]*"', r'\1 = "..."', hlo),
            kernels=tuple(kernels),
            temp_bytes=memory.temp_size_in_bytes,
            alias_bytes=memory.alias_size_in_bytes,
        )

    def _mosaic_kernels(self, dump: Path) -> list[Kernel]:
        """Mosaic's own dumps: NAME_N.before_layout_inference.txt always, the PTX only when it was not compiled before."""
        kernels = {}
        for module in sorted(dump.glob("*.before_layout_inference.txt")):
            stem = module.name.split(".")[0]
            text = module.read_text().replace(f'"{stem}"', "")  # the only difference between two dumps of one kernel
            ptx = dump / f"{stem}.ptx"
            if ptx.exists():
                self.mosaic_kernels[text] = _assembled(ptx.read_text(), _mosaic_shared_bytes(text))
            kernel = self.mosaic_kernels[text]
            kernels[kernel.ptx] = kernel
        return list(kernels.values())


def _triton_kernels(dump: Path, hlo: str) -> list[Kernel]:
    """Of the kernels XLA wrote to .ptx files, those that come from Pallas (the others are its own fusions)."""
    names = set(re.findall(r'custom_call_target="__gpu\$xla\.gpu\.triton".*? name = "([^"]+)"', hlo))
    shared = {}
    for sequence in dump.glob("*.thunk_sequence.txt"):
        shared |= dict(re.findall(r"kCustomKernel .*?\] (\S+) grid:.*shared_memory: (\d+) bytes", sequence.read_text()))
    kernels = []
    for path in sorted(dump.glob("module_*.ptx")):
        ptx = path.read_text()
        if ".entry" not in ptx:  # a while loop's module may hold no kernel
            continue
        entry = _entry(ptx)
        if any(re.fullmatch(rf"{re.escape(name)}(__\d+|_\d+)?", entry) for name in names):
            kernels.append(_assembled(ptx, int(shared[entry])))
    return kernels


def _entry(ptx: str) -> str:
    [entry] = re.findall(r"^\.visible \.entry (\S+?)\(", ptx, re.MULTILINE)
    return entry


def _mosaic_shared_bytes(module: str) -> int:
    """The dynamic shared memory of the launch: an SSA name, defined as a constant above it."""
    [name] = re.findall(r"dynamic_shared_memory_size (%\w+)", module)
    [size] = re.findall(rf"{re.escape(name)} = arith\.constant (\d+) : i32", module)
    return int(size)


def _assembled(ptx: str, shared_bytes: int) -> Kernel:
    """Runs ptxas -v over the PTX of one kernel."""
    [arch] = re.findall(r"^\.target (\w+)", ptx, re.MULTILINE)
    [threads] = re.findall(r"^\.(?:reqntid|maxntid) ([\d, ]+)", ptx, re.MULTILINE)
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, "kernel.ptx")
        source.write_text(ptx)
        command = [_ptxas(), "-v", f"--gpu-name={arch}", f"--output-file={scratch}/kernel.cubin", source]
        log = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    [stack, stores, loads] = _numbers(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    [registers] = _numbers(r"Used (\d+) registers", log)
    return Kernel(
        name=_entry(ptx),
        arch=arch,
        ptx=ptx,
        registers=registers,
        spill_bytes=stores + loads,
        stack_bytes=stack,
        shared_bytes=shared_bytes,
        threads=int(np.prod([int(n) for n in threads.split(",")])),
        log=log,
    )


def _numbers(pattern: str, log: str) -> list[int]:
    found = re.search(pattern, log)
    if found is None:
        raise RuntimeError(f"aot: ptxas did not print {pattern!r}:\n{log}")
    return [int(number) for number in found.groups()]


def _ptxas() -> str:
    """The ptxas of the nvidia-cuda-nvcc wheel."""
    found = sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/cu*/bin/ptxas"))
    if not found:
        raise RuntimeError("aot: no ptxas in this environment; need the test extra: pip install -e '.[test]'.")
    return str(found[-1])


def _target_config(target: Target) -> str:
    """A GpuTargetConfigProto as text. What a Device does not tell only steers XLA's cost model, and is the H200's."""
    device = target.device
    # One SM has 1 KiB more shared memory than a block of it may use, on every capability from 8.0 on.
    return f"""
gpu_device_info {{
  threads_per_block_limit: {device.max_threads_per_block}
  threads_per_warp: {device.warp_size}
  shared_memory_per_block: 49152
  shared_memory_per_core: {device.shared_memory_per_block + 1024}
  shared_memory_per_block_optin: {device.shared_memory_per_block}
  threads_per_core_limit: 2048
  core_count: {device.sm_count}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  memory_bandwidth: {device.memory_bandwidth}
  l2_cache_size: {device.l2_bytes}
  clock_rate_ghz: 1.98
  device_memory_size: 151397597184
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  cuda_compute_capability {{
    major: {device.arch // 10}
    minor: {device.arch % 10}
    feature_extension: {"ACCELERATED_FEATURES" if device.arch >= 90 else "NONE"}
  }}
}}
platform_name: "CUDA"
device_description_str: "{target.part}"
"""


def _print_table(target: str, cases: str, *names: str) -> None:
    for report in compile_cases(target, cases).values():
        if names and report.name not in names:
            continue
        print(f"{report.name}: {report.error or 'compiled'}, {report.temp_bytes} temporary bytes")
        for k in report.kernels:
            print(f"  {k.name} {k.arch}: {k.threads} threads, {k.registers} registers, bytes spilled {k.spill_bytes}, ", end="")
            print(f"shared {k.shared_bytes}")
            print("".join(f"    {loss}\n" for loss in k.losses), end="")


if __name__ == "__main__":
    # Cases are made by modules that import tests.aot, so the work is done by that module and not by __main__.
    from tests import aot

    if sys.argv[1] == "--worker":
        aot._worker(*sys.argv[2:])
    else:
        aot._print_table(*sys.argv[1:])
