"""The README's table of what is served where, written from the catalogue: python -m jax_ops.tools.support."""

from __future__ import annotations

from dispatch_core import CATALOGUE, SLOTS

TARGETS = {
    "sm90": "SM90 (H100, H200, GH200, H20)",
    "sm80": "SM80 and newer (A100, A10, L4, 4090, B200)",
    "xla": "anywhere else",
}


def support_table() -> str:
    """Markdown: a row per op and kernel, with its region's conditions and a column per target."""
    lines = [f"| op | kernel | serves | {' | '.join(TARGETS.values())} |", f"|---|---|---|{'---|' * len(TARGETS)}"]
    for slot, keys in SLOTS.items():
        op = slot if slot == "append_paged" else f"gqa_{slot}"
        for key in keys:
            kernel = CATALOGUE[key]
            serves = "; ".join(c.text for c in kernel.region.conditions) or "every call"
            names = {build.name for build in kernel.builds}
            cells = ["yes" if name in names or (name == "sm90" and "sm80" in names) else "-" for name in TARGETS]
            lines.append(f"| `{op}` | `{key}` | {serves} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(support_table())
