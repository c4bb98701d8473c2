"""The record says which kernels at HEAD have passed on hardware, and which have changed since."""

import json
from pathlib import Path

from tests.gpu_record import RECORD, digest, kernel_digests, kernel_sources

RUN = json.loads(RECORD.read_text())


def test_the_recorded_run_passed():
    assert RUN["failed"] == 0
    assert RUN["skipped"] == 0
    assert RUN["passed"] >= 500
    assert RUN["device"].startswith("NVIDIA")


def test_kernels_that_changed_since_are_named_with_a_reason():
    now = kernel_digests()
    changed = {name for name in now if RUN["kernels"].get(name) != now[name]}
    assert changed == set(RUN["changed_since"]), "run `make gpu-test` on a GPU, or name what changed in the record"
    assert all(RUN["changed_since"].values())


def test_a_digest_ignores_words_and_sees_code():
    first = digest('"""A."""\n\n\ndef f(x):\n    """B."""\n    if x:\n        return x + 1\n')
    assert digest('"""C."""\n\n\ndef f(x):  # d\n    """E."""\n    if x:\n        return x + 1\n') == first
    assert digest('"""A."""\n\n\ndef f(x):\n    """B."""\n    if x:\n        return x + 2\n') != first


def test_every_kernel_module_is_covered():
    names = {path.parent.name for path in kernel_sources()}
    assert "sm80" in names
    assert "common" in names


def test_gpu_tests_have_one_room():
    marked = [p for p in RECORD.parent.rglob("test_*.py") if "mark.gpu" in p.read_text() and p != Path(__file__)]
    assert marked
    assert all(p.parent.name == "gpu" for p in marked)
