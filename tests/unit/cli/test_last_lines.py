"""The last lines of a worker: which are kept, and when the worker is shown them."""

from __future__ import annotations

from paceline._session.output_file import MOST_BYTES, MOST_LINES
from paceline.cli.launcher.last_lines import SHOWN_AFTER_S, SHOWN_EVERY_S, LastLines
from paceline.cli.launcher.printed import LineSplitter, Printed


def test_the_last_lines_of_both_streams_are_kept_in_order() -> None:
    last, out, err = LastLines(), LineSplitter(), LineSplitter()
    for number in range(100):
        last.add(out.feed(b"out %d\n" % number))
        last.add(err.feed(b"err %d\n" % number))
    lines = last.text().split(b"\n")
    assert len(lines) == MOST_LINES
    assert lines[-3:] == [b"err 98", b"out 99", b"err 99"]


def test_many_lines_at_once_leave_the_last() -> None:
    last = LastLines()
    last.add(LineSplitter().feed(b"".join(b"%d\n" % number for number in range(10_000))))
    assert last.text().split(b"\n") == [b"%d" % number for number in range(10_000 - MOST_LINES, 10_000)]


def test_present_states_are_no_lines_until_they_end() -> None:
    last, out = LastLines(), LineSplitter()
    last.add(out.feed(b"begin\n10%\r20%\r"))
    last.add(out.feed(b"30%"))
    assert last.text() == b"begin"
    assert last.text([out.unended, b""]) == b"begin\n30%"
    last.add(out.feed(b"\r100%\nend\n"))
    assert last.text([out.unended]) == b"begin\n100%\nend"


def test_ten_megabytes_without_a_newline_take_eight_kilobytes() -> None:
    last, out = LastLines(), LineSplitter()
    for _ in range(160):
        last.add(out.feed(b"x" * (64 << 10)))
        assert sum(map(len, last._lines)) <= MOST_LINES * MOST_BYTES
    last.add(out.feed(b"y" * 100))
    text = last.text([out.unended])
    assert len(text) == MOST_BYTES
    assert text.endswith(b"\n" + b"y" * 100)


def test_a_worker_is_shown_its_lines_some_times_a_second() -> None:
    last = LastLines()
    assert not last.is_due(100.0)
    assert last.due is None, "the launcher need not wake up for it"
    last.add([Printed(b"first")])
    assert not last.is_due(100.0), "the rest of a line may follow"
    assert last.due == 100.0 + SHOWN_AFTER_S
    last.add([Printed(b"second")])
    assert not last.is_due(100.01)
    assert last.due == 100.0 + SHOWN_AFTER_S, "it does not wait for a worker that goes on to print"
    assert last.is_due(101.0)
    last.shown(101.0)
    assert last.due is None, "there is nothing new"
    for _ in range(1_000):
        last.add([Printed(b"more")])
        assert not last.is_due(101.1)
    assert last.due == 101.0 + SHOWN_EVERY_S
