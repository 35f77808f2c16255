"""A member's side of its session: it connects, resumes, registers again, and says again what may have been lost."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from simulation.network import COORDINATOR, Stream

from paceline_server.effects import Welcome
from paceline_server.events import FinishedLine, Heard, LeftJob, MetOthers, Registered, Reported, Resumed
from paceline_server.model import Met, Process, Progress, Report, Tag
from paceline_server.shares import Share

if TYPE_CHECKING:
    from simulation.world import World

    from paceline.elastic.place import Meet

__all__ = ["Session"]


class Session(abc.ABC):
    """One worker process, as far as its talk with the coordinator goes. `Member` says what it makes of what it hears.

    Args:
        world: where.
        name: its host.
        pid: its process.

    Attributes:
        alive: the process runs, or is frozen.
        stream: what carries the session, None while there is nothing.
        lost_at: since when the coordinator cannot be reached, None while it can.
    """

    def __init__(self, world: World, name: str, pid: int) -> None:
        self.world = world
        self.name = name
        hosts = world.shape.hosts
        self.process = Process(name, pid, node=f"node-{pid % hosts}" if hosts else "")
        self.alive = True
        self.frozen = False
        self.stream: Stream | None = None
        self.lost_at: float | None = world.clock.now
        self.member_id = self.asked_id = ""
        self.former_id = ""
        self.floor = 0
        self.last_meet: Meet | None = None
        self.finish: tuple[int, int] | None = None
        self.unanswered: tuple[int, Report] | None = None
        self.word = (0, 0.0)
        self._token = self._former_token = b""
        self._backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.later(0.0, self._connect)
        self.later(world.delay(0.0, 0.5), self._beat)

    # Time -------------------------------------------------------------------------------------------------------------

    def hear(self, action: Callable[..., None], *args: Any) -> None:
        """Something happens to the process; a frozen one takes it in when it wakes."""
        if not self.alive:
            return
        if self.frozen:
            self._backlog.append((action, args))
        else:
            action(*args)

    def later(self, delay: float, action: Callable[..., None], *args: Any) -> None:
        """The process does something after a delay."""
        self.world.clock.after(delay, self.hear, action, *args)

    def freeze(self, seconds: float) -> None:
        """The process stands still for a while."""
        if self.alive and not self.frozen:
            self.frozen = True
            self.world.note(self.name, f"freezes for {seconds:.2f} s")
            self.world.clock.after(seconds, self._thaw)

    def _thaw(self) -> None:
        self.frozen = False
        self.world.note(self.name, "wakes")
        backlog, self._backlog = self._backlog, []
        for action, args in backlog:
            self.hear(action, *args)

    def answers_as(self, member_id: str) -> bool:
        """True if a link to this member finds the process, and finds it to be this member."""
        return self.alive and self.asked_id == member_id

    def end(self) -> None:
        """The process is no more."""
        self.alive = False
        if self.stream is not None:
            self.stream.reset()

    # The stream -------------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def generation(self) -> int:
        """The generation that it knows to be in."""

    @abc.abstractmethod
    def welcome(self) -> None:
        """The session is there (again)."""

    @abc.abstractmethod
    def session_ended(self, why: str) -> None:
        """The coordinator refuses the session."""

    @abc.abstractmethod
    def take(self, message: Any) -> None:
        """A message from the coordinator."""

    def _connect(self) -> None:
        if self.stream is not None:
            return
        world = self.world
        if not world.coordinator.up or not world.network.reaches(self.name, COORDINATOR):
            self.later(world.delay(0.1, 1.0), self._connect)
            return
        number = world.number()
        self.stream = Stream(world, self, number)  # type: ignore[arg-type]
        if self.member_id:
            self.stream.up(Resumed(self.member_id, self._token, number, self.generation()))
            return
        self.asked_id = f"m{number}"
        world.by_id[self.asked_id] = self  # type: ignore[assignment]
        self.stream.up(
            Registered(
                member_id=self.asked_id,
                token_sha256=b"token-%d" % number,
                stream=number,
                process=self.process,
                address=self.name,
                settings=world.settings,
                claimed_rank=None,
                generation_floor=self.floor,
                former_member_id=self.former_id,
                former_token_sha256=self._former_token,
            )
        )

    def stream_ended(self, stream: Stream, refusal: str) -> None:
        """The stream is no more."""
        if stream is not self.stream:
            return
        self.stream = None
        if self.lost_at is None:
            self.lost_at = self.world.clock.now
        if refusal:
            self.world.note(self.name, f"is refused: {refusal}")
            if self.member_id:
                self.former_id, self._former_token = self.member_id, self._token
            self.floor = max(self.floor, self.generation())
            self.member_id = ""
            self.session_ended(refusal)
        self.later(self.world.delay(0.01, 1.0), self._connect)

    def receive(self, stream: Stream, message: Any) -> None:
        """A message comes on a stream."""
        if stream is not self.stream:
            return
        if type(message) is tuple:
            self.stream_ended(stream, message[1])
            return
        if type(message) is Welcome:
            self.member_id, self._token = stream.member_id, stream.token
            self.lost_at = None
            self._say_again()
            self.welcome()
            return
        self.take(message)

    # What it says -----------------------------------------------------------------------------------------------------

    def send(self, event: Any) -> None:
        """Says something, if there is a session to say it on."""
        if self.stream is not None and self.lost_at is None:
            self.stream.up(event)

    def say_meet(self, meet: Meet) -> None:
        """Says that it has stopped, now and whenever it is back."""
        self.last_meet = meet
        tag = None if meet.tag is None else Tag(*meet.tag)
        shares = (
            "" if self.world.shape.node_size == 1 else f", {' '.join(f'{part}/{parts}' for part, parts in meet.shares)}"
        )
        if meet.prepared is not None:
            shares += f", prepared for {tuple(meet.prepared)}"
        self.world.note(self.name, f"meets after generation {meet.generation} with {tag and tuple(tag)}{shares}")
        self.send(MetOthers(self.member_id, _met(meet)))

    def say_report(self, generation: int, report: Report) -> None:
        """Says what went wrong, until there is an answer."""
        self.unanswered = generation, report
        self.send(Reported(self.member_id, generation, report))

    def say_finish(self, generation: int, step: int) -> None:
        """Says that the line is done, now and whenever it is back."""
        self.finish = generation, step
        self.send(FinishedLine(self.member_id, generation, step))

    def leave(self, cause: str = "") -> None:
        """Says that it goes."""
        self.send(LeftJob(self.member_id, cause))

    def _say_again(self) -> None:
        if self.last_meet is not None:
            self.send(MetOthers(self.member_id, _met(self.last_meet)))
        if self.unanswered is not None:
            self.send(Reported(self.member_id, *self.unanswered))
        if self.finish is not None:
            self.send(FinishedLine(self.member_id, *self.finish))

    def _beat(self) -> None:
        step, at = self.word
        if self.lost_at is None:
            self.send(Heard(self.member_id, Progress(step=step, step_at=at)))
        self.later(self.world.settings.heartbeat_interval, self._beat)


def _met(meet: Meet) -> Met:
    fields = {field.name: getattr(meet, field.name) for field in dataclasses.fields(meet)}
    fields["shares"] = tuple(Share(*share) for share in meet.shares)
    for name in ("tag", "prepared"):
        fields[name] = None if fields[name] is None else Tag(*fields[name])
    return Met(**fields)
