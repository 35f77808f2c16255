"""Compares the flight records of all ranks, to find which rank is stuck in which operation, and since when. Pure.

Ranks are compared by (generation, group, operation): all members of a group call the same operations in the same order.
Each rank's times are taken relative to the moment of its own record, so clocks of hosts need not agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pacelinepb.debug.records import GroupKey, MemberRecord, RecordedOperation, group_name

LEAST_S = 0.5
"""Seconds after which a wait is worth a word. Records of a job that runs are milliseconds apart, and so differ too."""

_MESSAGES = ("send", "recv")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was found, in a sentence.

    `kind` is "mismatch", "wait", "message", "no answer", "other generation", "moving" or "idle". `group` is "" for that
    of all members; `operation` is 0 for none. `seconds` is how long the longest wait has lasted, and `waiting` the same
    by rank. `missing` says in words what each other rank does.
    """

    kind: str
    text: str
    group: str = ""
    operation: int = 0
    seconds: float = 0.0
    waiting: Mapping[int, float] = field(default_factory=dict)
    missing: Mapping[int, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Returns it as `--json` prints it."""
        return {
            "kind": self.kind,
            "text": self.text,
            "group": self.group,
            "operation": self.operation,
            "seconds": round(self.seconds, 3),
            "waiting": {str(rank): round(seconds, 3) for rank, seconds in self.waiting.items()},
            "missing": {str(rank): text for rank, text in self.missing.items()},
        }


@dataclass(frozen=True, slots=True)
class Report:
    """A summary of the records of one job.

    `generation` is the latest that a record is of, and the one that all findings are about. They begin with the most
    telling, and are never empty.
    """

    generation: int
    size: int
    findings: tuple[Finding, ...]


def in_ranks(ranks: Iterable[int]) -> str:
    """Names ranks: "rank 2", "ranks 0, 1, 3-5"."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words: list[str] = []
    for run in runs:
        words += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else list(map(str, run))
    return f"rank{'s' if sum(map(len, runs)) > 1 else ''} {', '.join(words)}"


def find_stuck(records: Sequence[MemberRecord], silent: Mapping[int, str]) -> Report:
    """Compares records, one of each member; `silent` says why there is none, by rank."""
    generation = max((record.generation for record in records), default=0)
    here = {record.rank: record for record in records if record.generation == generation and record.rank is not None}
    size = max((record.size for record in here.values()), default=0)
    behind = {each.rank: f"is in generation {each.generation}" for each in records if each.generation != generation}
    view = _View(generation, size, here, silent, {rank: text for rank, text in behind.items() if rank is not None})
    findings = [*view.mismatches(), *view.waits(), *view.messages(), *view.unanswered()]
    findings += _of_others(records, generation)
    if not any(each.kind in ("mismatch", "wait", "message") for each in findings):
        findings.append(view.quiet())
    order = ("mismatch", "wait", "message", "no answer", "other generation", "moving", "idle")
    findings.sort(key=lambda each: (order.index(each.kind), -each.seconds))
    return Report(generation, size, tuple(findings))


def _of_others(records: Sequence[MemberRecord], generation: int) -> list[Finding]:
    found = []
    for record in records:
        if record.generation != generation or record.rank is None:
            where = f"in generation {record.generation}" if record.generation else "in no generation yet"
            text = f"{record} is {where}, others are in generation {generation}"
            found.append(Finding("other generation", text))
    return found


class _View:
    """The records of one generation's members, by rank; `silent` and `behind` say why there is none."""

    def __init__(
        self,
        generation: int,
        size: int,
        records: Mapping[int, MemberRecord],
        silent: Mapping[int, str],
        behind: Mapping[int, str],
    ) -> None:
        self.records = records
        self.behind = behind
        unknown = [rank for rank in range(size) if rank not in records and rank not in behind]
        self.silent = {**dict.fromkeys(unknown, "has left no record"), **silent}
        self.of: dict[GroupKey, dict[int, dict[int, RecordedOperation]]] = {}
        self.members: dict[GroupKey, set[int]] = {}
        for rank, record in records.items():
            for name, ranks in record.groups.items():
                self.members.setdefault((name, min(ranks, default=0)), set()).update(ranks)
            for each in record.operations:
                if each.generation == generation and each.number:
                    self.of.setdefault(each.group, {}).setdefault(rank, {})[each.number] = each
                    self.members.setdefault(each.group, set()).add(rank)

    def label(self, rank: int) -> str:
        """Names a rank with its host and process, if they are known."""
        record = self.records.get(rank)
        return f"rank {rank}" if record is None else str(record)

    def waiting_in(self, rank: int, group: GroupKey) -> RecordedOperation | None:
        """Returns the operation in which a rank waits: the first that is not done; in one that failed it has waited."""
        unfinished = [each for each in self.of.get(group, {}).get(rank, {}).values() if each.state != "done"]
        return min(unfinished, key=lambda each: each.number, default=None)

    def age(self, rank: int, operation: RecordedOperation) -> float:
        """Returns for how long a rank has waited in an operation: until its record, or until it failed."""
        until = self.records[rank].at if operation.ended_at is None else operation.ended_at
        return max(0.0, until - operation.issued_at)

    def mismatches(self) -> list[Finding]:
        """Finds operations of one number that differ, where a rank waits in one of them."""
        found = []
        for group, by_rank in self.of.items():
            numbers = {each.number for rank in by_rank if (each := self.waiting_in(rank, group)) is not None}
            for number in sorted(numbers):
                there = {rank: each for rank in sorted(by_rank) if (each := by_rank[rank].get(number)) is not None}
                calls: dict[str, list[int]] = {}
                for rank, each in there.items():
                    calls.setdefault(each.signature, []).append(rank)
                asked = {(each.kind, each.detail) for each in there.values()}
                arrays = {each.array for each in there.values()} - {""}  # one that the sender decides is unknown
                if len(asked) > 1 or len(arrays) > 1:
                    said = ", ".join(f"{in_ranks(ranks)} called {call}" for call, ranks in calls.items())
                    text = f"operation {number}{_of_group(group)} differs: {said}"
                    found.append(Finding("mismatch", text, group[0], number))
        return found

    def waits(self) -> list[Finding]:
        """Finds the operations in which ranks wait, and what the others do."""
        found = []
        for group, by_rank in self.of.items():
            waiting = {rank: each for rank in by_rank if (each := self.waiting_in(rank, group)) is not None}
            for number in sorted({each.number for each in waiting.values()}):
                there = {rank: each for rank, each in waiting.items() if each.number == number}
                ages = {rank: self.age(rank, each) for rank, each in sorted(there.items())}
                operation = next(iter(there.values()))
                failed = next((each for each in there.values() if each.state == "failed"), None)
                longest = max(ages.values())
                if longest < LEAST_S and failed is None:
                    continue
                others = sorted(self.members[group] - set(there))
                missing = {rank: self._beside(rank, group, number) for rank in others}
                who = in_ranks(ages) if len(ages) > 1 else self.label(next(iter(ages)))
                verb = "have" if len(ages) > 1 else "has"
                where = f"{operation}{_of_group(group)}"
                if failed is None:
                    text = f"{who} {verb} waited {longest:.1f} s in {where}"
                else:
                    text = f"{who} {verb} waited {longest:.1f} s in {where}, which then failed ({failed.error[:200]})"
                text += "".join(f"; {line}" for line in self._folded(missing))
                found.append(Finding("wait", text, group[0], number, longest, ages, missing))
        return found

    def _folded(self, missing: Mapping[int, str]) -> list[str]:
        """Says what ranks do, those that do the same in one sentence."""
        by_text: dict[str, list[int]] = {}
        for rank, text in missing.items():
            by_text.setdefault(text, []).append(rank)
        return [
            f"{in_ranks(ranks) if len(ranks) > 1 else self.label(ranks[0])}: {text}" for text, ranks in by_text.items()
        ]

    def _beside(self, rank: int, group: GroupKey, number: int) -> str:
        """Says what a rank does while others wait in an operation of a group."""
        if rank not in self.records:
            return self.silent.get(rank) or self.behind.get(rank, "has left no record")
        calls = self.of.get(group, {}).get(rank, {})
        waiting = self.waiting_in(rank, group)
        if waiting is not None:
            where = "is still in" if waiting.number < number else "is already in"
            return f"{where} {waiting}, for {self.age(rank, waiting):.1f} s"
        if calls and max(calls) >= number:
            done = calls.get(number)
            return "has finished it" + (f", {self._ago(rank, done)}" if done is not None else "")
        return "has not entered it: " + (self._last(rank, group, calls) if calls else self._doing(rank, group))

    def _last(self, rank: int, group: GroupKey, calls: Mapping[int, RecordedOperation]) -> str:
        last = calls[max(calls)]
        elsewhere = self._elsewhere(rank, group)
        return f"its last was {last.kind} {last.number}, done {self._ago(rank, last)}" + (
            f", and it is in {elsewhere}" if elsewhere else ""
        )

    def _doing(self, rank: int, group: GroupKey) -> str:
        elsewhere = self._elsewhere(rank, group)
        if elsewhere:
            return f"it is in {elsewhere}"
        operations = self.records[rank].operations
        if not operations:
            return "it has called no operation yet"
        last = operations[-1]
        return f"it has called none of this group; its last was {last}{_of_group(last.group)}, {self._ago(rank, last)}"

    def _elsewhere(self, rank: int, group: GroupKey) -> str:
        """Names what a rank waits in, in another group or for a message; empty if it waits nowhere."""
        for each in self.records[rank].operations:
            if each.state in ("issued", "running") and (each.group != group or not each.number):
                return f"{each}{_of_group(each.group)}, for {self.age(rank, each):.1f} s"
        return ""

    def _ago(self, rank: int, operation: RecordedOperation) -> str:
        ended = operation.ended_at if operation.ended_at is not None else operation.issued_at
        return f"{max(0.0, self.records[rank].at - ended):.1f} s ago"

    def messages(self) -> list[Finding]:
        """Finds the messages that a rank waits for, or to send."""
        found = []
        for rank, record in sorted(self.records.items()):
            for each in record.operations:
                seconds = self.age(rank, each)
                if each.kind not in _MESSAGES or each.number or each.state not in ("issued", "running"):
                    continue
                if seconds >= LEAST_S:
                    text = f"{self.label(rank)} has waited {seconds:.1f} s in {each}{_of_group(each.group)}"
                    found.append(Finding("message", text, each.group[0], 0, seconds, {rank: seconds}))
        return found

    def unanswered(self) -> list[Finding]:
        """Lists the ranks without a record, those for the same reason together."""
        by_text: dict[str, list[int]] = {}
        for rank, text in sorted(self.silent.items()):
            by_text.setdefault(text, []).append(rank)
        return [
            Finding("no answer", f"{in_ranks(ranks)}: {text}", missing=dict.fromkeys(ranks, text))
            for text, ranks in by_text.items()
        ]

    def quiet(self) -> Finding:
        """Says that nobody waits: the ranks are moving, or compute."""
        if not self.records:
            return Finding("idle", "no rank has left a record")
        ages = {}
        last: tuple[float, int, RecordedOperation] | None = None
        for rank, record in self.records.items():
            if record.operations:
                each = record.operations[-1]
                ended = record.at if each.ended_at is None else each.ended_at
                ages[rank] = max(0.0, record.at - ended)
                if last is None or ages[rank] < last[0]:
                    last = ages[rank], rank, each
        if last is None:
            return Finding("idle", "no rank has called an operation yet")
        longest = max(ages.values())
        if longest < LEAST_S:
            text = f"{in_ranks(ages)}: moving; the last operation of the slowest ended {longest:.1f} s ago"
            return Finding("moving", text)
        text = (
            f"nobody waits in an operation: {in_ranks(ages)} compute, or wait for something else; the last was "
            f"{last[2]}{_of_group(last[2].group)}, which {self.label(last[1])} left {last[0]:.1f} s ago"
        )
        return Finding("idle", text, seconds=longest)


def _of_group(group: GroupKey) -> str:
    return f" of group {group_name(group[0])!r} (from rank {group[1]})" if group[0] else ""
