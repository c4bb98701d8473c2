"""The derivative of every op: the prefill ops have one, through XLA; the cache ops say which op to use instead.

The backward pass recomputes the probabilities tile by tile from the saved log-sum-exp, so its memory is linear in length
(Dao et al., FlashAttention, 2022), whichever build ran forward. `o` and `lse` carry checkpoint names, so that remat
policies can save them: `jax.checkpoint_policies.save_only_these_names("attention_out", "attention_lse")`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dispatch_core import DEVICES, FLOAT8, TileConfig, fitting_tile
from jax_ops.request import Arrays, Request, facts
from jax_ops.signature import SIGNATURES
from jax_ops.transforms import transformable
from pallas_kernels.xla.prefill import dense_prefill_vjp, packed_prefill_vjp

OUT_NAME, LSE_NAME = "attention_out", "attention_lse"
_BACKWARD = {"prefill": dense_prefill_vjp, "prefill_packed": packed_prefill_vjp}


def differentiable(
    run: Callable[..., tuple[jax.Array, ...]],
    request: Request,
    names: tuple[str, ...],
    forward: Callable[[], Callable[..., tuple[jax.Array, ...]]],
) -> Callable[..., tuple[jax.Array, ...]]:
    """`run` with a reverse-mode derivative, or with an error that names the differentiable op.

    Args:
      run: the op on positional arrays.
      request: its static half.
      names: the arrays' names.
      forward: gives the same op with the lse returned, which the backward pass needs.
    """

    @jax.custom_vjp
    def primal(*arrays: Any) -> tuple[jax.Array, ...]:
        return run(*arrays)

    def forwards(*arrays: Any) -> Any:
        _check_differentiable(request, dict(zip(names, arrays, strict=True)))
        o, lse = forward()(*arrays)
        o, lse = checkpoint_name(o, OUT_NAME), checkpoint_name(lse, LSE_NAME)
        return ((o, lse) if request.return_lse else (o,)), (arrays, o, lse)

    def backwards(saved: Any, cotangents: tuple[jax.Array, ...]) -> tuple[Any, ...]:
        values, o, lse = saved
        arrays = dict(zip(names, values, strict=True))
        do = cotangents[0]
        dlse = cotangents[1] if request.return_lse else jnp.zeros_like(lse)
        return _pull_back(request, arrays, o, lse, do, dlse)

    primal.defvjp(forwards, backwards)
    return primal


def _check_differentiable(request: Request, arrays: Arrays) -> None:
    if request.slot not in _BACKWARD:
        raise TypeError(
            f"{request.op}: has no derivative, and one was asked for; need an op that has (gqa_prefill, gqa_prefill_packed). "
            f"Stop the gradient with jax.lax.stop_gradient, or attend with one of those."
        )
    if str(arrays["q"].dtype) == FLOAT8:
        raise TypeError(
            f"{request.op}: q has element type {FLOAT8}, which has no derivative; need 16-bit or float32 inputs. "
            "Attend to the dequantised arrays to train."
        )


def _pull_back(request: Request, arrays: Arrays, o: Any, lse: Any, do: Any, dlse: Any) -> tuple[Any, ...]:
    gradient = dict(zip("qkv", _backward(request, tuple(arrays))(*arrays.values(), o, lse, do, dlse), strict=True))
    if "sinks" in arrays:
        gradient["sinks"] = _sink_cotangent(arrays["sinks"], o, lse, do, dlse)
    return tuple(gradient.get(name) for name in arrays)


@lru_cache(maxsize=1024)
def _backward(request: Request, names: tuple[str, ...]) -> Callable[..., tuple[jax.Array, ...]]:
    """The pull-back to q, k and v as a function that vmap and the partitioner can divide like the op itself."""
    signature = SIGNATURES[request.slot].backward()
    saved = ("o", "lse", "do", "dlse")

    def launch(*values: Any) -> tuple[jax.Array, ...]:
        arrays = dict(zip((*names, *saved), values, strict=True))
        last = [arrays.pop(name) for name in saved]
        call = facts(replace(request, return_lse=True), arrays, DEVICES["CPU"])
        tile = fitting_tile(call, "xla_prefill")
        assert isinstance(tile, TileConfig), tile
        every = {name: arrays.get(name) for name in SIGNATURES[request.slot].inputs}
        gradient = _BACKWARD[request.slot](call, tile, every, *last)
        return tuple(gradient[name] for name in signature.outputs)

    return transformable(launch, signature, (*names, *saved), tuple(signature.outputs))


def _sink_cotangent(sinks: jax.Array, o: jax.Array, lse: jax.Array, do: jax.Array, dlse: jax.Array) -> jax.Array:
    """The sink's probability exp(sink - lse) shrinks o in proportion and joins the lse; summed over every row of the head."""
    probability = jnp.where(lse > -jnp.inf, jnp.exp(jnp.broadcast_to(sinks, lse.shape) - lse), 0.0)
    of_output = jnp.sum(o.astype(jnp.float32) * do.astype(jnp.float32), axis=-1)
    return jnp.sum(probability * (dlse - of_output), axis=tuple(range(lse.ndim - 1)))
