"""Rotary position embedding, as a value the paged ops take."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from dispatch_core import ROPE_STYLES, RopeFacts
from jax_ops import checks


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["inv_freq"],
    meta_fields=["theta", "rotary_dim", "max_position", "style"],
)
@dataclass(frozen=True, eq=False)
class Rope:
    """Rotary embedding of queries and new keys at their absolute positions, computed in float32 inside the op.

    The angle of pair i at position p is p * inv_freq[i]. Style "half" pairs dims (i, i + rotary_dim / 2), as NeoX and
    Llama checkpoints in the Hugging Face layout do; "interleaved" pairs (2i, 2i + 1), as GPT-J does. Dims from rotary_dim on
    pass through. Stored keys are the rotated ones. (Su et al., RoFormer, 2021.)

    Attributes:
      theta: base of the default frequencies theta ** (-2i / rotary_dim).
      inv_freq: float32 (rotary_dim / 2,) for scaled variants (Llama 3, YaRN, linear); may be traced. None: from theta.
      rotary_dim: leading dims that are rotated, even; None: head_dim.
      max_position: how many positions the caller allows for, a fact of dispatch; the ops need it. Positions past it are
        computed like any other, since there is no table to run past.
      style: "half" or "interleaved".

    Example:
      >>> Rope(theta=500000.0, max_position=8192).style
      'half'
    """

    theta: float = 10000.0
    inv_freq: Any = None
    rotary_dim: int | None = None
    max_position: int | None = None
    style: str = "half"


def rope_facts(op: str, rope: Rope | None, head_dim: int) -> tuple[RopeFacts | None, dict[str, Any]]:
    """The static facts of a rope and its frequencies as the op's `inv_freq` array; (None, {}) without one."""
    if rope is None:
        return None, {}
    if not isinstance(rope, Rope):
        raise checks.wrong_type(op, "rope", f"is {rope!r}", "a jax_ops.Rope or None")
    fields = {"theta": rope.theta, "rotary_dim": rope.rotary_dim, "max_position": rope.max_position, "style": rope.style}
    checks.check_static(op, {f"rope.{name}": value for name, value in fields.items()})
    max_position = checks.static_length(op, "rope.max_position", rope.max_position)
    if max_position is None:
        raise checks.fail(
            op,
            "rope.max_position",
            "is None",
            "the number of positions to allow for",
            "The cache's capacity per sequence will do.",
        )
    rotary_dim = head_dim if rope.rotary_dim is None else rope.rotary_dim
    if isinstance(rotary_dim, bool) or not isinstance(rotary_dim, (int, np.integer)):
        raise checks.wrong_type(op, "rope.rotary_dim", f"is {rotary_dim!r}", "a Python int or None")
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim:
        raise checks.fail(
            op, "rope.rotary_dim", f"is {rotary_dim}", f"a positive even int of at most head_dim, which is {head_dim}"
        )
    if rope.style not in ROPE_STYLES:
        raise checks.fail(op, "rope.style", f"is {rope.style!r}", f"one of {', '.join(ROPE_STYLES)}")
    facts = RopeFacts(int(rotary_dim), max_position, rope.style)
    return facts, {"inv_freq": _frequencies(op, rope, facts.rotary_dim)}


def _frequencies(op: str, rope: Rope, rotary_dim: int) -> Any:
    if rope.inv_freq is not None:
        inv_freq = rope.inv_freq if checks.is_array(rope.inv_freq) else np.asarray(rope.inv_freq, np.float32)
        if inv_freq.shape != (rotary_dim // 2,):
            raise checks.fail(
                op, "rope.inv_freq", f"has shape {inv_freq.shape}", f"({rotary_dim // 2},), half of rotary_dim {rotary_dim}"
            )
        return inv_freq
    theta = checks.static_number(op, "rope.theta", rope.theta)
    if theta is None or theta <= 0:
        raise checks.fail(op, "rope.theta", f"is {rope.theta!r}", "a positive number")
    return (theta ** (-np.arange(0, rotary_dim, 2) / rotary_dim)).astype(np.float32)
