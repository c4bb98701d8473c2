"""The kernels at HEAD are the ones that last passed on hardware."""

import json
from pathlib import Path

import pytest

from tests.gpu_record import RECORD, kernel_sources, kernels_digest


def test_kernels_at_head_have_passed_on_a_gpu():
    record = json.loads(RECORD.read_text())
    assert record["failed"] == 0 and record["skipped"] == 0 and record["passed"] >= 100
    assert record["kernels"] == kernels_digest(), "a kernel changed since its last GPU run: run `make gpu-test` on a GPU"


@pytest.fixture
def module(tmp_path):
    def write(text):
        path = tmp_path / "kernel.py"
        path.write_text(text)
        return kernels_digest([path])

    return write


def test_digest_ignores_words_and_sees_code(module):
    first = module('"""A."""\n\n\ndef f(x):\n    """B."""\n    return x + 1\n')
    assert module('"""C."""\n\n\ndef f(x):  # d\n    """E."""\n    return x + 1\n') == first
    assert module('"""A."""\n\n\ndef f(x):\n    """B."""\n    return x + 2\n') != first


def test_every_kernel_module_is_covered():
    names = {path.parent.name for path in kernel_sources()}
    assert "sm80" in names and "common" in names


def test_gpu_tests_have_one_room():
    marked = [p for p in RECORD.parent.rglob("test_*.py") if "mark.gpu" in p.read_text() and p != Path(__file__)]
    assert marked and all(p.parent.name == "gpu" for p in marked)
