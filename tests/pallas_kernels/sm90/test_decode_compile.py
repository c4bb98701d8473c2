"""Decode on Mosaic GPU compiled for the H200 that is not there: registers, instructions, shared memory, aliasing."""

from typing import Any

import pytest

from dispatch_core import RopeFacts, Window
from dispatch_core.calls import AttentionCall
from dispatch_core.tiling import POLICIES, TileConfig, fitting_tile, shape_of
from pallas_kernels.sm90.decode import decode, paged_decode
from tests import aot
from tests.pallas_kernels.sm80 import test_decode_compile as plain

pytestmark = pytest.mark.oldest_jax

SETTINGS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "dim_64_page_64": {"dtype": "float16", "group": 8, "dims": (64, 64), "page": 64},
    "page_16_rules": {"page": 16, "tokens": 3, "softcap": 30.0, "window": Window(1000), "has_sinks": True},
    "new_tokens": {"page": 64, "new": True, "tokens": 4, "rope": RopeFacts(128, 8192)},
}


def case(target: aot.Target, setting: dict[str, Any]) -> tuple[AttentionCall, aot.Case]:
    return plain.case(target, **setting, family="sm90_decode", launches=(decode, paged_decode))


def every_case(target: aot.Target) -> dict[str, aot.Case]:
    return {name: case(target, setting)[1] for name, setting in SETTINGS.items()}


def report(name: str) -> aot.Report:
    return aot.compile_cases("h200", f"{__name__}:every_case")[name].ok()


def kernels(name: str) -> tuple[aot.Kernel, aot.Kernel]:
    """The attention and the merge."""
    found = {"merge" in k.name: k for k in report(name).kernels if "append" not in k.name}
    return found[False], found[True]


@pytest.mark.parametrize("name", SETTINGS)
def test_nothing_spills_and_the_ring_has_the_memory_it_claims(name: str) -> None:
    call, _ = case(aot.TARGETS["h200"], SETTINGS[name])
    tile = fitting_tile(call, "sm90_decode")
    assert isinstance(tile, TileConfig)
    claimed = POLICIES["sm90_decode"].shared_bytes(tile, shape_of(call))
    attention, merge = kernels(name)
    assert claimed - 4096 <= attention.shared_bytes <= claimed
    assert attention.spill_bytes == merge.spill_bytes == 0
    assert attention.losses == merge.losses == []


@pytest.mark.parametrize("name", SETTINGS)
def test_keys_come_in_bulk_copies_and_the_merge_is_launched_early(name: str) -> None:
    attention, merge = kernels(name)
    assert attention.arch == merge.arch == "sm_90a"
    assert attention.count("wgmma.mma_async") > 0 and attention.count("cp.async.bulk.tensor") > 0
    assert attention.count("st.global") == 0, "parts leave through TMA"
    assert attention.count("griddepcontrol.launch_dependents") == 1
    assert attention.count("griddepcontrol.wait") == merge.count("griddepcontrol.wait") == 1


def test_new_tokens_are_written_in_place() -> None:
    pools = sum(x.size * x.dtype.itemsize for x in case(aot.TARGETS["h200"], SETTINGS["new_tokens"])[1].args[0].values())
    made = report("new_tokens")
    assert made.alias_bytes == pools
    assert made.temp_bytes < pools / 8
