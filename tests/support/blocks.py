"""The code blocks of README.md and docs/, as readers meet them: from the top of a page to its end.

A fence names a language, then what only tests read, then a title:

    python                  a whole script; it is run in a process of its own page, alone and among workers
    python title="x.py"     a file: the page's console blocks may run it
    console                 commands after `$ ` (continued after `> `), each followed by what it prints
    text output             what the python block before it prints
    sh, text, diff, yaml    not run; the commands in sh are checked against the command line

    torch                   needs PyTorch
    fails                   the last command of the block does not end with 0
    unordered               lines may come in another order, as those of several workers do; others may come between
    whole                   with unordered: no others may come
    fragment                no script by itself: another test runs it

Expected output is compared as text, but a number stands for any number, `...` for anything, and a line `...` for any
lines. Where a machine is slow, Paceline says for whom a job waits: these lines may be missing on the page.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support.command import SAID_WHEN_BUSY

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
LANGUAGES = {"python", "console", "text", "sh", "diff", "yaml", "mermaid"}
FLAGS = {"torch", "fails", "unordered", "whole", "fragment", "output"}
_PROGRESS = re.compile(r"^paceline: job '[^']*': waiting for .*\n", re.MULTILINE)
FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """One fence of a page."""

    page: Path
    line: int
    language: str
    flags: frozenset[str]
    title: str
    code: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """The fences of a page, from the top."""
    found, text = [], page.read_text()
    for match in FENCE.finditer(text):
        language, rest, code = match.groups()
        title = re.search(r'title="([^"]*)"', rest)
        flags = frozenset(re.sub(r'title="[^"]*"', "", rest).split())
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(page, line, language, flags, title.group(1) if title else "", code))
    return found


def scripts(page: Path, *, torch: bool = False) -> list[Block]:
    """The page's scripts without a title, but for fragments."""
    return [
        block
        for block in blocks(page)
        if block.language == "python" and not block.title and "fragment" not in block.flags
        if ("torch" in block.flags) == torch
    ]


def printed_by(block: Block) -> str | None:
    """What the page says that a script prints; None if it does not say."""
    whole = blocks(block.page)
    after = whole[whole.index(block) + 1 :]
    return after[0].code if after and after[0].language == "text" and "output" in after[0].flags else None


def as_program(some: list[Block]) -> str:
    """A program that runs scripts one after the other, each in a job of its own and with names of its own."""
    lines = ["import os"]
    for number, block in enumerate(some):
        lines.append(f"os.environ['PACELINE_JOB'] = 'block-{number}'")
        lines.append(f"print({MARK!r}, flush=True)")
        code = f"compile({block.code!r}, {block.where!r}, 'exec')"
        lines.append(f"exec({code}, {{'__name__': '__main__'}})")
    return "\n".join(lines)


MARK = "=== next block"


def differs(expected: str, found: str, *, unordered: bool = False, whole: bool = False) -> str | None:
    """Says how an output differs from what the page shows; None if it does not."""
    if not any(map(SAID_WHEN_BUSY.match, expected.splitlines())):
        found = "".join(line for line in found.splitlines(keepends=True) if not SAID_WHEN_BUSY.match(line))
    if unordered:
        missing = [
            line for line in expected.splitlines() if line and not re.search(f"^{_pattern(line)}$", found, re.MULTILINE)
        ]
        if missing:
            return f"no line like {missing[0]!r} in\n{found}"
        patterns = [_pattern(line) for line in expected.splitlines() if line]
        if not whole:
            return None
        more = [line for line in found.splitlines() if line and not any(re.fullmatch(each, line) for each in patterns)]
        return f"the page does not show {more[0]!r} of\n{found}" if more else None
    lines = expected.splitlines()
    if not _PROGRESS.search(expected):
        found = _PROGRESS.sub("", found)
    pattern = "".join(r"(?:.*\n)*?" if line.strip() == "..." else rf"{_pattern(line)}\n" for line in lines)
    text = "".join(f"{line.rstrip()}\n" for line in found.splitlines())
    return None if re.fullmatch(pattern, text) else f"expected\n{expected}\nfound\n{found}"


def _pattern(line: str) -> str:
    """A regular expression for one line."""
    found = ""
    for part in re.split(r"(\d+(?:[.,]\d+)*|\.\.\.|\s+)", line.strip()):
        if part == "...":
            found += ".*"
        elif part.isspace():
            found += r"[ \t]+"
        elif re.fullmatch(r"\d+(?:[.,]\d+)*", part):
            found += r"\d+(?:[.,]\d+)*"
        else:
            found += re.escape(part)
    return rf"[ \t]*{found}[ \t]*"


def commands(block: Block) -> Iterator[tuple[str, str]]:
    """The commands of a console block, each with what it prints."""
    command, output = "", ""
    for line in block.code.splitlines():
        if line.startswith("$ "):
            if command:
                yield command, output
            command, output = line[2:], ""
        elif line.startswith("> ") and not output:
            command += f"\n{line[2:]}"
        else:
            output += f"{line}\n"
    if command:
        yield command, output


class Terminal:
    """A folder and a shell in which a page's commands are typed. Commands that end with `&` go on until the end."""

    def __init__(self, folder: Path, ports: dict[str, str]) -> None:
        self._folder, self._ports = folder, ports
        self._state = folder / ".state"
        self._state.write_text("")
        self._behind: list[subprocess.Popen[str]] = []
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")},
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "TMPDIR": str(folder),
            "COLUMNS": "100",
            "OMP_NUM_THREADS": "1",
        }

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._behind:
            os.killpg(process.pid, signal.SIGTERM)
        for process in self._behind:
            process.communicate(timeout=20)

    def show(self, block: Block) -> None:
        """Writes a file, or types commands and compares what they print.

        Raises:
            AssertionError: a command failed, or printed something else than the page shows.
        """
        if block.language == "python" and block.title:
            (self._folder / block.title).write_text(self._here(block.code))
        elif block.language == "console":
            typed = list(commands(block))
            for number, (command, expected) in enumerate(typed):
                fails = "fails" in block.flags and number == len(typed) - 1
                self._type(block, command, expected, fails=fails)

    def _type(self, block: Block, command: str, expected: str, *, fails: bool) -> None:
        if behind := command.rstrip().endswith("&"):
            command = command.rstrip()[:-1]
        command = self._here(command)
        then = f"exec {command}" if behind else f"{command}\ncode=$?; export -p >{self._state}; exit $code"
        process = subprocess.Popen(
            ["bash", "-c", f". {self._state}\n{then}"],
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        if behind:
            self._behind.append(process)
            return
        try:
            found, _ = process.communicate(timeout=100)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError(f"{block.where}: {command} does not end:\n{process.communicate()[0]}") from None
        assert (process.returncode != 0) == fails, f"{block.where}: {command} ended with {process.returncode}:\n{found}"
        flags = {name: name in block.flags for name in ("unordered", "whole")}
        wrong = differs(expected, found, **flags) if expected else None
        assert wrong is None, f"{block.where}: {command}: {wrong}"

    def _here(self, text: str) -> str:
        """With ports that no other test uses."""
        for known, port in self._ports.items():
            text = re.sub(rf"\b{known}\b", port, text)
        return text
