"""Members whose streams have ended are knocked at again and again, at a bounded cost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from paceline_protocol import OURS, JobSettings, Process
from paceline_protocol.coordinator import Session
from paceline_server import probe_address
from paceline_server.probe_address import AddressProbes, pauses
from support.coordinator import run


def _cut_off(number: int = 0, patience: float = 3.0) -> Session:
    """A member without a stream."""
    settings = JobSettings(1, 9, patience)
    return Session(
        f"m{number}", b"", Process("host", 1), f"host-{number}:1", settings, None, 0, number, None, 0.0, 0.0, OURS
    )


class Doors:
    """What is found at each knock, in place of the network; and the pauses before, which take no time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, found: Callable[[int], bool]) -> None:
        self.knocks: list[str] = []
        self.pauses: list[float] = []
        self._found = found
        pause = asyncio.sleep

        async def is_refused(address: str, _: object) -> bool:
            self.knocks.append(address)
            await pause(0)
            return self._found(len(self.knocks))

        async def sleep(seconds: float) -> None:
            self.pauses.append(seconds)
            await pause(0)

        monkeypatch.setattr(probe_address, "is_refused", is_refused)
        monkeypatch.setattr(asyncio, "sleep", sleep)

    async def watch(self, session: Session, sessions: dict[str, Session]) -> list[str]:
        """Watches one member until that ends; returns what was found."""
        found: list[str] = []
        probes = AddressProbes()
        probes.watch(session, sessions, lambda: found.append("refused"))
        await asyncio.gather(*probes._watches.values())
        assert not probes._watches
        return found


def test_a_dying_process_is_found_by_a_later_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    doors, session = Doors(monkeypatch, lambda count: count == 5), _cut_off()
    assert run(lambda: doors.watch(session, {"m0": session})) == ["refused"]
    assert doors.pauses == [0.0, 0.02, 0.04, 0.08, 0.16]


@pytest.mark.parametrize(("patience", "last"), [(0.01, 0.0), (0.1, 0.04), (3.0, 0.16), (86_400.0, 0.16)])
def test_pauses_double_to_a_limit_and_end_with_the_lease_or_a_minute(patience: float, last: float) -> None:
    found = list(pauses(patience))
    assert found[-1] == pytest.approx(last)
    assert sum(found) <= min(patience, 60.0) < sum(found) + max(0.02, 2 * last)


def test_a_member_that_keeps_listening_is_not_reported_as_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    doors, session = Doors(monkeypatch, lambda _: False), _cut_off()
    assert run(lambda: doors.watch(session, {"m0": session})) == []
    assert len(doors.knocks) == 21


@pytest.mark.parametrize("how", ["is back", "has ended", "has another session"])
def test_probing_stops_when_a_member_returns_ends_or_is_replaced(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    session = _cut_off()
    sessions = {"m0": session}

    def look(count: int) -> bool:
        if count == 2 and how == "is back":
            session.stream = 7
        elif count == 2 and how == "has ended":
            del sessions["m0"]
        elif count == 2:
            sessions["m0"] = _cut_off()
        return False

    doors = Doors(monkeypatch, look)
    assert run(lambda: doors.watch(session, sessions)) == []
    assert len(doors.knocks) == 2


def test_watching_a_member_again_replaces_the_previous_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    doors, session = Doors(monkeypatch, lambda count: count == 1), _cut_off()

    async def main() -> None:
        found: list[str] = []
        probes = AddressProbes()
        for turn in ("first", "second"):
            probes.watch(session, {"m0": session}, lambda turn=turn: found.append(turn))  # type: ignore[misc]
        (task,) = probes._watches.values()
        await task
        assert found == ["second"]

    run(main)
    assert len(doors.knocks) == 1


def test_concurrent_probes_of_thousands_of_members_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when a network is cut: nobody answers, and each knock lasts for as long as it may."""
    answers = asyncio.Event()
    at_once = most = 0

    async def is_refused(*_: object) -> bool:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await answers.wait()
        at_once -= 1
        return False

    monkeypatch.setattr(probe_address, "is_refused", is_refused)

    async def main() -> None:
        probes, sessions = AddressProbes(), {f"m{number}": _cut_off(number, 0.0) for number in range(3000)}
        for session in sessions.values():
            probes.watch(session, sessions, lambda: None)
        for _ in range(10):
            await asyncio.sleep(0)
        assert at_once == probe_address._MOST_WATCHED
        answers.set()
        await asyncio.gather(*probes._watches.values())
        assert most == probe_address._MOST_WATCHED

    run(main)
