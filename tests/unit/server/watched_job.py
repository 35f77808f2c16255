"""A job whose tally checks itself after each event."""

from __future__ import annotations

from typing import Any

from paceline_protocol import Counters, Meet, Process, Progress, Tag
from paceline_protocol.coordinator import Event, ExitReported, Heard, MetOthers
from paceline_server.tally import Tally
from support.coordinator import PureJob

__all__ = ["WatchedJob"]


class WatchedJob(PureJob):
    """A job with its tally. Begins with a view of workers that have compared their states, at step `base`."""

    def __init__(
        self, world: int, *, least: int = 1, most: int = 9, base: int = 0, failure_timeout: float = 3.0
    ) -> None:
        super().__init__()
        self.tally = Tally(self.now, self.state)
        self.events: list[tuple[str, str]] = []
        self._falls: dict[str, float] = {}
        decide = self.membership.handle

        def handle(now: float, event: Event) -> list[Any]:
            effects = decide(now, event)
            for happening in self.tally.saw(now, event, effects, self.state):
                self.events.append((happening.kind, happening.text))
            self._check()
            return effects

        self.membership.handle = handle  # type: ignore[method-assign]
        self.members = [self.join(least, most, timeout=failure_timeout) for _ in range(world)]
        self.pass_time(0.3)
        for member in self.members:  # 0.02 s ago their first view has formed
            self.do(MetOthers(member, Meet(1, Tag(bool(base), base), False)))
        assert self.state.live is not None
        assert self.state.live.base is not None
        self.base = self.state.live.base.step

    def _check(self) -> None:
        """No counter falls."""
        tally = self.tally
        counters = {**tally.seconds(self.now), "committed steps": tally.committed, "samples": tally.samples}
        counters |= {"checkpoints": tally.checkpoint.total, "checkpoint failures": tally.checkpoint_failures}
        counters |= tally.losses(self.now) | {"lost": tally.members_lost}
        counters |= {f"sent {kind}": size for kind, size in tally.sent_bytes.items()}
        assert {
            name: counters[name] for name, value in self._falls.items() if counters.get(name, 0) < value - 1e-9
        } == {}
        self._falls = counters

    def step(self, member: str, number: int, after: float = 1.0, **counters: Any) -> None:
        """The word of a step completes after some seconds, and a heartbeat says so at once."""
        self.now += after
        self.do(Heard(member, Progress(1, self.now, False, number, self.now), Counters(**counters)))

    def stop(self, members: list[str], step: int, **meet: Any) -> None:
        """Members have stopped after a step."""
        generation = self.state.view.generation if self.state.view is not None else 0
        for member in members:
            self.do(MetOthers(member, Meet(generation, Tag(generation, step), True, **meet)))

    def kill(self, number: int) -> None:
        """The worker that came as this one is killed, and its launcher says so."""
        self.do(ExitReported(Process(f"host-{number}", 1000 + number), -9))

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds so far, without uses that have none."""
        return {use: round(seconds, 6) for use, seconds in self.tally.seconds(self.now).items() if seconds}

    def told(self, kind: str) -> list[str]:
        """The sentences of the events of a kind."""
        return [text for each, text in self.events if each == kind]
