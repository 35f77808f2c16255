"""Bytes into lines."""

from __future__ import annotations

import random

import pytest

from paceline.cli.launcher.worker import LineSplitter


def test_whole_lines_come_out_at_once_and_the_rest_waits() -> None:
    lines = LineSplitter()
    assert lines.feed(b"one\ntwo\nthr") == [b"one", b"two"]
    assert lines.feed(b"ee\n") == [b"three"]
    assert lines.finish() == []


def test_a_last_line_without_an_end_is_not_lost() -> None:
    lines = LineSplitter()
    assert lines.feed(b"no end") == []
    assert lines.finish() == [b"no end"]
    assert lines.finish() == []


def test_empty_lines_and_dos_ends() -> None:
    assert LineSplitter().feed(b"\n\r\na\r\nb\rc\n") == [b"", b"", b"a", b"b\rc"]


def test_a_line_that_never_ends_comes_in_pieces() -> None:
    lines = LineSplitter(max_line_bytes=10)
    assert lines.feed(b"0123456789") == []
    assert lines.feed(b"x") == [b"0123456789x"]
    assert lines.finish() == []


@pytest.mark.parametrize("seed", range(5))
def test_it_does_not_matter_where_the_stream_is_cut(seed: int) -> None:
    rng = random.Random(seed)
    data = bytes(rng.choice(b"ab\n\xff") for _ in range(500)) + b"end"
    lines, found, start = LineSplitter(), [], 0
    while start < len(data):
        stop = start + rng.randint(1, 40)
        found += lines.feed(data[start:stop])
        start = stop
    assert found + lines.finish() == data.split(b"\n")
