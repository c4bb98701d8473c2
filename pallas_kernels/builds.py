"""The launch function behind a build of a key: the only place that knows the catalogue and the kernels.

Modules are imported when one of their builds is first launched, so that a machine without a GPU never loads Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import Any

from dispatch_core import SLOTS, AttentionCall, Build, TileConfig

Launch = Callable[..., tuple[Any, ...]]

_MODULES = {
    "prefill": {"xla": "xla.prefill", "sm80": "sm80.prefill", "sm90": "sm90.prefill"},
    "decode": {"xla": "xla.decode", "sm80": "sm80.decode", "sm90": "sm90.decode"},
    "decode_paged": {"xla": "xla.paged", "sm80": "sm80.paged", "sm90": "sm90.decode"},
    "prefill_paged": {"xla": "xla.paged", "sm80": "sm80.paged_prefill", "sm90": "sm90.prefill"},
    "append_paged": {"xla": "xla.paged", "sm80": "sm80.append"},
}
_FUNCTIONS = {"decode": "decode", "decode_paged": "paged_decode", "prefill_paged": "paged_prefill", "append_paged": "append"}


@lru_cache(maxsize=256)
def launch_function(key: str, build: Build) -> Launch:
    """launch(call, tile, **arrays) -> results, for a shipped build of a dispatch key.

    A build is named after its target. Which kernel it is, the family of its tiles says: the sm90 builds of the batch-1 decode
    keys have tiles of Triton's.
    """
    kind = (build.tiles or build.name).split("_")[0]
    if key in SLOTS["prefill"]:
        module = import_module(f"pallas_kernels.{_MODULES['prefill'][kind]}")
        return _prefill(module.dense_prefill, module.packed_prefill)
    slot = next(slot for slot in _FUNCTIONS if key in SLOTS[slot])
    return getattr(import_module(f"pallas_kernels.{_MODULES[slot][kind]}"), _FUNCTIONS[slot])


def _prefill(dense: Launch, packed: Launch) -> Launch:
    """The prefill keys serve both layouts; sequences packed with one length are a dense batch by reshape."""

    def launch(call: AttentionCall, tile: TileConfig, *, q: Any, k: Any, v: Any, **arrays: Any) -> tuple[Any, ...]:
        if "cu_seqlens_q" not in arrays:
            return dense(call, tile, q=q, k=k, v=v, **arrays)
        if not call.is_uniform:
            return packed(call, tile, q=q, k=k, v=v, **arrays)
        rows = {name: arrays[name] for name in arrays if not name.startswith("cu_seqlens")}
        split = {name: a.reshape(call.batch, -1, *a.shape[1:]) for name, a in (("q", q), ("k", k), ("v", v))}
        o, lse = dense(call, tile, **split, q_lengths=None, kv_lengths=None, **rows)
        join = lambda a: None if a is None else a.reshape(-1, *a.shape[2:])  # noqa: E731
        return join(o), join(lse)

    return launch
