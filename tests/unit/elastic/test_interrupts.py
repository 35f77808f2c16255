"""Ctrl-C in a worker alone, at any line of the modules of the line: trained again, or refused; never other weights."""

from __future__ import annotations

import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from unit.elastic.solo import ENVIRONMENT, Training, undisturbed

import paceline
from paceline._elastic import training_loop
from paceline.errors import StepOrderError

_SHELF = "offer.py"
"""Left out: it holds a lock for an instant, and a trace interrupts where a signal does not, just behind its taking."""
_MODULES = {str(path): path.name for path in Path(training_loop.__file__).parent.glob("*.py") if path.name != _SHELF}

Place = tuple[str, int, str]
"""Module, line and function."""

TOTAL = 2


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENVIRONMENT:
        monkeypatch.delenv(f"PACELINE_{name}", raising=False)


@pytest.fixture
def session() -> Iterator[Any]:
    with paceline.join() as joined:
        yield joined


class Interrupt:
    """Raises KeyboardInterrupt at a line, the second time that it runs if it does; and counts the lines."""

    def __init__(self, where: Place | None = None, times: int = 0) -> None:
        self.lines: Counter[Place] = Counter()
        self._where, self._times = where, times

    def __enter__(self) -> Interrupt:
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if frame.f_code.co_filename in _MODULES else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            where = _MODULES[frame.f_code.co_filename], frame.f_lineno, frame.f_code.co_name
            self.lines[where] += 1
            if where == self._where and self.lines[where] == self._times:
                raise KeyboardInterrupt
        return self._line


class TwiceInAStep(Training):
    """Two updates in each step, of which a copy is kept meanwhile."""

    def train(self, step: Any) -> None:
        step.keep_copy()
        super().train(step)
        self.notes["seen"] -= 1
        super().train(step)


def outcome(where: Place, times: int, expected: Any, kind: type[Training]) -> str:
    """What becomes of a loop that is interrupted at a line, and run again."""
    with paceline.join() as session:
        training = kind()
        with suppress(KeyboardInterrupt), Interrupt(where, times):
            training.run(session, TOTAL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the loop may have been interrupted before it put this back
        try:
            training.run(session, TOTAL)
        except StepOrderError:
            return "refused"
        same = np.array_equal(training.weights, expected) and training.notes["seen"] == TOTAL
        return "trained" if same and training.state.step == TOTAL else "other weights"


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", [Training, pytest.param(TwiceInAStep, marks=pytest.mark.exhaustive)])
def test_an_interrupt_at_any_line_never_yields_other_weights(kind: type[Training]) -> None:
    with paceline.join() as session:
        expected = kind().run(session, TOTAL).weights
    with paceline.join() as session, Interrupt() as counted:
        kind().run(session, TOTAL)
    outcomes = {where: outcome(where, min(times, 2), expected, kind) for where, times in counted.lines.items()}
    wrong = sorted(where for where, kind in outcomes.items() if kind == "other weights")
    assert not wrong, f"{len(wrong)} places: {wrong}"
    kinds = list(outcomes.values())
    assert kinds.count("trained") > len(kinds) // 2, "most of them are no harm"
    assert kinds.count("refused") > 0


def test_an_interrupted_update_blocks_training_until_a_state_is_loaded(session: Any) -> None:
    training = Training()
    saved, update = training.state.state_dict(), training.optimizer._update

    def halt(*arguments: Any) -> None:
        update(*arguments)
        raise KeyboardInterrupt  # before the other parameter has changed

    training.optimizer._update = halt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        training.run(session, TOTAL)
    training.optimizer._update = update  # type: ignore[method-assign]
    assert not training.state.is_whole
    with pytest.raises(StepOrderError, match=r"half changed.*state\.load_state_dict"):
        training.run(session, TOTAL)
    with paceline.join() as another, pytest.raises(StepOrderError, match="half changed"):
        training.run(another, TOTAL)
    training.state.load_state_dict(saved)
    training.run(session, TOTAL)
    np.testing.assert_array_equal(training.weights, undisturbed(TOTAL))


def test_an_interrupt_before_the_update_does_not_change_the_result(session: Any) -> None:
    training = Training()

    def halt(step: Any) -> None:
        training.compute(step.indices)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        training.run(session, TOTAL, inside=halt)
    training.run(session, TOTAL)
    np.testing.assert_array_equal(training.weights, undisturbed(TOTAL))


def test_an_interrupt_after_the_update_blocks_further_training(session: Any) -> None:
    training = Training()

    def break_off(step: Any) -> None:
        training.train(step)
        raise KeyboardInterrupt  # where a second optimizer was to run, or a schedule

    with pytest.raises(KeyboardInterrupt):
        training.run(session, TOTAL, inside=break_off)
    with pytest.raises(StepOrderError, match="half changed"):
        training.run(session, TOTAL)
