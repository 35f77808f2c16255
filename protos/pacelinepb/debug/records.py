"""Flight records as they are read: the answers of members, and dumps. Pure.

They come from other processes, so everything is checked before it is believed.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from datetime import datetime
from typing import Any

MOST_OPERATIONS = 1_000
"""Operations in a full recorder. Of a record that has more the newest are kept."""

_MOST_STEPS = 256
"""Steps of a record that are kept, the newest; a recorder has fewer."""

_MOST_ENTRIES = 10_000
_MOST_RANKS = 1 << 16
_MOST_CHARACTERS = 4_000
_MOST_LINKS, _MOST_LINK = 16, 40
_MOST_NUMBER = 1 << 63
_EARLIEST, _LATEST = 946_684_800.0, 4_102_444_800.0
"""The years 2000 and 2100, in seconds since 1970."""

GroupKey = tuple[str, int]
"""A group in one generation: its name, and the lowest rank in the view among its members."""


def group_name(name: str) -> str:
    """Returns a group's name for people: "tp 1" for the first that its members have called "tp".

    The name itself has a digest of the members, too, which tells it from groups of others.
    """
    return re.sub(r"(?:^|(?<=/))[0-9a-f]{16}-(\w*)-(\d+)(?=/|$)", lambda found: " ".join(found.groups()).strip(), name)


@dataclass(frozen=True, slots=True)
class RecordedOperation:
    """One operation of one member. Times are seconds since 1970 on the member's clock, None for what has not happened.

    `number` is that in its group and generation; 0 for messages. `detail` has its arguments, "op=sum". `array` is dtype
    and shape, "float32[1024]", and empty if no array is sent, or if the sender decides; then `bytes` is None. `state`
    is "issued", "running", "done" or "failed".
    """

    number: int
    group: GroupKey
    generation: int
    kind: str
    detail: str
    array: str
    bytes: int | None
    state: str
    issued_at: float
    began_at: float | None
    ended_at: float | None
    error: str = ""

    @property
    def signature(self) -> str:
        """Kind, arguments and array, as one text."""
        return " ".join(filter(None, (self.kind, self.detail, self.array)))

    def __str__(self) -> str:
        name = f"{self.kind} {self.number}" if self.number else self.kind
        inner = " ".join(filter(None, (self.detail, self.array)))
        return f"{name} ({inner})" if inner else name


@dataclass(frozen=True, slots=True)
class Entered:
    """A step that all members had entered at a time, in seconds since 1970 on the member's clock."""

    generation: int
    number: int
    at: float


@dataclass(frozen=True, slots=True)
class MemberRecord:
    """The record of one member, made at `at`, in seconds since 1970 on its clock.

    `rank` and `size` are None and 0 while it is in no view. `groups` are the ranks in the view of the members of its
    groups, by name. `read_at` and `sent_at` are as in `paceline._session.answers`; None for a dump. `left_out`
    operations had no room in an answer, or were more than a recorder has. `links` are the kinds over which it has sent
    in this generation.
    """

    job: str
    rank: int | None
    size: int
    generation: int
    host: str
    pid: int
    member_id: str
    at: float
    reason: str
    groups: dict[str, tuple[int, ...]]
    steps: tuple[Entered, ...]
    operations: tuple[RecordedOperation, ...]
    read_at: float | None = None
    sent_at: float | None = None
    left_out: int = 0
    links: tuple[str, ...] = ()

    def __str__(self) -> str:
        who = f"member {self.member_id}" if self.rank is None else f"rank {self.rank}"
        return f"{who} ({self.host}, pid {self.pid})"


def read_record(data: bytes) -> MemberRecord:
    """Parses a flight record; raises ValueError if it is none."""
    try:
        found = json.loads(data)
        return _record(found)
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"not a flight record: {type(error).__name__}: {str(error)[:200]}") from None


def _record(found: Any) -> MemberRecord:
    if not isinstance(found, dict):
        raise ValueError("not a flight record: no JSON object")
    operations, steps, groups = found["operations"], found.get("steps") or [], found.get("groups") or {}
    if max(len(operations), len(steps), len(groups)) > _MOST_ENTRIES:
        raise ValueError("not a flight record: too many entries")
    rank = found.get("rank")
    return MemberRecord(
        job=_text(found.get("job")),
        rank=None if rank is None else _number(rank, _MOST_RANKS),
        size=_number(found.get("size") or 0, _MOST_RANKS),
        generation=_number(found.get("generation") or 0),
        host=_text(found["host"]),
        pid=_number(found["pid"]),
        member_id=_text(found.get("member_id")),
        at=_time(found["time"]),
        reason=_text(found.get("reason")),
        groups={_text(name): tuple(_number(each, _MOST_RANKS) for each in ranks) for name, ranks in groups.items()},
        steps=tuple(
            Entered(_number(each["generation"]), _number(each["number"]), _time(each["at"]))
            for each in steps[-_MOST_STEPS:]
        ),
        operations=tuple(_operation(each) for each in operations[-MOST_OPERATIONS:]),
        read_at=_seconds(found.get("read_at")),
        sent_at=_seconds(found.get("sent_at")),
        left_out=_number(found.get("left_out") or 0) + max(0, len(operations) - MOST_OPERATIONS),
        links=tuple(_text(each)[:_MOST_LINK] for each in (found.get("links") or [])[:_MOST_LINKS]),
    )


def _operation(found: Any) -> RecordedOperation:
    state = found["state"]
    if state not in ("issued", "running", "done", "failed"):
        raise ValueError(f"not a flight record: an operation in state {state!r:.40}")
    shape, size = found["shape"], found["bytes"]
    array = "" if shape is None else f"{_text(found['dtype'])}[{','.join(str(_number(each)) for each in shape)}]"
    issued = _time(found["issued_at"])
    began = None if found["began_at"] is None else max(issued, _time(found["began_at"]))
    ended = None if found["ended_at"] is None else max(issued if began is None else began, _time(found["ended_at"]))
    return RecordedOperation(
        number=_number(found["number"]),
        group=(_text(found["group"]), _number(found.get("first_rank") or 0, _MOST_RANKS)),
        generation=_number(found["generation"]),
        kind=_text(found["operation"]),
        detail=_text(found["detail"]),
        array=array,
        bytes=None if size is None else _number(size),
        state=state,
        issued_at=issued,
        began_at=began,
        ended_at=ended,
        error=_text(found["error"]),
    )


def _text(found: Any) -> str:
    if found is None:
        return ""
    if not isinstance(found, str):
        raise TypeError(f"a text is missing: {found!r:.40}")
    return found[:_MOST_CHARACTERS]


def _number(found: Any, most: int = _MOST_NUMBER) -> int:
    if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found < most:
        raise TypeError(f"a number is missing, or out of bounds: {found!r:.40}")
    return found


def _seconds(found: Any) -> float | None:
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found) or abs(found) > 1e11:
        raise TypeError(f"a time is missing, or out of bounds: {found!r:.40}")
    return float(found)


def _time(found: Any) -> float:
    at = datetime.fromisoformat(_text(found))
    if at.tzinfo is None:
        raise ValueError("not a flight record: a time without a time zone")
    if not _EARLIEST <= (seconds := at.timestamp()) < _LATEST:
        raise ValueError(f"not a flight record: it is of the year {at.year}")
    return seconds
