"""Bytes into lines, and into present states of lines that have not ended."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from paceline.cli.launcher.printed import LineSplitter, Printed, read_streams


def lines_of(parts: Sequence[Printed]) -> list[bytes]:
    return [part.text for part in parts if part.ended]


def states_of(parts: Sequence[Printed]) -> list[bytes]:
    return [part.text for part in parts if not part.ended]


def test_complete_lines_are_returned_and_a_partial_line_is_buffered() -> None:
    lines = LineSplitter()
    assert lines_of(lines.feed(b"one\ntwo\nthr")) == [b"one", b"two"]
    assert lines.feed(b"ee\n") == [Printed(b"three", raw=b"three\n")]
    assert lines.finish() == []


def test_finish_returns_a_last_line_without_a_newline() -> None:
    lines = LineSplitter()
    assert lines.feed(b"no end") == []
    assert lines.finish() == [Printed(b"no end", raw=b"no end")]
    assert lines.finish() == []


def test_the_visible_text_of_an_unfinished_line() -> None:
    lines = LineSplitter()
    for data, seen in (
        (b"", b""),
        (b"Epoch", b"Epoch"),
        (b" 1: 10%\r", b"Epoch 1: 10%"),
        (b"20%", b"20%"),
        (b"\n", b""),
        (b"outer\ninner\r\x1b[A", b"inner"),
    ):
        lines.feed(data)
        assert lines.unended == seen, data
    lines.finish()
    assert lines.unended == b""


def test_empty_lines_and_carriage_returns_before_a_newline() -> None:
    assert lines_of(LineSplitter().feed(b"\n\r\na\r\nb\rc\n")) == [b"", b"", b"a", b"c"]


def test_a_line_longer_than_the_limit_is_returned_in_pieces() -> None:
    lines = LineSplitter(max_line_bytes=10)
    assert lines.feed(b"0123456789") == []
    assert lines.feed(b"x") == [Printed(b"0123456789x", raw=b"0123456789x")]
    assert lines.finish() == []


@pytest.mark.parametrize("seed", range(5))
def test_lines_do_not_depend_on_how_the_stream_is_split(seed: int) -> None:
    rng = random.Random(seed)
    data = bytes(rng.choice(b"ab\n\xff") for _ in range(500)) + b"end"
    assert lines_of(cut(data, rng)) == data.split(b"\n")


@pytest.mark.parametrize("seed", range(20))
def test_raw_parts_add_up_to_the_input_bytes(seed: int) -> None:
    rng = random.Random(seed)
    data = b"".join(rng.choice([b"a", b"\r", b"\n", b"\r\n", b"\x1b[A", b"  ", b"long" * 5]) for _ in range(300))
    assert b"".join(part.raw for part in cut(data, rng, max_line_bytes=40)) == data


def cut(data: bytes, rng: random.Random, **options: int) -> list[Printed]:
    lines, found, start = LineSplitter(**options), [], 0
    while start < len(data):
        stop = start + rng.randint(1, 40)
        found += lines.feed(data[start:stop])
        start = stop
    return found + lines.finish()


def test_progress_bar_states_are_returned_and_the_last_is_the_line() -> None:
    lines = LineSplitter()
    assert lines.feed(b"\r 10%|#") == [Printed(b" 10%|#", ended=False)]
    assert states_of(lines.feed(b"\r 20%|##")) == [b" 20%|##"]
    (last,) = lines.feed(b"\r100%|##########\n")
    assert (last.text, last.ended) == (b"100%|##########", True)
    assert last.raw == b"\r 10%|#\r 20%|##\r100%|##########\n"


def test_an_erased_progress_bar_leaves_no_line() -> None:
    lines = LineSplitter()
    lines.feed(b"\r 99%")
    assert states_of(lines.feed(b"\r    \r")) == [b""]
    assert lines_of(lines.feed(b"loss 0.5\n")) == [b"loss 0.5"]
    lines.feed(b"\r 99%\r    \r")
    assert lines_of(lines.finish()) == []


def test_progress_bar_states_do_not_count_toward_the_line_limit() -> None:
    lines = LineSplitter(max_line_bytes=100)
    parts = [part for step in range(1000) for part in lines.feed(b"\r%4d/1000" % step)]
    assert lines_of(parts) == []
    assert states_of(parts)[-1] == b" 999/1000"
    parts += lines.feed(b"\n")
    assert lines_of(parts) == [b" 999/1000"]
    assert len(b"".join(part.raw for part in parts)) == 1000 * 10 + 1


def test_nested_progress_bars_are_two_rows_of_one_state() -> None:
    """The bytes of tqdm with an outer and an inner bar, whose `leave` is False."""
    lines = LineSplitter()
    assert states_of(lines.feed(b"\router 0%")) == [b"outer 0%"]
    first = lines.feed(b"\n\rinner 0%\x1b[A")  # its newline may as well end a line: that is known only later
    assert lines_of(first) == [b"outer 0%"]
    assert lines_of(lines.feed(b"\n\rinner 50%\x1b[A")) == []
    assert states_of(lines.feed(b"\router 50%")) == [b"outer 50%\ninner 50%"]
    parts = lines.feed(b"\n\rinner 99%\x1b[A\n\r         \r\x1b[A\router 100%\n")
    assert lines_of(parts) == []
    assert states_of(parts)[-1] == b"outer 100%"
    assert lines_of(lines.feed(b"done\n")) == [b"outer 100%", b"done"]


def test_read_streams_parses_which_streams_are_kept_and_hidden() -> None:
    assert not read_streams(None, None, 2).kept
    assert not read_streams("0", "0", 2).kept
    assert read_streams("1", None, 2).hidden == {(0, "stdout"), (1, "stdout")}
    assert read_streams("0:3,1:2", None, 2).hidden == {(0, "stdout"), (0, "stderr"), (1, "stderr")}
    tee = read_streams("3", "1:1", 2)
    assert tee.kept
    assert (1, "stdout") not in tee.hidden
    assert (0, "stdout") in tee.hidden
    assert read_streams(None, "3", 2).kept
    assert not read_streams(None, "3", 2).hidden


@pytest.mark.parametrize("text", ["4", "x", "0:4", "1:", ":1", "a:1", "1,2"])
def test_read_streams_refuses_invalid_text(text: str) -> None:
    with pytest.raises(ValueError, match="-t/--tee must be 0"):
        read_streams(None, text, 2)
