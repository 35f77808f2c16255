"""What grpc logs about callers is paced, and what it logs about anything else is not touched."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest

from pacelinepb.grpc_log import Paced


def record(text: str, error: Exception | None = None, *words: Any) -> logging.LogRecord:
    about = None if error is None else (type(error), error, None)
    return logging.LogRecord("grpc._cython.cygrpc", logging.ERROR, "file", 1, text, words, about)


def unreadable() -> Exception:
    try:
        b"\xff".decode()
    except UnicodeDecodeError as error:
        return error
    raise AssertionError


def test_each_kind_of_caller_error_is_logged_once_a_minute_with_a_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    paced = Paced()
    first = record("Invalid encoding on %s", unreadable(), b"\xff" * 1_000)
    assert paced.filter(first)
    assert first.getMessage() == (
        "Invalid encoding: a caller has sent what grpc cannot read, or has hung up (further ones are counted)"
    )
    other = record("Unexpected [UnicodeDecodeError] raised by servicer method [/\xff\x1b[2J]", unreadable())
    assert paced.filter(other)
    assert other.getMessage().startswith("Unexpected [UnicodeDecodeError]: a caller has sent")
    for _ in range(9):
        assert not paced.filter(record("Invalid encoding on %s", unreadable(), b"\xff"))
    now = 60.0
    again = record("Invalid encoding on %s", unreadable(), b"\xff")
    assert paced.filter(again)
    assert again.getMessage().endswith("(10 times since the last line about it)")


@pytest.mark.parametrize("error", [None, ValueError("a bug of a servicer"), RuntimeError()])
def test_other_errors_are_logged_unchanged(error: Exception | None) -> None:
    paced = Paced()
    for _ in range(3):
        said = record("Unexpected [ValueError] raised by servicer method [%s]", error, "/a/b")
        assert paced.filter(said)
        assert said.getMessage() == "Unexpected [ValueError] raised by servicer method [/a/b]"


def test_an_error_raised_by_a_servicer_is_logged_unchanged() -> None:
    """A servicer may be a user's, in the process of a worker."""
    paced, error = Paced(), unreadable()
    for _ in range(3):
        said = record("Unexpected [UnicodeDecodeError] raised by servicer method [/a/b]", error)
        said.exc_info = type(error), error, error.__traceback__
        assert paced.filter(said)
        assert said.getMessage() == "Unexpected [UnicodeDecodeError] raised by servicer method [/a/b]"
