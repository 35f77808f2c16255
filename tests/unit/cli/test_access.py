"""When a command waits at a terminal for a key, and for which one."""

from __future__ import annotations

import os
import pty
import sys
from collections.abc import Iterator

import pytest

from paceline.cli import access
from paceline.launch._own_coordinator import Served

PAGE = Served("127.0.0.1:7400", page="http://127.0.0.1:7401/", token="")


class Terminal:
    """Both standard streams of a command, and the keys that it has read."""

    def __init__(self) -> None:
        self.user, self.fd = pty.openpty()
        self.read_keys: list[bytes] = []

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.fd

    def readline(self) -> str:
        self.read_keys.append(os.read(self.fd, 100))
        return "\n"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    made = Terminal()
    monkeypatch.setattr(access, "say", lambda text: os.write(made.user, b"pressed after it was said\n"))
    monkeypatch.setattr(os, "tcgetpgrp", lambda fd: os.getpgrp())
    opened = made.user, made.fd
    yield made
    for fd in opened:
        os.close(fd)


def keep_the_page(terminal: Terminal) -> None:
    with pytest.MonkeyPatch.context() as patch:  # pytest sets the streams again between a fixture and its test
        patch.setattr(sys, "stdin", terminal)
        patch.setattr(sys, "stdout", terminal)
        access.keep_the_page(PAGE)


def test_a_key_that_was_pressed_during_training_does_not_end_the_page(terminal: Terminal) -> None:
    os.write(terminal.user, b"pressed before\n")
    keep_the_page(terminal)
    assert terminal.read_keys == [b"pressed after it was said\n"]


@pytest.mark.parametrize("group", ["another command's", "none"])
def test_a_command_in_the_background_waits_for_no_key(
    group: str, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tcgetpgrp(fd: int) -> int:
        if group == "none":
            raise OSError("not this session's terminal")
        return os.getpgrp() + 1

    monkeypatch.setattr(os, "tcgetpgrp", tcgetpgrp)
    keep_the_page(terminal)
    assert terminal.read_keys == []


def test_a_terminal_that_was_closed_ends_the_page(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = os.open(os.devnull, os.O_RDONLY)
    monkeypatch.setattr(terminal, "fd", closed)
    keep_the_page(terminal)
    os.close(closed)
    assert terminal.read_keys == []
