"""Tokens at a real coordinator: who is refused and how, how they are rotated, and that none of them ever shows."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import paceline
from paceline._base.proofs import TokenSource, TokenTimes
from paceline._base.waits import loop_thread
from paceline.cli import admin
from paceline.config import Config
from paceline.credentials import Credentials
from paceline.testing import coordinator
from paceline_server._grpc import aio, grpc
from paceline_server.security.token_file import KeeperTimes, TokenKeeper
from paceline_server.security.tokens import Role
from paceline_server.services.authenticate import JOB_OF, LIST_JOBS, role_for
from pacelinepb import checks
from pacelinepb.v1 import admin_pb2, session_pb2, store_pb2
from support.coordinator import reason_of, run, running
from support.hanging import hanging
from support.http2 import DATA, claimed, connect, frame, open_call

pytestmark = pytest.mark.alone

ALL, ONE, TWO = "the-token-for-all-0123456789", "the-token-for-one-0123456789", "the-token-for-two-0123456789"

QUICK = Config(failure_timeout=1.0, join_timeout=10.0)

SOON = 3.0
"""Seconds in which a final refusal comes; `join` would wait for 10."""

METHODS = {
    f"/{service.full_name}/{method.name}": method
    for file in (session_pb2, store_pb2, admin_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


@pytest.fixture
def tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of tokens that is looked at for every call."""
    monkeypatch.setattr(TokenKeeper, "of_file", partial(TokenKeeper.of_file, times=KeeperTimes(look_s=0.0)))
    path = tmp_path / "tokens"
    path.touch(0o600)
    path.write_text(f"{ALL}\n{ONE} one\n{TWO} two\n")
    return path


def join(address: str, token: str | Path | None, job: str = "one") -> paceline.Session:
    """Joins; a file of a token is looked at for every call."""
    source = TokenSource(token, TokenTimes(look_s=0.0)) if isinstance(token, Path) else token
    return paceline.join(address, job=job, credentials=Credentials(token=source), config=QUICK)


def refusal(kind: type[paceline.PacelineError], address: str, token: str | None, job: str = "one") -> str:
    """What `join` says, soon."""
    start = time.monotonic()
    with pytest.raises(kind) as caught:
        join(address, token, job)
    assert time.monotonic() - start < SOON
    text = str(caught.value)
    assert text.startswith(f"the coordinator at {address}: ")
    assert token is None or token not in text
    return text


def test_join_needs_a_known_token_for_its_job(tokens: Path) -> None:
    with coordinator(token_file=tokens) as address:
        for token in (ALL, ONE):
            with join(address, token) as session:
                session.store.set("key", b"value")
                session.barrier("b", timeout=5.0)
        said = refusal(paceline.NotAuthenticated, address, None)
        assert said.endswith("it wants a token: set PACELINE_TOKEN or PACELINE_TOKEN_FILE")
        assert "it does not know this token" in refusal(paceline.NotAuthenticated, address, "an-unknown-token-0123")
        assert "valid for another job" in refusal(paceline.NotPermitted, address, TWO)


def test_a_coordinator_with_a_single_token_refuses_others() -> None:
    with coordinator(token=ALL) as address:
        refusal(paceline.NotAuthenticated, address, ONE)
        with join(address, ALL):
            pass


async def answer(
    channel: aio.Channel, method: str, token: str | None, request: Any = None, *, unread: bool = False
) -> aio.AioRpcError | None:
    """How a call ends: its error, or None. A session's first message is the request.

    `unread` is True if the call is refused whatever its message says. A stream then sends none: if the refusal
    overtakes it, grpc's client reports INTERNAL instead.
    """
    kind = METHODS[method]
    made = request if request is not None else kind.input_type._concrete_class()
    metadata = aio.Metadata() if token is None else aio.Metadata(("authorization", f"Bearer {token}"))
    serialize, parse = type(made).SerializeToString, kind.output_type._concrete_class.FromString
    try:
        if kind.server_streaming:
            call: Any = channel.stream_stream(method, None, parse)(metadata=metadata, timeout=5.0)  # type: ignore[call-arg]
            if not unread:
                await call.write(checks.with_check(serialize(made), 0))
            await call.read()
            await call.done_writing()
            while await call.read() is not aio.EOF:  # type: ignore[attr-defined]
                pass
        else:
            await channel.unary_unary(method, serialize, parse)(made, metadata=metadata, timeout=5.0)
    except aio.AioRpcError as error:
        return error
    return None


def test_every_method_of_every_service_needs_a_token() -> None:
    async def main() -> None:
        async with running(token=ALL) as channel:
            for method in METHODS:
                for token in (None, "an-unknown-token-0123"):
                    error = await answer(channel, method, token, unread=True)
                    assert error is not None, method
                    assert error.code() is grpc.StatusCode.UNAUTHENTICATED, method
                    assert reason_of(error) == "UNAUTHENTICATED", method
                error = await answer(channel, method, ALL)
                assert error is None or error.code() is not grpc.StatusCode.UNAUTHENTICATED, method

    run(main)


def test_an_unauthenticated_call_is_refused_before_its_request_arrives() -> None:
    """Its request is announced and never comes: the refusal does not wait for it."""

    def said(address: str, method: str) -> bytes:
        with connect(address, SOON) as there:
            there.sendall(open_call(method) + frame(DATA, 0, 1, claimed(1 << 20) + b"x" * 100))
            heard = b""
            while b"it wants a token" not in heard:
                piece = there.recv(65536)
                assert piece, heard
                heard += piece
            return heard

    with coordinator(token=ALL) as address:
        for method in METHODS:
            assert b"grpc-status" in said(address, method)


def test_a_first_message_of_another_kind_is_a_bad_request(tokens: Path) -> None:
    async def main() -> None:
        async with running(token_file=tokens) as channel:
            for first in (session_pb2.SessionRequest(heartbeat=session_pb2.Heartbeat()), session_pb2.SessionRequest()):
                for token in (ALL, ONE):
                    error = await answer(channel, "/pacelinepb.v1.SessionService/Session", token, first)
                    assert error is not None
                    assert reason_of(error) == "BAD_REQUEST"

    run(main)


def test_a_hanging_token_file_delays_calls_only_briefly(tokens: Path, tmp_path: Path) -> None:
    """Neither the coordinator's nor a worker's holds anybody up."""
    mine = tmp_path / "mine"
    mine.touch(0o600)
    mine.write_text(ALL)
    with coordinator(token_file=tokens) as address, join(address, mine) as session, hanging(tokens), hanging(mine):
        began = time.monotonic()
        session.store.set("key", b"value")
        assert time.monotonic() - began < SOON
        began = time.monotonic()
        with pytest.raises(paceline.OperationTimeout):
            session.store.get("another", timeout=0.2)
        assert session.store.get("key") == b"value"
        session.barrier("b", timeout=5.0)
        with join(address, ALL, "two"):
            pass
        assert time.monotonic() - began < 2.0, "each of them waits for 0.5 s"


def program(limits: str) -> str:
    """A coordinator that looks at its tokens within these limits."""
    return (
        "from functools import partial\n"
        "from paceline_server.__main__ import main\n"
        "from paceline_server.security.token_file import KeeperTimes, TokenKeeper\n"
        f"TokenKeeper.of_file = partial(TokenKeeper.of_file, times=KeeperTimes({limits}))\n"
        "raise SystemExit(main())\n"
    )


@pytest.mark.slow
def test_processes_can_exit_while_their_token_files_hang(tmp_path: Path) -> None:
    theirs, mine = tmp_path / "tokens", tmp_path / "mine"
    theirs.touch(0o600)
    theirs.write_text(ALL)
    mine.touch(0o600)
    mine.write_text(ALL)
    script = (
        "import logging, os, pathlib, sys, paceline\n"
        "from paceline._base.proofs import TokenSource, TokenTimes\n"
        "logging.basicConfig()\n"
        "times = TokenTimes(look_s=0.0, patience_s=0.1)\n"
        "token = TokenSource(pathlib.Path(os.environ['PACELINE_TOKEN_FILE']), times)\n"
        "with paceline.join(job='one', credentials=paceline.Credentials(token=token)) as session:\n"
        "    print('joined', flush=True)\n"
        "    sys.stdin.readline()\n"
        "    session.store.set('key', b'value')\n"
    )
    serve = program("look_s=0.0, patience_s=0.1")
    with ExitStack() as stack:
        server = stack.enter_context(process(["-c", serve, "--listen", "127.0.0.1:0", "--token-file", str(theirs)]))
        assert server.stdout is not None
        where = {"PACELINE_COORDINATOR": server.stdout.readline().split()[-1], "PACELINE_TOKEN_FILE": str(mine)}
        worker = stack.enter_context(process(["-c", script], where))
        assert worker.stdout is not None
        assert worker.stdout.readline() == "joined\n"
        stack.enter_context(hanging(theirs))
        stack.enter_context(hanging(mine))
        said = worker.communicate("\n", timeout=10.0)[1]
        assert "Error" not in said
        assert f"the token file {mine} has not been read for 0.1 s" in said
        assert worker.returncode == 0
        server.send_signal(signal.SIGTERM)
        said = server.communicate(timeout=5.0)[1]
        assert server.returncode == 0
        assert "the token file has not been read for 0.1 s" in said


def test_a_token_file_that_hangs_at_the_start_ends_the_process(tmp_path: Path) -> None:
    """It has an end, names the file, and does not keep the process from ending."""
    path = tmp_path / "tokens"
    os.mkfifo(path)
    serve = program("first_s=0.2")
    with process(["-c", serve, "--listen", "127.0.0.1:0", "--token-file", str(path)]) as server:
        said = server.communicate(timeout=10.0)[1]
    assert server.returncode == 1
    assert f"cannot read the token file {path} within 0.2 s" in said
    assert "Traceback" not in said


def test_sigterm_ends_a_start_that_hangs(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    os.mkfifo(path)
    serve = ["-m", "paceline_server", "--listen", "127.0.0.1:0", "--token-file", str(path)]
    with process(serve) as server, ExitStack() as stack:
        end = time.monotonic() + 10.0
        while True:
            try:
                stack.callback(os.close, os.open(path, os.O_WRONLY | os.O_NONBLOCK))
                break  # it reads, and nothing comes
            except OSError:
                assert time.monotonic() < end, "the file is not opened"
                time.sleep(0.01)
        server.send_signal(signal.SIGTERM)
        out, said = server.communicate(timeout=5.0)
        assert (server.returncode, out) == (0, "")
        assert "Traceback" not in said


@contextlib.contextmanager
def process(arguments: list[str], environment: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """Python, killed at the end of the block if it still runs."""
    pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    environ = {**os.environ, **(environment or {})}
    with subprocess.Popen([sys.executable, *arguments], text=True, env=environ, **pipes) as running:
        try:
            yield running
        finally:
            running.kill()


def test_every_request_about_another_job_is_refused(tokens: Path) -> None:
    def about(method: str, job: str) -> Any:
        made = METHODS[method].input_type._concrete_class()
        if isinstance(made, session_pb2.SessionRequest):
            made.resume.job = job
        elif hasattr(made, "caller"):
            made.caller.job = job
        else:
            made.job = job
        return made

    async def main() -> None:
        async with running(token_file=tokens) as channel:
            for method in JOB_OF:
                for job in ("two", "", "one "):
                    error = await answer(channel, method, ONE, about(method, job))
                    assert error is not None, method
                    assert error.code() is grpc.StatusCode.PERMISSION_DENIED, method
                    assert reason_of(error) == "PERMISSION_DENIED", method
                error = await answer(channel, method, ONE, about(method, "one"))
                assert error is None or error.code() is not grpc.StatusCode.PERMISSION_DENIED, method
            register = session_pb2.SessionRequest(register=session_pb2.Register(job="two"))
            error = await answer(channel, "/pacelinepb.v1.SessionService/Session", ONE, register)
            assert error is not None
            assert error.code() is grpc.StatusCode.PERMISSION_DENIED

    run(main)


def test_each_role_may_call_only_its_methods(tokens: Path) -> None:
    """A worker's token has nobody leave and ends no line, and one that reads joins no job."""
    callers = {Role.READ: ALL, Role.WORKER: ONE, Role.OPERATOR: TWO}
    tokens.write_text("".join(f"{token} role={role.name.lower()}\n" for role, token in callers.items()))

    async def main() -> None:
        async with running(token_file=tokens) as channel:
            for method in METHODS:
                for role, token in callers.items():
                    too_low = role < role_for(method)
                    error = await answer(channel, method, token, unread=too_low)
                    denied = error is not None and error.code() is grpc.StatusCode.PERMISSION_DENIED
                    assert denied == too_low, (method, role)
                    if denied:
                        assert error is not None
                        assert reason_of(error) == "PERMISSION_DENIED"

    run(main)


def test_a_worker_token_may_not_drain_or_restart(tokens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its token is good for the launchers of its job too."""
    monkeypatch.setenv("PACELINE_TOKEN", ONE)
    tokens.write_text(f"{ONE} role=worker one\n{TWO} role=operator one\n")
    with coordinator(token_file=tokens) as address, join(address, ONE) as session, join(address, ONE, "one/nodes"):
        for order in (lambda: admin.drain(address, "one", [], 5.0), lambda: admin.restart(address, "one", 5.0)):
            with pytest.raises(paceline.NotPermitted, match="has the role 'worker', and this call needs 'operator'"):
                order()
        session.barrier("nobody has left", timeout=5.0)


def test_health_check_is_open_but_watch_and_reflection_need_a_token(tokens: Path) -> None:
    async def services(channel: aio.Channel, token: str | None) -> int:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        metadata = aio.Metadata() if token is None else aio.Metadata(("authorization", f"Bearer {token}"))
        answered = await stub.ServerReflectionInfo(asked, metadata=metadata).read()
        return len(answered.list_services_response.service)

    async def main() -> None:
        async with running(token_file=tokens) as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            assert (await health.Check(health_pb2.HealthCheckRequest())).status == 1
            assert await services(channel, ALL) > 3
            everybody = aio.Metadata(("authorization", f"Bearer {ALL}"))
            assert (await health.Watch(health_pb2.HealthCheckRequest(), metadata=everybody).read()).status == 1
            watch = health.Watch(health_pb2.HealthCheckRequest())
            assert (await watch.code()).name == "UNAUTHENTICATED"
            for token, code in ((None, "UNAUTHENTICATED"), (ONE, "PERMISSION_DENIED")):
                with pytest.raises(aio.AioRpcError) as caught:
                    await services(channel, token)
                assert caught.value.code().name == code

    run(main)


def test_a_token_for_one_job_lists_only_that_job(tokens: Path) -> None:
    def listed(address: str, token: str) -> list[str]:
        credentials = Credentials(token=token)
        jobs = loop_thread().run(admin._ask(address, 5.0, credentials, _list, ""))
        return [job.name for job in jobs]

    async def _list(channel: aio.Channel, left: float) -> list[admin_pb2.JobSummary]:
        from pacelinepb.v1.admin_pb2_grpc import AdminServiceStub

        return list((await AdminServiceStub(channel).ListJobs(admin_pb2.ListJobsRequest(), timeout=left)).jobs)

    assert LIST_JOBS in METHODS
    with coordinator(token_file=tokens) as address, join(address, ALL, "one"), join(address, ALL, "two"):
        assert listed(address, ALL) == ["one", "two"]
        assert listed(address, ONE) == ["one"]


def test_tokens_can_be_rotated_without_a_restart(
    tokens: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mine = tmp_path / "mine"
    mine.touch(0o600)
    mine.write_text(ALL)
    new = "the-next-token-for-all-0123456789"
    with coordinator(token_file=tokens) as address, join(address, mine, "job") as session:
        tokens.write_text(f"{ALL}\n{new}\n")
        with join(address, ALL), join(address, new, "two"):
            pass
        mine.write_text(new)
        tokens.write_text(f"{new}\n")
        refusal(paceline.NotAuthenticated, address, ALL)
        with join(address, new):
            pass
        session.store.set("key", b"the session has not noticed, and shows the new token")
        session.barrier("b", timeout=5.0)
        tokens.write_text("")
        with join(address, new):
            pass
        refusal(paceline.NotAuthenticated, address, ALL)
    assert "there is no token in it" in caplog.text
    assert not any(token in caplog.text for token in (ALL, new, ONE))


def test_a_new_call_with_a_revoked_token_is_refused(tokens: Path) -> None:
    with coordinator(token_file=tokens) as address:
        session = join(address, ALL)
        try:
            tokens.write_text(f"{TWO}\n")
            session.barrier("b", timeout=5.0)  # it is connected, and stays so
            with pytest.raises(paceline.NotAuthenticated, match="it does not know this token"):
                session.store.set("key", b"a new call shows the old token")
        finally:
            session.leave()
