"""Runs one child process: reads its output as lines of two streams, and its reports to the launcher."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol, TypeAlias

from paceline._session.identity import process_identity
from paceline._session.output_file import OUTPUT_FD, OutputFile, newest_text, readable_lines
from paceline.cli.launcher.last_lines import LastLines
from paceline.cli.launcher.printed import LineSplitter, Printed
from paceline.launch._supervision import Exit

NEWS = "news"
"""Name of the stream on which a worker reports to its launcher, such as views; the others are "stdout" and "stderr"."""

_SHIM = Path(__file__).with_name("shim.py")

_READ_BYTES = 64 << 10  # the default capacity of a pipe


class StartedProcess(Protocol):
    """A child process, as `subprocess.Popen` starts it, with pipes from its standard output and error."""

    pid: int
    returncode: int | None
    """The exit code, or the negated number of a signal; None until `wait` has returned."""
    stdout: IO[bytes] | None
    stderr: IO[bytes] | None

    def wait(self) -> int:
        """Waits for its end; returns `returncode`."""


Start: TypeAlias = Callable[[Mapping[str, str], Sequence[int]], StartedProcess]
"""Starts a process in a session of its own, which keeps the terminal's Ctrl-C away: the launcher alone decides how
workers end. Arguments: its environment, and the descriptors that it inherits."""


def command_line(command: Sequence[str], options: Sequence[str] = ()) -> Start:
    """Returns what starts SCRIPT ARGS..., -m MODULE ARGS..., or -- PROGRAM ARGS..., with these options of the shim."""

    def start(environment: Mapping[str, str], inherited: Sequence[int]) -> StartedProcess:
        return subprocess.Popen(
            [sys.executable, str(_SHIM), str(os.getpid()), *options, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            pass_fds=inherited,
            start_new_session=True,
        )

    return start


class ReportedView(NamedTuple):
    """A view of which a worker has told, and the time at which the launcher heard it."""

    job: str
    generation: int
    heard_at: float

    def follows(self, other: ReportedView) -> bool:
        """True if it is a later view of the same job. A coordinator without its state may count from 1 again."""
        newer = self.generation > other.generation and self.heard_at > other.heard_at
        return newer and self.job == other.job


class Worker:
    """A worker process. Start it from a thread that lives as long as the launcher.

    The kernel kills the child when the *thread* that started it ends (shim.py), not only when the process ends.

    `rank` is None until a `view` that the worker reports gives it. `killed_as` says why the launcher killed it, if it
    did, in words that complete "rank 2 ...". `replaces_another` is True for a new worker in place of one that failed,
    until the launcher has said that it joined. `work` is a command line, or a function that starts the process.
    `environment` returns the worker's environment, given the descriptor of the worker's end of its news pipe. With
    `cores` None it may use all. A `spare` does the imports of its command, and waits until `begin` makes it a worker;
    what it prints stays in its pipes. With a `replica_size` it is one of so many ranks of a replica, which follow each
    other by `index`, and `rank` is the number of its replica.
    """

    def __init__(
        self,
        index: int,
        work: Sequence[str] | Start,
        environment: Callable[[int], dict[str, str]],
        cores: Collection[int] | None = None,
        *,
        spare: bool = False,
        replica_size: int | None = None,
    ) -> None:
        self.index = index
        self.rank: int | None = None
        self.view: ReportedView | None = None
        self.killed_as = ""
        self.replaces_another = False
        self._replica_size = replica_size
        self._blamed: list[int] = []
        self._lost_mate = False
        self._unfinished = False
        self._waits = self._has_left = False
        self._used_paceline = False
        self._looked_for_none = False
        self._go: int | None = None
        self._last_lines = LastLines()
        self._output: OutputFile | None = None
        news, theirs = os.pipe()
        inherited, options = [theirs], list[str]()
        try:
            with suppress(OSError):  # no memory, or nowhere to write: it runs without
                self._output = OutputFile()
            # The worker must never wait for a launcher that does not read; it drops news instead.
            os.set_blocking(theirs, False)
            if spare:
                read_end, self._go = os.pipe()
                inherited.append(read_end)
                options = ["--spare", str(read_end)]
            start = work if callable(work) else command_line(work, options)
            with _bound(cores):
                self._process = self._start(start, environment(theirs), inherited)
        except OSError:
            os.close(news)
            if self._output is not None:
                self._output.close()
            if self._go is not None:
                os.close(self._go)
            raise
        finally:
            for fd in inherited:
                os.close(fd)
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self.identity = process_identity(self._process.pid)
        self.streams: dict[str, int] = {
            NEWS: news,
            "stdout": self._process.stdout.fileno(),
            "stderr": self._process.stderr.fileno(),
        }
        self._lines = {name: LineSplitter() for name in self.streams}
        for fd in self.streams.values():
            os.set_blocking(fd, False)

    def _start(self, start: Start, environment: dict[str, str], inherited: Sequence[int]) -> StartedProcess:
        if self._output is None:
            return start(environment, inherited)
        return start(environment | {OUTPUT_FD: str(self._output.fd)}, [*inherited, self._output.fd])

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def begin(self, index: int, cores: Collection[int] | None) -> None:
        """Makes a spare a worker, which runs the script as soon as its imports are done."""
        assert self._go is not None
        self.index = index
        if cores is not None:
            for thread in Path(f"/proc/{self.pid}/task").glob("*"):  # imports may have started some
                with suppress(ProcessLookupError):  # it has already ended
                    os.sched_setaffinity(int(thread.name), cores)
        with suppress(BrokenPipeError):  # it has just died; `reap` will notice
            os.write(self._go, b"%d\n" % index)
        os.close(self._go)
        self._go = None

    def dismiss(self) -> None:
        """Ends a spare that is not needed, or is dead."""
        self.signal(signal.SIGKILL)
        if self._go is not None:
            os.close(self._go)
            self._go = None
        self._process.wait()
        for stream in list(self.streams):
            self.close(stream)

    @property
    def label(self) -> str:
        """The prefix of its lines: the rank, or #index as long as it has none; then "." and its rank in its replica."""
        member = f"#{self._number}" if self.rank is None else str(self.rank)
        return member if self.position is None else f"{member}.{self.position}"

    @property
    def position(self) -> int | None:
        """Its rank in its replica; None if it is a member by itself."""
        return None if self._replica_size is None else self.index % self._replica_size

    @property
    def running(self) -> bool:
        """True until `reap` has seen its end."""
        return self._process.returncode is None

    @property
    def succeeded(self) -> bool:
        """True once `reap` has seen it end with code 0."""
        return self._process.returncode == 0

    @property
    def is_stopped(self) -> bool:
        """True if the process is stopped, by SIGSTOP or a debugger; False where that cannot be known."""
        return self._status("State") in ("T", "t")

    @property
    def is_traced(self) -> bool:
        """True if a debugger such as gdb is attached to the process; False where that cannot be known."""
        return self._status("TracerPid") not in ("", "0")

    def _status(self, name: str) -> str:
        """Returns the first word of a line of /proc/PID/status; empty where there is none."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii", errors="replace")
        except OSError:  # the system has no /proc
            return ""
        return next((line.split()[1] for line in status.splitlines() if line.startswith(f"{name}:")), "")

    def is_behind(self, views: Collection[ReportedView]) -> bool:
        """True if the job goes on without the worker, which has not noticed it; others have reported these views.

        It hangs then, or is frozen. A worker that waits to be taken in again has noticed, and so has one that has left
        the loop over the steps, by an error for example.
        """
        own = self.view
        if own is None or not (self.running and self._unfinished) or self._waits or self._has_left:
            return False
        return any(view.follows(own) for view in views)

    @property
    def alone(self) -> bool:
        """True if its script has ended without having looked for other workers."""
        return self._looked_for_none and not self._used_paceline

    def read(self, stream: str) -> list[Printed] | None:
        """Reads what has arrived on a stream; None at its end: then `close` it."""
        try:
            data = os.read(self.streams[stream], _READ_BYTES)
        except BlockingIOError:
            return []
        return self._take(stream, self._lines[stream].feed(data)) if data else None

    def close(self, stream: str) -> list[Printed]:
        """Closes a stream, and removes it from `streams`; returns its last line if that had no newline."""
        fd = self.streams.pop(stream)
        if stream == NEWS:
            os.close(fd)
        else:
            pipe = self._process.stdout if stream == "stdout" else self._process.stderr
            assert pipe is not None
            pipe.close()
        last = self._take(stream, self._lines[stream].finish())
        if not self.streams and self._output is not None:
            self._output.close()
            self._output = None
        return last

    def _take(self, stream: str, parts: list[Printed]) -> list[Printed]:
        if stream != NEWS:
            self._last_lines.add(parts)
        return parts

    @property
    def output_due(self) -> float | None:
        """The time at which `show_output` has something to do; None if it has nothing."""
        return None if self._output is None else self._last_lines.due

    def show_output(self, now: float) -> None:
        """Writes its last lines where the worker reads them when an operator asks, if that is due."""
        if self._output is not None and self._last_lines.is_due(now):
            self._output.write(self._text())
            self._last_lines.shown(now)

    @property
    def last_output(self) -> str:
        """The last lines that it has printed, for the report of its end."""
        return newest_text(readable_lines(self._text()))

    def _text(self) -> bytes:
        return self._last_lines.text([self._lines[stream].unended for stream in ("stdout", "stderr")])

    def heard(self, line: bytes) -> dict[str, Any] | None:
        """Parses a line of news and records the rank; None if it is not a JSON object.

        It ignores views of another process, because one that the worker forked may have joined too.
        """
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # a script may write anything to a descriptor that it finds open
            return None
        if not isinstance(record, dict):
            return None
        if record.get("kind") == "alone":
            self._looked_for_none = True
        else:
            self._used_paceline = True
        if record.get("kind") == "view" and record.get("pid") == self.pid:
            rank = record.get("rank")
            if type(rank) is int and rank >= 0:  # True is an int too
                self.rank = rank
            if type(generation := record.get("generation")) is int:
                self.view = ReportedView(str(record.get("job")), generation, time.monotonic())
            self._waits = False
        elif record.get("kind") == "loop" and record.get("pid") == self.pid:
            self._unfinished = record.get("unfinished") is True
            self._waits, self._has_left = record.get("waits") is True, record.get("left") is True
        elif record.get("kind") == "error" and isinstance(record.get("ranks"), list):
            self._blamed = record["ranks"]
            self._lost_mate = record.get("mate") is True
        return record

    def reap(self) -> int | None:
        """Returns the exit code or negated signal of a worker that has ended, once; else None.

        It also kills what a failed worker leaves in its process group, such as a data loader's processes. It does so
        while the worker is a zombie and still holds the group's number, which no other group can have then.
        """
        if not self.running:
            return None
        found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        if found.si_code != os.CLD_EXITED or found.si_status != 0:
            self.signal(signal.SIGKILL)
        # `found` also tells of a core dump, but only the code is reported, and Popen has to reap its child itself.
        return self._process.wait()

    def end(self) -> Exit:
        """Describes its end; call it after `reap`, when all its news has been read."""
        follows = self._lost_mate or (bool(self._blamed) and self.rank not in self._blamed)
        joined, unfinished = self.rank is not None, self._unfinished
        code = self._process.returncode
        assert code is not None
        # It may have ended by itself just before the kill.
        words = self.killed_as if code == -signal.SIGKILL else ""
        member = f"the former {self.member}" if words else self.member
        return Exit(member, self.pid, code, follows, self.index, joined, unfinished, self.position, words)

    def __str__(self) -> str:
        return self.member if self.position is None else f"rank {self.position} of {self.member}"

    @property
    def _number(self) -> int:
        """Its number, or that of its replica, among those of the launcher."""
        return self.index // (self._replica_size or 1)

    @property
    def member(self) -> str:
        """The member of the job that it is, alone or with its mates, as the user knows it."""
        if self._replica_size is not None:
            return f"replica #{self._number}" if self.rank is None else f"replica {self.rank}"
        return f"worker #{self._number}" if self.rank is None else f"rank {self.rank}"

    def ask(self, signum: signal.Signals) -> bool:
        """Sends a signal to the worker if it handles that signal, as it would die of it otherwise; True if sent."""
        if not self.running:
            return False
        if not int(self._status("SigCgt") or "0", 16) >> (signum - 1) & 1:
            return False
        os.kill(self.pid, signum)
        return True

    def signal(self, signum: signal.Signals) -> None:
        """Signals the worker and all other processes in its group."""
        if not self.running:
            return
        try:
            os.killpg(self.pid, signum)
        except ProcessLookupError:  # between fork and setsid the group does not exist yet
            os.kill(self.pid, signum)


@contextmanager
def _bound(cores: Collection[int] | None) -> Iterator[None]:
    """Binds this thread inside the block, since a process inherits the cores of the thread that starts it.

    Bound later, a worker would start its first threads on all cores whenever the launcher is slow.
    """
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
