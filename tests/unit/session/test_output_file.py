"""The file from which a worker reads the last lines that it has printed."""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
from collections.abc import Iterator

import pytest

from paceline._session import output_file
from paceline._session.output_file import (
    MOST_BYTES,
    MOST_OF_ENDED,
    OUTPUT_FD,
    OutputFile,
    newest_text,
    own_output,
    readable_lines,
)


@pytest.fixture(params=["memfd", "file"])
def kept(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[OutputFile]:
    if request.param == "file":  # as on macOS
        monkeypatch.delattr(os, "memfd_create", raising=False)
    made = OutputFile()
    yield made
    made.close()


def read(kept: OutputFile) -> tuple[list[str], str]:
    return own_output({OUTPUT_FD: str(kept.fd)})


def test_the_worker_reads_what_was_written_last(kept: OutputFile) -> None:
    assert read(kept) == ([], ""), "it has printed nothing"
    for number in range(5):
        kept.write(b"line %d\nmore" % number)
        assert read(kept) == ([f"line {number}", "more"], "")
    kept.write(b"x" * MOST_BYTES)
    assert read(kept) == (["x" * MOST_BYTES], "")
    kept.write(b"short")
    assert read(kept) == (["short"], "")


def test_a_half_written_text_leaves_the_one_before(kept: OutputFile) -> None:
    kept.write(b"whole")  # in the second place
    kept.write(b"half" * 100)
    os.pwrite(kept.fd, b"#", 200)
    assert read(kept) == (["whole"], "")


def test_a_reader_meets_no_mixture_while_the_launcher_writes(kept: OutputFile) -> None:
    ended = threading.Event()

    def write() -> None:
        number = 0
        while not ended.is_set():
            number += 1
            kept.write(b"%d\n" % (number % 10) * (MOST_BYTES // 2))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(300):
            lines, trouble = read(kept)
            assert not trouble
            assert len({*lines} - {""}) <= 1
    finally:
        ended.set()
        writer.join()


def test_a_missing_closed_or_foreign_descriptor_is_explained() -> None:
    assert own_output({}) == ([], "its output is not kept: it was not started by paceline run")
    reads, writes = os.pipe()
    os.close(reads)
    os.close(writes)
    with tempfile.TemporaryFile() as other, open(os.devnull, "rb") as device:
        other.write(b"a file of the script's" * 1_000)
        other.flush()
        for fd in (str(reads), str(other.fileno()), str(device.fileno()), "nine", "-1", "9" * 30, ""):
            lines, trouble = own_output({OUTPUT_FD: fd})
            assert lines == []
            assert "has closed the descriptor" in trouble
        assert other.tell() == 22_000, "nothing has moved"


@pytest.mark.skipif(not hasattr(fcntl, "F_ADD_SEALS"), reason="seals are Linux's")
def test_a_worker_that_seals_or_cuts_the_file_disturbs_no_launcher() -> None:
    kept = OutputFile()
    os.ftruncate(kept.fd, 0)
    kept.write(b"after a cut")
    assert read(kept) == (["after a cut"], "")
    file = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.dup2(file, kept.fd)
    fcntl.fcntl(kept.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    kept.write(b"goes nowhere")
    assert read(kept)[0] == []
    os.close(file)
    kept.close()
    kept.close()


def test_lines_are_readable_whatever_was_printed() -> None:
    text = b"\x1b[31mred\x1b[m \x1b]0;title\x07\ttab\r\ncaf\xc3\xa9 \xff\x00\x07end\n\xe2\x80\xaeturned"
    assert readable_lines(text) == ["red \ttab ", "café \N{REPLACEMENT CHARACTER}end", "turned"]
    assert readable_lines(b"") == []
    garbage = readable_lines(bytes(range(256)) * 32)
    assert all(character.isprintable() or character == "\t" for line in garbage for character in line)


@pytest.mark.parametrize("start", [b"\x1bP", b"\x1b]0;", b"\xc2\x90", b"\x1b["])
def test_a_sequence_without_an_end_hides_no_later_line(start: bytes) -> None:
    lines = readable_lines(b"start " + start + b"\nTraceback\nValueError")
    assert lines == ["start ", "Traceback", "ValueError"]


def test_the_newest_lines_that_fit_are_reported() -> None:
    lines = [f"line {number}" for number in range(1_000)]
    text = newest_text(lines)
    assert MOST_OF_ENDED - 10 < len(text.encode()) <= MOST_OF_ENDED
    assert text.endswith("line 998\nline 999")
    assert text.startswith("line "), "lines are whole"
    assert newest_text(["first", "é" * 5_000]) == "é" * 1_000
    assert newest_text(["x" * MOST_OF_ENDED]) == "x" * MOST_OF_ENDED
    assert newest_text(["ab", "cd"], 5) == "ab\ncd"
    assert newest_text(["ab", "cd"], 4) == "cd"
    assert newest_text([]) == ""


def test_without_memfd_nor_a_folder_there_is_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> None:
        raise FileNotFoundError("no folder")

    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr(output_file.tempfile, "TemporaryFile", nowhere)
    with pytest.raises(FileNotFoundError):
        OutputFile()
