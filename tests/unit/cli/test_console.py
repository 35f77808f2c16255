"""Prefixed lines."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from paceline.cli.launcher.console import Console, LogFiles, prefixed
from paceline.cli.launcher.worker import Worker


def test_a_line_carries_its_rank() -> None:
    assert prefixed("3", b"loss 0.5", colour=False) == "[3] loss 0.5\n"
    assert prefixed("#0", b"starting", colour=False) == "[#0] starting\n"


def test_bytes_that_are_no_text_are_replaced() -> None:
    assert prefixed("0", b"caf\xc3\xa9 \xff", colour=False) == "[0] café \N{REPLACEMENT CHARACTER}\n"


def test_colour_is_in_the_prefix_and_ends_with_the_line() -> None:
    line = prefixed("1", b"\x1b[1mbold", colour=True)
    assert line == "\x1b[33m[1]\x1b[0m \x1b[1mbold\x1b[0m\n"


def test_lines_that_are_hidden_are_kept(tmp_path: Path) -> None:
    out, err = io.StringIO(), io.StringIO()
    worker = cast(Worker, SimpleNamespace(index=0, pid=7, label="0"))
    with contextlib.closing(Console(LogFiles(tmp_path), out, err, hidden={(0, "stdout"), (1, "stderr")})) as console:
        console.line(worker, "stdout", b"hidden")
        console.line(worker, "stderr", b"shown")
    assert (out.getvalue(), err.getvalue()) == ("", "[0] shown\n")
    assert (tmp_path / "worker-0.log").read_text() == "# pid 7\nhidden\nshown\n"
