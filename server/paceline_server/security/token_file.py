"""The file of tokens, read again when it has changed: on a thread, and at most once a second.

It is read whole at each look: a time of change can be the same for two contents. A file that cannot be read any more,
or holds no token, leaves the last tokens in force: a slip of an editor must not open or shut everything.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from paceline_server.security.tokens import Tokens, TokensUnusable

__all__ = ["TokenKeeper", "read_tokens"]

_log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between two looks at the file."""

PATIENCE_S = 1.0
"""For how long a call waits for a look: a file on a network that is away must not hold up everybody."""

MAX_FILE_BYTES = 1 << 20


def read_tokens(path: Path) -> Tokens:
    """Reads the file.

    Raises:
        TokensUnusable: it cannot be read, or is no file of tokens; the text names it.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise TokensUnusable(f"cannot read the token file {path}: {error.strerror or error}") from None
    if len(data) > MAX_FILE_BYTES:
        raise TokensUnusable(f"the token file {path} has more than {MAX_FILE_BYTES} bytes")
    try:
        return Tokens.parse(data.decode())
    except UnicodeDecodeError:
        raise TokensUnusable(f"the token file {path} is no text in UTF-8") from None
    except TokensUnusable as error:
        raise TokensUnusable(f"the token file {path}: {error}") from None


class TokenKeeper:
    """The tokens that are in force now. On one loop.

    Args:
        tokens: those at the start.
        read: reads them again; None if they never change.
    """

    def __init__(self, tokens: Tokens, read: Callable[[], Tokens] | None = None) -> None:
        self._tokens = tokens
        self._read = read
        self._look: asyncio.Task[None] | None = None
        self._looked_at = float("-inf")
        self._trouble = ""

    async def current(self) -> Tokens:
        """The tokens in force; has a look at the file if the last one was a second ago."""
        if self._read is None:
            return self._tokens
        if self._look is None and asyncio.get_running_loop().time() - self._looked_at >= LOOK_S:
            self._look = asyncio.create_task(self._look_at(self._read))
        if self._look is not None:
            await asyncio.wait({self._look}, timeout=PATIENCE_S)
        return self._tokens

    async def close(self) -> None:
        """Waits for a look that is under way."""
        if self._look is not None:
            self._look.cancel()
            await asyncio.wait({self._look})

    async def _look_at(self, read: Callable[[], Tokens]) -> None:
        try:
            found = await asyncio.to_thread(read)
        except TokensUnusable as error:
            if str(error) != self._trouble:  # once, not every second
                _log.error("%s; the last tokens stay in force", error)
            self._trouble = str(error)
        else:
            if found != self._tokens:
                _log.info("the tokens have changed: %d are in force", len(found.grants))
            self._tokens, self._trouble = found, ""
        finally:
            self._looked_at = asyncio.get_running_loop().time()
            self._look = None
