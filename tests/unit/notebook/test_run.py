"""`paceline.run` checks its arguments and its process before it starts anything."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace

import pytest

import paceline
from paceline import UnsupportedOp
from paceline._notebook import _run
from paceline._notebook._forked import Returned


def nothing(session: paceline.Session) -> None:
    raise AssertionError("it must not be called")


@pytest.fixture(autouse=True)
def _has_used_no_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process may have joined jobs."""
    monkeypatch.setattr(_run, "has_loop_thread", lambda: False)


@pytest.mark.parametrize("wrong", [{"n": 0}, {"n": 2, "min": 3}, {"n": 2, "min": 0}, {"n": 2, "restarts": -1}])
def test_numbers_that_make_no_sense_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="want 1 <= min <= n and restarts >= 0, not min="):
        paceline.run(nothing, **wrong)


def test_it_says_why_a_process_cannot_be_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(reason: str) -> None:
        with pytest.raises(UnsupportedOp, match=f"paceline.run cannot fork this process: .*{reason}"):
            paceline.run(nothing, n=2)

    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        refused("that does not work on darwin")
    with monkeypatch.context() as patch:
        patch.setattr(_run, "has_loop_thread", lambda: True)
        refused("has joined a job or asked a coordinator itself")

    def bad_autograd(*_: object, **__: object) -> None:
        raise RuntimeError("Unable to handle autograd's threading in combination with fork")

    torch = SimpleNamespace(
        cuda=SimpleNamespace(_is_in_bad_fork=lambda: True),
        ones=lambda *_, **__: SimpleNamespace(backward=lambda: None),
    )
    other = SimpleNamespace(
        cuda=SimpleNamespace(_is_in_bad_fork=lambda: False),
        ones=lambda *_, **__: SimpleNamespace(backward=bad_autograd),
    )
    for used in (torch, other):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "torch", used)
            refused("has used CUDA")
    elsewhere = threading.Thread(target=refused, args=("main thread",))
    elsewhere.start()
    elsewhere.join()


def test_results_are_those_of_the_last_generation_by_rank() -> None:
    found = [Returned(1, 3, "b"), Returned(0, 3, "a"), Returned(2, 2, "earlier"), Returned(-1, 3, "left")]
    assert _run._results(found) == {0: "a", 1: "b"}
    assert list(_run._results(found)) == [0, 1]
    assert _run._results([]) == {}
