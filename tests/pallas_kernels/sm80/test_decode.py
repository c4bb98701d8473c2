"""Decode and paged decode in Pallas' interpreter, against the oracle."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dispatch_core import DEVICES, AttentionCall, Device, Paging, RopeFacts, TileConfig, Window
from pallas_kernels.sm80.decode import decode, launch_plan
from pallas_kernels.sm80.paged import paged_decode
from tests.edge_cases import edge_cases
from tests.inputs import FEATURES, Case, feature_cases, poisoned, random_case
from tests.oracle import inverse_frequencies, per_kv_head
from tests.tolerance import assert_same_bits, check_case

OPS = ("gqa_decode", "gqa_decode_paged")
TILE = TileConfig(16, 16, num_splits=2)
H200, A100 = DEVICES["H200"], DEVICES["A100-80"]


def run(case: Case, tile: TileConfig = TILE, device: Device = H200) -> tuple[Any, ...]:
    """The case through its launch function: results in the order and the shapes of the op."""
    a, rope = dict(case.arrays), case.options.get("rope")
    is_flat = a["q"].ndim == 3
    for name in {"q", "k_new", "v_new"} & a.keys() if is_flat else ():
        a[name] = a[name][:, None]
    batch, tokens, q_heads, head_dim = a["q"].shape
    paged = case.op == "gqa_decode_paged"
    pool = a["k_pages" if paged else "k"]
    paging = Paging(pool.shape[1], a["page_table"].shape[1]) if paged else None
    capacity = paging.capacity if paging else pool.shape[1]
    a["kv_lengths"] = np.clip(a.get("kv_lengths", np.full(batch, capacity)), 0, capacity).astype(np.int32)
    for name in ("k_scale", "v_scale"):
        a[name] = per_kv_head(a.get(name), batch, pool.shape[2])
    if rope is not None:
        a["inv_freq"] = inverse_frequencies(rope, head_dim)
    left, right = case.options.get("window") or (None, None)
    call = AttentionCall(
        device, str(case.dtype), batch, q_heads, pool.shape[2], head_dim, tokens, capacity,
        head_dim_v=a["v_pages" if paged else "v"].shape[3],
        is_causal=True,
        scale=case.options.get("scale"),
        softcap=case.options.get("softcap"),
        window=Window(left, right),
        paging=paging,
        kv_dtype=str(pool.dtype),
        rope=None if rope is None else RopeFacts(2 * len(a["inv_freq"]), 1, rope.style),
        has_sinks="sinks" in a,
        return_lse=True,
    )  # fmt: skip
    names = ["q", "kv_lengths", "k_scale", "v_scale", "sinks"]
    names += ["k_pages", "v_pages", "page_table", "k_new", "v_new", "inv_freq"] if paged else ["k", "v"]
    arrays = {name: None if a.get(name) is None else jnp.asarray(a[name]) for name in names}
    launch: Callable[..., tuple[Any, ...]] = paged_decode if paged else decode
    o, lse, *pools = jax.jit(functools.partial(launch, call, tile, interpret=True))(**arrays)
    if paged and not pools:
        pools = [arrays["k_pages"], arrays["v_pages"]]
    return (o[:, 0], lse[:, 0], *pools) if is_flat else (o, lse, *pools)


def check(case: Case, **how: Any) -> None:
    results = run(case, **how)
    check_case(case, *results[: 2 if "k_new" not in case.arrays else 4])
