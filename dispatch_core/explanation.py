"""Why a call lands where it does: the chosen kernel with its plan, and every other candidate with its reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from dispatch_core.calls import AttentionCall
from dispatch_core.costs import Cost, append_roofline, roofline
from dispatch_core.kernels import APPEND_PAGED_KEYS, CATALOGUE, PAGED_PREFILL_EXTENDED_KEYS, Kernel
from dispatch_core.selection import (
    AmbiguousDispatchError,
    Choice,
    NoImplementationError,
    ReplacementRefusedError,
    candidates,
    choose,
)
from dispatch_core.splitting import SplitPlan
from dispatch_core.tiling import TileConfig, select_split_plan, select_tile_config


@dataclass(frozen=True)
class Explanation:
    """The outcome of one selection. Prints as an aligned table.

    Attributes:
      call: the facts.
      key: the chosen key, or None when the call is refused.
      build: the chosen build's name.
      reason: why this key, or the refusing error's text.
      tile: the chosen build's tile; None when it takes none.
      splits: its split-KV plan; None when it never splits.
      roofline: the least the device needs for the call.
      others: every other candidate and its reasons.
    """

    call: AttentionCall
    key: str | None
    build: str | None
    reason: str
    tile: TileConfig | None
    splits: SplitPlan | None
    roofline: Cost
    others: tuple[tuple[str, tuple[str, ...]], ...]

    def _facts(self) -> list[tuple[str, str]]:
        facts = [
            ("call", str(self.call)),
            ("kernel", self.key or "none"),
            ("build", self.build),
            ("because", self.reason.splitlines()[0]),
            ("tile", _text_of(self.tile)),
            ("splits", None if self.splits is None else str(self.splits)),
            ("roofline", str(self.roofline)),
        ]
        return [(name, text) for name, text in facts if text is not None]

    def __str__(self) -> str:
        facts = self._facts()
        width = max(len(name) for name, _ in facts)
        lines = [f"{name:<{width}}  {text}" for name, text in facts]
        if self.others:
            width = max(len(key) for key, _ in self.others)
            lines += ["others" if self.key else "candidates"]
            lines += [f"  {key:<{width}}  {'; '.join(reasons)}" for key, reasons in self.others]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        facts = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in self._facts())
        others = "".join(
            f"<tr><td><code>{escape(key)}</code></td><td>{'<br>'.join(escape(reason) for reason in reasons)}</td></tr>"
            for key, reasons in self.others
        )
        return f"<table>{facts}</table><table><tr><th>candidate</th><th>not chosen because</th></tr>{others}</table>"

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values, for JSON."""
        return asdict(self) | {"others": {key: list(reasons) for key, reasons in self.others}}


def explain(
    keys: tuple[str, ...],
    call: AttentionCall,
    kernels: Mapping[str, Kernel] = CATALOGUE,
    replaced: frozenset[str] = frozenset(),
    build: str | None = None,
) -> Explanation:
    """As `select_kernel_key`, but a refused call is explained instead of raised."""
    cost = _roofline(keys, call)
    asked = candidates(keys, call, kernels, replaced, build)
    try:
        choice = choose(keys, call, kernels, replaced, build)
    except (NoImplementationError, AmbiguousDispatchError, ReplacementRefusedError) as error:
        others = tuple((c.key, c.refusals or ("serves it",)) for c in asked)
        return Explanation(call, None, None, str(error), None, None, cost, others)
    yields = (f"general, yields to {choice.key}",)
    return Explanation(
        call=call,
        key=choice.key,
        build=choice.build.name,
        reason=_why(choice, choice.key in replaced),
        tile=select_tile_config(call, choice.build),
        splits=select_split_plan(call, choice.build),
        roofline=cost,
        others=tuple((c.key, c.refusals or yields) for c in asked if c.key != choice.key),
    )


def _roofline(keys: tuple[str, ...], call: AttentionCall) -> Cost:
    if keys == APPEND_PAGED_KEYS:
        return append_roofline(call)
    return roofline(call, appends=not set(keys).isdisjoint(PAGED_PREFILL_EXTENDED_KEYS))


def _why(choice: Choice, is_replacement: bool) -> str:
    supplied = "supplied by the caller; " if is_replacement else ""
    if choice.kernel.general:
        return f"{supplied}general ({choice.kernel.region.name}), and no specialised kernel serves the call"
    return f"{supplied}specialised ({choice.kernel.region.name})"


def _text_of(tile: TileConfig | None) -> str | None:
    return None if tile is None else ", ".join(f"{name} {value}" for name, value in asdict(tile).items() if value != 1)
