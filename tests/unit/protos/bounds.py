"""Which fields of our messages may be long, how long they may be, and requests with one that is too long."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from paceline._base.arrays import MAX_SIGNATURE_BYTES
from paceline._links.base import MAX_GROUP_NAME
from paceline._links.frame import MAX_FRAME_BYTES
from paceline._links.grpc_knock import MAX_ADDRESS_BYTES
from paceline_server.settings import ServerSettings
from paceline_server.wire import MOST_OUTPUT
from pacelinepb import MOST_KINDS, MOST_LOGGED, MOST_NAME_BYTES, MOST_PIDS
from pacelinepb.bounds import MOST
from pacelinepb.pieces import cut
from pacelinepb.v1 import admin_pb2, peer_pb2, session_pb2, store_pb2

__all__ = ["BOUNDS", "ELSEWHERE", "FILES", "fields_of", "methods", "too_long"]

FILES = (session_pb2, store_pb2, admin_pb2, peer_pb2)
"""Not etcd.proto: it says what etcd does, and grpc bounds etcd's answers."""

SETTINGS = ServerSettings()

ELSEWHERE = {
    "AddRequest.key": SETTINGS.max_key_bytes,
    "AnswerAskRequest.data": SETTINGS.max_wait_keys,
    "AnswerAskRequest.data[]": SETTINGS.max_value_bytes,
    "AskMembersRequest.members": SETTINGS.max_job_sessions,
    "AskMembersRequest.pids": MOST_PIDS,
    "CompareSetRequest.desired": SETTINGS.max_wait_keys,
    "CompareSetRequest.desired[]": SETTINGS.max_value_bytes,
    "CompareSetRequest.expected": SETTINGS.max_wait_keys,
    "CompareSetRequest.expected[]": SETTINGS.max_value_bytes,
    "CompareSetRequest.key": SETTINGS.max_key_bytes,
    "DeleteRequest.key": SETTINGS.max_key_bytes,
    "DrainMembersRequest.members": SETTINGS.max_job_sessions,
    "EnterBarrier.name": SETTINGS.max_barrier_name_bytes,
    "FramesRequest.payload": MAX_FRAME_BYTES,
    "FramesRequest.signature": MAX_SIGNATURE_BYTES,
    "GetRequest.key": SETTINGS.max_key_bytes,
    "Heartbeat.doing": 64,
    "Heartbeat.logged": MOST_LOGGED,
    "Heartbeat.logged[]": MOST_NAME_BYTES,
    "Heartbeat.part": 128,
    "Heartbeat.sent_bytes": MOST_KINDS,
    "Heartbeat.sent_bytes[]": 16,
    "HelloRequest.group": MAX_GROUP_NAME,
    "JobSettings.tuning": 16,
    "KnockRequest.address": MAX_ADDRESS_BYTES,
    "Leave.cause": SETTINGS.max_text_bytes,
    "Register.address": SETTINGS.max_address_bytes,
    "Register.job": SETTINGS.max_name_bytes,
    "ReportExitRequest.output": MOST_OUTPUT,
    "Report.text": SETTINGS.max_text_bytes,
    "SetRequest.key": SETTINGS.max_key_bytes,
    "SetRequest.value": SETTINGS.max_wait_keys,
    "SetRequest.value[]": SETTINGS.max_value_bytes,
    "WaitRequest.keys": SETTINGS.max_wait_keys,
    "WaitRequest.keys[]": SETTINGS.max_key_bytes,
}
"""As `pacelinepb.bounds.MOST`: bounds that other readers know."""

BOUNDS = {**MOST, **ELSEWHERE}


def methods() -> Iterator[MethodDescriptor]:
    """All methods of all our services."""
    for file in FILES:
        for service in file.DESCRIPTOR.services_by_name.values():
            yield from service.methods


def _reached(message: Descriptor, seen: set[str]) -> Iterator[Descriptor]:
    """A message of ours, and all that are in it, each once."""
    if message.full_name.startswith("pacelinepb.") and message.name not in seen:
        seen.add(message.name)
        yield message
        for field in message.fields:
            if field.message_type is not None:
                yield from _reached(field.message_type, seen)


def _long_fields(message: Descriptor) -> Iterator[str]:
    texts = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
    for field in message.fields:
        if field.is_repeated or field.type in texts:
            yield f"{message.name}.{field.name}"
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        if (field.is_repeated and field.type in texts) or is_map:
            yield f"{message.name}.{field.name}[]"


def fields_of(messages: Iterable[Descriptor]) -> set[str]:
    """Names of the fields of these messages, and of those in them, that may be long; with [] as in `MOST`."""
    seen: set[str] = set()
    ours = [each for message in messages for each in _reached(message, seen)]
    return {field for message in ours if not message.GetOptions().map_entry for field in _long_fields(message)}


def too_long(message: Descriptor) -> Iterator[tuple[str, Any]]:
    """For each bounded field of a message, and of the messages in it: its name, and a message with more in it."""
    for field in message.fields:
        name = f"{message.name}.{field.name}"
        for of in ("", "[]"):
            if (most := BOUNDS.get(name + of)) is not None:
                made = GetMessageClass(message)()
                _fill(made, field, most + 1, of)
                yield name + of, made
        if field.message_type is not None:
            for inner_name, inner in too_long(field.message_type):
                made = GetMessageClass(message)()
                target = getattr(made, field.name)
                (target.add() if field.is_repeated else target).CopyFrom(inner)
                yield inner_name, made


def _fill(message: Message, field: FieldDescriptor, size: int, of: str) -> None:
    """Fills a field with so many entries or bytes; with [], with an entry, or with pieces, of so many bytes."""
    value = getattr(message, field.name)
    is_text = field.type == field.TYPE_STRING
    if not field.is_repeated:
        setattr(message, field.name, "x" * size if is_text else bytes(size))
    elif field.message_type is not None and field.message_type.GetOptions().map_entry:
        for number in range(1 if of else size):
            value["x" * size if of else f"x{number}"] = 1
    elif field.message_type is not None:
        for _ in range(size):
            value.add()
    elif of:
        value.extend(["x" * size] if is_text else cut(bytes(size)))
    else:
        value.extend(["x" if is_text else b"x" if field.type == field.TYPE_BYTES else 1] * size)
