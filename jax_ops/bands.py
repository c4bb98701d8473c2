"""Attention whose visible keys are a band of key index minus query index, counted from the first token of each (top-left).

The kernels count from the last tokens (bottom-right), so a band is converted. Without lengths: keys and rows that meet nothing
are dropped, and the bounds move by the difference of the lengths. With lengths, which are only known at run time: each sequence
is reversed, which turns first tokens into last ones and swaps the bounds.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dispatch_core import Device, Kernel
from jax_ops import checks
from jax_ops.dispatch import run, target
from jax_ops.options import common
from pallas_kernels.xla.masked import masked_attention

logger = logging.getLogger("jax_ops")


class Band(NamedTuple):
    """Which keys a query sees: key index minus query index is at least `low` and at most `high`; None is unbounded."""

    low: int | None = None
    high: int | None = None

    def within(self, low: int | None, high: int | None) -> Band:
        """What this band and another one both show."""
        lows, highs = [x for x in (self.low, low) if x is not None], [x for x in (self.high, high) if x is not None]
        return Band(max(lows, default=None), min(highs, default=None))


@dataclass(frozen=True)
class Rules:
    """The static options of a call, as `gqa_prefill` takes them."""

    op: str
    scale: float | None = None
    softcap: float | None = None
    build: str | None = None
    kernel_map: Mapping[str, Kernel] | None = None
    device: str | Device | None = None
    interpret: bool = False


class Operands(NamedTuple):
    """The arrays of a call, batched: q (B, T, N, H), k (B, S, K, H), v (B, S, K, Hv), lengths (B,) and sinks (N,) or None."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    q_lengths: jax.Array | None = None
    kv_lengths: jax.Array | None = None
    sinks: jax.Array | None = None


def _check_operands(op: str, operands: Operands) -> None:
    """Shapes and element types, under the names the caller knows."""
    q, k, v = operands[:3]
    batch, _, heads, dim = q.shape
    expected = {"key": (k, (batch, k.shape[1], k.shape[2], dim)), "value": (v, (batch, k.shape[1], k.shape[2], v.shape[3]))}
    for name, (x, shape) in expected.items():
        if x.shape != shape:
            like = "key" if name == "value" else "query"
            raise checks.fail(op, name, f"has shape {x.shape}", f"{shape}, to match {like}")
    for name, x in (("query", q), ("key", k), ("value", v)):
        if 0 in x.shape[2:]:
            raise checks.fail(op, name, f"has shape {x.shape}", "at least 1 head and a head size of at least 1")
        if str(x.dtype) not in checks.ACCEPTED_TYPES:
            raise checks.wrong_type(op, name, f"has element type {x.dtype}", f"one of {', '.join(checks.ACCEPTED_TYPES)}")
        if x.dtype != q.dtype:
            raise checks.wrong_type(op, name, f"has element type {x.dtype}", f"{q.dtype}, as query has")
    if heads % k.shape[2]:
        raise checks.fail(op, "query", f"has {heads} heads", f"a multiple of the {k.shape[2]} heads of key")
    lengths = {"query_seq_lengths": operands.q_lengths, "key_value_seq_lengths": operands.kv_lengths}
    for name, x in lengths.items():
        if x is not None and x.shape != (batch,):
            raise checks.fail(op, name, f"has shape {x.shape}", f"({batch},), one entry a sequence")
        if x is not None and not np.issubdtype(x.dtype, np.integer):
            raise checks.wrong_type(op, name, f"has element type {x.dtype}", "an integer type (int32)")
    if operands.sinks is not None and operands.sinks.shape != (heads,):
        raise checks.fail(op, "sinks", f"has shape {operands.sinks.shape}", f"({heads},), one per query head")


def attend(
    rules: Rules, operands: Operands, band: Band, bias: Any, mask: Any, return_lse: bool
) -> tuple[jax.Array, jax.Array | None]:
    """Attention of the queries to the keys in a band.

    Args:
      rules: the static options.
      operands: the arrays; checked here, under the names of the public arguments.
      band: what each query sees. With lengths it must hold the diagonal.
      bias: added to the scores, broadcastable to (B, N, T, S), or None.
      mask: bool, likewise, or None. XLA computes a call with a mask or a bias.
      return_lse: whether the lse is wanted.

    Returns:
      o (B, T, N, Hv) and lse float32 (B, T, N); the lse may be None unless wanted.
    """
    _check_operands(rules.op, operands)
    if bias is not None or mask is not None:
        return _attend_masked(rules, operands, band, bias, mask)
    if operands.q_lengths is None and operands.kv_lengths is None:
        return _attend_band(rules, operands, band, return_lse)
    if band == Band():
        return _prefill(rules, operands, None, None, return_lse)
    return _attend_reversed(rules, operands, band, return_lse)


def _prefill(
    rules: Rules, operands: Operands, left: int | None, right: int | None, return_lse: bool
) -> tuple[jax.Array, jax.Array | None]:
    """`gqa_prefill` with a window, in its alignment; a right bound of 0 is a causal mask."""
    arrays = {name: x for name, x in operands._asdict().items() if x is not None}
    has_window = left is not None or right not in (None, 0)
    invocation = common(
        rules.op,
        "prefill",
        arrays,
        is_uniform=operands.q_lengths is None and operands.kv_lengths is None,
        is_causal=right == 0,
        window=(left, None if right == 0 else right) if has_window else None,
        return_lse=return_lse,
        scale=rules.scale,
        softcap=rules.softcap,
        build=rules.build,
        kernel_map=rules.kernel_map,
        device=rules.device,
        interpret=rules.interpret,
    )
    return run(invocation) if return_lse else (run(invocation), None)


def _attend_band(rules: Rules, operands: Operands, band: Band, return_lse: bool) -> tuple[jax.Array, jax.Array | None]:
    """A band over sequences without lengths.

    Keys past the last one that any query sees are dropped, then queries past the last one that sees any key; after that the
    bounds, counted from the last tokens, are 0 or more.
    """
    q, k, v = operands[:3]
    tokens, low, high = q.shape[1], band.low, band.high
    keys = k.shape[1] if high is None else max(0, min(k.shape[1], tokens + high))
    rows = tokens if low is None else max(0, min(tokens, keys - low))
    if low is not None and high is not None and high < low:
        rows = 0
    if rows == 0 or (keys == 0 and k.shape[1] > 0):
        return _rows_past(operands, 0)
    offset = keys - rows
    seen = operands._replace(q=q[:, :rows], k=k[:, :keys], v=v[:, :keys])
    left, right = (None if low is None else offset - low), (None if high is None else high - offset)
    o, lse = _prefill(rules, seen, left, right, return_lse)
    if rows < tokens:
        more_o, more_lse = _rows_past(operands, rows)
        o = jnp.concatenate([o, more_o], axis=1)
        lse = None if lse is None else jnp.concatenate([lse, more_lse], axis=1)
    return o, lse


def _rows_past(operands: Operands, first: int) -> tuple[jax.Array, jax.Array]:
    """The results of rows from `first` on, which see no key."""
    q, sinks = operands.q[:, first:], operands.sinks
    empty = jnp.full(1, -jnp.inf) if sinks is None else sinks.astype(jnp.float32)
    o = jnp.zeros((*q.shape[:3], operands.v.shape[-1]), q.dtype)
    return o, jnp.broadcast_to(empty[None, None], q.shape[:3])


def _attend_reversed(rules: Rules, operands: Operands, band: Band, return_lse: bool) -> tuple[jax.Array, jax.Array | None]:
    """A band, with the diagonal in it, over sequences with lengths: reversed, it is a window with its bounds swapped."""
    q_lengths, kv_lengths = operands.q_lengths, operands.kv_lengths
    q, k, v = operands[:3]
    reverse = operands._replace(q=_reversed(q, q_lengths), k=_reversed(k, kv_lengths), v=_reversed(v, kv_lengths))
    o, lse = _prefill(rules, reverse, band.high, None if band.low is None else -band.low, return_lse)
    return _reversed(o, q_lengths), None if lse is None else _reversed(lse, q_lengths)


@jax.jit
def _reversed(x: jax.Array, lengths: jax.Array | None) -> jax.Array:
    """X (B, S, ...) with the first `lengths` rows of each sequence in reverse order; its own inverse."""
    if lengths is None:
        return jnp.flip(x, axis=1)
    size = x.shape[1]
    last = jnp.clip(lengths, 0, size).astype(jnp.int32) - 1
    order = (last[:, None] - jnp.arange(size, dtype=jnp.int32)[None]) % max(size, 1)
    take = lambda rows, i: rows.at[i].get(unique_indices=True, mode="promise_in_bounds")  # noqa: E731
    return jax.vmap(take)(x, order)


def _attend_masked(rules: Rules, operands: Operands, band: Band, bias: Any, mask: Any) -> tuple[jax.Array, jax.Array]:
    """A call with a mask or a bias, by XLA."""
    q, k = operands[:2]
    scores = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    given = {name: _score_array(rules.op, name, x, scores) for name, x in (("bias", bias), ("mask", mask)) if x is not None}
    _check_masked(rules, operands, " and a ".join(given))
    scale = checks.static_number(rules.op, "scale", rules.scale)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    softcap = checks.static_softcap(rules.op, rules.softcap)
    _log_masked(rules.op, scores, " and a ".join(given))
    return _masked(band, scale, softcap, operands, given.get("bias"), given.get("mask"))


@partial(jax.jit, static_argnums=(0, 1, 2))
def _masked(
    band: Band, scale: float, softcap: float | None, operands: Operands, bias: jax.Array | None, mask: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """`masked_attention` with band and lengths in the mask, and zeros for what lies past the lengths."""
    q, k, v = operands[:3]
    i, j = jnp.arange(q.shape[1], dtype=jnp.int32), jnp.arange(k.shape[1], dtype=jnp.int32)
    seen = [] if mask is None else [mask]
    between = (j[None, :] - i[:, None])[None, None]
    if band.low is not None:
        seen.append(between >= band.low)
    if band.high is not None:
        seen.append(between <= band.high)
    if operands.q_lengths is not None:
        real = i[None] < operands.q_lengths[:, None]
        q = jnp.where(real[..., None, None], q, 0)
        seen.append(real[:, None, :, None])
    if operands.kv_lengths is not None:
        real = j[None] < operands.kv_lengths[:, None]
        k, v = (jnp.where(real[..., None, None], x, 0) for x in (k, v))
        seen.append(real[:, None, None, :])
    mask = reduce(jnp.logical_and, seen) if seen else None
    return masked_attention(q, k, v, mask=mask, bias=bias, sinks=operands.sinks, scale=scale, softcap=softcap)


def _score_array(op: str, name: str, x: Any, scores: tuple[int, ...]) -> jax.Array:
    """A mask or bias with 4 axes, each that of the scores or 1."""
    x = jnp.asarray(x)
    rule = f"broadcastable to {scores}, (batch, heads, queries, keys)"
    if x.ndim > 4 or any(n not in (1, full) for n, full in zip(x.shape[::-1], scores[::-1], strict=False)):
        raise checks.fail(op, name, f"has shape {x.shape}", rule)
    if name == "mask" and x.dtype != bool:
        raise checks.wrong_type(
            op, name, f"has element type {x.dtype}", "bool", "Pass what is to be added to the scores as bias."
        )
    if name == "bias" and not jnp.issubdtype(x.dtype, jnp.floating):
        raise checks.wrong_type(op, name, f"has element type {x.dtype}", "a float type")
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


def _check_masked(rules: Rules, operands: Operands, given: str) -> None:
    """Options that ask for what only kernels can do."""
    remedy = "A causal mask, a window and padding have arguments of their own, which kernels serve."
    if rules.build not in (None, "xla"):
        raise checks.fail(
            rules.op, "build", f"is {rules.build!r} with a {given}", "None or 'xla', which alone serves it", remedy
        )
    if rules.kernel_map:
        raise checks.fail(
            rules.op, "kernel_map", f"is given with a {given}", "None: no kernel is asked for such a call", remedy
        )
    if target(rules.op, rules.device, rules.interpret, {"q": operands.q})["interpret"]:
        raise checks.fail(rules.op, "interpret", f"is True with a {given}", "False: no kernel serves such a call", remedy)


@lru_cache(maxsize=1024)
def _log_masked(op: str, scores: tuple[int, ...], given: str) -> None:
    logger.info("%s: XLA serves the call with a %s, and holds its scores %s in float32", op, given, scores)
