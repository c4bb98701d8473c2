from __future__ import annotations

import re
from dataclasses import replace

import pytest

from dispatch_core import DEVICES, Device, device_named
from tests.dispatch_core.facts import A100, H200, MIG_SLICE, V100

PROMISED = {"A100-40", "A100-80", "A30", "A10", "L4", "L40", "RTX4090", "H100", "H100-PCIE", "H200", "GH200", "H20", "B200"}
PROMISED |= {"V100", "BI-V100", "CPU"}


def test_the_promised_devices_are_known_by_their_own_names():
    assert set(DEVICES) >= PROMISED
    assert all(DEVICES[name].name == name for name in DEVICES)
    assert len({hash(device) for device in DEVICES.values()}) == len(DEVICES)


@pytest.mark.parametrize(
    "name, arch, sm_count, shared_kib",
    [
        ("V100", 70, 80, 96),
        ("A100-80", 80, 108, 163),
        ("A10", 86, 72, 99),
        ("L4", 89, 58, 99),
        ("RTX4090", 89, 128, 99),
        ("H100", 90, 132, 227),
        ("H20", 90, 78, 227),
        ("H200", 90, 132, 227),
        ("B200", 100, 148, 227),
        ("BI-V100", 0, 16, 48),
    ],
)
def test_capabilities_are_those_of_the_data_sheets(name: str, arch: int, sm_count: int, shared_kib: int):
    device = device_named(name)
    assert (device.arch, device.sm_count, device.shared_memory_per_block) == (arch, sm_count, shared_kib * 1024)


def test_bi_v100_is_as_recorded():
    device = device_named("BI-V100")
    assert device.platform == "iluvatar"
    assert (device.memory_bandwidth, device.l2_bytes, device.has_async_copy) == (900 * 10**9, 6 * 2**20, False)


def test_derived_capabilities():
    assert [DEVICES[n].has_async_copy for n in ("V100", "A100-80", "H200", "CPU")] == [False, True, True, False]
    assert [DEVICES[n].has_fp8_matrix for n in ("A100-80", "A10", "L4", "H200", "CPU")] == [False, False, True, True, False]


def test_matrix_rates_are_looked_up_by_element_type():
    assert H200.flops("bfloat16") == H200.flops("float16") == 989 * 10**12
    assert H200.flops("float8_e4m3fn") == 1979 * 10**12
    assert A100.flops("float8_e4m3fn") is None


def test_a_device_of_ones_own_is_a_device():
    assert MIG_SLICE.sm_count == 16
    assert replace(H200, name="next year's", arch=121).has_fp8_matrix


@pytest.mark.parametrize(
    "device, changes, message",
    [
        (H200, {"arch": 9}, "Device: arch is 9; need major * 10 + minor, such as 90 for capability 9.0."),
        (H200, {"platform": "rocm"}, "Device: arch is 90 on platform 'rocm'; need 0 off CUDA."),
        (H200, {"sm_count": 0}, "Device: sm_count is 0; need a positive number."),
        (H200, {"warp_size": -32}, "Device: warp_size is -32; need a positive number."),
        (H200, {"max_threads_per_block": 0}, "Device: max_threads_per_block is 0; need a positive number."),
        (V100, {"memory_bandwidth": 0}, "Device: memory_bandwidth is 0; need a positive number."),
        (V100, {"shared_memory_per_block": -1}, "Device: shared_memory_per_block is -1; need 0 or more bytes."),
        (V100, {"l2_bytes": -1}, "Device: l2_bytes is -1; need 0 or more bytes."),
    ],
)
def test_a_wrong_device_is_refused(device: Device, changes: dict, message: str):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        replace(device, **changes)


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(
        ValueError, match=r"^device 'H300' is not known; need one of A10, A100-40, .*, or a Device of your own\.$"
    ):
        device_named("H300")
