"""Tokens: how a file of them is read, whom they let in, how they change, and where each request names its job."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_server.errors import PermissionDenied, Unauthenticated
from paceline_server.security import token_file
from paceline_server.security.token_file import KeeperTimes, TokenKeeper, read_tokens
from paceline_server.security.tokens import MAX_TOKENS, Grant, Role, Tokens, TokensUnusable, exposure
from paceline_server.services.authenticate import JOB_OF, LIST_JOBS, role_for
from paceline_server.settings import ServerSettings, token_settings
from pacelinepb.v1 import admin_pb2, session_pb2, store_pb2
from support.hanging import hanging

ALL, ONE, OTHER = "for-all-of-them-0123456789", "for-job-one-alone-0123456789", "for-two-of-them-0123456789"

METHODS = [
    f"/{service.full_name}/{method.name}"
    for file in (session_pb2, store_pb2, admin_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]

FILE = f"""\
# rotated on Monday
{ALL}

  {ONE}   one
{OTHER} one
{OTHER} job with spaces
"""


def test_parse_reads_tokens_and_their_jobs() -> None:
    tokens = Tokens.parse(FILE)
    assert tokens.grant(f"Bearer {ALL}") == Grant(None)
    assert tokens.grant(f"bearer  {ONE} ") == Grant(frozenset({"one"}))
    assert tokens.grant(f"Bearer {OTHER}") == Grant(frozenset({"one", "job with spaces"}))
    assert Tokens.parse(f"{ONE} one\n{ONE}\n{ONE} two").grant(f"Bearer {ONE}") == Grant(None)


def test_parse_reads_roles() -> None:
    text = f"{ALL} role=read\n{ONE}  role=worker   job with spaces \n{ONE} role=worker two\n{OTHER} role=operator one\n"
    tokens = Tokens.parse(text)
    assert tokens.grant(f"Bearer {ALL}") == Grant(None, Role.READ)
    assert tokens.grant(f"Bearer {ONE}") == Grant(frozenset({"job with spaces", "two"}), Role.WORKER)
    assert tokens.grant(f"Bearer {OTHER}") == Grant(frozenset({"one"})), "the operator's is the default"


@pytest.mark.parametrize("role", Role)
def test_each_role_includes_the_lower_roles(role: Role) -> None:
    for needed in Role:
        if needed <= role:
            Grant(None, role).check_role(needed)
        else:
            with pytest.raises(PermissionDenied, match=f"has the role '{role.name.lower()}', and this call needs"):
                Grant(None, role).check_role(needed)


def test_admin_methods_require_the_read_or_operator_role() -> None:
    assert {method for method in METHODS if role_for(method) is Role.READ} == {
        f"/pacelinepb.v1.AdminService/{name}" for name in ("ListJobs", "GetJob", "ListEvents")
    }
    assert {method for method in METHODS if role_for(method) is Role.OPERATOR} == {
        f"/pacelinepb.v1.AdminService/{name}" for name in ("AskMembers", "DrainMembers", "RestartJob", "ForgetJob")
    }


def test_a_job_token_allows_the_related_jobs_of_its_run() -> None:
    grant = Grant(frozenset({"A", "A/x"}))
    of_run = ("A", "A/nodes", "A/3", "A/3.1", "A/x", "A/x/nodes", "A/x/12")
    other = (
        "A/nodes/nodes",
        "A/y",
        "A/3/x",
        "A/3.",
        "A/.1",
        "A/3.1.1",
        "A/\u0663",
        "A/3\n",
        "B/nodes",
        "/nodes",
        "/3",
        "",
    )
    assert [job for job in (*of_run, *other) if grant.allows(job)] == list(of_run)


def test_only_digests_of_tokens_are_kept() -> None:
    assert ALL not in repr(Tokens.parse(FILE))
    assert hashlib.sha256(ALL.encode()).digest() in Tokens.parse(FILE).grants


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "there is no token in it"),
        (f"{ALL} role=root one", "line 1 has an unknown role: role= must be followed by one of read, worker, op"),
        (f"{ALL} role=", "line 1 has an unknown role"),
        (f"{ALL} one\n{ALL} role=read two", "the token in line 2 has another role in a line above"),
        ("# nothing\n\n", "there is no token in it"),
        (f"{ALL}\nshort", "the token in line 2 has 5 characters, but needs at least 16"),
        ("ü" * 20, "the token in line 1 has characters other than printable ASCII"),
        ("\n".join(f"{number:020}" for number in range(MAX_TOKENS + 1)), f"at most {MAX_TOKENS} are allowed"),
    ],
)
def test_an_invalid_token_file_raises_tokens_unusable(text: str, words: str) -> None:
    with pytest.raises(TokensUnusable, match=words) as caught:
        Tokens.parse(text)
    assert "short" not in str(caught.value)


@given(st.text(), st.text())
def test_arbitrary_text_raises_only_typed_token_errors(text: str, shown: str) -> None:
    with contextlib.suppress(TokensUnusable):
        Tokens.parse(text)
    with pytest.raises(Unauthenticated):
        Tokens.parse(FILE).grant(shown)


@pytest.mark.parametrize("shown", [None, "", "Bearer", "Bearer ", f"Basic {ALL}", ALL])
def test_a_missing_or_malformed_token_raises_unauthenticated(shown: str | None) -> None:
    with pytest.raises(Unauthenticated, match="it wants a token: set PACELINE_TOKEN or PACELINE_TOKEN_FILE"):
        Tokens.parse(FILE).grant(shown)


@pytest.mark.parametrize("shown", [ALL[:-1], ALL + "x", ALL.upper(), "\udcff" * 20])
def test_an_unknown_token_is_refused_without_being_repeated(shown: str) -> None:
    with pytest.raises(Unauthenticated, match="it does not know this token") as caught:
        Tokens.parse(FILE).grant(f"Bearer {shown}")
    assert shown not in str(caught.value)


def test_the_token_of_another_job_is_refused() -> None:
    grant = Tokens.parse(FILE).grant(f"Bearer {ONE}")
    grant.check("one")
    with pytest.raises(PermissionDenied, match="valid for another job"):
        grant.check("two")
    with pytest.raises(PermissionDenied):
        grant.check("")
    Grant(None).check("any")


def test_every_token_is_compared_even_after_a_match(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append(a)
        return a == b

    monkeypatch.setattr("hmac.compare_digest", compare)
    tokens = Tokens.parse(FILE)
    tokens.grant(f"Bearer {ALL}")
    assert compared == list(tokens.grants)


def test_an_unreadable_token_file_raises_tokens_unusable(tmp_path: Path) -> None:
    for path, words in ((tmp_path / "none", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(TokensUnusable, match=f"cannot read the token file {path}: {words}"):
            read_tokens(path)
    (tmp_path / "t").touch(0o600)
    (tmp_path / "t").write_bytes(b"\xff" * 20)
    with pytest.raises(TokensUnusable, match="is not UTF-8 text"):
        read_tokens(tmp_path / "t")
    (tmp_path / "t").write_bytes(b"x" * (token_file.MAX_FILE_BYTES + 1))
    with pytest.raises(TokensUnusable, match="bytes"):
        read_tokens(tmp_path / "t")


def rotation(steps: list[Callable[[], object]], path: Path) -> list[Tokens]:
    """The tokens in force after each step."""

    async def main() -> list[Tokens]:
        keeper = TokenKeeper(read_tokens(path), lambda: read_tokens(path), times=KeeperTimes(look_s=0.0))
        found = []
        for step in steps:
            step()
            found.append(await keeper.current())
        await keeper.close()
        return found

    return asyncio.run(main())


def test_tokens_are_reloaded_when_their_file_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "tokens"
    path.touch(0o600)
    path.write_text(ALL)
    both, last = f"{ALL}\n{ONE}", ONE
    with caplog.at_level("INFO"):
        found = rotation(
            [
                lambda: None,
                lambda: path.write_text(both),
                lambda: path.write_text(last),
                lambda: path.write_text(""),
                path.unlink,
                lambda: None,
                lambda: (path.touch(0o600), path.write_text("short")),
                lambda: path.write_text(ALL),
            ],
            path,
        )
    one = Tokens.parse(last)
    assert found == [Tokens.parse(ALL), Tokens.parse(both), one, one, one, one, one, Tokens.parse(ALL)]
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 3  # each trouble once
    assert all(error.endswith("the last tokens stay in force") for error in errors)
    assert not any(token in caplog.text for token in (ALL, ONE, "short"))


def test_concurrent_callers_share_one_read_of_the_token_file() -> None:
    looks: list[None] = []

    def read() -> Tokens:
        looks.append(None)
        return Tokens.single(ALL)

    async def main() -> None:
        keeper = TokenKeeper(Tokens.single(ALL), read, times=KeeperTimes(look_s=3_600.0))  # no second passes
        await asyncio.gather(*(keeper.current() for _ in range(50)))
        await keeper.current()

    asyncio.run(main())
    assert len(looks) == 1


def test_a_hanging_read_of_the_token_file_delays_callers_only_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tokens"
    path.touch(0o600)
    path.write_text(ALL)
    looks: list[None] = []

    def read() -> Tokens:
        looks.append(None)
        return read_tokens(path)

    async def main() -> None:
        keeper = TokenKeeper(read_tokens(path), read, times=KeeperTimes(look_s=0.0, patience_s=0.2))
        with hanging(path):
            began = time.monotonic()
            found = await asyncio.gather(*(keeper.current() for _ in range(100)))
            assert 0.15 < time.monotonic() - began < 100 * 0.2, "all wait together"
            began = time.monotonic()
            found += [await keeper.current() for _ in range(100)]
            assert time.monotonic() - began < 100 * 0.2, "none of them waits again"
            assert found == [Tokens.single(ALL)] * 200
            assert len(looks) == 1
        path.write_text(ONE)
        end = time.monotonic() + 20.0
        while await keeper.current() != Tokens.single(ONE):
            assert time.monotonic() < end, "it is not looked at any more"
            await asyncio.sleep(0.01)
        await keeper.close()

    asyncio.run(main())
    assert caplog.text.count("has not been read for 0.2 s; the last tokens stay in force") == 1


def test_a_hanging_read_of_the_token_file_does_not_delay_shutdown(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.touch(0o600)
    path.write_text(ALL)

    async def main() -> None:
        keeper = TokenKeeper(Tokens.single(ALL), lambda: read_tokens(path))
        asking = asyncio.create_task(keeper.current())
        await asyncio.wait({asking}, timeout=0.1)
        await keeper.close()
        assert await asking == Tokens.single(ALL)

    with hanging(path):
        began = time.monotonic()
        asyncio.run(main())  # waits for asyncio's pool
        assert time.monotonic() - began < 20.0


def test_token_settings_come_from_the_argument_or_the_environment(tmp_path: Path) -> None:
    assert token_settings(None, {}) == {}
    assert token_settings(None, {"PACELINE_TOKEN": ALL}) == {"token": ALL}
    assert token_settings(None, {"PACELINE_TOKEN_FILE": "f"}) == {"token_file": Path("f")}
    assert token_settings(tmp_path, {"PACELINE_TOKEN": ALL}) == {"token_file": tmp_path}
    with pytest.raises(ValueError, match="both set"):
        token_settings(None, {"PACELINE_TOKEN": ALL, "PACELINE_TOKEN_FILE": "f"})
    for name in ("PACELINE_TOKEN", "PACELINE_TOKEN_FILE"):
        for nothing in ("", " ", "\n"):
            with pytest.raises(ValueError, match=f"{name} is set, but empty"):
                token_settings(None, {name: nothing})
        assert token_settings(tmp_path, {name: ""}) == {"token_file": tmp_path}
    assert ALL not in repr(ServerSettings(token=ALL))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tls_cert": Path("c")}, "tls_cert and tls_key go together"),
        ({"tls_ca": Path("c")}, "tls_ca asks callers for certificates, which needs TLS"),
        ({"token": ALL, "token_file": Path("f")}, "give token or token_file, not both"),
    ],
)
def test_conflicting_settings_raise_value_error(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ServerSettings(**settings)


TLS = {"tls_cert": Path("c"), "tls_key": Path("k")}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"listen": "127.0.0.1:1"}, None),
        ({"listen": "[::1]:1"}, None),
        ({"listen": "localhost:1"}, None),
        ({"listen": "0.0.0.0:1"}, "callers are not authenticated"),
        ({"listen": "host:1", **TLS}, "callers are not authenticated"),
        ({"http": "127.0.0.1:1"}, None),
        ({"http": "0.0.0.0:1"}, "everyone who can reach 0.0.0.0:1 can"),
        ({"http": "0.0.0.0:1", "token": ALL}, "can be read on the wire to 0.0.0.0:1"),
        ({"listen": "[::]:1", "token": ALL}, "can be read on the wire"),
        ({"listen": "0.0.0.0:1", "token": ALL, **TLS}, None),
        ({"listen": "0.0.0.0:1", "tls_ca": Path("a"), **TLS}, None),
    ],
)
def test_exposure_warns_about_unprotected_addresses(settings: dict[str, Any], words: str | None) -> None:
    said = exposure(ServerSettings(**settings))
    assert (said is None) if words is None else words in (said or "")


def test_every_method_has_a_way_to_find_its_job() -> None:
    services = [
        service for file in (session_pb2, store_pb2, admin_pb2) for service in file.DESCRIPTOR.services_by_name.values()
    ]
    methods = {f"/{service.full_name}/{method.name}": method for service in services for method in service.methods}
    assert set(methods) == {*JOB_OF, LIST_JOBS}
    for name, job_of in JOB_OF.items():
        assert job_of(methods[name].input_type._concrete_class()) == ""
    assert (
        JOB_OF["/pacelinepb.v1.SessionService/Session"](session_pb2.SessionRequest(resume=session_pb2.Resume(job="j")))
        == "j"
    )
