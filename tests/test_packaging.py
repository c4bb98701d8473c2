"""What is shipped, what dispatch_core needs and costs to import, and how the Makefile finds an interpreter."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {"dispatch_core", "pallas_kernels", "jax_ops"}
IMPORT_SECONDS = 0.050
ON_OLDEST = re.compile(r"mark\.oldest_jax|aot\.on\(")

# Runs in a fresh interpreter: {package} must import although nothing but itself and the standard library can be.
IMPORT_ALONE = """
import importlib, pkgutil, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top != "{package}" and top not in sys.stdlib_module_names:
            raise ImportError("outside the standard library: " + name)

sys.meta_path.insert(0, Refuse())
package = importlib.import_module("{package}")
for module in pkgutil.walk_packages(package.__path__, "{package}."):
    importlib.import_module(module.name)
"""

# Processor time, because other work on the machine is none of the import's.
IMPORT_TIMED = """
import time
start = time.process_time()
import dispatch_core
print(time.process_time() - start)
"""


def run_python(code: str, root: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(root)}
    return subprocess.run([sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy so that the checkout gets no build folder, and without a download."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for folder in ROOT.iterdir():
        if folder.is_dir() and not folder.name.startswith(".") and folder.name not in ("build", "dist"):
            shutil.copytree(folder, source / folder.name, ignore=shutil.ignore_patterns("__pycache__"))
    code = f"from setuptools import build_meta; print(build_meta.build_wheel({str(built)!r}))"
    done = run_python(code, source)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(built / done.stdout.splitlines()[-1]) as archive:
        yield archive


def test_wheel_holds_the_three_packages_and_nothing_else(wheel):
    tops = {name.partition("/")[0] for name in wheel.namelist()}
    assert tops == PACKAGES | {"pallas_gqa-0.1.0.dist-info"}


def test_wheel_holds_every_module_and_the_type_markers(wheel):
    modules = {str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    markers = {f"{package}/py.typed" for package in PACKAGES}
    assert modules | markers <= set(wheel.namelist())


def test_wheel_metadata(wheel):
    metadata = message_from_bytes(wheel.read("pallas_gqa-0.1.0.dist-info/METADATA"))
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert required == ["jax<0.13,>=0.11.2", "jaxlib<0.13,>=0.11.2", "numpy>=2.1"]
    assert metadata["Requires-Python"] == ">=3.12"
    assert {"cuda13", "test", "demo", "notebooks"} <= set(metadata.get_all("Provides-Extra", []))
    assert metadata["License-Expression"] == "Apache-2.0"


def test_dispatch_core_imports_with_the_standard_library_alone():
    done = run_python(IMPORT_ALONE.format(package="dispatch_core"), ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("statement", ["import numpy", "def late():\n    import numpy\nlate()", "from jax_ops import dispatch"])
def test_the_import_check_can_fail(tmp_path, statement):
    package = tmp_path / "impure"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "deep.py").write_text(statement)
    done = run_python(IMPORT_ALONE.format(package="impure"), tmp_path)
    assert done.returncode != 0
    assert "outside the standard library: " in done.stderr


def test_dispatch_core_imports_fast():
    run_python(IMPORT_TIMED, ROOT)  # compiles the bytecode
    seconds = min(float(run_python(IMPORT_TIMED, ROOT).stdout) for _ in range(7))
    assert seconds < IMPORT_SECONDS, f"import dispatch_core takes {seconds * 1e3:.0f} ms"


def find_python(checkout: Path, path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs tools/find-python of a checkout with only `path` and the shell's own tools on PATH, and no pyenv."""
    return subprocess.run(
        ["/bin/sh", checkout / "tools" / "find-python"],
        env={"PATH": f"{path}:{checkout / 'posix'}", "HOME": str(checkout), **environment},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "find-python", tmp_path / "tools")
    (tmp_path / ".python-version").write_text("3.12\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "posix").mkdir()
    for tool in ("dirname", "head"):
        (tmp_path / "posix" / tool).symlink_to(shutil.which(tool) or "")
    return tmp_path


def script(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def interpreter(path: Path) -> None:
    """A command that is the running interpreter, under another name."""
    script(path, f'exec {sys.executable} "$@"')


def interpreter_of_version(path: Path, version: tuple[int, int, int]) -> None:
    """A command that takes itself for another version."""
    script(path, f'shift; code=$1; shift; exec {sys.executable} -c "import sys; sys.version_info = {version}\n$code" "$@"')


def test_python_of_python_version_is_taken_first(checkout):
    interpreter(checkout / "bin" / "python3.12")
    script(checkout / "bin" / "python3.13", "echo /not/this/one")
    done = find_python(checkout, checkout / "bin")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == sys.executable


@pytest.mark.parametrize("name", ["python3.13", "python3.12", "python3"])
def test_python_is_found_behind_shims_that_fail(checkout, name):
    for shim in {"python3.13", "python3.12", "python3"} - {name}:
        script(checkout / "bin" / shim, "echo 'no such version' >&2; exit 127")
    interpreter(checkout / "bin" / name)
    assert find_python(checkout, checkout / "bin").stdout.strip() == sys.executable


def test_python_is_found_among_those_of_pyenv(checkout):
    interpreter_of_version(checkout / "bin" / "python3", (3, 11, 7))
    interpreter_of_version(checkout / "pyenv" / "versions" / "3.11.7" / "bin" / "python3", (3, 11, 7))
    interpreter(checkout / "pyenv" / "versions" / "3.13.0" / "bin" / "python3")
    done = find_python(checkout, checkout / "bin", PYENV_ROOT=str(checkout / "pyenv"))
    assert done.stdout.strip() == sys.executable


def test_no_python_is_an_error_that_says_what_was_tried(checkout):
    script(checkout / "bin" / "python3.13", "exit 127")
    interpreter_of_version(checkout / "bin" / "python3", (3, 11, 7))
    done = find_python(checkout, checkout / "bin")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "pallas-gqa needs Python 3.12 or newer and found none" in done.stderr
    assert "python3.13 does not run" in done.stderr
    assert "python3 is 3.11.7" in done.stderr
    assert "make PYTHON=" in done.stderr


def test_no_python_at_all(checkout):
    done = find_python(checkout, checkout / "bin")
    assert done.returncode == 1
    assert "no python3 on PATH" in done.stderr


def test_what_only_the_oldest_jax_runs_is_in_its_list():
    run = ("test_aot.py", "pallas_kernels/sm80/", "pallas_kernels/sm90/")
    assert all(f"tests/{name.rstrip('/')}" in (ROOT / "Makefile").read_text() for name in run)
    marked = [
        path.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py") if ON_OLDEST.search(path.read_text())
    ]
    assert marked
    assert [path for path in marked if not path.as_posix().startswith(run)] == []
