"""Which kernel serves a call, or why none does: a pure function of the call and the installed kernels.

The rule: of the asked keys that are installed and refuse nothing, the specialised ones are the candidates, or the general
ones where no specialised one applies. Exactly one candidate is an answer; order never decides. A kernel the caller supplied
and that refuses the call is never stood in for by a shipped one. The rule, its outcomes and its messages descend from the
kernel selection of TileOPs (MIT), restated here with the reason of every refusal.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from dispatch_core.calls import AttentionCall
from dispatch_core.kernels import CATALOGUE, Build, Kernel
from dispatch_core.tiling import NoImplementationError


class AmbiguousDispatchError(ValueError):
    """Two or more kernels claim the same call with the same standing."""


class ReplacementRefusedError(ValueError):
    """A kernel the caller supplied refuses the call, and a shipped one must not stand in for it."""


class Candidate(NamedTuple):
    """One asked key and why it refuses the call (empty: it serves it)."""

    key: str
    refusals: tuple[str, ...]
    is_general: bool
    is_replacement: bool


class Choice(NamedTuple):
    """What was chosen: the kernel's key and the build that serves the call."""

    key: str
    kernel: Kernel
    build: Build


def select_kernel_key(
    keys: tuple[str, ...],
    call: AttentionCall,
    kernels: Mapping[str, Kernel] = CATALOGUE,
    replaced: frozenset[str] = frozenset(),
    build: str | None = None,
) -> str:
    """The key of the kernel that serves the call.

    Args:
      keys: the keys to ask; their order does not matter. Keys that are not installed are skipped.
      call: the facts.
      kernels: the installed kernels by key.
      replaced: the keys whose kernels the caller supplied.
      build: a build that must serve the call ("sm90", "sm80", "xla"), or None.

    Raises:
      NoImplementationError: no asked kernel serves the call; the message gives every reason.
      AmbiguousDispatchError: several do.
      ReplacementRefusedError: a supplied kernel refuses the call and no other supplied one serves it.
    """
    return choose(keys, call, kernels, replaced, build).key


def choose(
    keys: tuple[str, ...],
    call: AttentionCall,
    kernels: Mapping[str, Kernel] = CATALOGUE,
    replaced: frozenset[str] = frozenset(),
    build: str | None = None,
) -> Choice:
    """As `select_kernel_key`, with the kernel and the build that serve the call."""
    installed = tuple(kernels[key] for key in keys if key in kernels)
    return _choose(tuple(key for key in keys if key in kernels), installed, call, replaced, build)


def candidates(
    keys: tuple[str, ...],
    call: AttentionCall,
    kernels: Mapping[str, Kernel] = CATALOGUE,
    replaced: frozenset[str] = frozenset(),
    build: str | None = None,
) -> tuple[Candidate, ...]:
    """Every installed key of `keys` with its refusals."""
    return tuple(
        Candidate(key, kernels[key].refusals(call, build), kernels[key].general, key in replaced)
        for key in keys
        if key in kernels
    )


@lru_cache(maxsize=4096)
def _choose(
    keys: tuple[str, ...], installed: tuple[Kernel, ...], call: AttentionCall, replaced: frozenset[str], build: str | None
) -> Choice:
    kernels = dict(zip(keys, installed, strict=True))
    builds = {key: kernel.build_for(call, build) for key, kernel in kernels.items()}
    serving = {key: found for key, found in builds.items() if found is not None}
    chosen = [key for key in serving if not kernels[key].general] or list(serving)
    if len(chosen) > 1:
        raise AmbiguousDispatchError(
            f"dispatch is ambiguous: {', '.join(chosen)} all serve this call with the same standing.\n  call: {call}"
        )
    is_refused = any(key in replaced for key in kernels.keys() - serving.keys())
    if not chosen or (is_refused and chosen[0] not in replaced):
        raise _refusal(candidates(keys, call, kernels, replaced, build), chosen[0] if chosen else None, call, build)
    return Choice(chosen[0], kernels[chosen[0]], serving[chosen[0]])


def _refusal(asked: tuple[Candidate, ...], shipped: str | None, call: AttentionCall, build: str | None) -> ValueError:
    facts = f"  call: {call}" + (f"\n  build: {build}" if build else "")
    refused = [c for c in asked if c.refusals and c.is_replacement]
    if not refused:
        return NoImplementationError(f"no implementation serves this call.\n{_reasons(asked)}\n{facts}")
    lead = f"the kernel supplied for {', '.join(c.key for c in refused)} refuses this call"
    if shipped is not None:
        remedy = f"; the shipped {shipped} would serve it and must not stand in. Drop the replacement or widen its region."
        return ReplacementRefusedError(f"{lead}{remedy}\n{_reasons(refused)}\n{facts}")
    return ReplacementRefusedError(f"{lead}, and no implementation serves this call.\n{_reasons(asked)}\n{facts}")


def _reasons(asked: tuple[Candidate, ...] | list[Candidate]) -> str:
    if not asked:
        return "  nothing is installed under the keys asked for"
    width = max(len(c.key) for c in asked)
    return "\n".join(f"  {c.key:<{width}}  {'; '.join(c.refusals) or 'serves it'}" for c in asked)
