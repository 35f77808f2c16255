"""The token that is shown to the coordinator: a text, or a file that is read again at most once a second.

If the file cannot be read or is empty for a moment, because it is being changed, the last token stays in use and an
error is logged. The coordinator treats its own file in the same way.

Reading the file can hang for ever if its network is down. So each reading has a daemon thread, one at a time, and calls
wait for it only briefly. In asyncio's pool a reading would delay every call and keep the process from ending.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from concurrent.futures import Future
from pathlib import Path

from pacelinepb.private_files import FileTooOpen, read_private
from pacelinepb.token_lines import token_flaw, token_lines

__all__ = ["TokenSource"]

_log = logging.getLogger("paceline.session")

LOOK_S = 1.0
"""Seconds between two readings of the file."""

PATIENCE_S = 0.5
"""Seconds that calls wait for a reading, from its beginning. If it ends later, later calls use its token."""

FIRST_S = 10.0
"""Seconds to wait for the first reading, without which there is no token."""

_MAX_FILE_BYTES = 1 << 20


class TokenSource:
    """The current token. Its `repr` does not contain the token. Thread-safe.

    Args:
        token: the text, or the path of a file, whose token is the first word of the first line that is neither empty
            nor a comment (`#`). So a coordinator's file can be used.

    Raises:
        ValueError: the file cannot be read within 10 s, or contains no valid token; `FileTooOpen` if other users may
            read it.
    """

    def __init__(self, token: str | Path) -> None:
        self._path = token if isinstance(token, Path) else None
        self._lock = threading.Lock()
        self._reading: Future[str] | None = None
        self._began_at = time.monotonic()
        self._trouble = ""
        if isinstance(token, str):
            if flaw := token_flaw(token):  # gRPC's own error would show the token
                raise ValueError(f"the token {flaw}")
            self._token = token
            return
        try:
            self._token = _start(token).result(FIRST_S)
        except TimeoutError:
            raise ValueError(f"cannot read the token file {token}: no answer in {FIRST_S:g} s") from None

    async def current(self) -> str:
        """Returns the token to show now. Waits for a reading of the file, for half a second at most."""
        reading = None if self._path is None else self._newest_reading(self._path)
        left = self._began_at + PATIENCE_S - time.monotonic()
        if reading is not None and not reading.done() and left > 0:
            try:
                async with asyncio.timeout(left):
                    await asyncio.wrap_future(reading)
            except TimeoutError:
                self._complain(f"the token file {self._path} has not been read for {PATIENCE_S:g} s")
            except ValueError:
                pass  # `_take` has logged it
        return self._token

    def __repr__(self) -> str:
        return "TokenSource(...)" if self._path is None else f"TokenSource({str(self._path)!r})"

    def _newest_reading(self, path: Path) -> Future[str] | None:
        """Returns the reading that is under way, or the last one; starts a new one if it is time."""
        with self._lock:
            free = self._reading is None or self._reading.done()
            if free and time.monotonic() - self._began_at >= LOOK_S:
                self._began_at = time.monotonic()
                try:
                    self._reading = _start(path)
                except RuntimeError as error:  # no thread can be started
                    self._complain(f"cannot read the token file {path}: {error}")
                else:
                    self._reading.add_done_callback(self._take)
            return self._reading

    def _take(self, reading: Future[str]) -> None:
        """Takes over the token of a reading, before any call that waits for it goes on."""
        if (error := reading.exception()) is not None:
            self._complain(str(error))
        else:
            self._token, self._trouble = reading.result(), ""

    def _complain(self, trouble: str) -> None:
        """Logs a problem once, not at every reading."""
        if trouble != self._trouble:
            _log.error("%s; the last token stays in use", trouble)
        self._trouble = trouble


def _start(path: Path) -> Future[str]:
    """Reads the token in a file, on a daemon thread of its own."""
    answer: Future[str] = Future()
    answer.set_running_or_notify_cancel()  # a call that stops waiting must not cancel it for others

    def run() -> None:
        try:
            found = _read(path)
        except BaseException as error:  # noqa: BLE001  the waiting call raises it
            answer.set_exception(error)
        else:
            answer.set_result(found)

    threading.Thread(target=run, name="paceline-token", daemon=True).start()
    return answer


def _read(path: Path) -> str:
    try:
        text = read_private(path, _MAX_FILE_BYTES).decode("utf-8", "replace")
    except FileTooOpen as error:
        raise FileTooOpen(f"the token file {error}") from None
    except OSError as error:
        raise ValueError(f"cannot read the token file {path}: {error.strerror or error}") from None
    try:
        for _, token, _ in token_lines(text):
            return token
    except ValueError as error:
        raise ValueError(f"the token file {path}: {error}") from None
    raise ValueError(f"there is no token in {path}")
