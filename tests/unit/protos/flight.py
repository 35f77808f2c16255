"""Flight records by hand, in a few words."""

from __future__ import annotations

from typing import Any

from pacelinepb.debug.records import MemberRecord, RecordedOperation

__all__ = ["NOW", "done", "failed", "record", "waits"]

NOW = 1_700_000_000.0
"""When all records are made."""


def _operation(number: int, state: str, issued: float, ended: float | None, **fields: Any) -> RecordedOperation:
    group = fields.pop("group", ("", 0))
    facts: dict[str, Any] = {
        "kind": "all_reduce",
        "detail": "op=sum",
        "array": "float32[1024]",
        "bytes": 4096,
        **fields,
    }
    began = NOW - issued
    at = None if ended is None else NOW - ended
    return RecordedOperation(
        number=number, group=group, generation=3, state=state, issued_at=began, began_at=began, ended_at=at, **facts
    )


def done(number: int, ago: float, took: float = 0.1, **fields: Any) -> RecordedOperation:
    """An operation that ended so many seconds ago."""
    return _operation(number, "done", ago + took, ago, **fields)


def waits(number: int, seconds: float, **fields: Any) -> RecordedOperation:
    """An operation that was entered so many seconds ago, and is not over."""
    return _operation(number, "running", seconds, None, **fields)


def failed(number: int, seconds: float, error: str, **fields: Any) -> RecordedOperation:
    """An operation that failed just now, after so many seconds."""
    return _operation(number, "failed", seconds, 0.0, error=error, **fields)


def record(rank: int, *operations: RecordedOperation, size: int = 4, **fields: Any) -> MemberRecord:
    """The record of a rank on host-RANK."""
    facts: dict[str, Any] = {
        "job": "digits",
        "generation": 3,
        "host": f"host-{rank}",
        "pid": 100 + rank,
        "member_id": f"m{rank}",
        "at": NOW,
        "reason": "",
        "groups": {"": tuple(range(size))},
        "steps": (),
        **fields,
    }
    return MemberRecord(rank=rank, size=size, operations=operations, **facts)
