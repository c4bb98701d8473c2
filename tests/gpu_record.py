"""The record of the last passing run of the GPU tests, and the digests that tie it to the kernel sources.

`pytest -m gpu tests/gpu` writes tests/gpu_validation.json when everything has passed. A digest covers the syntax tree of a
kernel module without its docstrings, so that words can be mended without a GPU. A module whose code changes afterwards has to
be named in the record under "changed_since", with the reason, until a new run takes it off: whoever reads the record sees
what has run on hardware and what has not.
"""

from __future__ import annotations

import ast
import datetime
import hashlib
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RECORD = Path(__file__).parent / "gpu_validation.json"
KERNEL_FOLDERS = ("common", "sm80", "sm90")


def kernel_sources() -> list[Path]:
    """Every module that a GPU executes."""
    return sorted(p for folder in KERNEL_FOLDERS for p in (ROOT / "pallas_kernels" / folder).rglob("*.py"))


def digest(source: str) -> str:
    """SHA-256 of a module's syntax tree without docstrings."""
    tree = ast.parse(source)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


def kernel_digests() -> dict[str, str]:
    """The digest of each kernel module, by its path under pallas_kernels."""
    folder = ROOT / "pallas_kernels"
    return {path.relative_to(folder).as_posix(): digest(path.read_text()) for path in kernel_sources()}


def write_record(counts: dict[str, int]) -> None:
    """Writes the record of a run on the device that is here."""
    import jax

    record: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "passed": counts.get("passed", 0),
        "failed": counts.get("failed", 0) + counts.get("error", 0),
        "skipped": counts.get("skipped", 0),
        "not_run": {},
        "changed_since": {},
        "kernels": kernel_digests(),
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
