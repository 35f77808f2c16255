"""One world as a launcher sees it, until it is done, fails, or ends because another launcher comes."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from enum import Enum, auto

from paceline._elastic.session import Session
from paceline.cli.launcher import Place
from paceline.errors import PacelineError
from paceline.launch._supervision import KILL_AFTER_S

_FOR_EVER_S = 1e8
_GROWN = "another node has come"
_WHY_BYTES = 2000

_LOOK_S = 1.0
"""Seconds between a launcher's checks whether another one waits, or whether node 0 has said so."""

_STOPPED_S = KILL_AFTER_S + 5.0
"""Seconds in which the other launchers' workers must stop."""


class NodeFailed(PacelineError):
    """A launcher's workers failed, or it was told to end; the other launchers' errors name this as the cause."""


class Ending(Enum):
    """How a world ended."""

    DONE = auto()
    FAILED = auto()
    GROWN = auto()
    """Another launcher waits to be admitted; it is in the next world."""


class World:
    """A world as one launcher sees it.

    Attributes:
        place: the place of this launcher's workers in it.

    Args:
        place: the place of this launcher's workers in it.
        session: the session that connects the launchers; None if there is only one.
    """

    def __init__(self, place: Place, session: Session | None = None) -> None:
        self.place = place
        self._session = session
        self._over = threading.Event()
        self._why = ""
        self._listener: threading.Thread | None = None

    @contextlib.contextmanager
    def watched(self, stop: Callable[[str], None], newcomers: Callable[[], bool] | None) -> Iterator[None]:
        """Calls `stop` on another thread if the world ends elsewhere during the block.

        Args:
            stop: called with the reason.
            newcomers: called from time to time, returns whether another launcher waits; None if not to be called.
        """
        if self._session is None:
            yield
            return
        self._listener = threading.Thread(target=self._listen, args=(self._session, stop), daemon=True)
        self._listener.start()
        looker = threading.Thread(target=self._look, args=(self._session, stop, newcomers), daemon=True)
        looker.start()
        try:
            yield
        finally:
            self._over.set()
            looker.join()

    def end(self, failure: str) -> tuple[Ending, str]:
        """Waits, after this launcher's workers have ended, until the others' have.

        Args:
            failure: a sentence about the failure of this launcher's workers; empty if they succeeded.

        Returns:
            How the world ended, and the reason if it is not done.
        """
        if self._session is None:
            return (Ending.FAILED, failure) if failure else (Ending.DONE, "")
        if failure:
            failure = f"{failure}, at {self._label}"
        if not failure and not self._why:
            try:
                self._session.barrier("done", timeout=_FOR_EVER_S)
            except PacelineError as error:
                self._why = f"among the launchers, {error}"
        if not (why := failure or self._why):
            self._leave("")
            return Ending.DONE, ""
        why = self._agreed(self._session, why)
        if why == _GROWN:  # all leave together, because they must meet again within the coordinator's settle_time
            with contextlib.suppress(PacelineError):
                self._session.barrier("over", timeout=_STOPPED_S)
        self._leave(why)
        return (Ending.GROWN if why == _GROWN else Ending.FAILED), why

    def interrupted(self, signum: signal.Signals) -> None:
        """Leaves the world after this launcher was told to end and its workers have ended."""
        self._leave(f"{self._label} was ended by {signum.name}")

    @property
    def _label(self) -> str:
        return f"node {self.place.node} ({socket.gethostname()})"

    def _leave(self, why: str) -> None:
        """Leaves the session; with a reason, the other launchers see this as a failure."""
        if self._session is not None:
            self._session.leave(NodeFailed(self._agreed(self._session, why)) if why else None)
        if self._listener is not None:
            self._listener.join()

    def _listen(self, session: Session, stop: Callable[[str], None]) -> None:
        try:
            # No other member enters this barrier, so it ends when the view ends.
            session.barrier(f"listening {session.rank}", timeout=_FOR_EVER_S)
        except PacelineError as error:
            if not self._over.is_set():
                self._why = f"among the launchers, {error}"
                stop(self._agreed(session, self._why))

    def _look(self, session: Session, stop: Callable[[str], None], newcomers: Callable[[], bool] | None) -> None:
        while not self._over.wait(_LOOK_S):
            if newcomers is not None and newcomers():
                self._agreed(session, _GROWN)
            with contextlib.suppress(PacelineError):  # the coordinator comes back, or the view ends
                if session.store.compare_set(_key(session), _GROWN.encode(), _GROWN.encode())[0]:
                    self._why = _GROWN
                    stop(_GROWN)
                    return

    @staticmethod
    def _agreed(session: Session, why: str) -> str:
        """Returns the reason for the world's end, the same for all: the first launcher writes it to the store."""
        with contextlib.suppress(PacelineError):  # without a coordinator each launcher keeps its own reason
            _, first = session.store.compare_set(_key(session), None, why.encode()[:_WHY_BYTES])
            why = (first or b"").decode(errors="replace")
        return why


def _key(session: Session) -> str:
    """Returns the key in the store of the reason for a world's end."""
    return f"over {session.generation}"
