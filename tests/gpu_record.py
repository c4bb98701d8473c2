"""The record of the last passing run of the GPU tests, and the digest that ties it to the kernel sources.

`pytest -m gpu` writes tests/gpu_validation.json when everything it selected has passed. The digest covers the syntax trees
of the kernels without their docstrings, so that words can be mended without a GPU and code cannot.
"""

from __future__ import annotations

import ast
import datetime
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RECORD = Path(__file__).parent / "gpu_validation.json"
KERNEL_FOLDERS = ("common", "sm80", "sm90")


def kernel_sources() -> list[Path]:
    """Every module that a GPU executes."""
    return sorted(p for folder in KERNEL_FOLDERS for p in (ROOT / "pallas_kernels" / folder).rglob("*.py"))


def kernels_digest(sources: Iterable[Path] | None = None) -> str:
    """SHA-256 over the names and syntax trees of the kernel modules."""
    digest = hashlib.sha256()
    for path in kernel_sources() if sources is None else sources:
        digest.update(f"{path.parent.name}/{path.name}\n{_tree(path.read_text())}\n".encode())
    return digest.hexdigest()


def _tree(source: str) -> str:
    tree = ast.parse(source)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    return ast.dump(tree)


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
        "kernels": kernels_digest(),
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
