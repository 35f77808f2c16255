"""A worker that is a copy of this process, because a notebook's functions are in its memory and nowhere else.

Functions of `__main__` cannot be imported by another process, and to send them would need pickle. So the process is
forked. Only the thread that forked goes on in the child. The child gets streams, signal handlers and random numbers of
its own, and ends as a process of `multiprocessing` does: without the exit functions that the notebook has registered.
"""

from __future__ import annotations

import builtins
import faulthandler
import gc
import getpass
import io
import logging
import multiprocessing.util
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

from paceline._base.uncaught import users_line
from paceline._collectives.objects import decode_object, encode_object
from paceline._elastic.join import join
from paceline.cli.launcher.shim import die_with, report
from paceline.errors import UnsupportedOp

_HELD_BACK = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2}
"""Signals that a child gets when it has handlers of its own; the parent's would note them and do nothing."""


class Returned(NamedTuple):
    """The return value of the function in one worker."""

    rank: int
    """-1 if the worker is no longer a member."""
    generation: int
    value: Any


class ForkedFunction:
    """Starts workers that call a function with their session; see `cli.launcher.worker.Start`.

    In `folder` they write what the function returns or raises.
    """

    def __init__(self, function: Callable[..., Any], args: Sequence[Any], folder: Path) -> None:
        self._function = function
        self._args = args
        self._folder = folder
        self._parent = os.getpid()

    def __call__(self, environment: Mapping[str, str], inherited: Sequence[int]) -> Forked:
        """Forks a worker."""
        pipes: list[int] = []
        try:
            pipes += os.pipe()
            pipes += os.pipe()
            out, its_out, err, its_err = pipes
            with _signals_held_back() as mask:
                if not (pid := _fork()):
                    self._become_a_worker(environment, its_out, its_err, mask)
        except OSError:
            for descriptor in pipes:
                os.close(descriptor)
            raise
        os.close(its_out)
        os.close(its_err)
        return Forked(pid, open(out, "rb", buffering=0), open(err, "rb", buffering=0))

    def returned(self) -> list[Returned]:
        """Returns the results of the workers that came to the end."""
        return [Returned(*decode_object(file.read_bytes())) for file in sorted(self._folder.glob("*.returned"))]

    def raised(self, pid: int) -> str:
        """Returns what a worker raised, and in which line; empty for nothing."""
        file = self._folder / f"{pid}.raised"
        return file.read_text(encoding="utf-8") if file.exists() else ""

    def _become_a_worker(self, environment: Mapping[str, str], out: int, err: int, mask: set[Any]) -> NoReturn:
        """Goes on as a worker. Nothing of the notebook's process may run here again, so this never returns."""
        code = 1
        try:
            gc.freeze()  # what the parent has yet to free may wait for threads that are not here
            die_with(self._parent)
            os.setsid()
            _take_signals(mask)
            _print_to(out, err)
            os.environ.clear()
            os.environ.update(environment)
            # The coordinator is a process that nobody starts again: workers need not wait for it.
            os.environ["PACELINE_COORDINATOR_ENDS"] = "1"
            # It forgets the parent's processes and finalizers, and waits for its own threads and processes at its end.
            process: Any = multiprocessing.get_context("fork").Process(target=self._work, daemon=False)
            code = process._bootstrap()
        except BaseException:  # noqa: BLE001  shown, and the process ends
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(code & 0xFF)

    def _work(self) -> None:
        _differ_from_others()
        code = self._call()
        multiprocessing.util._exit_function()  # type: ignore[attr-defined]  # since Python 3.13 `_bootstrap` leaves it to exit functions
        sys.exit(code)

    def _call(self) -> int:
        """Joins the job and calls the function; returns the exit code."""
        try:
            with join() as session:
                value = self._function(session, *self._args)
                rank = session.rank if session.members else -1
                result = _encoded(Returned(rank, session.generation, value), self._function)
            self._write("returned", result)
        except SystemExit as error:  # also of a worker that was drained
            if not isinstance(error.code, int | None):
                print(error.code, file=sys.stderr)  # noqa: T201  as Python does
            return error.code if isinstance(error.code, int) else int(error.code is not None)
        except BaseException as error:  # noqa: BLE001  shown, and told to the notebook's process
            trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
            text = "\n".join([f"{type(error).__name__}: {error}", *users_line(error.__traceback__)])
            self._write("raised", text.encode(errors="backslashreplace"))
            report(type(error), error, trace)
            return 1
        return 0

    def _write(self, kind: str, content: bytes) -> None:
        """Writes a whole file, or none if the process is killed meanwhile."""
        unfinished = self._folder / f"{os.getpid()}.unfinished"
        unfinished.write_bytes(content)
        unfinished.replace(unfinished.with_suffix(f".{kind}"))


class Forked:
    """A forked child with the part of `subprocess.Popen` that `cli.launcher.worker.Worker` uses."""

    def __init__(self, pid: int, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdout: IO[bytes] | None = stdout
        self.stderr: IO[bytes] | None = stderr

    def wait(self) -> int:
        """Waits for its end; returns the exit code, or the negated number of a signal."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def works_in_a_child(try_it: Callable[[], None]) -> bool:
    """Returns whether a call raises nothing in a forked child."""
    with _signals_held_back():
        if not (pid := _fork()):
            code = 1
            try:
                try_it()
                code = 0
            finally:
                os._exit(code)
        return os.waitpid(pid, 0)[1] == 0


@contextmanager
def _signals_held_back() -> Iterator[set[Any]]:
    """Holds signals back until the end of the block; gives the mask of before."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)
    try:
        yield before
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _fork() -> int:
    """Calls `os.fork` without its warning about threads: a notebook always has some, and the child needs none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _take_signals(mask: set[Any]) -> None:
    """Gives up the parent's handlers, and then takes signals that have come meanwhile; but not those for the parent."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGINT, signal.SIGUSR2):
        handler = signal.getsignal(number)
        signal.signal(number, signal.SIG_IGN)  # forgets one that waits
        signal.signal(number, handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _print_to(out: int, err: int) -> None:
    """Redirects standard output and standard error to pipes. The notebook's own streams need its threads."""
    null = os.open(os.devnull, os.O_RDONLY)
    for number, descriptor in enumerate((null, out, err)):
        if descriptor != number:
            os.dup2(descriptor, number)
            os.close(descriptor)
    former = {id(sys.stdout): "stdout", id(sys.stderr): "stderr"}
    streams = [open(0)]  # noqa: SIM115  until the process ends
    for number in (1, 2):
        raw = open(number, "wb", buffering=0, closefd=False)  # noqa: SIM115
        streams.append(io.TextIOWrapper(raw, "utf-8", "backslashreplace", write_through=True))
    for stream, name in zip(streams, ("stdin", "stdout", "stderr"), strict=True):
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    loggers = [logging.getLogger(), *logging.getLogger().manager.loggerDict.values()]
    for handler in [handler for logger in loggers for handler in getattr(logger, "handlers", ())]:
        if isinstance(handler, logging.StreamHandler) and id(handler.stream) in former:
            # Not setStream: it would flush the old stream, whose lock a thread may have held at the fork.
            with suppress(AttributeError):  # it looks the stream up itself
                handler.stream = getattr(sys, former[id(handler.stream)])
    builtins.input = getpass.getpass = _ask_nobody
    sys.breakpointhook = sys.__breakpointhook__
    faulthandler.enable()


def _ask_nobody(prompt: object = "", *_: Any, **__: Any) -> str:
    """Takes the place of `input`: the notebook's own would wait for an answer that its process gets."""
    raise EOFError("a worker has no standard input: ask before paceline.run, and give it the answer")


def _differ_from_others() -> None:
    """Gives this worker random numbers of NumPy of its own, as a new process has, and one thread for torch.

    The pool of torch's threads that the notebook's process may have does not survive the fork. Python's own random
    numbers are new after each fork.
    """
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


def _encoded(returned: Returned, function: Callable[..., Any]) -> bytes:
    try:
        return encode_object(tuple(returned))
    except UnsupportedOp as error:
        name = getattr(function, "__name__", "the function")
        raise UnsupportedOp(f"what {name}() returned cannot be brought back: {error}") from None
