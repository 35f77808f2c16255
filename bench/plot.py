"""Plots bus bandwidth over size: a panel for each collective, a line for each implementation and link.

It needs matplotlib, which the group `peers` of pyproject.toml installs.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path

from jobs import BenchRow
from paceline._base.terminal import UsageError
from paceline.cli.sizes import bus_factor, size_text

Lines = Mapping[str, Mapping[str, list[tuple[int, float]]]]
"""Maps a collective to its lines, and a line's name to its points: (bytes, GB/s)."""

_PANEL_INCHES = (5.2, 3.8)


def check_plot(file: Path) -> None:
    """Checks before the measurement that the picture can be made: matplotlib, the file's type and its folder."""
    if find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib, which is not installed: pip install matplotlib")
    if file.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UsageError(f"--plot writes .png, .svg or .pdf, not {file}")
    if not file.absolute().parent.is_dir():
        raise UsageError(f"there is no folder {file.absolute().parent} for --plot")


def lines_of(rows: Iterable[BenchRow], *, by_schedule: bool) -> Lines:
    """Collects the lines of all panels. A barrier has no bandwidth, so it has no panel."""
    lines: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for row in rows:
        # Computed from the time, because the row's own figure is rounded, for small sizes to 0.
        rate = row.bytes / row.median_us * bus_factor(row.collective, row.world_size) / 1e3
        if rate > 0:
            name = f"{row.impl}, {row.link}"
            if by_schedule and row.schedule:
                name += f", {row.schedule}"
            lines.setdefault(row.collective, {}).setdefault(name, []).append((row.bytes, rate))
    return {collective: {name: sorted(of[name]) for name in of} for collective, of in lines.items()}


def plot(lines: Lines, world: int, file: Path) -> None:
    """Draws the lines into a file."""
    from matplotlib.figure import Figure  # without pyplot, which has global state and may open a display
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    columns = min(3, max(1, len(lines)))
    shape = (-(-len(lines) // columns), columns)
    figure = Figure(figsize=(_PANEL_INCHES[0] * shape[1], _PANEL_INCHES[1] * shape[0]), layout="constrained")
    panels = figure.subplots(*shape, squeeze=False)
    for panel in panels.flat[len(lines) :]:
        panel.set_axis_off()
    names = list(dict.fromkeys(name for of in lines.values() for name in of))
    for panel, (collective, of) in zip(panels.flat, lines.items(), strict=False):
        for name, points in of.items():
            colour = f"C{names.index(name) % 10}"  # a name has the same colour in all panels
            panel.plot(*zip(*points, strict=True), marker="o", markersize=4, linewidth=1.5, label=name, color=colour)
        panel.set(
            title=f"{collective}, W={world}, {os.cpu_count()} cores", xlabel="bytes", ylabel="bus bandwidth, GB/s"
        )
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.xaxis.set_major_locator(LogLocator(base=2, numticks=8))
        panel.xaxis.set_minor_locator(NullLocator())
        panel.xaxis.set_major_formatter(FuncFormatter(lambda size, _: size_text(round(size))))
        panel.yaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:g}"))
        panel.grid(visible=True, which="major", alpha=0.3)
        panel.legend(fontsize="small", frameon=False)
    figure.savefig(file, dpi=130)
