"""Draws the diagrams of our documents, so that the site needs no script of others for it.

It knows what they use of mermaid's language: of a sequence participants, messages (`A->>B: text`, `A--xB: text`), and
notes over one or several participants; of states their transitions (`A --> B: text`, `[*]` is outside), drawn in the
same way, one below the other. Anything else is an error.
"""

from __future__ import annotations

import re
from html import escape

__all__ = ["as_svg"]

COLUMN, ROW, EDGE = 170, 34, 80  # pixels


def as_svg(text: str) -> str:
    """Returns a diagram as SVG, in the colours of the page around it.

    Raises:
        ValueError: a line is none of those that are known.
    """
    names: dict[str, str] = {}
    rows: list[str] = []
    y = 60
    for line in map(str.strip, text.splitlines()):
        if line in ("", "sequenceDiagram", "stateDiagram-v2"):
            continue
        if found := re.fullmatch(r"(\w+|\[\*\]) --> (\w+|\[\*\]): (.+)", line):
            begin, end = (state.strip("[]") for state in found.groups()[:2])
            for state in (begin, end):
                names.setdefault(state, "outside" if state == "*" else state)
            line = f"{begin}->>{end}: {found[3]}"
        if found := re.fullmatch(r"participant (\w+) as (.+)", line):
            names[found[1]] = found[2]
            continue
        if found := re.fullmatch(r"Note over (\w+)(?:,(\w+))?: (.+)", line):
            first, last = sorted((_x(names, found[1]), _x(names, found[2] or found[1])))
            width = max(last - first + 60, 7.2 * len(found[3]) + 16)
            left = (first + last - width) / 2
            rows.append(
                f'<rect x="{left:.0f}" y="{y - 17}" width="{width:.0f}" height="24" rx="4" class="note"/>'
                f'<text x="{(first + last) / 2:.0f}" y="{y}">{escape(found[3])}</text>'
            )
        elif found := re.fullmatch(r"(\w+|\*)(-->>|->>|--x|-x)(\w+|\*): (.+)", line):
            begin, end = _x(names, found[1]), _x(names, found[3])
            dashed = ' stroke-dasharray="5 4"' if found[2].startswith("--") else ""
            head = "cross" if found[2].endswith("x") else "arrow"
            if begin == end:
                rows.append(f'<text x="{begin + 12}" y="{y}" class="left">{escape(found[4])}</text>')
            else:
                stop = end - 4 if end > begin else end + 4
                rows.append(
                    f'<line x1="{begin}" y1="{y + 4}" x2="{stop}" y2="{y + 4}" marker-end="url(#{head})"{dashed}/>'
                    f'<text x="{(begin + end) / 2:.0f}" y="{y - 2}">{escape(found[4])}</text>'
                )
        else:
            raise ValueError(f"a sequence diagram with {line!r}")
        y += ROW
    width = 2 * EDGE + COLUMN * (len(names) - 1) + 100
    heads = "".join(
        f'<line x1="{_x(names, key)}" y1="34" x2="{_x(names, key)}" y2="{y}" class="life"/>'
        f'<text x="{_x(names, key)}" y="24" class="name">{escape(name)}</text>'
        for key, name in names.items()
    )
    style = (
        ".seq text{font:13px sans-serif;text-anchor:middle;fill:currentColor}.seq .left{text-anchor:start}"
        ".seq .name{font-weight:700}.seq line{stroke:currentColor}.seq .life{opacity:.3}"
        ".seq .note{fill:#f5d76e;fill-opacity:.25;stroke:currentColor;stroke-opacity:.4}"
    )
    marks = (
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="currentColor"/></marker>'
        '<marker id="cross" viewBox="0 0 8 8" refX="4" refY="4" markerWidth="9" markerHeight="9" orient="auto">'
        '<path d="M0 0L8 8M8 0L0 8" stroke="currentColor"/></marker></defs>'
    )
    return (
        f'<svg class="seq" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y + 10}" width="{width}" '
        f'style="max-width:100%" role="img"><style>{style}</style>{marks}{heads}{"".join(rows)}</svg>\n'
    )


def _x(names: dict[str, str], key: str) -> int:
    return EDGE + 50 + COLUMN * list(names).index(key)
