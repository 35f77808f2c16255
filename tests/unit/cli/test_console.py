"""Prefixed lines."""

from __future__ import annotations

from paceline.cli.launcher.console import prefixed


def test_a_line_carries_its_rank() -> None:
    assert prefixed("3", b"loss 0.5", colour=False) == "[3] loss 0.5\n"
    assert prefixed("#0", b"starting", colour=False) == "[#0] starting\n"


def test_bytes_that_are_no_text_are_replaced() -> None:
    assert prefixed("0", b"caf\xc3\xa9 \xff", colour=False) == "[0] café \N{REPLACEMENT CHARACTER}\n"


def test_colour_is_in_the_prefix_and_ends_with_the_line() -> None:
    line = prefixed("1", b"\x1b[1mbold", colour=True)
    assert line == "\x1b[33m[1]\x1b[0m \x1b[1mbold\x1b[0m\n"
