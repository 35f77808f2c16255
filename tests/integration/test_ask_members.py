"""An operator asks members: the coordinator passes the question and the answers on, and keeps nothing."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from paceline_server import Coordinator, ServerSettings
from paceline_server._grpc import aio
from paceline_server.services.admin import AdminLimits
from pacelinepb.pieces import MESSAGE_BYTES, cut, in_messages
from pacelinepb.v1 import admin_pb2 as pb
from pacelinepb.v1 import session_pb2
from pacelinepb.v1.admin_pb2_grpc import AdminServiceStub
from support.coordinator import RawSession, duration, reason_of, run, running

RECORDS = session_pb2.QUESTION_RECORDS
LONGER_THAN_THE_TEST = duration(50.0)


async def pair(channel: aio.Channel) -> list[RawSession]:
    """Two members in a view, by rank."""
    sessions = [await RawSession.register(channel, pid=pid, failure_timeout=60.0) for pid in (1, 2)]
    ranks = [(await session.view()).rank for session in sessions]
    return [session for _, session in sorted(zip(ranks, sessions, strict=True))]


async def answer(session: RawSession, asked: session_pb2.Asked, data: bytes, **fields: Any) -> bool:
    """What the coordinator says to a member's answer."""
    message = session_pb2.AnswerAskRequest(
        job=session.job,
        member_id=fields.get("member_id", session.member_id),
        session_token=fields.get("session_token", session.token),
        ask=fields.get("ask", asked.ask),
        data=cut(data),
    )
    messages = in_messages(message)
    assert all(each.ByteSize() <= MESSAGE_BYTES for each in messages)
    response: session_pb2.AnswerAskResponse = await session.stub.AnswerAsk(iter(messages))
    return response.taken


def question(**fields: Any) -> pb.AskMembersRequest:
    return pb.AskMembersRequest(**{"job": "job", "what": RECORDS, "patience": LONGER_THAN_THE_TEST, **fields})


def test_answers_arrive_complete_in_the_order_given() -> None:
    async def main() -> None:
        async with running() as channel:
            admin: Any = AdminServiceStub(channel)
            first, second = await pair(channel)
            before = time.time()
            call = admin.AskMembers(question())
            asked = [await session.next("asked") for session in (first, second)]
            assert asked[0].ask == asked[1].ask
            assert asked[0].what == RECORDS
            long = bytes(range(256)) * 4096  # 1 MiB
            giving = asyncio.create_task(answer(second, asked[1], long))
            came = await call.read()
            assert (came.member.rank, came.in_view, came.trouble) == (1, True, "")
            assert came.data == long
            at = came.asked_at.ToNanoseconds() / 1e9, came.answered_at.ToNanoseconds() / 1e9
            assert before - 1 <= at[0] <= at[1] <= time.time() + 1
            assert await giving
            assert not await answer(second, asked[1], b"again"), "a member answers once"
            giving = asyncio.create_task(answer(first, asked[0], b"{}"))
            assert (await call.read()).data == b"{}"
            assert await giving
            assert await call.read() is aio.EOF

    run(main)


def test_a_silent_or_disconnected_member_is_reported_with_a_reason() -> None:
    async def main() -> None:
        async with running() as channel:
            admin: Any = AdminServiceStub(channel)
            first, second = await pair(channel)
            second.call.cancel()
            members: list[pb.MemberStatus] = []
            while not members or all(each.attached for each in members):
                members = list((await admin.GetJob(pb.GetJobRequest(job="job"))).members)
            found = [each async for each in admin.AskMembers(question(patience=duration(0.05)))]
            assert {each.member.rank: each.trouble for each in found} == {
                0: "has not answered within 0.1 s",
                1: "is not connected",
            }
            asked = await first.next("asked")
            assert not await answer(first, asked, b"too late")

    run(main)


def test_a_question_that_times_out_gives_a_reason_for_each_member() -> None:
    """Planted: an error that the commands take for the silence of the coordinator."""

    async def main() -> None:
        async with running(admin_limits=AdminLimits(longest_ask_s=0.3)) as channel:
            admin: Any = AdminServiceStub(channel)
            await pair(channel)
            troubles = {each.member.rank: each.trouble async for each in admin.AskMembers(question())}
            assert troubles == dict.fromkeys((0, 1), "has not answered within 0.3 s")

    run(main)


def test_an_operator_that_does_not_read_holds_up_no_member() -> None:
    async def main() -> None:
        limits = AdminLimits(longest_ask_s=0.3, most_unread_s=0.0)
        coordinator = Coordinator(ServerSettings(listen="127.0.0.1:0"), admin_limits=limits)
        address = await coordinator.start()
        small_window = [("grpc.http2.bdp_probe", 0)]  # what is on its way unread stays far below an answer
        async with aio.insecure_channel(address) as channel, aio.insecure_channel(address, small_window) as operator:
            admin: Any = AdminServiceStub(operator)
            first, second = await pair(channel)
            call = admin.AskMembers(question())
            asked = [await session.next("asked") for session in (first, second)]
            long = bytes(1 << 20)
            taken = await asyncio.gather(answer(first, asked[0], long), answer(second, asked[1], long))
            assert not all(taken)
            call.cancel()
        await coordinator.stop()

    run(main)


def test_only_the_asked_member_can_answer() -> None:
    async def main() -> None:
        async with running() as channel:
            admin: Any = AdminServiceStub(channel)
            first, second = await pair(channel)
            call = admin.AskMembers(question(members=["0"]))
            asked = await first.next("asked")
            assert not await answer(second, asked, b"not asked")
            assert not await answer(first, asked, b"another question", ask=asked.ask ^ 1)
            with pytest.raises(aio.AioRpcError) as caught:
                await answer(second, asked, b"posing", member_id=first.member_id)
            assert reason_of(caught.value) == "SESSION_ENDED"
            giving = asyncio.create_task(answer(first, asked, b"mine"))
            assert (await call.read()).data == b"mine"
            assert await giving
            assert await call.read() is aio.EOF

    run(main)


def test_answers_are_dropped_after_the_operator_cancels() -> None:
    async def main() -> None:
        async with running() as channel:
            admin: Any = AdminServiceStub(channel)
            first, second = await pair(channel)
            call = admin.AskMembers(question())
            asked = [await session.next("asked") for session in (first, second)]
            call.cancel()
            assert not any([await answer(first, asked[0], b"a"), await answer(second, asked[1], b"b")])

    run(main)


def test_concurrent_questions_are_limited() -> None:
    async def main() -> None:
        async with running() as channel:
            admin: Any = AdminServiceStub(channel)
            first, _ = await pair(channel)
            calls = [admin.AskMembers(question(members=["0"])) for _ in range(4)]
            for _ in calls:
                await first.next("asked")
            with pytest.raises(aio.AioRpcError, match="ask again") as caught:
                await admin.AskMembers(question(members=["0"])).read()
            assert reason_of(caught.value) == "LIMIT"
            for call in calls:
                call.cancel()

    run(main)


def test_a_stopping_coordinator_ends_open_questions() -> None:
    async def main() -> None:
        coordinator = Coordinator(ServerSettings(listen="127.0.0.1:0"))
        async with aio.insecure_channel(await coordinator.start()) as channel:
            admin: Any = AdminServiceStub(channel)
            first, _ = await pair(channel)
            call = admin.AskMembers(question())
            await first.next("asked")
            await coordinator.stop(grace=20.0)
            with pytest.raises(aio.AioRpcError) as caught:
                await call.read()
            assert reason_of(caught.value) == "DRAINING"

    run(main)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (question(job="none"), "NOT_FOUND"),
        (question(members=["7"]), "NOT_FOUND"),
        (question(what=0), "BAD_REQUEST"),
        (question(what=9), "BAD_REQUEST"),
        (question(pids=range(1, 66)), "LIMIT"),
    ],
)
def test_an_invalid_question_is_refused(request_: pb.AskMembersRequest, reason: str) -> None:
    async def main() -> None:
        async with running() as channel:
            admin: Any = AdminServiceStub(channel)
            await pair(channel)
            with pytest.raises(aio.AioRpcError) as caught:
                await admin.AskMembers(request_).read()
            assert reason_of(caught.value) == reason

    run(main)


def test_only_an_operator_of_the_job_may_ask(tmp_path: Path) -> None:
    tokens = {role: role[0] * 32 for role in ("operator", "worker", "read")}
    file = tmp_path / "tokens"
    file.write_text("".join(f"{token} role={role} job\n" for role, token in tokens.items()) + f"{'x' * 32} other\n")
    file.chmod(0o600)

    async def main() -> None:
        async with running(token_file=file) as channel:
            admin: Any = AdminServiceStub(channel)
            sessions = [await RawSession.register(channel, pid=pid, token=tokens["worker"]) for pid in (1, 2)]
            for session in sessions:
                await session.view()
            for token in (tokens["worker"], tokens["read"], "x" * 32):
                with pytest.raises(aio.AioRpcError) as caught:
                    await admin.AskMembers(question(), metadata=(("authorization", f"Bearer {token}"),)).read()
                assert reason_of(caught.value) == "PERMISSION_DENIED"
            call = admin.AskMembers(
                question(patience=duration(0.01)), metadata=(("authorization", f"Bearer {tokens['operator']}"),)
            )
            assert len([each async for each in call]) == 2

    run(main)
