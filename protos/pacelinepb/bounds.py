"""The most that a request may have in a field, for fields whose reader has no limit of its own.

So handling a request costs what its bytes cost, and a number of the .proto comments is in one place of the code. Limits
that an operator sets (`ServerSettings`) are checked where a field is read, and so is what is cut instead of refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

__all__ = ["MOST", "too_much"]

_JOB, _MEMBER, _TOKEN, _SHA256 = 128, 64, 64, 32

MOST: Mapping[str, int] = {
    "AnswerAskRequest.job": _JOB,
    "AnswerAskRequest.member_id": _MEMBER,
    "AnswerAskRequest.session_token": _TOKEN,
    "AskMembersRequest.job": _JOB,
    "AskMembersRequest.members[]": _MEMBER,
    "Caller.job": _JOB,
    "Caller.member_id": _MEMBER,
    "Caller.session_token": _TOKEN,
    "DescribeStateRequest.job": _JOB,
    "DescribeStateRequest.to_member": _MEMBER,
    "DrainMembersRequest.job": _JOB,
    "DrainMembersRequest.members[]": _MEMBER,
    "ElementRun.array": 4_096,
    "ForgetJobRequest.job": _JOB,
    "GetJobRequest.job": _JOB,
    "GetManifestRequest.job": _JOB,
    "GetManifestRequest.to_member": _MEMBER,
    "GetRunsRequest.job": _JOB,
    "GetRunsRequest.runs": 1_024,
    "GetRunsRequest.to_member": _MEMBER,
    "GetStateRequest.chunks": 8_192,
    "GetStateRequest.job": _JOB,
    "GetStateRequest.to_member": _MEMBER,
    "GetViewRequest.job": _JOB,
    "GetViewRequest.known_sha256": _SHA256,
    "HelloRequest.from_member": _MEMBER,
    "HelloRequest.job": _JOB,
    "HelloRequest.offered": 8,
    "HelloRequest.to_member": _MEMBER,
    "KnockRequest.from_member": _MEMBER,
    "KnockRequest.job": _JOB,
    "KnockRequest.to_member": _MEMBER,
    "Launch.id": 64,
    "ListEventsRequest.job": _JOB,
    "Meet.fingerprint": _SHA256,
    "Meet.manifest": _SHA256,
    "Meet.shares": 64,
    "ProcessIdentity.boot_id": 64,
    "ProcessIdentity.host": 512,
    "ProcessIdentity.node": 128,
    "Register.former_member_id": _MEMBER,
    "Register.former_session_token": _TOKEN,
    "Register.replica_id": 64,
    "ReportExitRequest.job": _JOB,
    "ReportExitRequest.launch_id": 64,
    "RestartJobRequest.job": _JOB,
    "Resume.job": _JOB,
    "Resume.member_id": _MEMBER,
    "Resume.session_token": _TOKEN,
}
"""By message and field: bytes of a string or of bytes, entries of a repeated field; with [], bytes of each entry."""


def too_much(message: Message) -> str:
    """Returns which field of a message, or of a message in it, has more than it may; empty if none has."""
    for name, most, most_each, is_message, is_repeated in _bounded(message.DESCRIPTOR):
        if is_message and not is_repeated:
            if message.HasField(name) and (found := too_much(getattr(message, name))):
                return found
            continue
        value = getattr(message, name)
        if most is not None and (size := _size(value)) > most:
            unit = "entries" if is_repeated else "bytes"
            return f"{message.DESCRIPTOR.name}.{name} has at most {most:,} {unit}, not {size:,}"
        for each in value if is_message or most_each is not None else ():
            if is_message and (found := too_much(each)):
                return found
            if most_each is not None and (size := _size(each)) > most_each:
                return f"an entry of {message.DESCRIPTOR.name}.{name} has at most {most_each:,} bytes, not {size:,}"
    return ""


def _size(value: str | bytes) -> int:
    return len(value.encode()) if isinstance(value, str) else len(value)


@cache
def _bounded(message: Descriptor) -> list[tuple[str, int | None, int | None, bool, bool]]:
    """The fields of a message that have a bound, or hold messages with such fields; what is looked at of each."""
    found = []
    for field in message.fields:
        most, most_each = (MOST.get(f"{message.name}.{field.name}{of}") for of in ("", "[]"))
        is_message = field.message_type is not None and bool(_bounded(field.message_type))
        if is_message or most is not None or most_each is not None:
            found.append((field.name, most, most_each, is_message, field.is_repeated))
    return found
