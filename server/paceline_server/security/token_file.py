"""The file of tokens, which is looked at again at most once a second.

Each look reads the whole file, because two contents can have the same time of change. If the file cannot be read any
more, or holds no token, the last tokens stay in force: a mistake in an editor must neither let everyone in nor shut
everyone out.

A look can hang for good on a network file system: no other look begins until it has returned.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from paceline_server.blocking_calls import call_apart, start_apart
from paceline_server.security.tokens import Tokens, TokensUnusable
from pacelinepb.private_files import FileTooOpen, read_private

_log = logging.getLogger(__name__)

_THREAD = "paceline-tokens"

MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class KeeperTimes:
    """Times of a `TokenKeeper`."""

    look_s: float = 1.0
    """Seconds between two looks at the file."""

    patience_s: float = 1.0
    """Seconds from the beginning of a look for which calls wait for it; after that they use the last tokens."""

    first_s: float = 10.0
    """Seconds to wait for the first look, without which the coordinator has no tokens."""


def read_tokens(path: Path) -> Tokens:
    """Reads the file; raises `TokensUnusable` also if others may read it."""
    try:
        data = read_private(path, MAX_FILE_BYTES + 1)
    except FileTooOpen as error:
        raise TokensUnusable(f"the token file {error}") from None
    except OSError as error:
        raise TokensUnusable(f"cannot read the token file {path}: {error.strerror or error}") from None
    if len(data) > MAX_FILE_BYTES:
        raise TokensUnusable(f"the token file {path} has more than {MAX_FILE_BYTES} bytes")
    try:
        return Tokens.parse(data.decode())
    except UnicodeDecodeError:
        raise TokensUnusable(f"the token file {path} is not UTF-8 text") from None
    except TokensUnusable as error:
        raise TokensUnusable(f"the token file {path}: {error}") from None


class TokenKeeper:
    """The tokens in force now, which `read` reads again; None if they never change. Used on one loop."""

    def __init__(
        self, tokens: Tokens, read: Callable[[], Tokens] | None = None, *, times: KeeperTimes = KeeperTimes()
    ) -> None:
        self._tokens = tokens
        self._read = read
        self._times = times
        self._look: asyncio.Task[None] | None = None
        self._began_at = self._looked_at = float("-inf")
        self._hangs = False
        self._trouble = ""

    @classmethod
    async def of_file(cls, path: Path, *, times: KeeperTimes = KeeperTimes()) -> Self:
        """Makes a keeper of the tokens of a file; raises `TokensUnusable` also if it is not read within `first_s`."""
        try:
            first = await call_apart(lambda: read_tokens(path), _THREAD, times.first_s)
        except TimeoutError:
            raise TokensUnusable(
                f"cannot read the token file {path} within {times.first_s:g} s. Is it on a network file system that "
                "does not answer?"
            ) from None
        return cls(first, lambda: read_tokens(path), times=times)

    @property
    def last(self) -> Tokens:
        """The tokens in force as of the last look."""
        return self._tokens

    async def current(self) -> Tokens:
        """Returns the tokens in force; looks at the file if the last look was a second ago."""
        if self._read is None:
            return self._tokens
        now, times = asyncio.get_running_loop().time(), self._times
        if self._look is None and now - self._looked_at >= times.look_s:
            self._began_at, self._hangs = now, False
            self._look = asyncio.create_task(self._look_at(self._read))
        if self._look is not None and not self._hangs:
            _, hanging = await asyncio.wait({self._look}, timeout=max(0.0, self._began_at + times.patience_s - now))
            if hanging and not self._hangs:
                self._hangs = True
                _log.error("the token file has not been read for %g s; the last tokens stay in force", times.patience_s)
        return self._tokens

    async def close(self) -> None:
        """Gives up a look that is in progress."""
        if self._look is not None:
            self._look.cancel()
            await asyncio.wait({self._look})

    async def _look_at(self, read: Callable[[], Tokens]) -> None:
        try:
            found = await asyncio.wrap_future(start_apart(read, _THREAD))
        except (TokensUnusable, RuntimeError) as error:  # RuntimeError: there are too many threads
            if str(error) != self._trouble:  # log it once, not every second
                _log.error("%s; the last tokens stay in force", error)
            self._trouble = str(error)
        else:
            if found != self._tokens:
                _log.info("the tokens have changed: %d are in force", len(found.grants))
            self._tokens, self._trouble = found, ""
        finally:
            self._looked_at = asyncio.get_running_loop().time()
            self._look = None
