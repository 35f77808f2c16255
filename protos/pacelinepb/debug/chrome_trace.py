"""Flight records as a trace in Chrome's format, which Perfetto opens. Pure.

A process is a rank, a thread is a group. Each operation is a slice from its beginning to its end; if it was queued
before, that is a slice of a track of its own. Tracks whose operations overlap are split. Arrows go

- from the root to the others, or from the others to the root, where a collective has a root. They are exact: operations
  have the same number at all members;
- from the last rank that entered another collective, for which all others had to wait. That is exact if the clocks are
  known better than the last is apart from the one before;
- from each send to its receive. The k-th message from one rank to another with one tag is received k-th, so these are
  exact too, where both records reach back to the beginning of the generation; else, and where any sender would have
  done, there is none.

An arrow that would go back in time, because clocks are not known well enough, is left out, as Perfetto would do.

Perfetto's importer asks for more than Chrome's format (`tests/support/chrome_format.py` checks it): it names threads by
their number alone, so no two processes have a thread of the same number; and it drops a slice that overlaps another one
of its thread by a rounding error, so all times are whole microseconds.

In older generations ranks had other numbers, which records do not keep: there are only arrows of the second kind.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from pacelinepb.debug.clocks import Clock
from pacelinepb.debug.records import MOST_OPERATIONS, GroupKey, MemberRecord, RecordedOperation

COORDINATOR = 1_000_000
"""The number of the coordinator's process; ranks have their own, and members without a rank come after it."""

_FROM_ROOT, _TO_ROOT = ("broadcast", "scatter"), ("reduce", "gather")


@dataclass(frozen=True, slots=True)
class Happened:
    """An event of the job, in seconds since 1970 on the coordinator's clock."""

    at: float
    kind: str
    generation: int
    text: str


@dataclass(frozen=True, slots=True)
class _Slice:
    """An operation that is drawn, with its times on the coordinator's clock."""

    record: MemberRecord
    operation: RecordedOperation
    process: int
    thread: int
    began: float
    ended: float
    uncertainty: float | None


def make_trace(
    records: Sequence[MemberRecord], events: Iterable[Happened] = (), clocks: Mapping[str, Clock] | None = None
) -> dict[str, Any]:
    """Makes a trace, the JSON object. `ts` is in microseconds after `otherData.zero`, `dur` in microseconds.

    `clocks` has how far each member's clock is ahead, by member id; a member that is missing is drawn by its own clock.
    """
    return _Trace(records, sorted(events, key=lambda each: each.at), clocks or {}).made()


class _Trace:
    def __init__(
        self, records: Sequence[MemberRecord], events: Sequence[Happened], clocks: Mapping[str, Clock]
    ) -> None:
        self._records = records
        self._events = events
        self._clocks = clocks
        starts = [each.issued_at - self._clock(record).ahead for record in records for each in record.operations]
        starts += [each.at - self._clock(record).ahead for record in records for each in record.steps]
        self._zero = min(starts, default=min((each.at for each in events), default=0.0))
        self._made: list[dict[str, Any]] = []
        self._arrows = self._threads = 0

    def _clock(self, record: MemberRecord) -> Clock:
        return self._clocks.get(record.member_id, Clock())

    def _us(self, at: float) -> int:
        return round((at - self._zero) * 1e6)

    def _thread(self, process: int, name: str, order: int) -> int:
        """Adds a thread; returns its number."""
        self._threads += 1
        self._name("thread", process, self._threads, name, order)
        return self._threads

    def made(self) -> dict[str, Any]:
        slices: list[_Slice] = []
        for number, record in enumerate(self._records):
            slices += self._draw_member(record, COORDINATOR + 1 + number if record.rank is None else record.rank)
        self._draw_events()
        self._draw_collectives(slices)
        self._draw_messages(slices)
        jobs = sorted({record.job for record in self._records})
        other = {
            "job": ", ".join(jobs),
            "zero": self._zero,
            "clock": "the coordinator's, in seconds since 1970; members' clocks are shifted by `ahead_s`",
            "clocks": [self._clock_of(record) for record in self._records],
            "left_out": {str(record): record.left_out for record in self._records if record.left_out},
        }
        return {"traceEvents": self._made, "displayTimeUnit": "ms", "otherData": other}

    def _clock_of(self, record: MemberRecord) -> dict[str, Any]:
        clock = self._clock(record)
        return {
            "member": str(record),
            "ahead_s": round(clock.ahead, 6),
            "uncertainty_s": None if clock.uncertainty is None else round(clock.uncertainty, 6),
        }

    def _name(self, what: str, process: int, thread: int, name: str, order: int) -> None:
        place = {"ph": "M", "pid": process, "tid": thread}
        self._made.append({**place, "name": f"{what}_name", "args": {"name": name}})
        self._made.append({**place, "name": f"{what}_sort_index", "args": {"sort_index": order}})

    # Members ----------------------------------------------------------------------------------------------------------

    def _draw_member(self, record: MemberRecord, process: int) -> list[_Slice]:
        ahead, uncertainty = self._clock(record).ahead, self._clock(record).uncertainty
        self._name("process", process, 0, str(record), process)
        tracks: dict[str, list[tuple[RecordedOperation, float, float, str]]] = defaultdict(list)
        for each in record.operations:
            ended = record.at if each.ended_at is None else each.ended_at
            title = _track(each)
            if each.began_at is None or each.began_at > each.issued_at:
                until = ended if each.began_at is None else each.began_at
                tracks[f"{title}: queued"].append((each, each.issued_at, max(each.issued_at, until), "queued"))
            if each.began_at is not None:
                tracks[title].append((each, each.began_at, max(each.began_at, ended), each.kind))
        found: list[_Slice] = []
        if record.steps:
            self._draw_steps(record, process)
        for title in sorted(tracks):
            threads: list[int] = []  # by lane
            taken: list[tuple[float, int]] = []  # until when, and the lane
            free: list[int] = []
            for each, began, ended, category in sorted(tracks[title], key=lambda one: (one[1], one[2])):
                while taken and taken[0][0] <= began:
                    heappush(free, heappop(taken)[1])
                lane = heappop(free) if free else len(threads)
                if lane == len(threads):
                    name = title + (f" ({lane + 1})" if lane else "")
                    threads.append(self._thread(process, name, self._threads + 1))
                thread = threads[lane]
                heappush(taken, (ended, lane))
                drawn = _Slice(record, each, process, thread, began - ahead, ended - ahead, uncertainty)
                self._draw(drawn, category)
                if category != "queued":
                    found.append(drawn)
        return found

    def _draw(self, drawn: _Slice, category: str) -> None:
        each = drawn.operation
        arguments = {
            "generation": each.generation,
            "operation": each.number,
            "group": each.group[0],
            "signature": each.signature,
            "bytes": each.bytes,
            "state": each.state,
        }
        if each.generation == drawn.record.generation and drawn.record.links:
            arguments["links"] = ",".join(drawn.record.links)
        if each.error:
            arguments["error"] = each.error
        self._slice(drawn.process, drawn.thread, category, str(each), (drawn.began, drawn.ended), arguments)

    def _slice(
        self, process: int, thread: int, category: str, name: str, times: tuple[float, float], arguments: dict[str, Any]
    ) -> None:
        began, ended = map(self._us, times)
        self._made.append(
            {
                "ph": "X",
                "pid": process,
                "tid": thread,
                "cat": category,
                "name": name,
                "ts": began,
                "dur": ended - began,
                "args": arguments,
            }
        )

    def _draw_steps(self, record: MemberRecord, process: int) -> None:
        """Draws a step from the moment at which all members had entered it to that of the next one."""
        thread = self._thread(process, "steps", 0)
        ahead = self._clock(record).ahead
        last: dict[int, float] = defaultdict(float)  # when the last operation of a generation ended
        for each in record.operations:
            last[each.generation] = max(last[each.generation], each.ended_at or 0.0)
        for number, step in enumerate(record.steps):
            later = record.steps[number + 1].at if number + 1 < len(record.steps) else record.at
            nexts = record.steps[number + 1].generation if number + 1 < len(record.steps) else record.generation
            ended = later
            if nexts != step.generation:  # the generation ended in this step, with its last operation
                ended = min(later, max(step.at, last[step.generation]))
            arguments = {"generation": step.generation, "step": step.number}
            times = (step.at - ahead, max(step.at, ended) - ahead)
            self._slice(process, thread, "step", f"step {step.number}", times, arguments)

    def _draw_events(self) -> None:
        if not self._events:
            return
        self._name("process", COORDINATOR, 0, "coordinator", -1)
        thread = self._thread(COORDINATOR, "events", 0)
        for each in self._events:
            if each.at >= self._zero:
                self._made.append(
                    {
                        "ph": "i",
                        "s": "g" if each.kind in ("verdict", "view") else "t",
                        "pid": COORDINATOR,
                        "tid": thread,
                        "cat": each.kind,
                        "name": f"{each.kind}: {each.text}",
                        "ts": self._us(each.at),
                        "args": {"generation": each.generation},
                    }
                )

    # Arrows -----------------------------------------------------------------------------------------------------------

    def _draw_collectives(self, slices: Sequence[_Slice]) -> None:
        calls: dict[tuple[int, GroupKey, int], list[_Slice]] = defaultdict(list)
        for each in slices:
            if each.operation.number and each.operation.state == "done":
                calls[each.operation.generation, each.operation.group, each.operation.number].append(each)
        for (generation, _, _), members in sorted(calls.items(), key=lambda item: item[0]):
            kinds = {each.operation.kind for each in members}
            if len(members) < 2 or len(kinds) > 1:
                continue
            (kind,) = kinds
            root = self._root(generation, members)
            if kind in (*_FROM_ROOT, *_TO_ROOT):
                if root is not None:
                    for each in members:
                        if each is not root:
                            ends = (root, each) if kind in _FROM_ROOT else (each, root)
                            self._arrow(*ends, kind, exact=True)
                continue
            *others, before, last = sorted(
                members, key=lambda each: each.operation.issued_at - self._clock(each.record).ahead
            )
            apart = self._issued(last) - self._issued(before)
            doubts = [last.uncertainty, before.uncertainty]
            exact = all(each is not None for each in doubts) and apart > sum(each or 0.0 for each in doubts)
            for each in (*others, before):
                self._arrow(last, each, f"{kind}: the last to enter", exact=exact)

    def _issued(self, drawn: _Slice) -> float:
        return drawn.operation.issued_at - self._clock(drawn.record).ahead

    def _root(self, generation: int, members: Sequence[_Slice]) -> _Slice | None:
        """Finds the root among the members; None if it is not there, or ranks of that generation are not known."""
        found = re.search(r"(?:^| )root=(\d{1,9})(?: |$)", members[0].operation.detail)
        for each in members:
            ranks = each.record.groups.get(each.operation.group[0])
            if found is None or ranks is None or each.record.generation != generation:
                return None
            root = int(found[1])
            if root < len(ranks) and ranks[root] == each.record.rank:
                return each
        return None

    def _draw_messages(self, slices: Sequence[_Slice]) -> None:
        """Pairs sends with receives: by sender, receiver, tag and group, in order."""
        sends: dict[tuple[GroupKey, int, int, int], list[_Slice]] = defaultdict(list)
        receives: dict[tuple[GroupKey, int, int, int], list[_Slice]] = defaultdict(list)
        any_sender: set[tuple[GroupKey, int, int]] = set()
        generation = max((record.generation for record in self._records), default=0)
        whole = {record.rank: _reaches_back(record) for record in self._records if record.generation == generation}
        for each in sorted(slices, key=self._issued):
            record, operation = each.record, each.operation
            ranks = record.groups.get(operation.group[0])
            match = re.fullmatch(r"(to|from)=(\d{1,9}|any) tag=(\d{1,19})", operation.detail)
            if operation.number or match is None or ranks is None or record.rank is None:
                continue
            if operation.generation != generation or record.generation != generation:
                continue
            way, peer, tag = match[1], match[2], int(match[3])
            if peer == "any":
                any_sender.add((operation.group, record.rank, tag))
            elif int(peer) < len(ranks):
                other = ranks[int(peer)]
                ends = (record.rank, other) if way == "to" else (other, record.rank)
                (sends if way == "to" else receives)[operation.group, *ends, tag].append(each)
        for key, sent in sorted(sends.items(), key=lambda item: item[0]):
            group, source, target, tag = key
            if whole.get(source) and whole.get(target) and (group, target, tag) not in any_sender:
                for leaves, arrives in zip(sent, receives.get(key, ()), strict=False):
                    if arrives.operation.state == "done":
                        self._arrow(leaves, arrives, "message", exact=True)

    def _arrow(self, source: _Slice, target: _Slice, name: str, *, exact: bool) -> None:
        begins = self._us(source.began)
        # An arrow belongs to the slice that its time lies in, and a slice's end does not.
        ends = max(self._us(target.began), self._us(target.ended) - 1)
        if ends < begins:
            return
        self._arrows += 1
        common = {"cat": "flow", "name": name, "id": self._arrows, "args": {"exact": exact}}
        self._made.append({"ph": "s", "pid": source.process, "tid": source.thread, "ts": begins, **common})
        self._made.append({"ph": "f", "bp": "e", "pid": target.process, "tid": target.thread, "ts": ends, **common})


def _track(operation: RecordedOperation) -> str:
    name = f"group {operation.group[0]!r}" if operation.group[0] else "all ranks"
    return name if operation.number else f"{name}: messages"


def _reaches_back(record: MemberRecord) -> bool:
    """True if a record has every operation of its generation."""
    numbers = Counter(each.generation == record.generation for each in record.operations)
    return not record.left_out and (len(record.operations) < MOST_OPERATIONS or numbers[False] > 0)
