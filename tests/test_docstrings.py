"""Every example in a docstring of the three packages gives what it says, and every public op has one."""

import doctest
import importlib
import inspect
import pkgutil

import pytest

PACKAGES = ("dispatch_core", "pallas_kernels", "jax_ops")
OPTIONS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def _modules():
    for name in PACKAGES:
        package = importlib.import_module(name)
        yield package
        for info in pkgutil.walk_packages(package.__path__, f"{name}."):
            if not info.name.endswith("__main__"):
                yield importlib.import_module(info.name)


def _examples():
    """The docstrings that hold an example, each with the names a reader of it has: its module's, and the packages'."""
    public = {name: getattr(p, name) for p in map(importlib.import_module, PACKAGES) for name in getattr(p, "__all__", ())}
    finder = doctest.DocTestFinder(exclude_empty=True)
    for module in _modules():
        yield from (t for t in finder.find(module, globs={**public, **vars(module)}) if t.examples)


def _is_public_code(value):
    return callable(value) and not (inspect.isclass(value) and issubclass(value, Exception))


@pytest.mark.parametrize("example", [pytest.param(t, id=t.name) for t in _examples()])
def test_example(example):
    said = []
    runner = doctest.DocTestRunner(optionflags=OPTIONS, verbose=False)
    assert runner.run(example, out=said.append).failed == 0, "".join(said)


@pytest.mark.parametrize("name", importlib.import_module("jax_ops").__all__)
def test_public_op_has_an_example(name):
    value = getattr(importlib.import_module("jax_ops"), name)
    if _is_public_code(value):
        examples = doctest.DocTestFinder(recurse=False).find(inspect.unwrap(value), name)
        assert examples and examples[0].examples, f"{name} has no example"


@pytest.mark.parametrize("name", PACKAGES)
def test_public_code_is_documented(name):
    package = importlib.import_module(name)
    for attribute in getattr(package, "__all__", ()):
        value = getattr(package, attribute)
        if _is_public_code(value):
            assert inspect.getdoc(value), f"{name}.{attribute}"
