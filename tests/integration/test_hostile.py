"""Whoever speaks nonsense or claims too much harms nobody: at the coordinator and at a worker's door."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool
from google.protobuf.message_factory import GetMessageClass

from integration.hostile import Targets, targets_in
from pacelinepb.v1 import admin_pb2, peer_pb2, session_pb2, store_pb2
from pacelinepb.v1.admin_pb2_grpc import AdminServiceStub
from support.http2 import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    SETTINGS,
    call_headers,
    claimed,
    connect,
    frame,
    open_call,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def targets(tmp_path: Path) -> Iterator[Targets]:
    with targets_in(tmp_path) as made:
        yield made


HELLO = "/pacelinepb.v1.PeerService/Hello"
GET_VIEW = "/pacelinepb.v1.SessionService/GetView"
NOISE = {
    "nothing": b"",
    "another protocol": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "a TLS greeting": bytes.fromhex("16030100050100000100") + b"\0" * 200,
    "random bytes": random.Random(1).randbytes(100_000),
    "a preface and no more": PREFACE,
    "half a preface": PREFACE[:11],
    "a frame that claims 16 MiB": PREFACE + frame(SETTINGS, 0, 0, b"", length=(1 << 24) - 1),
    "settings that are none": PREFACE + frame(SETTINGS, 0, 0, b"abcde"),
    "a stream of frames without a call": PREFACE + frame(SETTINGS, 0, 0, b"") + frame(DATA, 0, 7, b"x" * 1000) * 50,
}


@pytest.mark.parametrize("where", ["coordinator", "door"])
def test_noise_on_open_connections_is_survived(where: str, targets: Targets) -> None:
    """Of all kinds, each on 20 connections that are left open."""
    address = targets.coordinator if where == "coordinator" else targets.door
    with ExitStack() as stack:
        for noise in NOISE.values():
            for _ in range(20):
                there = stack.enter_context(connect(address))
                there.sendall(noise)
        targets.check()


@pytest.mark.parametrize(("where", "method"), [("coordinator", GET_VIEW), ("door", HELLO)])
def test_a_message_that_claims_a_gibibyte_is_refused_by_its_header(where: str, method: str, targets: Targets) -> None:
    """It is refused by its head: nobody waits for it, or makes room."""
    before = targets.resident()
    with ExitStack() as stack:
        for _ in range(8):
            there = stack.enter_context(connect(getattr(targets, where)))
            there.sendall(open_call(method) + frame(DATA, 0, 1, claimed(1 << 30) + b"x" * 100))
            there.settimeout(20.0)
            said = b""
            while b"grpc-status" not in said and b"larger than max" not in said:
                piece = there.recv(65536)
                if not piece:  # one in ten times grpc gives the call up before it has an answer, and hangs up
                    assert b"connection idle" in said
                    break
                said += piece
        assert targets.resident() - before < 32 << 20
        targets.check()


def test_a_health_watcher_that_never_reads_does_not_block_shutdown(targets: Targets) -> None:
    no_window = frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 0))
    ask = PREFACE + no_window + frame(HEADERS, END_HEADERS, 1, call_headers("/grpc.health.v1.Health/Watch"))
    with connect(targets.coordinator) as there:
        there.sendall(ask + frame(DATA, END_STREAM, 1, claimed(0)))
        there.settimeout(20.0)
        while b"grpc" not in there.recv(65536):  # the headers of its answer: it watches
            pass
        targets.check()


def test_a_refusal_that_quotes_a_long_request_keeps_its_code(targets: Targets) -> None:
    with grpc.insecure_channel(targets.coordinator) as channel:
        for name in ("x" * 64, "\u00fc" * 32):
            request = admin_pb2.DrainMembersRequest(job="target", members=[name] * 200)
            with pytest.raises(grpc.RpcError) as caught:
                AdminServiceStub(channel).DrainMembers(request, timeout=20.0)
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            assert caught.value.details().startswith("job 'target' has no member")


MODULES = {"coordinator": (session_pb2, store_pb2, admin_pb2), "door": (peer_pb2,)}


@pytest.mark.parametrize("where", MODULES)
def test_every_method_answers_or_refuses_malformed_requests(where: str, targets: Targets) -> None:
    """A typed refusal or an answer, in either case at once; the process goes on."""
    services = [each for module in MODULES[where] for each in module.DESCRIPTOR.services_by_name.values()]
    methods = [f"/{service.full_name}/{method.name}" for service in services for method in service.methods]
    assert len(methods) >= 5
    with grpc.insecure_channel(getattr(targets, where)) as channel:
        for method, data in [(name, data) for name in methods for data in _nonsense(name)]:
            while "connection idle" in (ended := _end_of(channel, method, data)).details():
                pass  # the call met the end of a connection on which nothing had been said for a second
            is_known = where == "coordinator" or "does not prove that it belongs to this job" not in ended.details()
            assert not is_known or ended.code() in _ENDS, (
                f"{method}: {ended.code()}: {ended.details()} for {data[:80]!r}"
            )
    targets.check()


def _end_of(channel: grpc.Channel, method: str, data: bytes) -> Any:
    call = channel.stream_stream(method)(iter([data]), timeout=20.0)
    with suppress(grpc.RpcError):  # its caller looks at it
        list(call)
    return call


_ENDS = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.DATA_LOSS,
}


def _nonsense(method: str) -> list[bytes]:
    _, service, name = method.split("/")
    described = descriptor_pool.Default().FindServiceByName(service).methods_by_name[name]
    request = GetMessageClass(described.input_type)()
    rng = random.Random(method)
    full = bytearray(_filled(request, rng).SerializeToString())
    found = [b"", b"\xff" * 50, rng.randbytes(1000), bytes(full), bytes(full[: len(full) // 2])]
    for _ in range(20):
        damaged = bytearray(full)
        for _ in range(3):
            if damaged:
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        found.append(bytes(damaged))
    return found


def _filled(message: Any, rng: random.Random) -> Any:
    """Every field set, texts long and with odd letters, numbers at their ends."""
    for field in message.DESCRIPTOR.fields:
        if field.type == field.TYPE_MESSAGE:
            inner = getattr(message, field.name)
            if field.message_type.GetOptions().map_entry:
                inner["\u202e" * 1000] = (1 << 64) - 1
                continue
            _filled(inner.add() if field.is_repeated else inner, rng)
            if not field.is_repeated:
                inner.SetInParent()
            continue
        values = {
            field.CPPTYPE_STRING: ["\u202e\0" * 40, "x" * 3000]
            if field.type == field.TYPE_STRING
            else [b"\xff" * 3000],
            field.CPPTYPE_BOOL: [True],
            field.CPPTYPE_ENUM: [1, 77],
            field.CPPTYPE_DOUBLE: [float("nan"), -1e308],
            field.CPPTYPE_FLOAT: [float("inf")],
            field.CPPTYPE_INT32: [-(1 << 31)],
            field.CPPTYPE_INT64: [-(1 << 63)],
            field.CPPTYPE_UINT32: [(1 << 32) - 1],
            field.CPPTYPE_UINT64: [(1 << 64) - 1],
        }[field.cpp_type]
        value = rng.choice(values)
        if field.is_repeated:
            getattr(message, field.name).extend([value] * 3)
        else:
            setattr(message, field.name, value)
    return message
