"""Stacks of a process that cannot answer, because it holds the GIL: by a signal, into a file of that process.

A process registers faulthandler for `SIGNAL` with a file in this user's folder, which it keeps locked for as long as it
lives. The lock is a POSIX record lock: the kernel knows which process holds it, children do not inherit it, and it ends
with its process. So a signal, whose default action would kill, goes only to a process that has the handler (decision
054). The file is named after the process's pid namespace, its pid and the number of its signal.

Beside it lies a mark for each job of which the process is a member: an empty file, whose name only processes with the
job's secret can compute. A member signals only processes that have the mark of its own job.

This process must never open its own file again: to close it again would end the lock.
"""

from __future__ import annotations

import errno
import faulthandler
import logging
import os
import re
import signal
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from paceline._base.processes import check_own, make_private, user_folder
from paceline._base.proofs import DoorKey

_FOLDER = "stacks"

_OFFSET = 9
"""The signal is SIGRTMIN + 9: libraries and runtimes that use realtime signals begin at SIGRTMIN."""

MAX_STACK_BYTES = 256 << 10
"""The most bytes of one process's stacks that are read; faulthandler writes at most 100 threads of 100 lines."""

_PATIENCE_S = 0.5
"""Seconds for the first bytes, and for the rest, since only silence tells that the dump is complete."""

_SILENCE_S = 0.05

_LOCK = struct.Struct("hhqqi4x")
"""`struct flock` of Linux on 64 bits (fcntl(2)): type, whence, start, length, pid."""

_MARK = re.compile(r"\d{1,20}\.\d{1,10}\.\d{1,3}\.[0-9a-f]{64}", re.ASCII)
"""The name of a mark: the file's name, and the proof."""

_log = logging.getLogger("paceline.session")


class StackFile(NamedTuple):
    """A file of stacks, by its name."""

    path: Path
    namespace: int
    pid: int
    signal: int


_kept: tuple[int, int, Path] | None = None
"""The pid of the process that has a file, the file's descriptor, which is never closed, and its path."""

_trouble = "this process has not joined a job"
_once = threading.Lock()


def keep_stack_file() -> None:
    """Makes this process's file, and registers the handler, once for the life of the process. Raises nothing.

    Where that is impossible, `trouble_here` says why: in a container without a writable folder, without Linux, outside
    the main thread, or if other code handles the signal.
    """
    global _kept, _trouble
    with _once:
        if _kept is not None and _kept[0] == os.getpid():
            return
        try:
            _kept, _trouble = (os.getpid(), *_make()), ""
        except (OSError, ValueError, RuntimeError) as error:
            _kept, _trouble = None, error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            _log.debug("no stacks by signal: %s", error)


class JobMark:
    """Marks the file of this process as one of a job's member. It may be used by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shown: tuple[int, Path] | None = None  # the process that has made the mark, and its path

    def show(self, key: DoorKey) -> None:
        """Makes the mark, in place of an earlier secret's, if this process has a file. Raises nothing."""
        self.remove()
        with self._lock, suppress(OSError):
            if _kept is not None and _kept[0] == os.getpid():
                path = _mark_of(_kept[2], key)
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
                self._shown = os.getpid(), path

    def remove(self) -> None:
        """Removes the mark. Raises nothing, and leaves a parent process's mark."""
        with self._lock:
            shown, self._shown = self._shown, None
            if shown is not None and shown[0] == os.getpid():
                with suppress(OSError):
                    shown[1].unlink()


def _mark_of(path: Path, key: DoorKey) -> Path:
    return path.with_name(f"{path.name}.{key.mark(path.name)}")


def trouble_here() -> str:
    """Says why this process has no file; empty if it has one."""
    return _trouble if _kept is None or _kept[0] == os.getpid() else "this process was forked from one that has joined"


def own_stacks() -> str:
    """Returns the stacks of all threads of this process, as faulthandler writes them.

    The caller holds the GIL, so no other thread runs Python meanwhile, and no signal is sent.
    """
    with _scratch() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        os.lseek(file, 0, os.SEEK_SET)
        return os.read(file, MAX_STACK_BYTES).decode("utf-8", "replace")


@contextmanager
def _scratch() -> Iterator[int]:
    if hasattr(os, "memfd_create"):  # needs no folder
        file = os.memfd_create("paceline-stacks")
        try:
            yield file
        finally:
            os.close(file)
    else:
        with tempfile.TemporaryFile() as temporary:
            yield temporary.fileno()


def stacks_by_signal(pid: int, key: DoorKey | None = None) -> str:
    """Has another process of this user, on this host, write its stacks, and returns them.

    `pid` is the one in this process's pid namespace. The process must be a member of the job whose secret `key` has;
    None for any job of this user. Raises OSError if that is not possible; the text says why.
    """
    if sys.platform != "linux":
        raise OSError(errno.ENOTSUP, "stacks by signal need Linux")
    if pid == os.getpid():
        raise OSError(errno.EINVAL, "a process does not signal itself: it answers")
    found = _find(pid)
    if found is None:
        if not Path(f"/proc/{pid}").exists():
            raise OSError(errno.ESRCH, "the process has ended")
        raise OSError(
            errno.ENOENT,
            "the process has no file for stacks: it could not make one when it joined, or it is another user's, or has "
            "another TMPDIR",
        )
    check_own(found.path.parent, "it is not used")  # another user's process must not be what this one signals
    file = os.open(found.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        # Only once the file is open: a process that got the same pid has removed the marks before it made its own file.
        if key is not None and not os.path.lexists(_mark_of(found.path, key)):
            raise PermissionError(
                errno.EPERM, f"pid {pid} is no member of this job, and a member answers only for members of its own job"
            )
        return _signalled(file, found)
    finally:
        os.close(file)


def _signalled(file: int, found: StackFile) -> str:
    _await_turn(file)
    _check_holder(file, found.pid)
    process = os.pidfd_open(found.pid)
    try:
        _check_holder(file, found.pid)  # again: so the pidfd is a process's that held the lock
        state, caught = _status(found.pid)
        if state in "Tt":
            raise OSError(
                errno.EAGAIN, "the process is stopped (SIGSTOP or a debugger): it runs no code, and cannot say"
            )
        if not caught >> (found.signal - 1) & 1:
            raise OSError(errno.ENOENT, f"the process does not handle signal {found.signal} any more")
        os.ftruncate(file, 0)
        signal.pidfd_send_signal(process, found.signal)
    finally:
        os.close(process)
    return _written(file, found.pid)


def _await_turn(file: int) -> None:
    """Lets one reader in at a time, by a lock that has nothing to do with the process's lock."""
    import fcntl

    deadline = time.monotonic() + 2.0
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise OSError(errno.EBUSY, "another command is reading its stacks; ask again") from None
        time.sleep(0.01)


def _written(file: int, pid: int) -> str:
    """Waits until the stacks are written. Nothing marks their end, so a while without another byte does."""
    began = last = time.monotonic()
    size = 0
    while True:
        now, new = time.monotonic(), os.fstat(file).st_size
        if new != size:
            size, last = new, now
        elif size and now - last >= _SILENCE_S:
            return os.pread(file, MAX_STACK_BYTES, 0).decode("utf-8", "replace")
        if not size and now - began > _PATIENCE_S:
            state, _ = _status(pid)
            text = f"the process does not take the signal within {_PATIENCE_S} s: the kernel has it in state {state}"
            raise OSError(errno.ETIMEDOUT, text)
        time.sleep(0.005)


def _check_holder(file: int, pid: int) -> None:
    holder = _holder(file)
    if holder != pid:
        raise OSError(errno.ESRCH, "the process has ended" if not holder else f"its file belongs to pid {holder}")


def _holder(file: int) -> int:
    """Returns the pid of the process that has locked a file; 0 if none has, -1 if it has no pid in this namespace."""
    import fcntl

    asked = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, pid = _LOCK.unpack(fcntl.fcntl(file, fcntl.F_GETLK, asked))
    return 0 if kind == fcntl.F_UNLCK else pid or -1


def _status(pid: int) -> tuple[str, int]:
    """Returns the state of a process, a letter, and the mask of signals that it catches (proc(5))."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        raise OSError(errno.ESRCH, "the process has ended") from None
    state = re.search(r"^State:\s*(\w)", text, re.MULTILINE)
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", text, re.MULTILINE)
    return state[1] if state else "?", int(caught[1], 16) if caught else 0


def _find(pid: int) -> StackFile | None:
    namespace = _namespace()
    for each in _files():
        if (each.pid, each.namespace) == (pid, namespace):
            return each
    return None


def _files() -> list[StackFile]:
    folder = user_folder(_FOLDER)
    try:
        paths = sorted(folder.iterdir())
    except OSError:
        return []
    matches = [(path, re.fullmatch(r"(\d{1,20})\.(\d{1,10})\.(\d{1,3})", path.name, re.ASCII)) for path in paths]
    return [StackFile(path, *map(int, match.groups())) for path, match in matches if match is not None]


def _namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _make() -> tuple[int, Path]:
    """Makes and locks the file, then registers the handler; returns the descriptor and the path."""
    if sys.platform != "linux" or struct.calcsize("P") != 8:
        raise OSError(errno.ENOTSUP, "stacks by signal need Linux on 64 bits")
    import fcntl

    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("join ran outside the main thread, where no signal handler can be set")
    number = signal.SIGRTMIN + _OFFSET
    free = signal.getsignal(number) is signal.SIG_DFL and not _status(os.getpid())[1] >> (number - 1) & 1
    if not free and _kept is None:  # otherwise the handler belongs to the process which this one was forked from
        raise RuntimeError(f"other code handles signal {number}")
    path = user_folder(_FOLDER) / f"{_namespace()}.{os.getpid()}.{number}"
    make_private(path.parent, "set TMPDIR to another directory")
    _sweep()
    file, temporary = tempfile.mkstemp(prefix=".", dir=path.parent)  # 0600, not inherited by programs
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_APPEND)
        if free:
            signal.signal(number, signal.SIG_IGN)  # what faulthandler restores when the interpreter ends
        os.replace(temporary, path)
        faulthandler.register(number, file=file, all_threads=True, chain=False)
    except BaseException:
        os.close(file)
        for left in (temporary, path):
            with suppress(OSError):
                os.unlink(left)
        raise
    return file, path


def _sweep() -> None:
    """Removes files and marks of processes that have ended. This process has none yet."""
    for mark in user_folder(_FOLDER).iterdir():
        path = mark.with_suffix("")
        with suppress(OSError):
            if _MARK.fullmatch(mark.name) and not (os.path.lexists(path) and _is_held(path)):
                mark.unlink()
    for each in _files():
        with suppress(OSError):
            if not _is_held(each.path):
                each.path.unlink()


def _is_held(path: Path) -> bool:
    """True if the process of a file lives."""
    file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return _holder(file) != 0
    finally:
        os.close(file)
