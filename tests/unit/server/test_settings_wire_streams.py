"""Settings, the table of refusals, stalls, wire checks, and the outgoing queue of a stream."""

import asyncio
import contextlib
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from paceline_protocol import Process, Versions
from paceline_protocol._versions import spoken_by
from paceline_protocol.coordinator import Wakefulness
from paceline_server import errors, wire
from paceline_server.errors import BadRequest, LimitMet, Refused, VersionMismatch
from paceline_server.settings import ServerSettings
from paceline_server.storage.base import StoredJob
from paceline_server.storage.checks import MOST_VERSION, check_job
from paceline_server.streams import SessionStream
from pacelinepb.v1 import session_pb2 as pb
from pacelinepb.v1.errors_pb2 import ErrorReason
from support.coordinator import run
from support.views import view


@pytest.mark.parametrize("listen", ["7400", "host:", ":7400", "host:x", "host:99999"])
def test_a_malformed_listen_address_is_refused(listen: str) -> None:
    with pytest.raises(ValueError, match="listen must be host:port"):
        ServerSettings(listen=listen)


def test_a_limit_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="max_keys must be above 0, not 0"):
        ServerSettings(max_keys=0)


def test_max_name_bytes_above_128_is_refused() -> None:
    with pytest.raises(ValueError, match="max_name_bytes must be at most 128, as in all messages, not 129"):
        ServerSettings(max_name_bytes=129)


def test_every_refusal_has_a_unique_pair_of_status_and_reason() -> None:
    kinds = set(Refused.__subclasses__())
    assert set(errors.STATUS) == kinds
    assert len({(kind.reason, errors.STATUS[kind]) for kind in kinds}) == len(kinds)
    assert {kind.__name__ for kind in kinds} < set(errors.__all__)
    assert ErrorReason.ERROR_REASON_UNSPECIFIED not in {kind.reason for kind in kinds}


def test_a_stall_is_a_gap_of_more_than_two_beats() -> None:
    wakefulness = Wakefulness(10.0, pulse=0.05)
    assert wakefulness.awake(10.06) == 0.0
    assert wakefulness.awake(14.06) == pytest.approx(4.0)
    assert wakefulness.awake(14.07) == 0.0


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (Process("h", 1, "b", 5), Process("h", 1, "b", 5), True),
        (Process("h", 1, "b", 5), Process("h", 1), True),
        (Process("h", 1, "b", 5), Process("h", 1, "b", 6), False),
        (Process("h", 1, "b", 5), Process("h", 1, "c", 5), False),
        (Process("h", 1, "b", 5, 7), Process("h", 1, "b", 5, 7), True),
        (Process("h", 1, "b", 5, 7), Process("h", 1, "b", 5, 8), False),
        (Process("h", 1, "b", 5, 7), Process("h", 1, "b", 5), True),
        (Process("h", 1, "", 0, 7), Process("h", 1, "", 0, 8), False),
        (Process("h", 1), Process("h", 2), False),
        (Process("h", 1), Process("g", 1), False),
    ],
)
def test_is_same_compares_process_identities(one: Process, other: Process, same: bool) -> None:
    assert one.is_same(other) is same
    assert other.is_same(one) is same


@pytest.mark.parametrize("bad", [Duration(seconds=-1), Duration(nanos=-1), Duration(nanos=2_000_000_000)])
def test_an_invalid_duration_is_refused(bad: Duration) -> None:
    with pytest.raises(BadRequest, match="x must be a duration"):
        wire.from_duration(bad, "x")


@pytest.mark.parametrize("seconds", [0.0, 0.5, 3.0, 86_400.25])
def test_durations_round_trip(seconds: float) -> None:
    assert wire.from_duration(wire.to_duration(seconds), "x") == pytest.approx(seconds)


@pytest.mark.parametrize("name", ["", "x" * 129, "a\nb", "\x1b[2J"])
def test_an_invalid_job_name_is_refused(name: str) -> None:
    with pytest.raises(BadRequest, match="name of a job"):
        wire.read_job_name(name, ServerSettings())


@pytest.mark.parametrize(
    "process", [{"pid": 1}, {"host": "h"}, {"host": "h\0", "pid": 1}, {"host": "h", "pid": 1, "boot_id": "x\n"}]
)
def test_an_invalid_process_identity_is_refused(process: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        wire.read_process(pb.ProcessIdentity(**process), ServerSettings())


@pytest.mark.parametrize(
    "settings", [{}, {"failure_timeout": Duration()}, {"failure_timeout": Duration(seconds=10**9)}]
)
def test_an_invalid_failure_timeout_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="failure_timeout"):
        wire.read_settings(pb.JobSettings(**settings), ServerSettings())


def test_read_report_keeps_the_unopened_flag() -> None:
    lost = ErrorReason.ERROR_REASON_PEER_LOST
    assert wire.read_report(pb.Report(reason=lost, accused=1, unopened=True), ServerSettings()).unopened
    assert not wire.read_report(pb.Report(reason=lost, accused=1), ServerSettings()).unopened


@pytest.mark.parametrize("number", [2**62, 2**64 - 1])
def test_numbers_too_large_for_the_state_file_are_refused(number: int) -> None:
    reason = ErrorReason.ERROR_REASON_TIMEOUT
    with pytest.raises(BadRequest, match=r"report.operation must be below 2\^62"):
        wire.read_report(pb.Report(operation=number, reason=reason), ServerSettings())
    with pytest.raises(BadRequest, match=r"heartbeat.operation must be below 2\^62"):
        wire.read_progress(0.0, pb.Heartbeat(operation=number))
    with pytest.raises(BadRequest, match=r"start_ticks must be below 2\^62"):
        wire.read_process(pb.ProcessIdentity(host="h", pid=1, start_ticks=number), ServerSettings())


@pytest.mark.parametrize(("seconds", "told"), [(2**63 - 1, 3.15e9), (-(2**63), 0.0), (60, 60.0)])
def test_the_since_duration_of_progress_is_clamped(seconds: int, told: float) -> None:
    beat = pb.Heartbeat(operation=2**62 - 1, since=Duration(seconds=seconds))
    again = wire.write_progress(1e6, wire.read_progress(1e6, beat))
    assert again.operation == beat.operation
    assert wire.from_duration(again.since, "since") == pytest.approx(told)


def test_read_versions_checks_the_protocol_versions() -> None:
    with pytest.raises(VersionMismatch, match=r"speaks version 99 of the protocol, .* versions 8 to 9: run workers"):
        wire.read_versions(pb.Register(protocol_version=99))
    assert wire.read_versions(pb.Register(protocol_version=8)) == Versions(8, 8)
    assert wire.read_versions(pb.Resume(protocol_version=8, newest_protocol_version=9)) == Versions(8, 9)
    with pytest.raises(BadRequest, match="9 to 8"):
        wire.read_versions(pb.Register(protocol_version=9, newest_protocol_version=8))


@pytest.mark.parametrize("kind", [pb.Register, pb.Resume])
def test_every_accepted_version_range_passes_the_state_check(kind: type[pb.Register] | type[pb.Resume]) -> None:
    """Otherwise one worker would make the state of all jobs unreadable."""
    numbers = (0, 1, 7, 8, 9, 10, MOST_VERSION, MOST_VERSION + 1, 2**32 - 1)
    accepted: set[Versions] = set()
    for oldest, newest in product(numbers, numbers):
        with contextlib.suppress(BadRequest, VersionMismatch):
            accepted.add(wire.read_versions(kind(protocol_version=oldest, newest_protocol_version=newest)))
    assert {Versions(1, 8), Versions(8, 9), Versions(9, MOST_VERSION)} < accepted
    for versions in accepted:
        for spoken in (versions, spoken_by([versions])):
            check_job(StoredJob("job", 1, replace(view(1), versions=spoken)))
    for damage in ((0, 9), (8, MOST_VERSION + 1)):
        with pytest.raises(BadRequest, match="cannot speak"):
            wire.read_versions(kind(protocol_version=damage[0], newest_protocol_version=damage[1]))


def test_long_texts_are_cut_between_characters() -> None:
    assert wire.cut("short", 10) == "short"
    assert wire.cut("ä" * 10, 10) == "äää..."


def message(number: int) -> pb.SessionResponse:
    return pb.SessionResponse(barrier_passed=pb.BarrierPassed(call=number))


def drained(stream: SessionStream) -> list[int]:
    async def main() -> list[int]:
        return [each.barrier_passed.call async for each in stream.messages()]

    return run(main)


def test_a_closed_stream_writes_only_messages_pushed_before() -> None:
    stream = SessionStream(1, "job", "m", limit=8)
    stream.push(message(1))
    stream.push(message(2))
    stream.close()
    stream.close(RuntimeError("too late to count"))
    stream.push(message(3))
    assert drained(stream) == [1, 2]


def test_a_stream_with_too_many_unread_messages_ends_with_limit_met() -> None:
    stream = SessionStream(1, "job", "m", limit=2)
    for number in range(3):
        stream.push(message(number))
    with pytest.raises(LimitMet, match="has not read its last 2 messages"):
        drained(stream)


def test_push_and_close_wake_a_waiting_writer() -> None:
    async def main() -> None:
        stream = SessionStream(1, "job", "m", limit=2)
        messages = stream.messages()
        first = asyncio.ensure_future(anext(messages))
        await asyncio.sleep(0)
        stream.push(message(4))
        assert (await first).barrier_passed.call == 4
        stream.close()
        with pytest.raises(StopAsyncIteration):
            await anext(messages)

    run(main)
