"""From the segment ids of a packed batch to the bounds that the packed ops take."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ops import checks

_OP = "segment_ids_to_cu_seqlens"


def segment_ids_to_cu_seqlens(segment_ids: Any, *, max_segments: int) -> jax.Array:
    """The cu_seqlens of packed segments, for `gqa_prefill_packed`.

    The convention is that of packed training batches: the tokens of a segment stand together, ids are non-decreasing from 1,
    and trailing tokens of id 0 (or less) are padding. Sequence i of the result is the segment of id i + 1, so a segment
    without tokens is an empty sequence.

        segment_ids  1 1 1 1 1 3 3 3 0 0        (max_segments=4)
        cu_seqlens   0 5 5 8 8                  rows 8 and 9 are padding: o = 0 there

    Other ids still never join two segments: a new sequence begins wherever the id changes, so an id that is lower than the
    one before it takes the next sequence, and padding before the last segment is a sequence of its own. Sequences past
    max_segments are padding.

    Args:
      segment_ids: integers (T,), or (B, T) for B packed rows; the rows are laid end to end, as `x.reshape(B * T, ...)` lays
        their tokens.
      max_segments: a static bound of the ids (of each row).

    Returns:
      int32 (max_segments + 1,). For (B, T): int32 (B * (max_segments + 1) + 1,), each row's max_segments sequences followed
      by one that holds its padding, whose outputs are to be ignored.

    Raises:
      ValueError: the rank, a max_segments below 1, or an id past max_segments (NumPy ids only, whose values can be read).
      TypeError: ids that are not integers, a max_segments that is not static.

    Example:
      >>> import jax.numpy as jnp
      >>> segment_ids_to_cu_seqlens(jnp.array([1, 1, 1, 1, 1, 3, 3, 3, 0, 0]), max_segments=4).tolist()
      [0, 5, 5, 8, 8]
      >>> segment_ids_to_cu_seqlens(jnp.array([[1, 1, 2, 0], [1, 2, 2, 2]]), max_segments=2).tolist()
      [0, 2, 3, 4, 5, 8, 8]
    """
    checks.check_static(_OP, {"max_segments": max_segments})
    count = checks.static_length(_OP, "max_segments", max_segments)
    if count is None:
        raise checks.wrong_type(_OP, "max_segments", "is None", "a Python int")
    ids = segment_ids if checks.is_array(segment_ids) else np.asarray(segment_ids)
    if ids.ndim not in (1, 2):
        raise checks.fail(_OP, "segment_ids", f"has shape {tuple(ids.shape)}", "2 axes (batch, tokens), or 1 axis (tokens,)")
    if not np.issubdtype(ids.dtype, np.integer):
        raise checks.wrong_type(_OP, "segment_ids", f"has element type {ids.dtype}", "an integer type (int32)")
    if isinstance(ids, np.ndarray) and ids.max(initial=0) > count:
        raise checks.fail(_OP, "segment_ids", f"has the id {ids.max()}", f"ids of at most max_segments, which is {count}")
    if ids.ndim == 1:
        return _bounds(jnp.asarray(ids)[None], count)[0]
    batch, tokens = ids.shape
    starts = _bounds(jnp.asarray(ids), count) + (tokens * jnp.arange(batch, dtype=jnp.int32))[:, None]
    return jnp.append(starts.reshape(-1), jnp.int32(batch * tokens))


@partial(jax.jit, static_argnums=1)
def _bounds(ids: jax.Array, count: int) -> jax.Array:
    """Where each of the sequences 0 to `count` begins in its row (B, T), int32 (B, count + 1)."""
    ids = jnp.clip(ids, 0, count + 1).astype(jnp.int32)
    run = jnp.cumsum(jnp.diff(ids, axis=1, prepend=ids[:, :1]) != 0, axis=1, dtype=jnp.int32)
    number = run + lax.cummax(jnp.maximum(ids - 1 - run, 0), axis=1)
    is_real = lax.cummax(ids, axis=1, reverse=True) > 0
    number = jnp.where(is_real, jnp.minimum(number, count), count)
    sequences = jnp.arange(count + 1, dtype=jnp.int32)
    return jax.vmap(lambda row: jnp.searchsorted(row, sequences))(number).astype(jnp.int32)
