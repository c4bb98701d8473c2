"""How an op divides over a mesh: along sequences and KV heads, never inside a sequence or a group.

Automatic sharding goes through custom_partitioning with a rule read off the op's signature; explicitly sharded arrays go
through a shard_map of the same specs, since a Pallas call needs manual axes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.custom_partitioning import ArrayMapping, CompoundFactor, SdyShardingRule
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_ops.request import Arrays, Request
from jax_ops.signature import SIGNATURES, Signature

Spec = tuple[Any, ...]


def rule(signature: Signature, names: tuple[str, ...], results: tuple[str, ...]) -> Callable[..., SdyShardingRule]:
    """The Shardy rule of a call with these arrays: q heads are (KV heads x group), and only `split_axes` may be split."""

    def build(mesh: Any, operands: Any, outputs: Any) -> SdyShardingRule:
        del mesh, outputs
        size = signature.sizes(names, tuple(a.shape for a in operands))

        def mapping(axes: str) -> ArrayMapping:
            return ArrayMapping(*(CompoundFactor("h", "g") if a == "hg" else a for a in axes.split()))

        operand_axes = [signature.inputs[name] for name in names]
        result_axes = [signature.outputs[name] for name in results]
        in_order = " ".join((*operand_axes, *result_axes)).replace("hg", "h g").split()
        split = signature.split_axes(names)
        sizes: dict[str, Any] = {"g": size["hg"] // size["h"]} if "hg" in size else {}
        return SdyShardingRule(
            operand_mappings=tuple(map(mapping, operand_axes)),
            result_mappings=tuple(map(mapping, result_axes)),
            need_replication_factors=tuple(f for f in dict.fromkeys(in_order) if f not in split),
            **sizes,
        )

    return build


def partition(
    launch: Callable[..., Any], signature: Signature, names: tuple[str, ...], results: tuple[str, ...]
) -> Callable[..., Any]:
    """custom_partitioning's callback: every operand takes the split of the first (q, or k where there is no q)."""

    def lower(mesh: Any, operands: Any, outputs: Any) -> Any:
        del outputs
        split = _split(signature, names, operands[0].sharding.spec, tuple(a.shape for a in operands), mesh)
        place = lambda axes: NamedSharding(mesh, _spec(axes, split))  # noqa: E731
        return (
            mesh,
            launch,
            tuple(place(signature.outputs[name]) for name in results),
            tuple(place(signature.inputs[name]) for name in names),
        )

    return lower


def under_explicit_mesh(run: Callable[[Arrays], tuple[Any, ...]], request: Request, arrays: Arrays) -> tuple[Any, ...]:
    """Runs an op on explicitly sharded arrays inside a shard_map along its split axes; on any others, as it is."""
    signature = SIGNATURES[request.slot]
    leader = next(iter(arrays.values()))
    mesh = getattr(getattr(jax.typeof(leader), "sharding", None), "mesh", None)
    if mesh is None or mesh.empty or AxisType.Explicit not in mesh.axis_types:
        return run(arrays)
    names = tuple(arrays)
    axes = {name: signature.axes_given(name, jax.numpy.ndim(arrays[name])) for name in names}
    size = {a: s for name in names for a, s in zip(axes[name].split(), jax.numpy.shape(arrays[name]), strict=True)}
    split = _split_of(axes[names[0]], jax.typeof(leader).sharding.spec, size, signature.split_axes(names), mesh)
    results = signature.results(names, request.return_lse)
    squeezed = axes[names[0]] != signature.inputs[names[0]]
    out_axes = [
        signature.outputs[n].replace("t ", "", 1) if squeezed and n in ("o", "lse") else signature.outputs[n] for n in results
    ]
    mapped = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=({name: _spec(axes[name], split) for name in names},),
        out_specs=tuple(_spec(a, split) for a in out_axes),
        check_vma=False,
    )
    return mapped(arrays)


def _split(
    signature: Signature, names: tuple[str, ...], spec: Spec, shapes: tuple[tuple[int, ...], ...], mesh: Any
) -> dict[str, Any]:
    return _split_of(signature.inputs[names[0]], spec, signature.sizes(names, shapes), signature.split_axes(names), mesh)


def _split_of(axes: str, spec: Spec, size: dict[str, int], may_split: tuple[str, ...], mesh: Any) -> dict[str, Any]:
    """The mesh axes of each op axis, from the leading array's spec; an axis that does not divide evenly stays whole."""
    split: dict[str, Any] = {}
    for axis, mesh_axes in zip(axes.split(), tuple(spec) + (None,) * 8, strict=False):
        factor = "h" if axis == "hg" else axis
        if mesh_axes is None or factor not in may_split:
            continue
        group = mesh_axes if isinstance(mesh_axes, tuple) else (mesh_axes,)
        ways = 1
        for name in group:
            ways *= mesh.shape[name]
        if size[factor] % ways == 0:
            split[factor] = mesh_axes
    return split


def _spec(axes: str, split: dict[str, Any]) -> PartitionSpec:
    return PartitionSpec(*(split.get("h" if a == "hg" else a) for a in axes.split()))
