"""A file of tokens as the coordinator and workers read it: what is wrong is said by name, and no part of a token."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import Credentials
from paceline._base.proofs import TokenSource
from paceline_server.security.token_file import read_tokens
from paceline_server.security.tokens import TokensUnusable
from paceline_server.settings import token_settings
from pacelinepb.token_lines import token_flaw, token_lines

TOKEN = "a-token-that-nobody-guesses"


def private(path: Path, text: str) -> Path:
    path.touch(0o600)
    path.write_bytes(text.encode())
    return path


@pytest.mark.parametrize("text", [f"{TOKEN}\r\n", f"# Monday\r\n\r\n{TOKEN}\trole=read  one \r\n", f" {TOKEN} "])
def test_windows_line_ends_and_blanks_around_a_token_are_stripped(text: str, tmp_path: Path) -> None:
    path = private(tmp_path / "tokens", text)
    assert read_tokens(path).grant(f"Bearer {TOKEN}")
    assert TokenSource(path)._token == TOKEN
    ((_, token, rest),) = token_lines(text)
    assert (token, rest) in ((TOKEN, ""), (TOKEN, "role=read  one"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("half-of\ra-token-that-nobody-guesses\n", "the token in line 1 has a space, a tab or a line end in it"),
        (f"# Monday\n{TOKEN}\r\r\n", r"the token in line 2 ends with a line end \(CR or LF\)"),
        (f"half-of\N{NO-BREAK SPACE}{TOKEN}", "the token in line 1 has a space, a tab or a line end in it"),
        ("half-of a-token-that-nobody-guesses", "the token in line 1 has 7 characters and then a space, but needs at"),
        (f"\N{ZERO WIDTH NO-BREAK SPACE}{TOKEN}\r\n", "the token in line 1 begins with a byte order mark"),
        (f"{TOKEN}\0", "the token in line 1 has characters other than printable ASCII"),
    ],
)
def test_token_file_errors_name_the_flaw_and_never_the_token(text: str, words: str, tmp_path: Path) -> None:
    path = private(tmp_path / "tokens", text)
    with pytest.raises(TokensUnusable, match=f"^the token file {path}: {words}") as coordinator:
        read_tokens(path)
    with pytest.raises(ValueError, match=f"^the token file {path}: {words}") as worker:
        Credentials.from_environment({"PACELINE_TOKEN_FILE": str(path)})
    for caught in (coordinator, worker):
        assert not any(part in str(caught.value) for part in ("half", "nobody"))


@pytest.mark.parametrize("text", [f"{TOKEN}\r", f"half {TOKEN}"])
def test_a_flawed_token_variable_is_named_without_the_token(text: str) -> None:
    """As `export PACELINE_TOKEN=$(cat FILE)` does, which keeps the CR of the last line."""
    for read in (Credentials.from_environment, lambda environ: token_settings(None, environ)):
        with pytest.raises(ValueError, match=r"^PACELINE_TOKEN (ends with a line end|has a space)") as caught:
            read({"PACELINE_TOKEN": text})
        assert "nobody" not in str(caught.value)


@given(st.text())
def test_a_token_without_flaws_can_be_a_header(text: str) -> None:
    if not token_flaw(text):
        assert text.isascii()
        assert text.isprintable()
        assert " " not in text
