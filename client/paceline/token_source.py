"""Where a token comes from: a text, or a file that is read anew whenever the token is shown.

A file that cannot be read for a moment, or is empty, because somebody is changing it, leaves the last token in use,
with an error in the log: the coordinator treats its own file the same.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

__all__ = ["TokenSource"]

_log = logging.getLogger("paceline.session")

_MAX_FILE_BYTES = 1 << 20


class TokenSource:
    """A token, now and later. Never shows it in its own text.

    Args:
        token: the text, or the path of a file. Of a file the first word of the first line counts that is neither empty
            nor a comment (`#`), so that a coordinator's file will do.

    Raises:
        ValueError: the file cannot be read, or what it holds can be no token.
    """

    def __init__(self, token: str | Path) -> None:
        self._path = token if isinstance(token, Path) else None
        self._token = _checked(token, "the token") if isinstance(token, str) else _read(token)

    async def current(self) -> str:
        """The token to show now. A file is read on a thread."""
        if self._path is not None:
            try:
                self._token = await asyncio.to_thread(_read, self._path)
            except ValueError as error:
                _log.error("%s; the last token stays in use", error)
        return self._token

    def __repr__(self) -> str:
        return "TokenSource(...)" if self._path is None else f"TokenSource({str(self._path)!r})"


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            lines = file.read(_MAX_FILE_BYTES).decode("utf-8", "replace").splitlines()
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
