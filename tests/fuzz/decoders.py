"""Pure decoders: frames, signatures, objects, messages, verdicts, statuses, member lists."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from fuzz.wire import pack_chunks, pack_frames, unpack_chunks, unpack_frames, without_checksums
from paceline._base.arrays import MAX_ARRAY_BYTES, MAX_SIGNATURE_BYTES, Signature
from paceline._base.rpc import aio, error_from_status, grpc
from paceline._collectives.choose import choose, dump_rules, format_rules, parse_rules, rules_digest
from paceline._collectives.mailbox import Assembler, to_frames
from paceline._collectives.objects import decode_object, encode_object
from paceline._collectives.schedules import SCHEDULES
from paceline._links.fault import error_of
from paceline._links.frame import Frame, FrameError, FrameKind, decode, encode
from paceline._session.view import MemberLists
from paceline.errors import PacelineError
from paceline_protocol import Verdict
from paceline_protocol.messages import ViewFormed
from paceline_protocol.translation import read_message
from pacelinepb import ERROR_DOMAIN
from pacelinepb.v1 import session_pb2
from pacelinepb.v1.errors_pb2 import ErrorReason
from pacelinepb.v1.peer_pb2 import FramesRequest

__all__ = ["SEEDS", "SEGMENT", "frame", "messages", "objects", "signature", "status", "tuning", "verdict", "view"]

SEGMENT = 1024
"""Bytes per frame while a target runs, so that a short input makes a message of many frames."""


@without_checksums()
def frame(data: bytes) -> None:
    """Accepted bytes are those that `encode` makes, and mean to protobuf what they mean here."""
    try:
        found = decode(data)
    except FrameError:
        with contextlib.suppress(DecodeError, FrameError, ValueError):  # ValueError: no kind of frame
            told = FramesRequest.FromString(data)
            again = Frame(
                FrameKind(told.kind), told.generation, told.operation, told.part, told.signature, told.payload
            )
            assert encode(again) != data, "a frame in canonical form was refused"
        return
    assert encode(found) == data
    assert len(found.signature) <= MAX_SIGNATURE_BYTES
    told = FramesRequest.FromString(data)
    assert (told.kind, told.generation, told.operation, told.part) == (
        found.kind,
        found.generation,
        found.operation,
        found.part,
    )
    assert (told.signature, told.payload) == (found.signature, found.payload)


def signature(data: bytes) -> None:
    """What is accepted describes an array that can be, and has a text of its own."""
    try:
        found = Signature.decode(data)
    except ValueError:
        return
    assert Signature.decode(found.encode()) == found
    assert (found.dtype is None) == (found.shape is None)
    if found.dtype is not None and found.shape is not None:
        nbytes = prod(found.shape) * found.dtype.itemsize
        assert nbytes <= MAX_ARRAY_BYTES
        assert np.broadcast_to(np.empty((), found.dtype), found.shape).nbytes == nbytes  # NumPy can have this shape


def objects(data: bytes) -> None:
    """What is accepted is no larger than it may be, and its encoding stands for the same."""
    try:
        found = decode_object(data)
    except ValueError:
        return
    assert _footprint(found) <= 32 * len(data) + 256
    again = encode_object(found)
    assert encode_object(decode_object(again)) == again


def _footprint(o: Any) -> int:
    """Bytes that an object takes, with what it holds."""
    size, todo = 0, [o]
    while todo:
        item = todo.pop()
        size += sys.getsizeof(item) + (item.nbytes if isinstance(item, np.ndarray) else 0)
        if isinstance(item, dict):
            todo += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple):
            todo += item
    return size


def messages(data: bytes) -> None:
    """No message ever has more bytes, or other ones, than its first frame announced."""
    assembler, taken, payload = Assembler(0, segment_bytes=SEGMENT), 0, b""
    for each in unpack_frames(data):
        try:
            message = assembler.add(each)
        except ValueError:
            return
        payload = (b"" if each.part == 0 else payload) + bytes(each.payload)
        under_way = message or assembler._message
        assert under_way is not None
        nbytes = prod(under_way.shape) * under_way.dtype.itemsize
        assert under_way.weight == len(payload) + 1024
        assert under_way.missing == nbytes - len(payload) >= 0
        assert len(under_way.payloads) <= max(1, len(payload))
        if message is None:
            continue
        taken += 1
        assert each.operation >= taken
        assert message.missing == 0
        result = np.empty(message.shape, message.dtype)
        message.unpack(result)
        assert result.tobytes() == payload


def verdict(data: bytes) -> None:
    """Any verdict is a typed error."""
    try:
        word = session_pb2.Verdict.FromString(data)
    except DecodeError:
        return
    told = read_message(session_pb2.SessionResponse(verdict=word))
    assert isinstance(told, Verdict)
    error = error_of(told)
    assert isinstance(error, PacelineError)
    assert (error.ranks, error.operation, error.generation) == (tuple(word.culprits), word.operation, word.generation)


_CODES = tuple(grpc.StatusCode)


def status(data: bytes) -> None:
    """Whatever a server says when it refuses is a typed error: code, text and details are its own."""
    code = _CODES[data[0] % len(_CODES)] if data else grpc.StatusCode.UNKNOWN
    text, details, *_ = [*unpack_chunks(data[1:]), b"", b""]
    trailing = aio.Metadata(("grpc-status-details-bin", details))
    error = aio.AioRpcError(code, aio.Metadata(), trailing, text.decode("utf-8", "replace") or None)
    assert isinstance(error_from_status(error, "the fuzzer"), PacelineError)


def view(data: bytes) -> None:
    """A member list is that of the view, or a typed error: the pages come from whoever answers there."""
    head, *pages = [*unpack_chunks(data), b""]
    try:
        formed = session_pb2.ViewFormed.FromString(head)
    except DecodeError:
        return
    if not formed.members_sha256:  # a digest is not guessed: the script leaves it out, and here it is made
        formed.members_sha256 = hashlib.sha256(b"".join(pages)).digest()
    formed.pages = len(pages)

    class Channel:
        async def call(self, make: Callable[[Any], Any]) -> Any:
            return await make(self)

        def unary_unary(self, path: str, request_serializer: Any) -> Callable[..., Any]:
            async def get_page(request: session_pb2.GetViewRequest, **_: Any) -> bytes:
                return pages[request.page]

            return get_page

    lists = MemberLists()
    lists._known, lists._known_sha256 = [_known_member("a", 0), _known_member("b", 1)], b"known"
    told = read_message(session_pb2.SessionResponse(view_formed=formed))
    assert isinstance(told, ViewFormed)
    task = lists.fetch(Channel(), "job", told.members, 0.0)  # type: ignore[arg-type]
    try:
        peers = _finish(task)
    except PacelineError:
        return
    assert [peer.rank for peer in peers] == list(range(formed.world_size))


def tuning(data: bytes) -> None:
    """A table that is accepted has a schedule for whatever is called, and survives being written."""
    try:
        rules = parse_rules(data.decode("utf-8", "replace"))
    except (ValueError, RecursionError):  # whoever reads the file takes both alike
        return
    assert rules_digest(parse_rules(dump_rules(rules))) == rules_digest(rules)
    for collective, schedules in SCHEDULES.items():
        for world, nodes in ((1, ()), (2, (0, 0)), (4, (0, 0, 1, 1)), (100, ())):
            for nbytes in (0, 1 << 20, 1 << 40):
                assert choose(collective, nbytes, world, rules=rules, nodes=nodes).schedule in schedules
    assert format_rules(rules)


def _finish(coroutine: Any) -> Any:
    """The result of a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits")


@without_checksums()
def _frame_seeds() -> Sequence[bytes]:
    return [
        encode(Frame(FrameKind.DATA, 1, 1, 0, b"all_reduce op=sum float32[4]", bytes(16))),
        encode(Frame(FrameKind.DATA, 2**64 - 1, 2**64 - 1, 2**32 - 1, bytes(MAX_SIGNATURE_BYTES), b"")),
        encode(Frame(FrameKind.CLOSE, 1, 0, 0, b"", b"")),
        encode(Frame(FrameKind.ABORT, 1, 0, 0, b"", _verdict_seeds()[0])),
    ]


def _signature_seeds() -> Sequence[bytes]:
    return [
        b"barrier",
        b"all_reduce op=sum float32[1024,3]",
        b"broadcast group=split1-00ff root=0 bfloat16[]",
        b"send tag=7 complex128[0,2]",
        b"all_gather rows=any bool[1,1,1,1,1,1,1,1]",
        b"array float32[0,999999999999999]",
    ]


def _object_seeds() -> Sequence[bytes]:
    values: list[Any] = [
        None,
        {"loss": 0.5, "step": 7, b"raw": [True, False, None], ("a", 1): -1},
        [1 << 70, -(1 << 63), "ä\ud800", b"", (), {}, []],
        np.arange(6, dtype=np.float32).reshape(2, 3),
        [np.float16(1.0), np.bool_(True), np.zeros((0, 3)), np.ones(2, np.complex64), ml_dtypes.bfloat16(1)],
        {np.float64(1.5): {1: {2: {3: [[[[]]]]}}}},
    ]
    return [encode_object(value) for value in values]


def _message_seeds() -> Sequence[bytes]:
    arrays = [np.arange(320, dtype=np.float64), np.empty((0, 2), np.int8), np.ones((), bool)]
    frames = partial(to_frames, segment_bytes=SEGMENT)
    whole = [f for number, array in enumerate(arrays, 1) for f in frames(array, number, 1, number)]
    given_up = [*list(frames(arrays[0], 1, 1, 1))[:2], *frames(arrays[2], 1, 1, 2)]
    return [pack_frames(whole), pack_frames(given_up)]


def _verdict_seeds() -> Sequence[bytes]:
    lost = ErrorReason.ERROR_REASON_PEER_LOST
    return [
        session_pb2.Verdict(
            generation=1, reason=lost, culprits=[0, 1], operation=9, text="rank 1 died"
        ).SerializeToString(),
        session_pb2.Verdict(generation=1, reason=lost, culprits=[0], operation=2**64 - 1).SerializeToString(),
        session_pb2.Verdict(generation=1, text="none is to blame").SerializeToString(),
    ]


def _status_seeds() -> Sequence[bytes]:
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(domain=ERROR_DOMAIN, reason="RANK_TAKEN"))
    told = status_pb2.Status(code=6, message="rank 1 is claimed twice", details=[detail]).SerializeToString()
    taken = bytes([_CODES.index(grpc.StatusCode.ALREADY_EXISTS)])
    return [
        taken + pack_chunks([b"rank 1 is claimed twice", told]),
        taken + pack_chunks([b"another text", told]),
        bytes([_CODES.index(grpc.StatusCode.UNAVAILABLE)]) + pack_chunks([b"no answer", b""]),
    ]


def _view_seeds() -> Sequence[bytes]:
    process = session_pb2.ProcessIdentity(host="host-a", pid=7)
    pages = [
        session_pb2.GetViewResponse(
            members=[session_pb2.Member(member_id=f"m{rank}", rank=rank, process=process, address="127.0.0.1:1")]
        ).SerializeToString()
        for rank in (0, 1)
    ]
    formed = session_pb2.ViewFormed(generation=3, world_size=2, rank=1, pages=2)
    huge = session_pb2.ViewFormed(generation=3, world_size=2**32 - 1, pages=1)
    known = session_pb2.GetViewResponse(members=[_known_member("a", 0), _known_member("b", 1)]).SerializeToString()
    same = session_pb2.ViewFormed(generation=4, world_size=2, pages=2, members_sha256=hashlib.sha256(known).digest())
    changes = session_pb2.GetViewResponse(stretches=[session_pb2.Stretch(first=0, count=2)]).SerializeToString()
    whole = [pack_chunks([formed.SerializeToString(), *pages]), pack_chunks([huge.SerializeToString(), pages[0]])]
    return [*whole, pack_chunks([same.SerializeToString(), changes])]


def _known_member(member_id: str, rank: int) -> session_pb2.Member:
    return session_pb2.Member(member_id=member_id, rank=rank)


def _tuning_seeds() -> Sequence[bytes]:
    tables: list[Any] = [
        {},
        {"barrier": [{"schedule": "ring", "max_world": 4}, {"schedule": "dissemination", "reason": "so"}]},
        {"all_reduce": [{"schedule": "hierarchical", "where": "shared_nodes", "max_bytes": None}]},
        {"all_reduce": [{"schedule": "nothing"}]},
        {"all_reduce": [{"schedule": "ring", "max_incast": -1}]},
    ]
    return [dump_rules().encode(), *(json.dumps({"rules": table}).encode() for table in tables), b"[" * 5000]


SEEDS: dict[str, Callable[[], Sequence[bytes]]] = {
    "tuning": _tuning_seeds,
    "frame": _frame_seeds,
    "signature": _signature_seeds,
    "objects": _object_seeds,
    "messages": _message_seeds,
    "verdict": _verdict_seeds,
    "status": _status_seeds,
    "view": _view_seeds,
}
