"""What the Mosaic GPU kernels share: the online softmax of a warpgroup's rows, and tiles of keys with holes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm, vector

from dispatch_core.calls import AttentionCall
from pallas_kernels.common import softmax

Array = jax.Array
WGMMA = plgpu.Layout.WGMMA
ROWS = 64  # of a warpgroup's products
OCTET = 8  # rows of swizzled memory that belong together
# Where top * scale passes 2**29, exp2 of a rounded product minus another is no longer near 1 at the maximum itself, and
# overflows from 2**31 on. Scores that differ at all still differ by 2**5 or more: their weights are 0 and 1 either way.
STEEPEST = 127 + 28  # as float32 stores the exponent
REGISTERS = 65536 // 128  # of a multiprocessor, by the threads of a warpgroup
LAG = 8.0  # of a row's base behind its maximum, in powers of two: weights stay below 2**8, and the sums are seldom rescaled


def registers(consumers: int, producer: int) -> tuple[int, int]:
    """A thread's, of a consumer and of a producer that needs so many: by what a launch is given."""
    threads = consumers + 1
    everyone = REGISTERS // threads // 8 * 8 * threads
    consumer = min(240, (everyone - producer) // consumers // 8 * 8)
    return consumer, min(40, everyone - consumer * consumers)


def by_row(x: Array, like: Array) -> Array:
    """One value per row, over the shape of a block."""
    return lax.broadcast_in_dim(x, like.shape, [0])


def tile_width(columns: int) -> int:
    """Elements of a swizzled row: the widest swizzle that divides the columns."""
    return 64 if columns % 64 == 0 else 32


def keep_rows(v: Any, begin: Array, end: Array, pages: Array | None, piece: int) -> None:
    """Zeroes a tile's rows outside [begin, end) or of no page: what lies there may be NaN, and 0 * NaN is NaN."""
    rows, columns = v.shape
    width = tile_width(columns)
    for row in range(0, rows, ROWS):
        for column in range(0, columns, width):
            block = v.at[pl.ds(row, ROWS), pl.ds(column, width)]
            x = plgpu.layout_cast(block[...], WGMMA)
            number = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=WGMMA) + row
            is_kept = (number >= begin) & (number < end)
            if pages is not None:
                is_kept = is_kept & is_paged(number, pages, piece)
            block[...] = jnp.where(is_kept, x, jnp.zeros_like(x))


def is_paged(key: Array, pages: Array, piece: int) -> Array:
    """Which keys of a KV tile have a page that exists."""
    page = lax.div(key, jnp.full_like(key, piece))
    return lax.shift_right_logical(jnp.full_like(key, pages), page) & 1 == 1


def score_scale(call: AttentionCall) -> float:
    """What turns `scored` products into scores in base 2."""
    return 1.0 if call.softcap is not None else abs(call.softmax_scale) * softmax.LOG2_E or 1.0


def scored(call: AttentionCall, dots: Array) -> Array:
    """Capped scores, short of a positive factor where there is no cap."""
    if call.softcap is not None:
        bound, rate = call.softcap * softmax.LOG2_E, call.softmax_scale * 2.0 * softmax.LOG2_E / call.softcap
        grown = jnp.exp2(jnp.minimum(dots * rate, 126.0))
        return bound * ((grown - 1.0) / (grown + 1.0))
    if call.softmax_scale <= 0:
        return dots * (-1.0 if call.softmax_scale < 0 else 0.0)
    return dots


def weighed(scale: float, scores: Array, top: Array, total: Array, is_edge: bool) -> tuple[Array, Array, Array, Array]:
    """Weights of a tile, what the sums so far are to be multiplied by, and the new top and total."""
    seen = jnp.max(by_octet(jnp.maximum, scores), axis=1)
    new_top = jnp.where(seen > top + min(LAG / scale, 2.0**100), seen, top)
    base = softmax.finite_base(new_top) if is_edge else new_top
    rate = _gentle(scale, base)
    p = jnp.exp2(scores * by_row(rate, scores) - by_row(base * rate, scores))
    kept = jnp.exp2((top - base) * rate)
    return p, kept, new_top, by_octet(jnp.add, p, total * by_row(kept, total))


def _gentle(scale: float, base: Array) -> Array:
    """The scale, or for a row with base * scale past 2**29 in magnitude as many powers of two less as it is past."""
    exponent = (
        lax.shift_right_logical(lax.bitcast_convert_type(base * scale, jnp.int32), jnp.full(base.shape, 23, jnp.int32)) & 255
    )
    excess = jnp.maximum(exponent - STEEPEST, 0)
    return lax.bitcast_convert_type(int(np.float32(scale).view(np.int32)) - excess * 2**23, jnp.float32)


def by_octet(combine: Callable[[Array, Array], Array], x: Array, start: Array | None = None) -> Array:
    """Every eighth column combined, in the order in which the columns are worked out: one thread's stay its own."""
    octets = [x[:, i : i + OCTET] for i in range(0, x.shape[1], OCTET)]
    return functools.reduce(combine, octets if start is None else [start, *octets])


def rescaled(interpret: bool, sums: Array, kept: Array) -> Array:
    """The sums times what is kept of them; a warp in which that is all of every row saves itself the products."""
    if interpret:
        return sums * by_row(kept, sums)
    return lax.cond(_differs_in_warp(kept), lambda x: x * by_row(kept, x), lambda x: x, sums)


def _differs_in_warp(kept: Array) -> Array:
    """Whether a row of this thread's warp has a factor other than 1."""

    def vote(_: Any, kept: Any) -> Any:
        f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
        factors = [vector.extract(x, dynamic_position=[], static_position=[0]) for x in kept.registers.flat]
        one, everyone = arith.constant(f32, ir.FloatAttr.get(f32, 1.0)), arith.constant(i32, ir.IntegerAttr.get(i32, -1))
        differs = functools.reduce(arith.ori, [arith.cmpf(arith.CmpFPredicate.UNE, x, one) for x in factors])
        return mgpu.FragmentedArray.splat(nvvm.vote_sync(everyone, differs, "any"), (), is_signed=False)

    answer = plgpu.ShapeDtypeStruct((), np.dtype(bool), layout=plgpu.Layout.WG_SPLAT(()))
    inlined: Any = plgpu.inline_mgpu(arg_types=(WGMMA.reduce(1),), return_type=answer)(vote)
    return inlined(kept)


def settled(interpret: bool, *arrays: Array) -> tuple[Array, ...]:
    """The arrays, computed before any product that follows: what is left of them would hold it up."""
    return arrays if interpret else tuple(lax.optimization_barrier(arrays))


def accumulated(interpret: bool, sums: Array, o_ref: Any, p: Array, v: Any) -> Any:
    """Begins sums + p v, and returns what awaits it. The interpreter knows neither products of values nor set accumulators."""
    if interpret:

        def multiplied() -> Array:
            result = sums + jnp.dot(p, v[...], preferred_element_type=jnp.float32)
            plgpu.commit_smem()  # a product reads as TMA writes; this read does not
            return result

        return multiplied
    o_ref[...] = sums
    plgpu.wgmma(o_ref, p, v)
    return lambda: settled(interpret, o_ref[...])[0]
