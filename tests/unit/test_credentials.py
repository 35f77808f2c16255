"""Credentials: what goes together, what is said of what does not, and that no secret shows."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from paceline._base.proofs import TokenSource, TokenTimes
from paceline._base.rpc import aio, grpc
from paceline.credentials import IN_THE_CLEAR, Credentials
from support.certificates import CertificateFolder, make_folder
from support.hanging import hanging

TOKEN = "a-token-that-nobody-guesses"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> CertificateFolder:
    return make_folder(tmp_path_factory.mktemp("tls") / "good")


def shown(credentials: Credentials) -> list[tuple[str, str]]:
    return list(asyncio.run(credentials.metadata()))


def test_an_empty_environment_gives_no_credentials() -> None:
    found = Credentials.from_environment({})
    assert found == IN_THE_CLEAR
    assert found.files is None
    assert shown(found) == []


def test_certificates_and_a_token_are_read_from_the_environment(good: CertificateFolder) -> None:
    found = Credentials.from_environment({**good.environment, "PACELINE_TOKEN": TOKEN})
    assert found.files is not None
    assert found.for_worker() is found
    assert shown(found) == [("authorization", f"Bearer {TOKEN}")]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["CERT"], "PACELINE_TLS_CERT is set, but PACELINE_TLS_KEY is not"),
        (["KEY"], "PACELINE_TLS_KEY is set, but PACELINE_TLS_CERT is not"),
        (["CA", "KEY"], "PACELINE_TLS_KEY is set, but PACELINE_TLS_CERT is not"),
        (["CERT", "KEY"], "PACELINE_TLS_CERT and PACELINE_TLS_KEY are set, but PACELINE_TLS_CA is not"),
    ],
)
def test_a_missing_tls_variable_is_named(good: CertificateFolder, names: list[str], words: str) -> None:
    environ = {f"PACELINE_TLS_{name}": good.environment[f"PACELINE_TLS_{name}"] for name in names}
    with pytest.raises(ValueError, match=words):
        Credentials.from_environment(environ)


def test_an_authority_alone_is_refused_for_workers(good: CertificateFolder) -> None:
    found = Credentials.from_environment({"PACELINE_TLS_CA": good.environment["PACELINE_TLS_CA"]})
    assert found == good.authority_only
    with pytest.raises(
        ValueError, match="PACELINE_TLS_CERT and PACELINE_TLS_KEY are not: connections from other members"
    ):
        found.for_worker()


def test_an_unreadable_file_is_named(good: CertificateFolder, tmp_path: Path) -> None:
    nowhere = str(tmp_path / "nowhere.pem")
    with pytest.raises(ValueError, match=f"PACELINE_TLS_KEY: cannot read {nowhere}: No such file"):
        Credentials.from_environment({**good.environment, "PACELINE_TLS_KEY": nowhere})
    with pytest.raises(ValueError, match=f"cannot read the token file {nowhere}: No such file"):
        Credentials.from_environment({"PACELINE_TOKEN_FILE": nowhere})


@pytest.mark.parametrize(
    ("name", "file", "words"),
    [
        ("CA", "member.key", r"the authority \(ca\) is not a certificate"),
        ("KEY", "coordinator.key", "the key does not belong to the certificate"),
        ("KEY", "ca.pem", "they are not in PEM"),
    ],
)
def test_a_tls_file_of_the_wrong_kind_is_refused(
    good: CertificateFolder, tmp_path: Path, name: str, file: str, words: str
) -> None:
    path = tmp_path / file
    path.touch(0o600)
    path.write_bytes((good.path / file).read_bytes())
    with pytest.raises(ValueError, match=words) as caught:
        Credentials.from_environment({**good.environment, f"PACELINE_TLS_{name}": str(path)})
    assert f"PACELINE_TLS_{name}={path}" in str(caught.value)


@pytest.mark.parametrize(
    ("address", "target"),
    [
        ("dns:7400", "dns:///dns:7400"),
        ("unix:7400", "dns:///unix:7400"),
        ("10.0.0.1:7400", "dns:///10.0.0.1:7400"),
        ("[::1]:7400", "dns:///%5B::1%5D:7400"),
    ],
)
def test_a_host_name_is_never_parsed_as_a_uri_scheme(
    good: CertificateFolder, monkeypatch: pytest.MonkeyPatch, address: str, target: str
) -> None:
    dialled: list[str] = []
    for module in (aio, grpc):
        for name in ("insecure_channel", "secure_channel"):
            monkeypatch.setattr(module, name, lambda target, *_, **__: dialled.append(target))
    for credentials in (IN_THE_CLEAR, good.credentials):
        for make in (credentials.coordinator_channel, credentials.member_channel, credentials.probe_channel):
            make(address, ())
    assert dialled == [target] * 6


def test_a_token_and_a_token_file_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="PACELINE_TOKEN and PACELINE_TOKEN_FILE are both set"):
        Credentials.from_environment({"PACELINE_TOKEN": TOKEN, "PACELINE_TOKEN_FILE": str(tmp_path)})


@pytest.mark.parametrize("nothing", ["", " ", "\n"])
def test_a_variable_that_is_set_but_empty_is_named(good: CertificateFolder, nothing: str) -> None:
    for name in (*good.environment, "PACELINE_TOKEN", "PACELINE_TOKEN_FILE"):
        for others in ({}, good.environment):
            with pytest.raises(ValueError, match=f"{name} is set, but empty: unset it if"):
                Credentials.from_environment({**others, name: nothing})
    with pytest.raises(ValueError, match="PACELINE_TLS_CA is set, but empty"):
        Credentials.tls_from_environment({"PACELINE_TLS_CA": nothing})


def test_tls_from_environment_ignores_tokens(good: CertificateFolder, tmp_path: Path) -> None:
    for token in ({"PACELINE_TOKEN_FILE": str(tmp_path / "nowhere")}, {"PACELINE_TOKEN": ""}):
        found = Credentials.tls_from_environment({**good.environment, **token})
        assert found == good.credentials
        assert shown(found) == []


@pytest.mark.parametrize("token", ["two words of it", "ünïcode-ünïcode-ünïcode", "line\nbreak-line-break", ""])
def test_an_invalid_token_is_refused_and_not_repeated(token: str) -> None:
    with pytest.raises(ValueError, match=r"^the token (is empty|has a space|has characters other than)") as caught:
        Credentials(token=token)
    assert not token or token not in str(caught.value)


def test_repr_shows_no_secret(good: CertificateFolder, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text(TOKEN)
    whole = good.credentials
    for credentials in (Credentials(whole.ca, whole.cert, whole.key, TOKEN), Credentials(token=path)):
        text = f"{credentials!r} {credentials} {credentials.token!r} {credentials.files!r}"
        assert TOKEN not in text
        assert "PRIVATE" not in text
    assert str(path) in repr(Credentials(token=path))
    assert repr(whole) == "Credentials(tls='mutual', token=None)"


def test_a_changed_token_file_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text(f"# comment\n\n{TOKEN} job\nanother-token\n")
    credentials = Credentials(token=TokenSource(path, TokenTimes(look_s=0.0)))
    assert shown(credentials) == [("authorization", f"Bearer {TOKEN}")]
    path.write_text("the-next-token-of-all\n")
    assert shown(credentials) == [("authorization", "Bearer the-next-token-of-all")]
    for trouble in (lambda: path.write_text("# none\n"), path.unlink):
        trouble()
        for _ in range(3):
            assert shown(credentials) == [("authorization", "Bearer the-next-token-of-all")]
    assert len(caplog.records) == 2  # each trouble once
    assert f"there is no token in {path}; the last token stays in use" in caplog.text
    assert f"cannot read the token file {path}" in caplog.text
    assert "the-next-token" not in caplog.text


def test_a_token_file_is_checked_at_most_once_a_second(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text(TOKEN)
    credentials = Credentials(token=path)
    path.write_text("the-next-token-of-all")
    assert shown(credentials) == [("authorization", f"Bearer {TOKEN}")]


def test_calls_wait_only_once_for_a_token_file_that_hangs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text(TOKEN)
    source = TokenSource(path, TokenTimes(look_s=0.0, patience_s=0.2))

    async def main() -> None:
        began = time.monotonic()
        assert await asyncio.gather(*(source.current() for _ in range(20))) == [TOKEN] * 20
        assert 0.15 < time.monotonic() - began < 20 * 0.2, "all wait together"
        began = time.monotonic()
        assert [await source.current() for _ in range(20)] == [TOKEN] * 20
        assert time.monotonic() - began < 20 * 0.2, "none of them waits again"
        assert [thread.name for thread in threading.enumerate()].count("paceline-token") == 1

    with hanging(path):
        began = time.monotonic()
        asyncio.run(main())  # waits for asyncio's pool
        assert time.monotonic() - began < 5.0
    assert caplog.text.count("has not been read for 0.2 s; the last token stays in use") == 1
    path.write_text("the-next-token-of-all")
    end = time.monotonic() + 5.0
    while asyncio.run(source.current()) != "the-next-token-of-all":
        assert time.monotonic() < end, "it is not looked at any more"


def test_a_token_file_that_hangs_at_the_first_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text(TOKEN)
    with hanging(path), pytest.raises(ValueError, match=f"cannot read the token file {path}: no answer in"):
        TokenSource(path, TokenTimes(first_s=0.1))


def test_unary_calls_add_the_token_to_their_metadata() -> None:
    from paceline.credentials import _ShowsToken

    seen: list[Any] = []

    class Details:
        metadata = (("mine", "1"),)

        def _replace(self, metadata: Any) -> Any:
            return metadata

    async def call(details: Any, request: Any) -> None:
        seen.append((sorted(details), request))

    asyncio.run(_ShowsToken(TokenSource(TOKEN).current).intercept_unary_unary(call, Details(), "request"))
    assert seen == [([("authorization", f"Bearer {TOKEN}"), ("mine", "1")], "request")]
