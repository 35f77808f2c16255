"""How long a killed worker and a new one held up the others. Pure: all times are arguments.

Times are of the monotonic clock, which all processes of one machine share. Workers tell each on a pipe of its own, so
what happened earlier may be heard later: facts are kept first, and looked at together.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Recoveries", "Recovery"]


@dataclass(frozen=True, slots=True)
class Recovery:
    """One change of the members that the job came through.

    Attributes:
        cause: "killed" or "joined".
        detect_ms: killed: until the first survivor knew, for its step was undone. joined: from the start of the new
            process until it stood ready to be taken in.
        recover_ms: killed: until every survivor had applied a step in the next generation. joined: from the end of the
            above until the new worker had applied its first step.
        text: it in words.
    """

    cause: str
    detect_ms: float
    recover_ms: float
    text: str

    def as_dict(self) -> dict[str, object]:
        """The form that `--json` gives it."""
        return {
            "cause": self.cause,
            "detect_ms": round(self.detect_ms, 1),
            "recover_ms": round(self.recover_ms, 1),
        }


@dataclass(frozen=True, slots=True)
class _Kill:
    pid: int
    rank: int
    generation: int
    step: int
    at: float


@dataclass(slots=True)
class Recoveries:
    """What is known of one run. Workers are known by their pids.

    Attributes:
        found: the recoveries so far, in the order in which they were complete.
    """

    found: list[Recovery] = field(default_factory=list)
    _worlds: dict[int, int] = field(default_factory=dict)
    _members: dict[int, set[int]] = field(default_factory=dict)
    _ended: set[int] = field(default_factory=set)
    _knew: dict[tuple[int, int], float] = field(default_factory=dict)
    """By (pid, generation): when the worker knew that it was over."""
    _applied: dict[tuple[int, int], float] = field(default_factory=dict)
    """By (pid, generation): when the worker had applied its first step there."""
    _kill: _Kill | None = None
    _new: dict[int, tuple[float, float]] = field(default_factory=dict)
    """New workers that have yet to apply a step: when their process began, and when `join` had returned."""

    def formed(self, pid: int, generation: int, world: int, at: float) -> list[Recovery]:
        """A worker goes on in a generation. As all of these, returns what is complete by this."""
        self._worlds[generation] = world
        self._members.setdefault(generation, set()).add(pid)
        earlier = [before for before in self._members if before < generation and pid in self._members[before]]
        if earlier:  # between two steps a failure undoes none: then this is how the worker learns of it
            self._knew.setdefault((pid, max(earlier)), at)
        return self._look()

    def killing(self, pid: int, rank: int, generation: int, step: int, at: float) -> list[Recovery]:
        """A worker is about to kill itself."""
        self._kill = self._kill or _Kill(pid, rank, generation, step, at)
        return self._look()

    def undone(self, pid: int, generation: int, at: float) -> list[Recovery]:
        """A worker's step was undone."""
        self._knew.setdefault((pid, generation), at)
        return self._look()

    def applied(self, pid: int, generation: int, at: float) -> list[Recovery]:
        """A worker has applied a step."""
        if (pid, generation) in self._applied:
            return []
        self._applied[pid, generation] = at
        return self._look()

    def joined(self, pid: int, began: float, at: float) -> list[Recovery]:
        """A worker that was started in the place of another has joined."""
        self._new[pid] = began, at
        return self._look()

    def ended(self, pid: int) -> list[Recovery]:
        """A worker's process has ended: nobody waits for it any more."""
        self._ended.add(pid)
        return self._look()

    def _look(self) -> list[Recovery]:
        complete = [recovery for pid in list(self._new) if (recovery := self._replaced(pid)) is not None]
        if (survived := self._survived()) is not None:
            complete.insert(0, survived)
        self.found += complete
        return complete

    def _survived(self) -> Recovery | None:
        kill = self._kill
        if kill is None or any(recovery.cause == "killed" for recovery in self.found):
            return None
        members = self._members.get(kill.generation, set())
        if len(members) != self._worlds.get(kill.generation):  # some have yet to be heard
            return None
        survivors = members - {kill.pid} - self._ended
        back = [self._first_step_after(pid, kill.generation) for pid in survivors]
        knew = [at for pid in survivors if (at := self._knew.get((pid, kill.generation))) is not None]
        went_on = [at for at in back if at is not None]
        if not knew or len(went_on) < len(back):
            return None
        after = _ms(kill.at, max(went_on))
        who = "1 worker" if len(survivors) == 1 else f"{len(survivors)} workers"
        text = f"rank {kill.rank} was killed in step {kill.step}; {who} went on after {after:.0f} ms"
        return Recovery("killed", _ms(kill.at, min(knew)), after, text)

    def _replaced(self, pid: int) -> Recovery | None:
        steps = [(at, generation) for (who, generation), at in self._applied.items() if who == pid]
        if not steps:
            return None
        began, joined = self._new.pop(pid)
        first, generation = min(steps)
        after = _ms(joined, first)
        world = self._worlds.get(generation, 0)
        text = f"a new worker joined; {world} train on after {after:.0f} ms"
        return Recovery("joined", _ms(began, joined), after, text)

    def _first_step_after(self, pid: int, generation: int) -> float | None:
        return min(
            (at for (who, later), at in self._applied.items() if who == pid and later > generation), default=None
        )


def _ms(start: float, end: float) -> float:
    return 1e3 * (end - start)
