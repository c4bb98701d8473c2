from __future__ import annotations

from dataclasses import replace

import pytest

from dispatch_core import DEVICES, Paging, Window, split_plan, tiles_of_split
from dispatch_core.splitting import MAX_SPLITS, reachable_keys
from tests.dispatch_core.facts import CPU, H200, MIG_SLICE, decode, packed

SHAPES = [
    (batch, kv_heads, group, keys)
    for batch in (1, 3, 8, 32, 128)
    for kv_heads in (1, 3, 8)
    for group in (1, 8)
    for keys in (1, 63, 64, 65, 1000, 8192, 131072)
]
PARTS = [H200, MIG_SLICE, DEVICES["A10"], DEVICES["H20"], CPU]


@pytest.mark.parametrize("tiles", [1, 2, 3, 7, 10, 64, 127, 2048])
@pytest.mark.parametrize("num_splits", [1, 2, 3, 4, 7, 32, 33, 128])
def test_splits_cover_every_tile_once_and_differ_by_at_most_one(num_splits: int, tiles: int):
    covered = [range(*tiles_of_split(split, num_splits, tiles)) for split in range(num_splits)]
    assert [tile for split in covered for tile in split] == list(range(tiles))
    lengths = [len(split) for split in covered]
    assert max(lengths) - min(lengths) <= 1
    assert max(lengths) == -(-tiles // num_splits)


def test_ten_tiles_in_four_splits():
    assert [tiles_of_split(split, 4, 10) for split in range(4)] == [(0, 2), (2, 5), (5, 7), (7, 10)]


def test_no_tiles_leave_every_split_empty():
    assert [tiles_of_split(split, 3, 0) for split in range(3)] == [(0, 0)] * 3


def test_the_worked_example():
    plan = split_plan(decode(), block_q=16, block_kv=64)
    assert (plan.num_splits, plan.tiles, plan.longest, plan.programs, plan.waves) == (32, 128, 4, 128, 1)
    assert str(plan) == "32 of up to 4 KV tiles; 128 programs in 1 wave"
    assert str(split_plan(decode(batch=64), 16, 64)) == "none, 128 KV tiles; 256 programs in 2 waves"


@pytest.mark.parametrize("batch, kv_heads, group, keys", SHAPES)
def test_a_plan_is_bounded_and_fills_the_device(batch: int, kv_heads: int, group: int, keys: int):
    for device in PARTS:
        call = decode(device, batch=batch, q_heads=kv_heads * group, kv_heads=kv_heads, max_seqlen_kv=keys)
        plan = split_plan(call, block_q=16, block_kv=64)
        assert 1 <= plan.num_splits <= min(plan.tiles, MAX_SPLITS)
        assert plan.tiles == -(-keys // 64)
        assert plan.programs == batch * kv_heads * plan.num_splits
        assert (plan.waves - 1) * device.sm_count < plan.programs <= plan.waves * device.sm_count
        # The busiest SM's tiles against an even share of them: no wave is left mostly idle where there is much to read.
        share = batch * kv_heads * plan.tiles / device.sm_count
        if batch * kv_heads >= device.sm_count:
            assert plan.num_splits == 1
        elif share >= 32:
            assert plan.waves * plan.longest <= 1.25 * share


@pytest.mark.parametrize("batch, fewest, most", [(2, 8, 64), (32, 4, 16), (128, 1, 8)])
def test_ragged_sequences_are_split_until_their_tail_is_short(batch: int, fewest: int, most: int):
    call = decode(batch=batch, kv_heads=8, max_seqlen_kv=8192, paging=Paging(64, 128))
    assert fewest <= split_plan(call, block_q=16, block_kv=64).num_splits <= most
    assert split_plan(decode(batch=batch, kv_heads=8, max_seqlen_kv=8192), 16, 64).num_splits <= most


def test_a_device_that_is_already_full_is_not_split_further():
    assert split_plan(decode(batch=33), 16, 64).num_splits == 1  # 132 programs, 132 SMs
    assert split_plan(decode(CPU), 16, 64).num_splits == 1


def test_a_launch_of_the_merge_must_pay():
    assert split_plan(decode(max_seqlen_kv=128), 16, 64).num_splits == 1
    assert split_plan(decode(max_seqlen_kv=2048), 16, 64).num_splits > 1


def test_row_blocks_are_programs():
    call = decode(q_heads=96, kv_heads=1, max_seqlen_q=2)
    assert split_plan(call, 16, 64, max_splits=1).programs == 12


def test_partition_and_max_splits_bound_a_plan():
    assert split_plan(decode(), 16, 64, max_splits=4).num_splits <= 4
    assert split_plan(decode(), 16, 64, partition=4096).num_splits <= 2
    assert split_plan(decode(), 16, 64, partition=16384).num_splits == 1


@pytest.mark.parametrize(
    "call, keys",
    [
        (decode(), 8192),
        (decode(window=Window(1023, 0)), 1024),
        (decode(window=Window(1023, 0), max_seqlen_q=4), 1027),
        (decode(is_causal=False, window=Window(1023, 500), max_seqlen_q=4), 1027),
        (decode(is_causal=False, window=Window(None, 2), max_seqlen_q=4), 8192),
        (packed(max_seqlen_q=512, max_seqlen_kv=300, window=Window(100, 0)), 300),
    ],
)
def test_a_left_bound_leaves_fewer_keys(call, keys: int):
    assert reachable_keys(call) == keys


def test_plans_read_capability_and_never_a_name():
    assert split_plan(decode(replace(H200, name="x")), 16, 64) == split_plan(decode(), 16, 64)
    assert split_plan(decode(MIG_SLICE), 16, 64).num_splits == 4  # 4 KV heads on 16 SMs
