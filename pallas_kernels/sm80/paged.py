"""Paged decode on Pallas-Triton: the kernel of `decode`, reading through a page table.

A page may hold any number of tokens. Where it holds whole KV tiles, a tile takes one look at the table and is then read
like a contiguous one; elsewhere every key looks up its own page. A key whose page does not exist is masked, and entries
past a sequence's last page are never read.

New tokens reach the kernel as they are, and as the cache stores them; it attends the former and writes the latter to the
pools, in place. XLA only rotates and quantises them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from dispatch_core.calls import FLOAT8, AttentionCall
from dispatch_core.tiling import TileConfig
from pallas_kernels.sm80.decode import Inputs, attend
from pallas_kernels.xla.rope import rotated
from pallas_kernels.xla.spans import last_positions


def paged_decode(
    call: AttentionCall,
    tile: TileConfig,
    *,
    interpret: bool = False,
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    kv_lengths: jax.Array,
    k_new: jax.Array | None,
    v_new: jax.Array | None,
    inv_freq: jax.Array | None,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    sinks: jax.Array | None,
) -> tuple[jax.Array | None, ...]:
    """Attention of the last Tq positions of each sequence, causal among themselves, after appending them if they are new.

    Args:
      call: the facts.
      tile: as for `decode.attend`.
      interpret: run on the host.
      q: (B, Tq, Hq, D).
      k_pages: (P, page, Hkv, D).
      v_pages: (P, page, Hkv, Dv).
      page_table: int32 (B, max_pages).
      kv_lengths: live keys, int32 (B,): before the append if there is one, else with the query tokens;
        clamped to [0, max_pages * page].
      k_new: keys of the query tokens (B, Tq, Hkv, D), or None where the cache holds them.
      v_new: their values (B, Tq, Hkv, Dv), or None.
      inv_freq: float32 (rotary_dim / 2,), or None for no rotation of q and the new keys.
      k_scale: float32 (B, Hkv), or None.
      v_scale: float32 (B, Hkv), or None.
      sinks: float32 (Hq,), or None.

    Returns:
      o (B, Tq, Hq, Dv) in the call's output type, lse float32 (B, Tq, Hq) or None, and with new keys both pools.
    """
    if inv_freq is not None:
        tokens, length = q.shape[1], jnp.clip(kv_lengths, 0, page_table.shape[1] * k_pages.shape[1])
        position = last_positions(length if k_new is None else length + tokens, tokens)
        q = rotated(q, position, inv_freq, call.rope)
        k_new = None if k_new is None else rotated(k_new, position, inv_freq, call.rope)
    k_stored = None if k_new is None else _stored(k_new, k_scale, k_pages.dtype)
    v_stored = None if v_new is None else _stored(v_new, v_scale, v_pages.dtype)
    inputs = Inputs(q, k_pages, v_pages, kv_lengths, page_table, k_new, v_new, k_stored, v_stored, k_scale, v_scale, sinks)
    return attend(call, tile, inputs, interpret=interpret)


def _stored(x: jax.Array, scale: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
    """X (B, Tq, Hkv, D) as a cache of that type holds it."""
    if dtype != FLOAT8:
        return x
    x = x.astype(jnp.float32)
    if scale is not None:
        x = x / lax.broadcast_in_dim(scale, x.shape, (0, 2))
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -largest, largest).astype(dtype)
