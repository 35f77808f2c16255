"""No call makes the coordinator parse more than its method needs: what is longer is refused as it came."""

from __future__ import annotations

from typing import Any

import pytest

from paceline._rpc import error_from_status
from paceline.errors import LimitExceeded
from paceline_server._grpc import aio, grpc
from paceline_server.services.sizes import TooLong, bounded, most_bytes
from paceline_server.settings import ServerSettings
from pacelinepb.v1 import admin_pb2, session_pb2, store_pb2
from pacelinepb.v1.store_pb2_grpc import StoreServiceStub
from support.coordinator import RawSession, reason_of, refused, run, running

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


def test_which_call_may_be_long() -> None:
    assert {method for method in METHODS if most_bytes(SETTINGS, method) > 64 << 10} == set(LONG)
    assert max(most_bytes(SETTINGS, method) for method in METHODS) == most_bytes(SETTINGS)
    longest = store_pb2.WaitRequest(keys=["k" * SETTINGS.max_key_bytes] * SETTINGS.max_wait_keys)
    assert longest.ByteSize() < most_bytes(SETTINGS, LONG[-1])


def test_what_is_too_long_is_not_parsed() -> None:
    parsed: list[bytes] = []
    parse = bounded(parsed.append, 3)
    parse(b"123")
    assert parse(b"1234") == TooLong(4, 3)
    assert parsed == [b"123"]
    assert bounded(None, 3)(b"123") == b"123"


async def refusal(channel: aio.Channel, method: str, data: bytes, token: str | None = None) -> aio.AioRpcError:
    call: Any = channel.stream_stream(method)(
        iter([data]), metadata=[("authorization", f"Bearer {token}")] if token else None
    )
    with pytest.raises(aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value


@pytest.mark.parametrize("token", [None, "a-token-of-this-test-alone"])
def test_every_call_has_a_limit(token: str | None) -> None:
    """Nothing was parsed of what was too long: it is no message of any kind."""

    async def main() -> None:
        async with running(token=token) as channel:
            for method in [*METHODS, *OTHERS, REFLECTION]:
                too_long = b"\xff" * (most_bytes(SETTINGS, method) + 1)
                error = await refusal(channel, method, too_long, token)
                if method in LONG:  # grpc's own limit, of which nothing gets to us
                    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, method
                    continue
                assert (reason_of(error), error.code()) == ("LIMIT", grpc.StatusCode.RESOURCE_EXHAUSTED), method
                assert error.details() == "a message of this call has at most 65,536 bytes, not 65,537"
                assert isinstance(error_from_status(error, "x"), LimitExceeded)

    run(main)


def test_a_long_message_ends_a_session_that_is_open() -> None:
    async def main() -> None:
        async with running() as channel:
            session = await RawSession.register(channel, host="a", pid=1)
            leave = session_pb2.SessionRequest(leave=session_pb2.Leave(cause="x" * (64 << 10)))
            await session.call.write(leave)
            assert reason_of(await refused(session)) == "LIMIT"

    run(main)


def test_half_a_million_empty_names() -> None:
    """They cost the coordinator 1.4 GiB and 2.8 s."""

    async def main() -> None:
        async with running() as channel:
            await RawSession.register(channel, host="a", pid=1)
            drain = "/pacelinepb.v1.AdminService/DrainMembers"
            for count, words in ((500_000, "65,536 bytes, not 1,000,005"), (20_000, "names at most 5,000 members")):
                request = admin_pb2.DrainMembersRequest(job="job", members=[""] * count)
                error = await refusal(channel, drain, request.SerializeToString())
                assert reason_of(error) == "LIMIT"
                assert words in (error.details() or "")

    run(main)


def test_a_value_of_the_longest_comes_in() -> None:
    async def main() -> None:
        async with running() as channel:
            session = await RawSession.register(channel, host="a", pid=1)
            request = store_pb2.SetRequest(
                caller=session.caller, key="k" * SETTINGS.max_key_bytes, value=b"v" * SETTINGS.max_value_bytes
            )
            await StoreServiceStub(channel).Set(request)

    run(main)
