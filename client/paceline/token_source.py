"""Where a token comes from: a text, or a file that is read anew when the token is shown, at most once a second.

A file that cannot be read for a moment, or is empty, because somebody is changing it, leaves the last token in use,
with an error in the log: the coordinator treats its own file the same.

A look at a file can hang for good, where a network is away. Each has a daemon thread, calls wait for it for a moment
only, and there is one at a time: in asyncio's pool it would hold up every call, and keep the process from ending.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from concurrent.futures import Future
from pathlib import Path

from pacelinepb.private_files import FileTooOpen, read_private

__all__ = ["TokenSource"]

_log = logging.getLogger("paceline.session")

LOOK_S = 1.0
"""Seconds between two looks at the file."""

PATIENCE_S = 0.5
"""For how long calls wait for a look, from its beginning. It may come late: its token is for the calls that follow."""

FIRST_S = 10.0
"""For how long the first look is waited for, without which there is no token at all."""

_MAX_FILE_BYTES = 1 << 20


class TokenSource:
    """A token, now and later. Never shows it in its own text. For all threads.

    Args:
        token: the text, or the path of a file. Of a file the first word of the first line counts that is neither empty
            nor a comment (`#`), so that a coordinator's file will do.

    Raises:
        ValueError: the file cannot be read, or not within 10 s, or what it holds can be no token; `FileTooOpen` if
            others may read it.
    """

    def __init__(self, token: str | Path) -> None:
        self._path = token if isinstance(token, Path) else None
        self._lock = threading.Lock()
        self._look: Future[str] | None = None
        self._began_at = time.monotonic()
        self._trouble = ""
        if isinstance(token, str):
            self._token = _checked(token, "the token")
            return
        try:
            self._token = _start(token).result(FIRST_S)
        except TimeoutError:
            raise ValueError(f"cannot read the token file {token}: nothing came of it in {FIRST_S:g} s") from None

    async def current(self) -> str:
        """The token to show now. Waits for a look at the file, for half a second at most."""
        look = None if self._path is None else self._newest_look(self._path)
        left = self._began_at + PATIENCE_S - time.monotonic()
        if look is not None and not look.done() and left > 0:
            try:
                async with asyncio.timeout(left):
                    await asyncio.wrap_future(look)
            except TimeoutError:
                self._complain(f"the token file {self._path} has not been read for {PATIENCE_S:g} s")
            except ValueError:
                pass  # it is in the log
        return self._token

    def __repr__(self) -> str:
        return "TokenSource(...)" if self._path is None else f"TokenSource({str(self._path)!r})"

    def _newest_look(self, path: Path) -> Future[str] | None:
        """The look that is under way, or a new one if it is time for one."""
        with self._lock:
            free = self._look is None or self._look.done()
            if free and time.monotonic() - self._began_at >= LOOK_S:
                self._began_at = time.monotonic()
                try:
                    self._look = _start(path)
                except RuntimeError as error:  # there are too many threads
                    self._complain(f"cannot read the token file {path}: {error}")
                else:
                    self._look.add_done_callback(self._take)
            return self._look

    def _take(self, look: Future[str]) -> None:
        """Before any who wait for it go on."""
        if (error := look.exception()) is not None:
            self._complain(str(error))
        else:
            self._token, self._trouble = look.result(), ""

    def _complain(self, trouble: str) -> None:
        """Once, not at every look."""
        if trouble != self._trouble:
            _log.error("%s; the last token stays in use", trouble)
        self._trouble = trouble


def _start(path: Path) -> Future[str]:
    """Reads the token in a file, on a daemon thread of its own."""
    answer: Future[str] = Future()
    answer.set_running_or_notify_cancel()  # whoever stops waiting must not take it from the others

    def run() -> None:
        try:
            found = _read(path)
        except BaseException as error:  # noqa: BLE001  whoever waits shall hear of it, whatever it is
            answer.set_exception(error)
        else:
            answer.set_result(found)

    threading.Thread(target=run, name="paceline-token", daemon=True).start()
    return answer


def _read(path: Path) -> str:
    try:
        lines = read_private(path, _MAX_FILE_BYTES).decode("utf-8", "replace").splitlines()
    except FileTooOpen as error:
        raise FileTooOpen(f"the token file {error}") from None
    except OSError as error:
        raise ValueError(f"cannot read the token file {path}: {error.strerror or error}") from None
    for line in lines:
        words = line.split(maxsplit=1)
        if words and not words[0].startswith("#"):
            return _checked(words[0], f"the token in {path}")
    raise ValueError(f"there is no token in {path}")


def _checked(token: str, what: str) -> str:
    """A token that metadata can carry: gRPC's own error would show it."""
    if not token or not all("!" <= character <= "~" for character in token):
        raise ValueError(f"{what} is empty, or has spaces or characters other than printable ASCII")
    return token
