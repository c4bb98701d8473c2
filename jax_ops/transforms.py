"""vmap and automatic sharding for an opaque launch, read off its signature.

The order of wrappers is custom_vmap outside custom_partitioning, which has no batching of its own; differentiation goes
around both (gradients.py), since custom_vmap has no reverse mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning

from jax_ops import sharding
from jax_ops.signature import Signature

Launch = Callable[..., tuple[jax.Array, ...]]


def transformable(launch: Launch, signature: Signature, names: tuple[str, ...], results: tuple[str, ...]) -> Launch:
    """`launch` as a function that vmap and the partitioner can divide.

    Args:
      launch: takes the arrays of `names` in order and returns those of `results`, for whatever sizes it is given.
      signature: the axes of both.
      names: the arrays that are passed.
      results: the arrays that are returned.
    """
    partitioned = custom_partitioning(launch)
    partitioned.def_partition(
        partition=sharding.partition(launch, signature, names, results),
        sharding_rule=sharding.rule(signature, names, results),
    )

    @custom_vmap
    def batched(*arrays: Any) -> tuple[jax.Array, ...]:
        return partitioned(*arrays)

    @batched.def_vmap
    def _(axis_size: int, in_batched: list[bool], *arrays: Any) -> Any:
        fold = _fold if _is_foldable(signature, names, in_batched) else _loop
        outputs = fold(batched, signature, names, axis_size, in_batched, arrays)
        return outputs, tuple(True for _ in outputs)

    return batched


def _leads_with_batch(signature: Signature, name: str) -> bool:
    return signature.inputs[name].split()[0] == "b"


def _is_foldable(signature: Signature, names: tuple[str, ...], in_batched: list[bool]) -> bool:
    """Whether a mapped axis can join the sequences: they can be divided, and every mapped array has them in front."""
    mapped = (name for name, is_mapped in zip(names, in_batched, strict=True) if is_mapped)
    return "b" in signature.split_axes(names) and all(_leads_with_batch(signature, name) for name in mapped)


def _fold(
    batched: Launch, signature: Signature, names: tuple[str, ...], axis_size: int, in_batched: list[bool], arrays: Any
) -> tuple[jax.Array, ...]:
    folded = []
    for name, array, is_mapped in zip(names, arrays, in_batched, strict=True):
        if _leads_with_batch(signature, name):
            full = array if is_mapped else jnp.broadcast_to(array, (axis_size, *array.shape))
            array = full.reshape(-1, *full.shape[2:])
        folded.append(array)
    return tuple(o.reshape(axis_size, -1, *o.shape[1:]) for o in batched(*folded))


def _loop(
    batched: Launch, signature: Signature, names: tuple[str, ...], axis_size: int, in_batched: list[bool], arrays: Any
) -> tuple[jax.Array, ...]:
    del signature, names, axis_size

    def member(mapped: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        slices = iter(mapped)
        return batched(*(next(slices) if is_mapped else a for a, is_mapped in zip(arrays, in_batched, strict=True)))

    return lax.map(member, tuple(a for a, is_mapped in zip(arrays, in_batched, strict=True) if is_mapped))
