"""Who reaches whom, and the streams between members and the coordinator.

A stream is first in, first out, each way, with random delays. While its two ends cannot reach each other it holds what
was sent (TCP would send it again); a reset loses what is under way, and each end hears of it in its own time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simulation.member import Member
    from simulation.world import World

__all__ = ["COORDINATOR", "Network", "Stream"]

COORDINATOR = "K"


class Network:
    """The cuts between hosts, by name."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._cuts: dict[frozenset[str], int] = {}
        self.streams: list[Stream] = []

    def reaches(self, one: str, other: str) -> bool:
        """True if nothing separates the two."""
        return not self._cuts or frozenset((one, other)) not in self._cuts

    def cut(self, pairs: list[tuple[str, str]], seconds: float) -> None:
        """Separates pairs for a while."""
        for pair in pairs:
            key = frozenset(pair)
            self._cuts[key] = self._cuts.get(key, 0) + 1
        self._world.clock.after(seconds, self._heal, pairs)

    def _heal(self, pairs: list[tuple[str, str]]) -> None:
        for pair in pairs:
            key = frozenset(pair)
            self._cuts[key] -= 1
            if not self._cuts[key]:
                del self._cuts[key]
        self._world.note("net", f"{' '.join(sorted('-'.join(sorted(pair)) for pair in pairs))} heal")
        self.streams = [stream for stream in self.streams if stream.open]
        for stream in self.streams:
            stream.flush()


class Stream:
    """One session's stream, from its first message on.

    Args:
        world: where.
        member: whose end it is.
        number: tells it from others.
    """

    def __init__(self, world: World, member: Member, number: int) -> None:
        self._world = world
        self.member = member
        self.number = number
        self.member_id = ""
        self.token = b""
        self.open = True
        self._last = [0.0, 0.0]
        self._held: tuple[list[Any], list[Any]] = ([], [])
        world.network.streams.append(self)

    def up(self, event: Any) -> None:
        """Sends to the coordinator."""
        self._send(0, event)

    def down(self, message: Any) -> None:
        """Sends to the member."""
        self._send(1, message)

    def reset(self) -> None:
        """The stream breaks."""
        if self.open:
            self.open = False
            delay = self._world.delay
            self._world.clock.after(delay(0.001, 0.05), self._world.coordinator.stream_ended, self)
            self._world.clock.after(delay(0.001, 0.05), self.member.hear, self.member.stream_ended, self, "")

    def refuse(self, text: str) -> None:
        """The coordinator ends the stream, once all that it sent has arrived."""
        self.down(("refused", text))

    def flush(self) -> None:
        """Delivers what was held, if the ends reach each other again."""
        if self._world.network.reaches(self.member.name, COORDINATOR):
            for way in (0, 1):
                held, self._held[way][:] = list(self._held[way]), []
                for message in held:
                    self._send(way, message)

    def _send(self, way: int, message: Any) -> None:
        if self.open:
            self._last[way] = max(self._last[way], self._world.clock.now + self._world.latency())
            self._world.clock.at(self._last[way], self._arrive, way, message)

    def _arrive(self, way: int, message: Any) -> None:
        if not self.open:
            return
        if self._held[way] or not self._world.network.reaches(self.member.name, COORDINATOR):
            self._held[way].append(message)
        elif way == 0:
            self._world.coordinator.receive(self, message)
        else:
            if type(message) is tuple:
                self.open = False
            self.member.hear(self.member.receive, self, message)
