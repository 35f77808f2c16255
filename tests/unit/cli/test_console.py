"""Prefixed lines, and rows for progress bars."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from types import SimpleNamespace
from typing import TextIO, cast

import pytest

from paceline.cli.launcher.console import Console, LogFiles, prefixed
from paceline.cli.launcher.live_rows import LiveRows
from paceline.cli.launcher.printed import LineSplitter, Printed
from paceline.cli.launcher.worker import Worker


def a_worker(index: int = 0) -> Worker:
    return cast(Worker, SimpleNamespace(index=index, pid=7 + index, label=str(index), position=None))


def printed(console: Console, *parts: tuple[int, str, bytes]) -> None:
    """Gives a console what workers print on their streams, as the launcher would."""
    splitters: dict[tuple[int, str], LineSplitter] = {}
    for index, stream, data in parts:
        for part in splitters.setdefault((index, stream), LineSplitter()).feed(data):
            console.line(a_worker(index), stream, part)
    for (index, stream), splitter in splitters.items():
        for part in splitter.finish():
            console.line(a_worker(index), stream, part)


def test_a_line_is_prefixed_with_its_rank() -> None:
    assert prefixed("3", b"loss 0.5", colour=False) == "[3] loss 0.5\n"
    assert prefixed("#0", b"starting", colour=False) == "[#0] starting\n"


def test_ranks_of_one_replica_have_one_colour() -> None:
    colours = {label: prefixed(label, b"", colour=True).partition("m[")[0] for label in ("1.0", "#1.3", "2.0")}
    assert colours["1.0"] == colours["#1.3"] != colours["2.0"]


def test_invalid_utf8_bytes_are_replaced() -> None:
    assert prefixed("0", b"caf\xc3\xa9 \xff", colour=False) == "[0] café \N{REPLACEMENT CHARACTER}\n"


def test_color_marks_the_prefix_and_is_reset_at_the_line_end() -> None:
    line = prefixed("1", b"\x1b[1mbold", colour=True)
    assert line == "\x1b[33m[1]\x1b[0m \x1b[1mbold\x1b[0m\n"


def test_cursor_movements_are_stripped_from_a_line() -> None:
    assert prefixed("0", b"\x1b[2Jup\x1b[A \x1b[31mred\x1b[m", colour=False) == "[0] up \x1b[31mred\x1b[m\n"


@pytest.mark.parametrize(
    "order",
    [
        "\x1b]52;c;cm0gLXJmIH4=\x07",  # OSC: the clipboard
        "\x1b]0;title\x1b\\",
        "\x1b]8;;http://example.org\x07",
        "\x9d0;title\x9c",  # the same in 8 bits
        "\x1bP$q m\x1b\\",  # DCS
        "\x1b_application\x1b\\",
        "\x1b^message\x1b\\",
        "\x1bXstring\x1b\\",
        "\x1bc",  # reset
        "\x1b7",
        "\x1b(0",  # another alphabet
        "\x0e",
        "\x1b[>4;1m",  # not a colour
        "\x1b[?1049h",
        "\x1b[1 q",
        "\x9b2J",
    ],
)
def test_terminal_escape_sequences_are_stripped_from_a_line(order: str) -> None:
    line = f"a{order}b \x1b[1;38:5:9mred\x1b[m"
    assert prefixed("0", line.encode(), colour=False) == "[0] ab \x1b[1;38:5:9mred\x1b[m\n"


@pytest.mark.parametrize("begun", ["\x1b", "\x1b[", "\x1b[31", "\x1b(", "\x1b]0;title", "\x1bP", "\x9d0;"])
def test_an_unfinished_escape_sequence_is_stripped_at_the_line_end(begun: str) -> None:
    assert prefixed("0", f"a{begun}".encode(), colour=False) == "[0] a\n"


def test_stripping_does_not_form_a_new_escape_sequence() -> None:
    assert prefixed("0", b"\x1b\x1b]0;x\x07[2J \x1b\x1b[31m", colour=False) == "[0] [2J \x1b[31m\n"


def test_escape_sequences_in_a_waiting_reason_are_escaped() -> None:
    err = io.StringIO()
    with contextlib.closing(Console(None, io.StringIO(), err)) as console:
        console.record(a_worker(), {"kind": "waiting", "reason": "for \x1b]0;title\x07", "key": "for"})
    assert err.getvalue() == "paceline: for \\x1b]0;title\\x07\n"


def test_waiting_reasons_with_one_key_are_shown_once() -> None:
    err = io.StringIO()
    with contextlib.closing(Console(None, io.StringIO(), err)) as console:
        for index, left in enumerate((3, 2)):
            reason = f"nobody answers; trying for another {left} s"
            console.record(a_worker(index), {"kind": "waiting", "reason": reason, "key": "nobody answers"})
    assert err.getvalue() == "paceline: nobody answers; trying for another 3 s\n"


def test_hidden_lines_are_still_written_to_the_log_file(tmp_path: Path) -> None:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.closing(Console(LogFiles(tmp_path), out, err, hidden={(0, "stdout"), (1, "stderr")})) as console:
        printed(console, (0, "stdout", b"hidden\n"), (0, "stderr", b"shown\n"))
    assert (out.getvalue(), err.getvalue()) == ("", "[0] shown\n")
    assert (tmp_path / "worker-0.log").read_text() == "# pid 7\nhidden\nshown\n"


def test_log_files_keep_the_raw_bytes(tmp_path: Path) -> None:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.closing(Console(LogFiles(tmp_path), out, err)) as console:
        printed(
            console,
            (0, "stdout", b"a\r\nb\xff\n"),
            (0, "stderr", b"\r 1%"),
            (0, "stderr", b"\r 2%\x1b[A\n"),
            (0, "stdout", b"end"),
        )
        console._logs.note(a_worker(), "rank 0 of 1")  # type: ignore[union-attr]
    kept = (tmp_path / "worker-0.log").read_bytes()
    assert kept == b"# pid 7\na\r\nb\xff\n\r 1%\r 2%\x1b[A\nend\n# rank 0 of 1\n"


def test_without_a_terminal_a_progress_bar_prints_only_its_last_state() -> None:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.closing(Console(None, out, err)) as console:
        printed(
            console,
            *((rank, "stderr", b"\r%3d%%" % percent) for percent in range(100) for rank in (0, 1)),
            (0, "stdout", b"loss 0.5\n"),
            (0, "stderr", b"\n"),
            (1, "stderr", b"\r    \r"),
        )
    assert (out.getvalue(), err.getvalue()) == ("[0] loss 0.5\n", "[0]  99%\n")


class Screen(io.StringIO):
    """A terminal; it may be shared by two streams."""

    def __init__(self, shared: io.StringIO | None = None) -> None:
        super().__init__()
        self.shared = shared or io.StringIO()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        return self.shared.write(text)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")


def rows_on(text: str) -> list[str]:
    """What stands on the screen after all: it knows the newline, "up" and "erase to the end", and nothing else."""
    rows, at = [""], 0
    while text:
        if text.startswith("\x1b["):
            kind = next(place for place, letter in enumerate(text[2:], 2) if letter.isalpha())
            if text[kind] == "A":
                at -= int(text[2:kind])
            else:
                assert text[kind] == "J"
                rows[at:] = [""]
            text = text[kind + 1 :]
        elif text[0] == "\n":
            at += 1
            rows += [""] * (at + 1 - len(rows))
            text = text[1:]
        else:
            rows[at] += text[0]
            text = text[1:]
    return rows


@pytest.mark.usefixtures("terminal")
def test_progress_bars_and_lines_of_several_workers_do_not_mix() -> None:
    screen = io.StringIO()
    console = Console(None, cast(TextIO, Screen(screen)), cast(TextIO, Screen(screen)))
    splitters = [LineSplitter(), LineSplitter()]
    for percent in range(0, 101, 5):
        for rank in (0, 1):
            for part in splitters[rank].feed(b"\r%3d%%|%s" % (percent, b"#" * (percent // 10))):
                console.line(a_worker(rank), "stderr", part)
            if percent % 25 == 0:
                console.line(a_worker(rank), "stdout", Printed(b"loss at %d" % percent))
    for part in splitters[0].feed(b"\n"):
        console.line(a_worker(0), "stderr", part)
    console.say("goes on")
    for part in splitters[1].finish():
        console.line(a_worker(1), "stderr", part)
    console.close()
    shown = rows_on(screen.getvalue())
    losses = [f"[{rank}] loss at {percent}" for percent in range(0, 101, 25) for rank in (0, 1)]
    assert shown == [*losses, "[0] 100%|##########", "paceline: goes on", "[1] 100%|##########", ""]


def test_live_rows_are_cut_to_the_terminal_width_and_height() -> None:
    live = LiveRows()
    assert live.erase() == ""
    for rank in range(30):
        live.show(rank, f"[{rank}] ", ["\x1b[31m" + "日" * 60])
    lines = live.draw(80, 10).splitlines()
    assert len(lines) == 8
    assert lines[-1] == "and 23 more"
    assert lines[0] == "[0] " + "日" * 37 + " "  # two columns each: 75 are left of 79
    assert live.erase() == "\x1b[8A\x1b[J"
    assert live.erase() == ""
