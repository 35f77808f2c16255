"""The form of tokens and of token files. Both the coordinator and the workers use it.

A line is `TOKEN`, then what the coordinator needs to know of it: its role and its job. Empty lines and those that begin
with `#` are left out. Lines may end as on Windows (CRLF). No error repeats any part of a line.
"""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["MIN_TOKEN_CHARACTERS", "token_flaw", "token_lines"]

MIN_TOKEN_CHARACTERS = 16
"""The least characters of a token: a shorter one can be guessed; `openssl rand -hex 32` makes a good one."""


def token_flaw(token: str) -> str:
    """Returns what keeps a text from being a token, as the end of a sentence about it; empty if nothing does.

    A header could not carry it, or its reader would take a part of it for the token.
    """
    if not token:
        return "is empty"
    if token.endswith(("\r", "\n")):
        return "ends with a line end (CR or LF): was it read from a file with Windows line ends?"
    if any(character.isspace() for character in token):
        return "has a space, a tab or a line end in it"
    if token.startswith("\ufeff"):
        return "begins with a byte order mark: save its file as UTF-8 without one"
    if not all("!" <= character <= "~" for character in token):
        return "has characters other than printable ASCII"
    return ""


def token_lines(text: str) -> Iterator[tuple[int, str, str]]:
    """Yields the number of each line with a token, its token, and the rest of the line.

    Raises:
        ValueError: a line's token cannot be one; the text names the line.
    """
    for number, line in enumerate(text.split("\n"), 1):
        token, _, rest = line.removesuffix("\r").strip(" \t").replace("\t", " ").partition(" ")
        if not token or token.startswith("#"):
            continue
        what = f"the token in line {number}"
        if flaw := token_flaw(token):
            raise ValueError(f"{what} {flaw}")
        if rest and len(token) < MIN_TOKEN_CHARACTERS:
            raise ValueError(
                f"{what} has {len(token)} characters and then a space, but needs at least {MIN_TOKEN_CHARACTERS} and "
                "has no space in it: its role and its job may follow"
            )
        yield number, token, rest.strip()
