"""Evidence, verdict, error: every transition once, and the verdict beats the suspicion."""

from __future__ import annotations

import threading
import time

import pytest

from paceline import errors
from paceline._links.fault import Fault, Suspicion
from paceline_protocol import Verdict
from pacelinepb.v1.errors_pb2 import ErrorReason

LOST = ErrorReason.ERROR_REASON_PEER_LOST


def suspicion(text: str = "the link to rank 1 ended", accused: int | None = 1) -> Suspicion:
    return Suspicion(LOST, accused, 7, text)


def test_the_first_suspicion_wakes_and_is_reported_once() -> None:
    fault = Fault(3, 0, verdict_timeout=0.01)
    woken: list[None] = []
    reported: list[Suspicion] = []
    fault.on_failure(lambda: woken.append(None))
    fault.on_suspicion(reported.append)
    fault.suspect(suspicion())
    fault.suspect(suspicion("another"))
    assert len(woken) == 1
    assert reported == [suspicion()]


def test_without_a_verdict_the_error_describes_the_suspicion() -> None:
    fault = Fault(3, 0, verdict_timeout=0.01)
    fault.suspect(suspicion())
    error = fault.error()
    assert isinstance(error, errors.PeerLost)
    assert (error.ranks, error.operation, error.generation) == ((1,), 7, 3)


def test_the_verdict_timeout_is_waited_once_from_the_first_suspicion() -> None:
    fault = Fault(3, 0, verdict_timeout=0.3)
    fault.suspect(suspicion())
    start = time.monotonic()
    for _ in range(100):
        assert isinstance(fault.error(), errors.PeerLost)
    assert time.monotonic() - start < 100 * 0.3


def test_a_suspicion_without_an_accused_names_the_members_own_rank() -> None:
    fault = Fault(3, 2, verdict_timeout=0.01)
    fault.suspect(suspicion(accused=None))
    assert fault.error().ranks == (2,)


def test_a_verdict_overrides_the_suspicion_and_wakes_waiters() -> None:
    fault = Fault(3, 0, verdict_timeout=30.0)
    fault.suspect(suspicion())
    settled = threading.Timer(0.0, fault.settle, [Verdict(3, LOST, (2,), 7, "rank 2 died")])
    settled.start()
    error = fault.error()
    settled.join()
    assert (error.ranks, str(error)) == ((2,), "rank 2 died")
    fault.settle(Verdict(3, LOST, (0,), 7, "a later one"))
    assert fault.error().ranks == (2,)


def test_a_failure_callback_added_after_the_failure_is_called_at_once() -> None:
    fault = Fault(3, 0, verdict_timeout=0.01)
    fault.suspect(suspicion())
    woken: list[None] = []
    fault.on_failure(lambda: woken.append(None))
    assert woken == [None]


def test_check_raises_only_after_a_failure() -> None:
    fault = Fault(3, 0, verdict_timeout=0.01)
    fault.check()
    fault.settle(Verdict(3, ErrorReason.ERROR_REASON_COLLECTIVE_MISMATCH, (0, 1), 7, "both sides"))
    with pytest.raises(errors.CollectiveMismatch, match="both sides"):
        fault.check()


def test_a_members_own_error_is_reported_and_becomes_the_cause() -> None:
    fault, error = Fault(3, 0, 0.01, "rank 0 (host-a)"), MemoryError("no room")
    reported: list[Suspicion] = []
    fault.on_suspicion(reported.append)
    fault.broke(error)
    (told,) = reported
    assert (told.reason, told.accused) == (ErrorReason.ERROR_REASON_PEER_RAISED, None)
    assert told.text == "rank 0 (host-a) raised MemoryError: no room"
    assert fault.own_error is error
    raised = fault.error()
    assert isinstance(raised, errors.PeerRaised)
    assert raised.__cause__ is error


@pytest.mark.parametrize("relayed", [True, False])
def test_a_mismatch_with_an_account_becomes_a_step_order_error(relayed: bool) -> None:
    fault = Fault(3, 1, verdict_timeout=0.01)
    reported: list[Suspicion] = []
    fault.on_suspicion(reported.append)
    mismatch = ErrorReason.ERROR_REASON_COLLECTIVE_MISMATCH
    fault.account = "rank 1 left the loop"
    fault.suspect(Suspicion(mismatch, 0, 7, "other calls", relayed=relayed))
    (told,) = reported
    assert (told.reason, told.accused, told.relayed) == (ErrorReason.ERROR_REASON_STEP_DIFFERS, None, False)
    assert told.text == "rank 1 left the loop"
    raised = fault.error()
    assert isinstance(raised, errors.StepOrderError)
    assert raised.ranks == (1,)


def test_a_lost_peer_still_gives_peer_lost_with_an_account() -> None:
    fault = Fault(3, 1, verdict_timeout=0.01)
    fault.account = "rank 1 left the loop"
    fault.suspect(Suspicion(ErrorReason.ERROR_REASON_PEER_LOST, 0, 7, "rank 0 is gone"))
    assert isinstance(fault.error(), errors.PeerLost)


def test_an_own_error_after_a_suspicion_is_not_recorded() -> None:
    fault = Fault(3, 0, 0.01)
    fault.suspect(suspicion())
    fault.broke(MemoryError())
    assert fault.own_error is None


def test_a_breach_seen_after_a_relayed_one_is_reported_once() -> None:
    fault = Fault(3, 0, verdict_timeout=0.01)
    reported: list[Suspicion] = []
    woken: list[None] = []
    fault.on_failure(lambda: woken.append(None))
    fault.on_suspicion(reported.append)
    broke = ErrorReason.ERROR_REASON_PEER_BROKE_PROTOCOL
    told, seen = Suspicion(broke, 1, 7, "a peer says so", relayed=True), Suspicion(broke, 1, 7, "rank 1 sent nonsense")
    for each in (told, suspicion(), seen, seen):
        fault.suspect(each)
    assert reported == [told, seen]
    assert fault.first is told
    assert len(woken) == 1
