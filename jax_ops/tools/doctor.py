"""python -m jax_ops doctor: versions, devices, and which builds run here; a block to paste into a bug report."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
import numpy as np

from dispatch_core import CATALOGUE, SLOTS, Explanation
from jax_ops.devices import device_from_jax
from jax_ops.tools.workloads import Workload

PACKAGES = (
    "pallas-gqa",
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "jax-cuda13-pjrt",
    "numpy",
    "flax",
    "tokamax",
    "flash-attn3-jax",
)
SMALL = {
    "prefill": Workload("prefill", "prefill", 1, 128, 128, 8, 2, 64),
    "prefill_packed": Workload("prefill_packed", "prefill_packed", 2, 128, 128, 8, 2, 64, lengths=(128, 37)),
    "decode": Workload("decode", "decode", 2, 1, 256, 8, 2, 64),
    "decode_paged": Workload("decode_paged", "decode_paged", 2, 1, 256, 8, 2, 64, lengths=(256, 100), page_size=16),
    "prefill_paged": Workload("prefill_paged", "prefill_paged", 2, 64, 256, 8, 2, 64, lengths=(256, 100), page_size=16),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("--json", action="store_true")


def run(args: argparse.Namespace) -> int:
    """Prints the report; 0 when every op ran and agreed with the xla build."""
    report = diagnose()
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        print("\n".join(_lines(report)))
    return 0 if all(op["agrees"] for op in report["ops"].values()) else 1


def diagnose() -> dict[str, Any]:
    """Versions, devices, and for every op what each build says, what is chosen, and whether it runs and agrees with XLA."""
    devices = [device_from_jax(d) for d in jax.devices()]
    return {
        "python": sys.version.split()[0],
        "system": f"{platform.system()} {platform.machine()}",
        "packages": {name: _version(name) for name in PACKAGES},
        "backend": jax.default_backend(),
        "devices": [f"{d.name} ({d.platform}, arch {d.arch}, {d.sm_count} SMs)" for d in dict.fromkeys(devices)],
        "ops": {slot: _try(slot, work) for slot, work in SMALL.items()},
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _try(slot: str, work: Workload) -> dict[str, Any]:
    from jax_ops.tools.bench import explain_workload

    arrays = work.arrays(0)
    names = sorted({b.name for key in SLOTS[slot] for b in CATALOGUE[key].builds})
    builds = {name: _said(explain_workload(work, arrays, name), name) for name in names}
    chosen = explain_workload(work, arrays)
    result: dict[str, Any] = {"kernel": chosen.key, "build": chosen.build, "builds": builds, "agrees": False, "error": None}
    try:
        got = np.asarray(work.call(arrays), np.float32)
        want = np.asarray(work.call(arrays, build="xla"), np.float32)
        result["agrees"] = bool(np.abs(got - want).max() < 0.05)
    except Exception as error:  # a report must come out whatever is broken
        result["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"
    return result


def _said(explanation: Explanation, build: str) -> str:
    """The key a build serves, or its first reason for serving none."""
    if explanation.key:
        return explanation.key
    reasons = (why for _, refusals in explanation.others for why in refusals if why.startswith(f"{build} build"))
    return f"no: {next(reasons, 'serves none of the keys')}"


def _lines(report: dict[str, Any]) -> list[str]:
    packages = ", ".join(f"{name} {v}" for name, v in report["packages"].items() if v)
    lines = ["```", f"python {report['python']} on {report['system']}; {packages}", f"backend {report['backend']}:"]
    lines += [f"  {device}" for device in report["devices"]]
    for slot, op in report["ops"].items():
        state = "runs and agrees with xla" if op["agrees"] else f"FAILS: {op['error'] or 'differs from the xla build'}"
        lines.append(f"gqa_{slot}: {op['kernel']} ({op['build']} build) {state}")
        lines += [f"  {name:5} {said}" for name, said in op["builds"].items()]
    return [*lines, "```"]
