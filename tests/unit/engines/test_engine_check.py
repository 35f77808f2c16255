"""The conformance check of engines passes for engines that keep the rules, and fails for those that do not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from time import monotonic

import numpy as np
import pytest
from unit.engines.fake_engine import FakeEngine, HangingEngine, _FakeTicket, _Hub, engines_of, link_engines, parts_of

from paceline._base.arrays import Array
from paceline.engines import DataEngine, EngineTimeout, Ticket
from paceline.engines._engine_check import ENDING_RULES, ENGINE_RULES, MakeEngines, check_engine

WORLDS: dict[str, MakeEngines] = {"fake": partial(engines_of, FakeEngine), "links": link_engines}


@pytest.mark.parametrize("rule", ENGINE_RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("kind", WORLDS)
def test_an_engine_keeps_the_rules(kind: str, rule: Callable[[MakeEngines], None]) -> None:
    check_engine(WORLDS[kind], [rule])


def test_an_engine_that_completes_only_on_abort_keeps_the_abort_rules() -> None:
    check_engine(partial(engines_of, HangingEngine), ENDING_RULES)


class _Deaf(FakeEngine):
    """Its sums cannot be aborted."""

    def abort(self) -> None:
        self.ready.set()

    def drained(self, deadline: float) -> bool:
        return False


class _Blocking(FakeEngine):
    """Waits for the sum, for a while, before it returns the ticket."""

    def all_reduce(self, x: Array) -> Ticket:
        ticket = super().all_reduce(x)
        with contextlib.suppress(EngineTimeout):
            ticket.wait(monotonic() + 0.4)
        return ticket


class _Hasty(FakeEngine):
    """Ends a wait at abort, and adds up later all the same."""

    def begin(self, hub: _Hub, number: int, ticket: _FakeTicket) -> None:
        with hub.lock:
            of_all = hub.started.setdefault(number, {})
            of_all[self.rank] = ticket
            if len(of_all) == hub.size:
                total = sum(each.x for each in of_all.values())
                for each in of_all.values():
                    each.x[:] = total
                    each.over.set()


class _Careless(FakeEngine):
    """Closes without waiting for the sums under way."""

    def close(self, deadline: float) -> None:
        for ticket in self._tickets:
            ticket.over = type(ticket.over)()  # as if the engine had forgotten them
        self._end("closed")


class _Turned(FakeEngine):
    """Gathers in another order."""

    def all_gather(self, x: Array) -> Ticket:
        return self._start(_FakeTicket(x, lambda given: np.roll(parts_of(given), len(x) // len(given))))


class _Same(FakeEngine):
    """Gives all ranks the sums of rank 0's part."""

    def reduce_scatter(self, x: Array) -> Ticket:
        return self._start(_FakeTicket(x, lambda given: np.tile(np.split(given.sum(0), len(given))[0], len(given))))


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (_Turned, "rule_2_shards"),
        (_Same, "rule_2_shards"),
        (_Deaf, "rule_4_abort"),
        (_Blocking, "rule_3_deadlines"),
        (_Hasty, "rule_5_arrays"),
        (_Careless, "rule_6_close"),
        (HangingEngine, "rule_3_deadlines"),
    ],
)
def test_the_check_detects_an_engine_that_breaks_a_rule(
    make: Callable[[], DataEngine], rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.engines._engine_check._LONG", 0.5)
    monkeypatch.setattr("paceline.engines._engine_check._AT_ONCE", 0.3)
    chosen = next(each for each in ENGINE_RULES if each.__name__ == rule)
    with pytest.raises(AssertionError, match=rule):
        check_engine(partial(engines_of, make), [chosen])
