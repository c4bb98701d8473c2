"""Kernels in Pallas' interpreter: compiled quickly and once, and sets of features in which every two of them meet."""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from dispatch_core import AttentionCall, TileConfig
from tests.inputs import FEATURES

FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@functools.cache
def compiled(launch: Callable[..., Any], call: AttentionCall, tile: TileConfig) -> Callable[..., tuple[Any, ...]]:
    """An interpreted kernel as a function of its arrays; cases that differ in values alone share it."""
    return jax.jit(functools.partial(launch, call, tile, interpret=True), compiler_options=FAST_COMPILE)


@functools.cache
def covering_sets(op: str) -> tuple[frozenset[str], ...]:
    """Sets of an op's features in which every two of them meet: both, either alone, neither."""
    rng = np.random.default_rng(zlib.crc32(op.encode()))
    missing = {(f, a, g, b) for f, g in itertools.combinations(FEATURES[op], 2) for a in (True, False) for b in (True, False)}
    chosen = []
    while missing:
        drawn = (frozenset(f for f in FEATURES[op] if rng.random() < 0.5) for _ in range(200))
        chosen.append(max(drawn, key=lambda features: len(_meetings(op, features) & missing)))
        missing -= _meetings(op, chosen[-1])
    return tuple(chosen)


def _meetings(op: str, features: frozenset[str]) -> set[tuple[str, bool, str, bool]]:
    """Every pair of features, and which of the two a set has."""
    return {(f, f in features, g, g in features) for f, g in itertools.combinations(FEATURES[op], 2)}
