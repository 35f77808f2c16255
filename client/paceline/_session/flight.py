"""Dumps the flight recorder to a file: on SIGUSR2, and on an abort.

This module owns the directory, the files and the signal. A dump is one JSON file for each process and rank, and each
new dump replaces it; of one rank of a job the latest ten files are kept. A dump holds the flight recorder's records,
and from the session only what `_FIELDS` lists: no token, nothing of the environment, no array.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import WeakValueDictionary

from paceline._base.activity import FlightRecorder, error_text
from paceline._base.processes import make_private, user_folder
from paceline._base.uncaught import wants_whole_stack
from paceline._session.launcher_pipe import tell_once

FLIGHT_DIR = "PACELINE_FLIGHT_DIR"

KEPT = 10
"""Dumps kept of one rank of a job, so that a worker which fails and restarts all night does not fill the disk."""

_FIELDS = ("job", "rank", "size", "generation", "host", "member_id", "links")
_OTHERS = " (each rank of this host has such a file)"
_SIGNAL: int | None = getattr(signal, "SIGUSR2", None)  # Windows has none

_log = logging.getLogger("paceline.flight")


def flight_directory(environ: Mapping[str, str]) -> Path | None:
    """Returns the directory for dumps: PACELINE_FLIGHT_DIR, or `paceline-UID/flight` among the temporary files.

    Returns None if the variable is "off" or empty, or if nothing can be written there, as in a read-only container. The
    directory is made only when there is a dump.
    """
    text = environ.get(FLIGHT_DIR)
    if text is None:
        try:
            return user_folder("flight")
        except FileNotFoundError:
            return None
    return Path(text).absolute() if text not in ("", "off") else None  # absolute: the script may change its directory


def flight_head(described: Mapping[str, Any], pid: int, reason: str) -> dict[str, Any]:
    """Returns what a record says of its member, beside the operations; only keys that are listed here."""
    return {
        "host": socket.gethostname(),
        **{name: described.get(name) for name in _FIELDS if name in described},
        "pid": pid,
        "time": datetime.now(UTC).isoformat(timespec="microseconds"),
        "reason": reason,
    }


class FlightLog:
    """Writes the dumps of one session. Thread-safe; a forked child writes nothing.

    `describe` gives job, rank, size, generation, host, member_id and links. With no `directory` nothing is written, and
    no signal watched.
    """

    def __init__(
        self, recorder: FlightRecorder, describe: Callable[[], dict[str, Any]], directory: Path | None
    ) -> None:
        self._recorder = recorder
        self._describe = describe
        self._directory = directory
        self._pid = os.getpid()
        self._warned = False
        self._aborted: Any = None
        self._once = threading.RLock()  # reentrant: a user's signal handler may leave the session, which aborts

    def dump(self, reason: str, *, is_abort: bool = False) -> Path | None:
        """Writes the recorded operations, and logs the file's name. Raises nothing.

        `is_abort` says that the generation has failed, so other members write their records too. Returns None if dumps
        are off, or if the file could not be written; the first such failure is logged.
        """
        if self._directory is None or os.getpid() != self._pid:
            return None
        path = None
        with suppress(Exception):  # a user's logging filter may raise; nothing may hide the error that caused the dump
            try:
                path, number = self._write(self._directory, reason)
            except Exception as error:  # noqa: BLE001  see above
                if not self._warned:
                    self._warned = True
                    _log.warning("the flight recorder could not be written (%.200s): %s", reason, error_text(error))
            else:
                last = "the last operation is" if number == 1 else f"the last {number} operations are"
                if is_abort and wants_whole_stack():  # every member of the generation writes one
                    tell_once(_log, f"{last} in {path}{_OTHERS}", key=f"flight {self._aborted}")
                elif is_abort:  # `paceline debug flight` finds it
                    _log.debug("%s in %s", last, path)
                else:
                    _log.warning("%s in %s", last, path)
        return path

    def on_abort(self, error: BaseException) -> None:
        """Dumps when a generation has failed, once for each generation. Raises nothing."""
        if self._directory is None or os.getpid() != self._pid:
            return
        with suppress(Exception):
            generation = self._describe().get("generation")
            with self._once:
                if self._aborted is not None and self._aborted == generation:
                    return
                self._aborted = generation
        self.dump(f"abort: {error_text(error)}", is_abort=True)

    def watch_signal(self) -> None:
        """Dumps on SIGUSR2 from now on.

        A signal that arrives just before the main thread falls asleep is handled when that wakes; then send another.
        Does nothing outside the main thread, where Python sets no handlers; if other code handles or ignores the
        signal; if dumps are off; and on Windows.
        """
        if _SIGNAL is None or self._directory is None or threading.current_thread() is not threading.main_thread():
            return
        handler = signal.getsignal(_SIGNAL)
        if handler is signal.SIG_DFL and not _caught_outside_python(_SIGNAL):
            signal.signal(_SIGNAL, _on_signal)
        elif handler is not _on_signal:
            return
        _watching[id(self)] = self

    def close(self) -> None:
        """Stops watching; the last watcher restores the signal's default action, if this is the main thread.

        In another thread the handler stays and has no effect. Idempotent.
        """
        if _watching.pop(id(self), None) is None or _live() or _SIGNAL is None:
            return
        if threading.current_thread() is threading.main_thread() and signal.getsignal(_SIGNAL) is _on_signal:
            signal.signal(_SIGNAL, signal.SIG_DFL)

    def _write(self, directory: Path, reason: str) -> tuple[Path, int]:
        described = self._describe()
        record = self._recorder.record()
        operations = record.pop("operations")
        head = json.dumps(flight_head(described, self._pid, reason), indent=2, default=str)[:-2]
        rest = "".join(f',\n  "{name}": {json.dumps(value)}' for name, value in record.items())
        # One operation a line, so that grep and diff work too.
        lines = ",\n".join(f"    {json.dumps(operation)}" for operation in operations)
        text = f'{head}{rest},\n  "operations": [\n{lines}\n  ]\n}}\n'
        make_private(directory, f"set {FLIGHT_DIR} to another directory")
        stem = f"{_plain(described.get('job'))}.rank{_plain(described.get('rank'))}.pid"
        path = directory / f"{stem}{self._pid}.json"
        # A unique name, opened exclusively with mode 0600: two threads may dump at once, and no link is followed.
        handle, temporary = tempfile.mkstemp(prefix=f"{path.name}.", suffix=".tmp", dir=directory)
        try:
            with open(handle, "w", encoding="ascii") as file:
                file.write(text)
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        _forget_oldest(path, stem)
        return path, len(operations)


_watching: WeakValueDictionary[int, FlightLog] = WeakValueDictionary()
_writer: threading.Thread | None = None


def _live() -> list[FlightLog]:
    """Returns the logs that watch in this process; a forked child inherits the list, but not the sessions."""
    found = [reference() for reference in _watching.valuerefs()]  # a copy, since another thread may close one
    return [log for log in found if log is not None and log._pid == os.getpid()]


def _on_signal(number: int, frame: FrameType | None) -> None:
    # The interrupted code may hold any lock, of logging or of the session. So a thread writes, without a wait for it.
    # A signal that comes while it writes is dropped. A daemon thread's start takes no lock that is not reentrant.
    global _writer
    if not _live() or (_writer is not None and _writer.is_alive()):
        return
    reason = f"signal {signal.Signals(number).name}"
    thread = threading.Thread(target=_dump_all, args=(reason,), name="paceline-flight", daemon=True)
    with suppress(RuntimeError):  # no thread can be started: too many, or the interpreter ends
        thread.start()
        _writer = thread


def _dump_all(reason: str) -> None:
    for log in _live():
        log.dump(reason)


def _caught_outside_python(number: int) -> bool:
    """True if C code handles or ignores the signal, as `faulthandler.register` does; Python cannot see that."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    masks = re.findall(r"^Sig(?:Cgt|Ign):\s*([0-9a-f]+)$", status, re.MULTILINE)  # proc(5)
    return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)


def _plain(name: object) -> str:
    """Makes a name safe for a file name: users choose job names, which may contain anything."""
    text = str(name)
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", text)[:64]
    if plain == text:
        return plain
    return f"{plain}-{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"


def _forget_oldest(latest: Path, stem: str) -> None:
    """Keeps `KEPT` files of a job's rank; half-written files of killed processes count and are removed too."""
    pattern = re.compile(re.escape(stem) + r"[0-9]+\.json(\.\w+\.tmp)?", re.ASCII)
    with suppress(OSError):
        others = [path for path in latest.parent.iterdir() if pattern.fullmatch(path.name) and path != latest]
        others.sort(key=lambda path: path.lstat().st_mtime_ns, reverse=True)
        for path in others[KEPT - 1 :]:
            path.unlink(missing_ok=True)
