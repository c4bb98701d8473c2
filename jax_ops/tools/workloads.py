"""The workloads that the benchmark times and the tests check: one list for both.

The rows are those of the project's performance record: causal and full prefill from launch-bound to throttled, chunks,
windows, uneven packs, and decode from one sequence to batches past every cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_ops
from dispatch_core import FLOAT8, Device, Window, matrix_rate, visible_pairs

ROTATED_BYTES = 8 * 60 * 2**20  # input sets of a decode row rotate through this much, eight times an H200's L2
OPS = ("prefill", "prefill_packed", "decode", "decode_paged", "prefill_paged")


@dataclass(frozen=True)
class Workload:
    """One call, by its facts.

    Attributes:
      name: the row's name.
      op: one of `OPS`.
      batch, q_len, kv_len: sequences, query tokens and keys of each (the longest, where they are uneven).
      q_heads, kv_heads, head_dim: sizes.
      dtype: element type of q, and of k and v but for an FP8 cache.
      is_causal, window: the mask.
      lengths: keys of each sequence where they are uneven; () otherwise.
      chunks: query tokens of each sequence where those of a paged prefill are uneven; () otherwise.
      page_size: tokens per page of a paged cache.
      kv_dtype: element type of the cache; None: dtype.
    """

    name: str
    op: str
    batch: int
    q_len: int
    kv_len: int
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"
    is_causal: bool = True
    window: tuple[int | None, int | None] | None = None
    lengths: tuple[int, ...] = ()
    chunks: tuple[int, ...] = ()
    page_size: int = 0
    kv_dtype: str | None = None

    @property
    def is_decode(self) -> bool:
        """Whether memory, not arithmetic, is the limit."""
        return self.op in ("decode", "decode_paged")

    @property
    def kv_lengths(self) -> tuple[int, ...]:
        """Keys of each sequence."""
        return self.lengths or (self.kv_len,) * self.batch

    @property
    def q_lengths(self) -> tuple[int, ...]:
        """Query tokens of each sequence; a packed sequence attends to itself."""
        if self.op == "prefill_packed" and self.lengths:
            return self.kv_lengths
        return self.chunks or (self.q_len,) * self.batch

    @property
    def flops(self) -> int:
        """Operations of both matrix products over the visible pairs."""
        window = None if self.window is None else Window(*self.window)
        lengths = zip(self.q_lengths, self.kv_lengths, strict=True)
        pairs = sum(visible_pairs(q, kv, self.is_causal, window) for q, kv in lengths)
        return 4 * self.head_dim * self.q_heads * pairs

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values that are attended."""
        width = jnp.dtype(self.kv_dtype or self.dtype).itemsize
        return 2 * sum(self.kv_lengths) * self.kv_heads * self.head_dim * width

    def roofline_seconds(self, device: Device) -> float:
        """The least time for the live work: its FLOPs at the matrix rate, or K and V at the bandwidth."""
        rate = matrix_rate(device, self.dtype)
        return max(0.0 if rate is None else self.flops / rate, self.kv_bytes / device.memory_bandwidth)

    def arrays(self, seed: int) -> dict[str, jax.Array]:
        """Random normal inputs by argument name; every page used once, in shuffled order."""
        q_tokens, kv_tokens = sum(self.q_lengths), sum(self.kv_lengths)
        queries, keys = (self.q_heads, self.head_dim), (self.kv_heads, self.head_dim)
        kv_dtype = self.kv_dtype or self.dtype
        if self.op == "prefill_packed":
            bounds = {"cu_seqlens_q": _bounds(self.q_lengths), "cu_seqlens_kv": _bounds(self.kv_lengths)}
            floats = {"q": (q_tokens, *queries), "k": (kv_tokens, *keys), "v": (kv_tokens, *keys)}
            return _normal(seed, floats, self.dtype) | bounds
        if not self.page_size:
            kv: dict[str, tuple[int, ...]] = dict.fromkeys(("k", "v"), (self.batch, self.kv_len, *keys))
            q = (self.batch, *queries) if self.is_decode else (self.batch, self.q_len, *queries)
            return _normal(seed, {"q": q}, self.dtype) | _normal(seed + 1, kv, kv_dtype)
        table, pages = _page_table(self.kv_lengths, self.page_size, seed)
        pools = _normal(seed, dict.fromkeys(("k_pages", "v_pages"), (pages, self.page_size, *keys)), kv_dtype)
        if self.op == "decode_paged":
            lengths = {"kv_lengths": jnp.asarray(self.kv_lengths, jnp.int32)}
            return _normal(seed + 1, {"q": (self.batch, *queries)}, self.dtype) | pools | {"page_table": table} | lengths
        chunk = {"q": (q_tokens, *queries), "k": (q_tokens, *keys), "v": (q_tokens, *keys)}
        cached = jnp.asarray(self.kv_lengths, jnp.int32) - jnp.asarray(self.q_lengths, jnp.int32)
        rows = {"page_table": table, "cu_seqlens_q": _bounds(self.q_lengths), "cache_lengths": cached}
        return _normal(seed + 1, chunk, self.dtype) | pools | rows

    def input_sets(self) -> list[dict[str, jax.Array]]:
        """Inputs to rotate among, so that no decode row finds its cache in L2."""
        count = max(2, min(16, -(-ROTATED_BYTES // self.kv_bytes))) if self.is_decode else 1
        return [self.arrays(1000 * i) for i in range(count)]

    def call(self, arrays: dict[str, Any], **options: Any) -> Any:
        """Runs the public op on the arrays and returns o (an append keeps its pools to itself)."""
        if not self.is_decode:
            options["is_causal"] = self.is_causal
        if self.op == "prefill_packed":
            options |= {"max_seqlen_q": max(self.q_lengths), "max_seqlen_kv": max(self.kv_lengths)}
        if self.op == "prefill_paged":
            options["max_seqlen_q"] = max(self.q_lengths)
        result = getattr(jax_ops, f"gqa_{self.op}")(**arrays, window=self.window, **options)
        return result[0] if isinstance(result, tuple) else result


def _normal(seed: int, shapes: dict[str, tuple[int, ...]], dtype: str) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    drawn_in = jnp.bfloat16 if dtype == FLOAT8 else dtype
    draw = jax.jit(jax.random.normal, static_argnums=(1, 2))
    return {n: draw(key, shape, drawn_in).astype(dtype) for key, (n, shape) in zip(keys, shapes.items(), strict=True)}


def _bounds(lengths: tuple[int, ...]) -> jax.Array:
    return jnp.asarray(np.concatenate([[0], np.cumsum(lengths)]), jnp.int32)


def _page_table(lengths: tuple[int, ...], page_size: int, seed: int) -> tuple[jax.Array, int]:
    """(table (B, max_pages), number of pages); entries beyond a sequence's last page are -1."""
    need = [-(-n // page_size) for n in lengths]
    order = np.random.default_rng(seed).permutation(sum(need))
    table = np.full((len(need), max(need)), -1, np.int32)
    for row, (start, count) in enumerate(zip(np.cumsum([0, *need]), need, strict=False)):
        table[row, :count] = order[start : start + count]
    return jnp.asarray(table), sum(need)


def _uneven(count: int, low: int, high: int, seed: int) -> tuple[int, ...]:
    return tuple(int(n) for n in np.random.RandomState(seed).randint(low, high + 1, size=count))


def _causal(batch: int, length: int, **changes: Any) -> Workload:
    return Workload(changes.pop("name", f"causal {batch}x{length}"), "prefill", batch, length, length, **changes)


def _full(batch: int, length: int, **changes: Any) -> Workload:
    return Workload(changes.pop("name", f"full {batch}x{length}"), "prefill", batch, length, length, is_causal=False, **changes)


def _decode(batch: int, length: int, **changes: Any) -> Workload:
    return Workload(changes.pop("name", f"decode {batch}x{length}"), "decode", batch, 1, length, **changes)


def _paged(name: str, lengths: tuple[int, ...], page_size: int, **changes: Any) -> Workload:
    longest = max(lengths)
    return Workload(name, "decode_paged", len(lengths), 1, longest, lengths=lengths, page_size=page_size, **changes)


_PACK = (4321, 700, 2600, 129, 3334, 1100, 200, 4000)
_RAGGED_32, _RAGGED_128 = _uneven(32, 1024, 8192, 1), _uneven(128, 1024, 8192, 2)
_APPEND, _UNEVEN_CHUNKS = (4608, 6144, 7168, 8704), (1500, 37, 1, 510)


def _append(name: str, q_len: int, lengths: tuple[int, ...], page_size: int, **changes: Any) -> Workload:
    name = f"append {name}, page {page_size}{', FP8 cache' if 'kv_dtype' in changes else ''}"
    return Workload(name, "prefill_paged", len(lengths), q_len, max(lengths), lengths=lengths, page_size=page_size, **changes)


WORKLOADS: tuple[Workload, ...] = (
    *(_causal(b, s) for b, s in ((4, 512), (8, 1024), (4, 2048), (2, 4096), (1, 16384))),
    _full(2, 4096),
    _full(1, 16384),
    Workload("chunk 2x512 of 4096", "prefill", 2, 512, 4096),
    _causal(2, 4096, name="head_dim 64 causal 2x4096", head_dim=64),
    _causal(1, 8192, name="head_dim 256 causal 1x8192, 16/4", head_dim=256, q_heads=16, kv_heads=4),
    _causal(1, 16384, name="window 1024 causal 1x16384", window=(1023, 0)),
    Workload("packed causal, 8 uneven", "prefill_packed", 8, max(_PACK), max(_PACK), lengths=_PACK),
    _causal(2, 4096, name="float16 causal 2x4096", dtype="float16"),
    _full(1, 16384, name="FP8 full 1x16384", dtype=FLOAT8),
    _causal(1, 16384, name="FP8 causal 1x16384", dtype=FLOAT8),
    *(_decode(1, s, name=f"decode 1x{s}, 32/4 float16", kv_heads=4, dtype="float16") for s in (8192, 32768, 131072)),
    *(_decode(b, s) for b, s in ((1, 8192), (1, 131072), (8, 8192), (32, 8192), (128, 8192))),
    _decode(32, 8192, name="decode 32x8192, head_dim 64", head_dim=64),
    _paged("paged 32 ragged, page 16", _RAGGED_32, 16),
    _paged("paged 32 ragged, page 64", _RAGGED_32, 64),
    _paged("paged 128 ragged, page 64", _RAGGED_128, 64),
    _paged("paged 1x32768, page 64", (32768,), 64),
    _paged("paged 32 ragged, page 64, FP8 cache", _RAGGED_32, 64, kv_dtype=FLOAT8),
    *(_append("4x512 to 4K..8K", 512, _APPEND, page) for page in (64, 16)),
    _append("4x512 to 4K..8K", 512, _APPEND, 64, kv_dtype=FLOAT8),
    _append("uneven chunks to 4K..8K", max(_UNEVEN_CHUNKS), _APPEND, 64, chunks=_UNEVEN_CHUNKS),
    _append("1x2048 to 32K", 2048, (32768 + 2048,), 64),
    Workload("chunk 1x2048 of 34K", "prefill", 1, 2048, 32768 + 2048),  # the same pairs without pages
)
