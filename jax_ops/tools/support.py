"""The README's table of what is served where, written from the catalogue: python -m jax_ops.tools.support."""

from __future__ import annotations

from dispatch_core import CATALOGUE, DEVICES, SLOTS

TARGETS = {
    "SM90 (H100, H200, GH200, H20)": DEVICES["H200"],
    "SM80 and newer (A100, A10, L4, 4090, B200)": DEVICES["A100-80"],
    "anywhere else": DEVICES["CPU"],
}


def support_table() -> str:
    """Markdown: a row per op and kernel, with its region's conditions and the builds of each target."""
    lines = [f"| op | kernel | serves | {' | '.join(TARGETS)} |", f"|---|---|---|{'---|' * len(TARGETS)}"]
    for slot, keys in SLOTS.items():
        op = slot if slot == "append_paged" else f"gqa_{slot}"
        for key in keys:
            kernel = CATALOGUE[key]
            serves = "; ".join(c.text for c in kernel.region.conditions) or "every call"
            names = [[b.name for b in kernel.builds if b.target.refusal(device) is None] for device in TARGETS.values()]
            cells = [", ".join(n for n in here if n != "xla" or here == ["xla"]) or "-" for here in names]
            lines.append(f"| `{op}` | `{key}` | {serves} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(support_table())
