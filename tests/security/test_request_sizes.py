"""No call makes the coordinator hold or parse more than it needs: grpc refuses a longer message at its first bytes."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline import errors
from paceline_server import Coordinator
from paceline_server._grpc import aio, grpc
from paceline_server.settings import ServerSettings
from pacelinepb.pieces import MESSAGE_BYTES, cut, in_messages
from pacelinepb.v1 import admin_pb2, session_pb2, store_pb2
from pacelinepb.v1.store_pb2_grpc import StoreServiceStub
from support.coordinator import RawSession, duration, reason_of, refused, run, running

SETTINGS = ServerSettings()
METHODS = [
    f"/{service.full_name}/{method.name}"
    for file in (session_pb2, store_pb2, admin_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
LONG = [f"/pacelinepb.v1.StoreService/{method}" for method in ("Set", "CompareSet", "Wait")]
OTHERS = ["/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"]
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


async def refusal(
    channel: aio.Channel,
    method: str,
    data: list[bytes],
    token: str | None = None,
    compression: grpc.Compression = grpc.Compression.NoCompression,
) -> aio.AioRpcError:
    metadata = [("authorization", f"Bearer {token}")] if token else None
    call: Any = channel.stream_stream(method)(iter(data), metadata=metadata, compression=compression)
    with pytest.raises(aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value


@pytest.mark.parametrize("token", [None, "a-token-of-this-test-alone"])
@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
def test_an_oversized_message_is_refused_by_every_method(token: str | None, compression: grpc.Compression) -> None:
    """Not even one that is short on the wire."""

    async def main() -> None:
        async with running(token=token) as channel:
            too_long = [bytes(MESSAGE_BYTES + 1)]
            methods = [*METHODS, *OTHERS, REFLECTION]
            ends = await asyncio.gather(*(refusal(channel, each, too_long, token, compression) for each in methods))
            assert {error.code() for error in ends} == {grpc.StatusCode.RESOURCE_EXHAUSTED}

    run(main)


def test_an_oversized_request_is_refused_without_parsing() -> None:
    """It is refused at the message with which it is too long, and nothing of it was parsed: it is no message at all."""

    async def main() -> None:
        async with running() as channel:
            count = SETTINGS.longest_request // MESSAGE_BYTES
            for method in LONG:
                error = await refusal(channel, method, [b"\xff" * MESSAGE_BYTES] * count + [b"\xff"])
                assert (reason_of(error), error.code()) == ("LIMIT", grpc.StatusCode.RESOURCE_EXHAUSTED), method
                assert error.details() == "a request of this call has at most 1,064,960 bytes"

    run(main)


def test_an_oversized_message_ends_an_open_session() -> None:
    async def main() -> None:
        async with running() as channel:
            session = await RawSession.register(channel, host="a", pid=1)
            leave = session_pb2.SessionRequest(leave=session_pb2.Leave(cause="x" * MESSAGE_BYTES))
            await session.call.write(leave)
            assert (await refused(session)).code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    run(main)


def test_a_drain_request_with_too_many_names_is_refused() -> None:
    """Half a million cost the coordinator 1.4 GiB and 2.8 s."""

    async def main() -> None:
        async with running() as channel:
            await RawSession.register(channel, host="a", pid=1)
            drain = "/pacelinepb.v1.AdminService/DrainMembers"
            for count, words in ((500_000, "larger than max"), (6_000, "names at most 5,000 members")):
                request = admin_pb2.DrainMembersRequest(job="job", members=[""] * count)
                error = await refusal(channel, drain, [request.SerializeToString()])
                assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert words in (error.details() or "")

    run(main)


def test_a_value_in_too_many_empty_pieces_is_refused() -> None:
    """They came as a MiB, and took 17 MiB for as long as the caller left its answer unread."""

    async def main() -> None:
        async with running() as channel:
            request = store_pb2.SetRequest(key="k", value=[b""] * 500_000)
            error = await refusal(channel, "/pacelinepb.v1.StoreService/Set", split(request.SerializeToString()))
            assert reason_of(error) == "LIMIT"
            assert error.details() == "a request of this call has at most 1,000 items, not 500,000"

    run(main)


def split(data: bytes) -> list[bytes]:
    return [data[at : at + MESSAGE_BYTES] for at in range(0, len(data), MESSAGE_BYTES)]


def test_the_longest_allowed_requests_are_accepted() -> None:
    async def main() -> None:
        async with running() as channel:
            session = await RawSession.register(channel, host="a", pid=1)
            store: Any = StoreServiceStub(channel)
            key, value = "k" * SETTINGS.max_key_bytes, b"v" * SETTINGS.max_value_bytes
            await store.Set(in_messages(store_pb2.SetRequest(caller=session.caller, key=key, value=cut(value))))
            answer = await store.CompareSet(
                in_messages(store_pb2.CompareSetRequest(caller=session.caller, key=key, expected=cut(value)))
            )
            assert answer.swapped
            keys = [key] * SETTINGS.max_wait_keys
            await store.Wait(in_messages(store_pb2.WaitRequest(caller=session.caller, keys=keys, timeout=duration(0))))

    run(main)


def test_a_worker_splits_large_values_and_refuses_larger_ones() -> None:
    """With a token, which each call shows."""

    async def main() -> None:
        coordinator = Coordinator(ServerSettings(listen="127.0.0.1:0", token="a-token-of-this-test-alone"))
        address = await coordinator.start()
        try:
            await asyncio.to_thread(store, address)
        finally:
            await coordinator.stop(grace=0.2)

    def store(address: str) -> None:
        credentials = paceline.Credentials(token="a-token-of-this-test-alone")
        with paceline.join(address, job="one", min_workers=1, credentials=credentials) as session:
            for size in (0, 1, MESSAGE_BYTES, 500_000):
                value = bytes(range(256)) * (size // 256) + bytes(size % 256)
                session.store.set("k", value)
                assert session.store.get("k") == value
                assert session.store.compare_set("k", value, value[1:]) == (True, value[1:])
            session.store.set("k", bytes(1 << 20))
            assert session.store.get("k") == bytes(1 << 20)
            assert session.store.compare_set("none", None, b"") == (True, b"")
            assert session.store.compare_set("none", b"", b"1") == (True, b"1")
            session.store.wait(["k"] * 1_000)
            with pytest.raises(errors.LimitExceeded, match="a value has at most 1048576 bytes, not 1048577"):
                session.store.set("k", bytes((1 << 20) + 1))
            with pytest.raises(errors.LimitExceeded, match="a value has at most 1 MiB"):
                session.store.set("k", bytes(2 << 20))
            with pytest.raises(errors.LimitExceeded, match="a key has at most 1,024 bytes"):
                session.store.get("k" * MESSAGE_BYTES)

    run(main)


@pytest.mark.parametrize("size", [10, 1 << 20])
def test_a_revoked_token_raises_not_authenticated_on_a_long_request(size: int, tmp_path: Path) -> None:
    """The token has been taken back: that ends the call at once, before all is sent."""
    tokens = tmp_path / "tokens"
    tokens.touch(0o600)
    tokens.write_text("a-token-of-this-test-alone\n")

    async def main() -> None:
        coordinator = Coordinator(ServerSettings(listen="127.0.0.1:0", token_file=tokens))
        address = await coordinator.start()
        try:
            await asyncio.to_thread(store, address)
        finally:
            await coordinator.stop(grace=0.2)

    def store(address: str) -> None:
        credentials = paceline.Credentials(token="a-token-of-this-test-alone")
        with paceline.join(address, job="one", min_workers=1, credentials=credentials) as session:
            tokens.write_text("another-token-of-this-test\n")
            with pytest.raises(errors.NotAuthenticated):
                set_until_refused(session, bytes(size))

    def set_until_refused(session: paceline.Session, value: bytes) -> None:
        until = time.monotonic() + 10.0
        while time.monotonic() < until:  # the coordinator reads the file once in a second
            session.store.set("k", value)

    run(main)
