"""The model of the demo, read once, and what transformers says of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:  # importing jax is left to the fixtures: tests/conftest.py chooses its platform first
    from jax_ops.demo.model import Config, Params
    from jax_ops.demo.tokenizer import Tokenizer

REFERENCE = Path(__file__).parents[2] / "data" / "smollm2_greedy.json"


class SmolLM2(NamedTuple):
    config: Config
    params: Params
    tokenizer: Tokenizer


@pytest.fixture(scope="session")
def params():
    """Random weights of a tiny model."""
    from tests.jax_ops.demo import llama

    return llama.random_params(llama.TINY)


@pytest.fixture(scope="session")
def reader():
    """The GGUF file; without its package the tests fail with the command that gets it."""
    from gguf import GGUFReader

    from jax_ops.demo.gguf_model import find_model

    return GGUFReader(find_model())


@pytest.fixture(scope="session")
def tokenizer(reader):
    from jax_ops.demo.tokenizer import Tokenizer

    return Tokenizer.from_gguf(reader)


@pytest.fixture(scope="session")
def smollm2(reader, tokenizer):
    from jax_ops.demo.gguf_model import load_config, load_params

    config = load_config(reader)
    return SmolLM2(config, load_params(reader, config), tokenizer)


@pytest.fixture(scope="session")
def reference():
    """Prompts and what follows them, made by tests/data/make_smollm2_greedy.py."""
    return json.loads(REFERENCE.read_text(encoding="utf-8"))["cases"]
