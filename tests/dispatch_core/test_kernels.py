from __future__ import annotations

import pytest

from dispatch_core import (
    ANYTHING,
    CATALOGUE,
    DECODE_EXTENDED_KEYS,
    DECODE_KEYS,
    DENSE_PREFILL_EXTENDED_KEYS,
    DENSE_PREFILL_KEYS,
    DEVICES,
    EVERYWHERE,
    PACKED_PREFILL_EXTENDED_KEYS,
    PACKED_PREFILL_KEYS,
    PAGED_DECODE_EXTENDED_KEYS,
    PAGED_DECODE_KEYS,
    PAGED_PREFILL_EXTENDED_KEYS,
    PAGED_PREFILL_KEYS,
    SLOTS,
    SM80_AND_NEWER,
    SM90_EXACTLY,
    Build,
    Kernel,
    Target,
    regions,
)
from tests.dispatch_core.facts import A100, CPU, H200, V100, packed

SM90_ONLY = {
    "gqa_prefill_square_fwd_kernel",
    "gqa_prefill_causal_fwd_kernel",
    "gqa_decode_bs1_kernel",
    "gqa_decode_paged_bs1_kernel",
}


def test_the_recorded_key_tuples():
    assert set(DENSE_PREFILL_KEYS) == {
        "gqa_prefill_square_fwd_kernel",
        "gqa_prefill_causal_fwd_kernel",
        "gqa_prefill_fwd_kernel",
    }
    assert set(PACKED_PREFILL_KEYS) == {
        *DENSE_PREFILL_KEYS,
        "gqa_prefill_fp8_tensor_core_fwd_kernel",
        "gqa_sliding_window_varlen_fwd_kernel",
        "gqa_prefill_varlen_fwd_kernel",
    }
    assert set(PAGED_PREFILL_KEYS) == {
        "gqa_prefill_paged_with_kv_cache_rope_fwd_kernel",
        "gqa_prefill_paged_with_fp8_kv_cache_fwd_kernel",
        "gqa_prefill_paged_with_kv_cache_fwd_kernel",
    }
    assert set(DECODE_KEYS) == {"gqa_decode_bs1_kernel", "gqa_decode_kernel"}
    assert set(PAGED_DECODE_KEYS) == {"gqa_decode_paged_bs1_kernel", "gqa_decode_paged_kernel"}


def test_the_extended_key_tuples():
    assert set(PACKED_PREFILL_EXTENDED_KEYS) == {*PACKED_PREFILL_KEYS, "gqa_prefill_fp8_fwd_kernel"}
    assert set(DENSE_PREFILL_EXTENDED_KEYS) == set(PACKED_PREFILL_EXTENDED_KEYS)
    assert set(DECODE_EXTENDED_KEYS) == {*DECODE_KEYS, "gqa_decode_fp8_kv_cache_kernel", "gqa_decode_multi_token_kernel"}
    assert set(PAGED_DECODE_EXTENDED_KEYS) == {
        *PAGED_DECODE_KEYS,
        "gqa_decode_paged_fp8_kv_cache_kernel",
        "gqa_decode_paged_multi_token_kernel",
    }
    assert set(PAGED_PREFILL_EXTENDED_KEYS) == {*PAGED_PREFILL_KEYS, "gqa_prefill_paged_with_fp8_kv_cache_rope_fwd_kernel"}


def test_every_slot_asks_for_shipped_keys_each_once():
    for keys in SLOTS.values():
        assert len(set(keys)) == len(keys)
        assert set(keys) <= set(CATALOGUE)
    assert {key for keys in SLOTS.values() for key in keys} == set(CATALOGUE)


def test_every_key_but_the_hopper_ones_has_an_xla_and_an_sm80_build():
    for key, kernel in CATALOGUE.items():
        names = {build.name for build in kernel.builds}
        assert kernel.key == key
        assert names == {"sm90"} if key in SM90_ONLY else {"xla", "sm80"} <= names


def test_the_general_kernels():
    general = {key for key, kernel in CATALOGUE.items() if kernel.general}
    assert general == {"gqa_prefill_fwd_kernel", "gqa_prefill_fp8_fwd_kernel", "gqa_decode_kernel", "gqa_decode_paged_kernel"}


@pytest.mark.parametrize(
    "target, device, refusal",
    [
        (SM90_EXACTLY, "H200", None),
        (SM90_EXACTLY, "A100-80", "needs arch 90, A100-80 has 80"),
        (SM90_EXACTLY, "B200", "needs arch 90, B200 has 100"),
        (SM80_AND_NEWER, "B200", None),
        (SM80_AND_NEWER, "V100", "needs arch 80 or newer, V100 has 70"),
        (SM80_AND_NEWER, "CPU", "needs platform cuda, CPU has cpu"),
        (SM80_AND_NEWER, "BI-V100", "needs platform cuda, BI-V100 has iluvatar"),
        (Target("cuda", 80, 89), "H200", "needs arch 80 to 89, H200 has 90"),
        (EVERYWHERE, "BI-V100", None),
    ],
)
def test_a_target_refuses_by_platform_and_architecture(target: Target, device: str, refusal: str | None):
    assert target.refusal(DEVICES[device]) == refusal


def test_a_build_refuses_by_target_then_by_region():
    build = Build("sm80", SM80_AND_NEWER, regions.DENSE, tiles="sm80_prefill")
    assert build.refusals(packed(V100, is_uniform=False)) == ("needs arch 80 or newer, V100 has 70",)
    assert build.refusals(packed(A100, is_uniform=False)) == ("needs sequences of one length, the call has ragged ones",)
    assert build.refusals(packed(A100)) == ()


def test_a_build_refuses_where_no_tile_fits():
    call = packed(DEVICES["A10"], dtype="float32", head_dim=1024)
    assert Build("sm80", SM80_AND_NEWER, tiles="sm80_prefill").refusals(call) == (
        "needs 196608 bytes of shared memory for the smallest tile, A10 has 101376",
    )
    assert Build("sm80", SM80_AND_NEWER).refusals(call) == ()


def test_a_cuda_device_takes_an_xla_build_only_by_name():
    build = Build("xla", tiles="xla_prefill")
    assert build.refusals(packed(H200)) == ('serves a CUDA device only when named: build="xla"',)
    assert build.refusals(packed(H200), is_named=True) == ()
    assert build.refusals(packed(CPU)) == ()
    assert build.refusals(packed(DEVICES["BI-V100"])) == ()


def test_a_build_without_a_policy_family_of_that_name_is_refused():
    with pytest.raises(ValueError, match=r"^Build: tiles is 'sm80'; need one of sm80_decode, .*xla_prefill, or None.$"):
        Build("sm80", tiles="sm80")


def test_the_first_build_that_serves_is_used():
    kernel = Kernel("k", ANYTHING, (Build("sm90", SM90_EXACTLY), Build("sm80", SM80_AND_NEWER), Build("xla")))
    used = {name: kernel.build_for(packed(DEVICES[name])) for name in ("H200", "A100-80", "B200", "V100", "CPU")}
    assert {name: build and build.name for name, build in used.items()} == {
        "H200": "sm90",
        "A100-80": "sm80",
        "B200": "sm80",
        "V100": None,
        "CPU": "xla",
    }


def test_a_named_build_is_never_replaced_by_another():
    kernel = Kernel("k", ANYTHING, (Build("sm90", SM90_EXACTLY), Build("xla")))
    assert kernel.refusals(packed(A100), "sm90") == ("sm90 build needs arch 90, A100-80 has 80",)
    assert kernel.refusals(packed(A100), "sm80") == ("has no sm80 build",)
    assert kernel.refusals(packed(A100), "xla") == ()


def test_a_kernel_lists_its_builds_reasons_first_and_then_its_regions():
    kernel = Kernel("k", regions.DENSE, (Build("sm90", SM90_EXACTLY), Build("xla")))
    assert kernel.refusals(packed(A100, is_uniform=False)) == (
        "sm90 build needs arch 90, A100-80 has 80",
        'xla build serves a CUDA device only when named: build="xla"',
        "needs sequences of one length, the call has ragged ones",
    )
    assert Kernel("k", ANYTHING, ()).refusals(packed()) == ("has no builds",)
