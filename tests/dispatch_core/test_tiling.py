from __future__ import annotations

from dataclasses import replace

import pytest

from dispatch_core import (
    CATALOGUE,
    DEVICES,
    POLICIES,
    SM80_AND_NEWER,
    Build,
    Device,
    NoImplementationError,
    TileConfig,
    fitting_tile,
    representatives,
    select_split_plan,
    select_tile_config,
    split_plan,
)
from dispatch_core.tiling import Policy, Row, Table, padded, shape_of, staged_bytes
from tests.dispatch_core.facts import H200, MIG_SLICE, decode, packed

FP8 = "float8_e4m3fn"
BI_V100 = DEVICES["BI-V100"]
TRITON = ("sm80_prefill", "sm80_decode")
PARTS: list[Device] = [
    *(DEVICES[name] for name in ("A100-80", "A10", "L4", "RTX4090", "H100", "H20", "H200", "B200")),
    MIG_SLICE,
    replace(H200, name="arch 103", arch=103),
    replace(H200, name="arch 121", arch=121, shared_memory_per_block=99 * 1024),
    replace(H200, name="little shared memory", shared_memory_per_block=64 * 1024),
]
ROWS = [(family, table, row) for family in POLICIES for table in POLICIES[family].tables for row in table.rows]


@pytest.mark.parametrize("family, table, row", ROWS)
def test_a_row_fits_every_device_it_is_for_and_states_its_cause(family: str, table: Table, row: Row):
    assert row.cause.startswith(("measured: ", "derived: "))
    names = {4: "float32", 2: "bfloat16", 1: FP8}
    for device in (d for d in (*DEVICES.values(), MIG_SLICE) if d.arch >= table.min_arch > 0):
        if device.shared_memory_per_block < table.shared_memory:
            continue
        sizes = {"q_heads": 8, "kv_heads": 8, "head_dim": row.max_head_dim, "max_seqlen_q": row.tile.block_q}
        call = packed(device, dtype=names[row.q_bytes], max_seqlen_kv=4096, **sizes)
        call = replace(call, kv_dtype=names[row.kv_bytes or row.q_bytes])
        assert POLICIES[family].shared_bytes(row.tile, shape_of(call)) <= device.shared_memory_per_block
        if device.shared_memory_per_block == table.shared_memory:
            tile = fitting_tile(call, family)
            assert isinstance(tile, TileConfig)
            assert replace(tile, num_splits=1) == row.tile


@pytest.mark.parametrize("device", PARTS, ids=lambda d: d.name)
@pytest.mark.parametrize("family", TRITON)
def test_whatever_is_returned_fits_and_is_a_triton_shape(family: str, device: Device):
    for dtype in ("float16", "bfloat16", "float32", FP8):
        for head_dim in (16, 40, 64, 80, 96, 128, 192, 256, 512):
            for tokens in (1, 5, 512):
                call = packed(device, dtype=dtype, head_dim=head_dim, max_seqlen_q=tokens)
                tile = fitting_tile(call, family)
                if isinstance(tile, str):
                    assert head_dim == 512, (call, tile)
                    continue
                assert POLICIES[family].shared_bytes(tile, shape_of(call)) <= device.shared_memory_per_block
                for size in (tile.block_q, tile.block_kv):
                    assert size >= 16
                    assert size & (size - 1) == 0
                assert tile.num_warps in (4, 8)


@pytest.mark.parametrize("family", TRITON)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_accumulator_and_the_scores_stay_in_registers(family: str, dtype: str):
    for device in PARTS:
        for head_dim in (64, 128, 256):
            tile = fitting_tile(packed(device, dtype=dtype, head_dim=head_dim), family)
            assert isinstance(tile, TileConfig)
            assert tile.block_q * (head_dim + tile.block_kv) / (32 * tile.num_warps) <= 192, (device.name, head_dim, tile)


def test_a_tile_has_no_more_rows_than_the_call():
    assert fitting_tile(decode(), "sm80_decode").block_q == 16  # type: ignore[union-attr]
    assert fitting_tile(decode(q_heads=96, kv_heads=4), "sm80_decode").block_q == 32  # type: ignore[union-attr]
    assert fitting_tile(packed(max_seqlen_q=8), "sm80_prefill").block_q == 32  # type: ignore[union-attr]
    assert fitting_tile(packed(), "sm80_prefill").block_q == 128  # type: ignore[union-attr]


def test_the_xla_tiles():
    assert fitting_tile(packed(DEVICES["CPU"]), "xla_prefill") == TileConfig(512, 1024)
    assert fitting_tile(decode(DEVICES["CPU"]), "xla_decode") == TileConfig(1, 512)
    assert fitting_tile(decode(DEVICES["V100"], head_dim=4096), "xla_decode") == TileConfig(1, 512)


def test_names_decide_nothing():
    for family in POLICIES:
        assert fitting_tile(packed(replace(H200, name="V100")), family) == fitting_tile(packed(H200), family)


def test_an_unknown_architecture_takes_an_older_ones_row_that_it_can_hold():
    newer = replace(DEVICES["A10"], name="arch 121", arch=121)
    assert fitting_tile(packed(newer), "sm80_prefill") == fitting_tile(packed(DEVICES["A10"]), "sm80_prefill")
    assert fitting_tile(packed(replace(H200, arch=103)), "sm80_prefill") == fitting_tile(packed(H200), "sm80_prefill")


def test_less_shared_memory_means_a_smaller_tile_and_then_a_refusal():
    sizes = []
    for kib in (227, 99, 64, 48, 32, 16):
        device = replace(H200, shared_memory_per_block=kib * 1024)
        tile = fitting_tile(packed(device), "sm80_prefill")
        if isinstance(tile, TileConfig):
            sizes.append(POLICIES["sm80_prefill"].shared_bytes(tile, shape_of(packed(device))))
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) == 6
    assert fitting_tile(packed(replace(H200, shared_memory_per_block=8 * 1024)), "sm80_prefill") == (
        "needs 12288 bytes of shared memory for the smallest tile, H200 has 8192"
    )


def test_no_architecture_older_than_its_table_takes_a_row():
    v100 = fitting_tile(packed(DEVICES["V100"]), "sm80_prefill")
    assert v100 in POLICIES["sm80_prefill"].safe_tiles


# The BI-V100 record.


@pytest.mark.parametrize(
    "head_dim, two_bytes, float32",
    [(64, 64, 64), (128, 64, 32), (192, 64, 32), (256, 32, 16), (512, 16, None), (1024, None, None)],
)
def test_the_staged_policy_is_as_recorded(head_dim: int, two_bytes: int | None, float32: int | None):
    for dtype, width, block in (("float16", 2, two_bytes), ("bfloat16", 2, two_bytes), ("float32", 4, float32)):
        tile = fitting_tile(packed(BI_V100, dtype=dtype, head_dim=head_dim), "staged")
        if block is None:
            needed = 16 * head_dim * width * 2
            assert tile == f"needs {needed} bytes of shared memory for the smallest tile, BI-V100 has 49152"
        else:
            assert tile == TileConfig(block_q=block, block_kv=block, num_warps=4, num_stages=1, num_splits=1)


def test_192_fits_the_staging_exactly():
    call = packed(BI_V100, head_dim=192)
    assert staged_bytes(TileConfig(64, 64), shape_of(call)) == 49152 == BI_V100.shared_memory_per_block


def test_the_staged_policy_never_partitions_decode():
    assert (POLICIES["staged"].partition, POLICIES["staged"].max_splits) == (512, 1)
    call = decode(BI_V100, max_seqlen_kv=131072)
    assert select_split_plan(call, Build("staged", tiles="staged")) is None
    assert fitting_tile(call, "staged").num_splits == 1  # type: ignore[union-attr]


# Builds.


def test_a_build_gets_its_familys_tile_with_its_splits():
    build = Build("sm80", SM80_AND_NEWER, tiles="sm80_decode")
    tile, plan = select_tile_config(decode(), build), select_split_plan(decode(), build)
    assert tile is not None
    assert plan is not None
    assert plan == split_plan(decode(), tile.block_q, tile.block_kv)
    assert tile.num_splits == plan.num_splits > 1
    assert select_split_plan(packed(), Build("sm80", SM80_AND_NEWER, tiles="sm80_prefill")) is None


def test_a_build_that_takes_no_tile_gets_none():
    assert select_tile_config(decode(), Build("fake")) is None
    assert select_split_plan(decode(), Build("fake")) is None


def test_when_nothing_fits_the_error_has_the_bytes_and_the_call():
    call = packed(BI_V100, head_dim=1024)
    message = (
        r"^staged build needs 65536 bytes of shared memory for the smallest tile, BI-V100 has 49152\.\n  call: AttentionCall"
    )
    with pytest.raises(NoImplementationError, match=message):
        select_tile_config(call, Build("staged", tiles="staged"))
    with pytest.raises(NoImplementationError, match=message):
        select_split_plan(call, Build("staged", tiles="staged"))


def test_tiles_are_cached():
    call = packed(batch=77)
    assert fitting_tile(call, "sm80_prefill") is fitting_tile(packed(batch=77), "sm80_prefill")


def test_every_family_tiles_a_shipped_build():
    used = {build.tiles for kernel in CATALOGUE.values() for build in kernel.builds if build.tiles}
    assert set(POLICIES) - used == {"staged"}, "the recorded rule alone has no build"


# Policies as data.


def test_a_row_that_does_not_fit_its_table_is_refused_at_import():
    row = Row(2, 128, TileConfig(64, 128), "derived: too large")
    with pytest.raises(ValueError, match=r"^Row\(.*too large.* needs 65536 bytes of shared memory, its table has 49152$"):
        Policy(staged_bytes, (Table(0, 48 * 1024, (row,)),), ())


def test_devices_with_one_policy_have_one_representative():
    found = representatives("sm80_prefill", [d for d in DEVICES.values() if d.arch >= 80])
    assert found["A100-40"] == found["A100-80"] == found["A30"] == "A100-40"
    assert {found[name] for name in ("A10", "L4", "L40", "RTX4090")} == {"A10"}
    assert {found[name] for name in ("H100", "H100-PCIE", "H200", "GH200", "H20", "B200")} == {"H100"}
    assert len(set(representatives("xla_prefill").values())) == 1


def test_the_lowest_architecture_stands_for_its_equals():
    newer, older = replace(H200, name="newer", arch=103), replace(H200, name="older", arch=90)
    assert representatives("sm80_decode", [newer, older]) == {"older": "older", "newer": "older"}


def test_padded():
    assert [padded(n) for n in (1, 16, 17, 64, 80, 96, 128, 129)] == [16, 16, 32, 64, 128, 128, 128, 256]
