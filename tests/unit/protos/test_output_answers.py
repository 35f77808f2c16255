"""A member's answer about its output is checked before it is shown."""

from __future__ import annotations

import json

import pytest

from pacelinepb.debug.output_answers import read_output_answer, readable


def test_lines_and_trouble_are_read() -> None:
    data = json.dumps({"lines": ["a", "\ttab", "\x1b[2Jb\nc"], "trouble": "", "read_at": 1.0, "sent_at": 2.0}).encode()
    assert read_output_answer(data) == (["a", "\ttab", "[2Jb c"], "")
    assert read_output_answer(b'{"lines": [], "trouble": "is\\u001b[2J not kept"}') == ([], "is[2J not kept")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"\xff",
        b"[" * 100_000,
        b'{"lines": 1, "trouble": ""}',
        b'{"lines": [1], "trouble": ""}',
        b'{"lines": [], "trouble": null}',
        b'{"lines": {"a": 1}, "trouble": ""}',
    ],
)
def test_an_answer_that_is_none_is_said_to_be_unreadable(data: bytes) -> None:
    assert read_output_answer(data) == ([], "gave an answer that cannot be read")


def test_too_many_and_too_long_lines_are_cut() -> None:
    lines, trouble = read_output_answer(json.dumps({"lines": ["x" * 20_000] * 1_000, "trouble": "y" * 1_000}).encode())
    assert (len(lines), len(lines[0]), len(trouble)) == (200, 10_000, 500)


def test_readable_text_keeps_tabs_newlines_and_other_scripts() -> None:
    assert readable("a\tb\n\x00\x1b\x7fc\r\u202ed\xa0e \u4e2d\U0001f600\n") == "a\tb\nc d e \u4e2d\U0001f600\n"
