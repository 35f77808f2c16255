"""How often something was tried in a row, and why it failed each time: what fails too often will fail again. Pure.

An attempt that failed because of a worker that has left since does not count: five reclaimed machines in one long step
say nothing about the step. A worker is known by its process, so that one which comes back as a new member after each
failure is the same worker. Host and process id alone do not tell: a container that is started again has the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline.errors import PacelineError, StepVoid
from paceline.links.base import Peer

__all__ = ["MAX_ATTEMPTS", "Failures"]

MAX_ATTEMPTS = 5
"""After so many failures in a row, of workers that are all still there, the next attempt would fail too."""

_Worker = tuple[str, int, int]


class Failures:
    """The failed attempts at what is tried now."""

    def __init__(self) -> None:
        self._what = ""
        self._attempts = 0
        self._causes: list[tuple[str, frozenset[_Worker]]] = []

    def begin(self, what: str, members: Iterable[Peer]) -> int:
        """Begins an attempt; returns how many that makes in a row, from 1.

        Args:
            what: "step 12", or whatever else is tried.
            members: who takes part.

        Raises:
            StepVoid: it has failed too often; the text has every cause.
        """
        self._look_at(what)
        present = {_worker(peer) for peer in members}
        self._causes = [(text, culprits) for text, culprits in self._causes if culprits <= present]
        if len(self._causes) >= MAX_ATTEMPTS:
            causes = "; ".join(text for text, _ in self._causes)
            raise StepVoid(f"{what} failed {len(self._causes)} times in a row: {causes}")
        return self._attempts + 1

    def add(self, what: str, cause: BaseException | None, members: Iterable[Peer]) -> None:
        """Takes note that an attempt has failed.

        Args:
            what: as given to `begin`.
            cause: why; a PacelineError says which ranks are to blame.
            members: the members of its generation.
        """
        self._look_at(what)
        blamed = cause.ranks if isinstance(cause, PacelineError) else ()
        culprits = frozenset(_worker(peer) for peer in members if peer.rank in blamed)
        self._attempts += 1
        self._causes.append((f"{type(cause).__name__}: {cause}", culprits))

    def _look_at(self, what: str) -> None:
        if what != self._what:
            self._what, self._attempts = what, 0
            self._causes.clear()


def _worker(peer: Peer) -> _Worker:
    return peer.host, peer.pid, peer.start_ticks
