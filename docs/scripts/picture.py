"""Draws docs/images/demo.svg: what `paceline demo` shows on a terminal, from a real run, as one animated picture.

python docs/scripts/picture.py OUT.svg        or `make panel`

It runs the demo and keeps each picture that the terminal would show. The frames that are worth seeing become the
groups of one SVG, which shows them in turn by CSS alone: no script, no font and no file from elsewhere.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from types import TracebackType

from rich.color import ColorType
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from paceline.cli.access import own_coordinator
from paceline.cli.demo import DemoListener, as_result, faults, picture
from paceline.cli.launcher import WorkerSettings
from paceline.cli.run import launch
from paceline.demo.progress import DemoProgress

WORKERS, KILL_AT_STEP = 4, 40
COLUMNS = 78
NOTES = 4  # lines above the panel
FRAME_S = 0.25  # a frame of the run is kept each so many seconds; it is shown for as long
READING_S = 1.5  # a frame with a new note is shown for so long
LAST_S = 5.0
CHARACTER, LINE, EDGE = 8.4, 18, 14  # pixels
BACKGROUND, FOREGROUND, DIM = "#16181d", "#d6d9df", "#868b96"
COLORS = ("#000000", "#e5534b", "#57ab5a", "#d9b340", "#539bf5", "#b083f0", "#39c5cf", "#d6d9df")

Line = tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Frame:
    """One picture of the terminal: its lines, and how many seconds it is shown."""

    lines: tuple[Line, ...]
    seconds: float


class Recorder:
    """Keeps pictures of a run instead of showing them (a `View` of the demo)."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self._console = Console(
            file=io.TextIOWrapper(io.BytesIO(), "utf-8"), width=COLUMNS, force_terminal=True, color_system="standard"
        )
        self._notes: list[Text] = []
        self._progress: DemoProgress | None = None
        self._next = 0.0

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def update(self, progress: DemoProgress) -> None:
        self._progress = progress
        if time.monotonic() >= self._next:
            self.keep(FRAME_S)

    def note(self, text: str) -> None:
        self._notes.append(Text(text))
        if self._progress is not None:
            self.keep(READING_S)

    def keep(self, seconds: float) -> None:
        """Keeps what the terminal shows now."""
        self._next = time.monotonic() + FRAME_S
        lines = [line for note in self._notes for line in self._console.render_lines(note)][-NOTES:]
        lines = [[]] * (NOTES - len(lines)) + lines
        if self._progress is not None:
            lines += self._console.render_lines(picture(self._progress, self._console))
        self.frames.append(Frame(tuple(tuple(line) for line in lines), seconds))


def record() -> list[Frame]:
    """Runs the demo and returns its frames.

    Raises:
        SystemExit: the demo did not show what it promises.
    """
    recorder = Recorder()
    listener = DemoListener(recorder)
    with own_coordinator(settle_time=10.0) as served:
        settings = WorkerSettings(served.address, "demo", WORKERS - 1, WORKERS, token=served.token)
        command = ["-m", "paceline.demo.training", str(WORKERS), str(KILL_AT_STEP)]
        code = launch(command, WORKERS, settings, listener, restarts=1)
    if code or listener.progress.result is None:
        raise SystemExit(f"the demo ended with {code}")
    result = as_result(listener.progress)
    if wrong := faults(result, kill=True):
        raise SystemExit("; ".join(wrong))
    recorder.note(
        f"every sample was used exactly once in each of {listener.progress.epochs} epochs, though a worker was killed"
    )
    return recorder.frames


def shortened(frames: Sequence[Frame]) -> list[Frame]:
    """Leaves out most frames in which nothing but numbers changes: every third is enough before the end."""
    notes = [frame.lines[:NOTES] for frame in frames]
    kept = [
        frame
        for n, frame in enumerate(frames)
        if n == 0 or notes[n] != notes[n - 1] or (n < 24 or n % 6 == 0) or n == len(frames) - 1
    ]
    return [*kept[:-1], Frame(kept[-1].lines, LAST_S)]


def as_svg(frames: Sequence[Frame]) -> str:
    """Returns one picture that shows the frames in turn, for ever.

    Who asks for reduced motion sees the last frame alone; so does a viewer without CSS animations.
    """
    rows = max(len(frame.lines) for frame in frames)
    width, height = COLUMNS * CHARACTER + 2 * EDGE, rows * LINE + 2 * EDGE
    total = sum(frame.seconds for frame in frames)
    rules, moving, groups, begin = [], [], [], 0.0
    for number, frame in enumerate(frames):
        at_end = int(number == len(frames) - 1)
        start, end = 100 * begin / total, 100 * (begin + frame.seconds) / total
        times = [(0, int(number == 0)), (start, 1), (end, at_end), (100, at_end)]
        moments = "".join(f"{percent:.3f}%{{opacity:{value}}}" for percent, value in times)
        rules.append(f"@keyframes f{number}{{{moments}}}#f{number}{{opacity:{at_end}}}")
        moving.append(f"#f{number}{{animation:f{number} {total:.2f}s step-end infinite}}")
        texts = "".join(_text(line, row) for row, line in enumerate(frame.lines))
        groups.append(f'<g id="f{number}">{texts}</g>')
        begin += frame.seconds
    style = (
        "text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono','Liberation Mono',monospace;"
        f"white-space:pre;fill:{FOREGROUND}}}.d{{fill:{DIM}}}.b{{font-weight:700}}"
        + "".join(f".c{n}{{fill:{color}}}" for n, color in enumerate(COLORS))
        + "".join(rules)
        + f"@media (prefers-reduced-motion:no-preference){{{''.join(moving)}}}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" role="img">'
        "<title>paceline demo: a worker is killed, the others go on, a new one joins</title>"
        f'<style>{style}</style><rect width="100%" height="100%" rx="8" fill="{BACKGROUND}"/>{"".join(groups)}</svg>\n'
    )


def _text(line: Line, row: int) -> str:
    """Returns one line; each piece has its own place and length, so that any fixed-width font keeps the columns."""
    found, column = [], 0
    for segment in line:
        text = segment.text
        stripped = text.strip()
        if stripped:
            x = EDGE + (column + len(text) - len(text.lstrip())) * CHARACTER
            kind = _kind(segment.style)
            found.append(
                f'<text x="{x:.1f}" y="{EDGE + row * LINE + 13}" textLength="{len(stripped) * CHARACTER:.1f}"'
                f"{f' class={chr(34)}{kind}{chr(34)}' if kind else ''}>{escape(stripped)}</text>"
            )
        column += len(text)
    return "".join(found)


def _kind(style: Style | None) -> str:
    """Returns the CSS classes of a style."""
    if style is None:
        return ""
    kinds = ["d"] if style.dim else []
    if style.color is not None and style.color.type is ColorType.STANDARD and style.color.number is not None:
        kinds.append(f"c{style.color.number % 8}")
    if style.bold:
        kinds.append("b")
    return " ".join(kinds)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(as_svg(shortened(record())), encoding="utf-8")
