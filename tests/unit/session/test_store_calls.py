"""The numbers by which the coordinator recognises that a worker repeats a write."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest

from paceline import errors
from paceline._session.store import CoordinatorStore
from pacelinepb.v1 import store_pb2 as pb


class Written(CoordinatorStore):
    """A store of which the test answers the calls.

    Attributes:
        requests: what was sent.
        answers: by number of a call.
    """

    def __init__(self, call_timeout: float = 60.0) -> None:
        nothing: Any = None
        super().__init__(nothing, nothing, pb.Caller(job="job"), call_timeout)
        self.requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.answers: dict[int, queue.SimpleQueue[Any]] = {number: queue.SimpleQueue() for number in range(1, 40)}

    def _call(self, name: str, method: str, request: Any, seconds: float) -> Any:
        self.requests.put(request)
        return self.answers[request.call].get(timeout=60)


def test_a_write_waits_for_the_call_number_whose_answer_it_replaces() -> None:
    """While one thread waits to repeat a write, another one may have made more writes than answers are kept for."""
    store = Written()
    threads = [threading.Thread(target=store.set, args=("k", b"v")) for _ in range(17)]
    for thread in threads[:16]:
        thread.start()
    assert {store.requests.get(timeout=60).call for _ in range(16)} == set(range(1, 17))
    threads[16].start()
    store.answers[5].put(pb.SetResponse())
    assert store.requests.get(timeout=60).call == 21
    for number in {*range(1, 17), 21} - {5}:
        store.answers[number].put(pb.SetResponse())
    for thread in threads:
        thread.join(60)


def test_a_write_times_out_while_earlier_writes_are_unanswered() -> None:
    store = Written(call_timeout=0.0)
    threads = [threading.Thread(target=store.delete, args=("k",)) for _ in range(16)]
    for thread in threads:
        thread.start()
    for _ in threads:
        store.requests.get(timeout=60)
    with pytest.raises(
        errors.CoordinatorUnreachable, match=r"store\.add: 16 earlier writes of this worker have no answer"
    ):
        store.add("k")
    for number in range(1, 17):
        store.answers[number].put(pb.DeleteResponse(existed=True))
    for thread in threads:
        thread.join(60)


def test_a_failed_swap_is_retried_if_the_key_holds_the_expected_value() -> None:
    """The coordinator answers a repeat with the value of now, which others may have set since the first try."""
    store = Written()
    store.answers[1].put(pb.CompareSetResponse(swapped=False, value=b"free"))
    store.answers[2].put(pb.CompareSetResponse(swapped=True, value=b"mine"))
    assert store.compare_set("lock", b"free", b"mine") == (True, b"mine")
    store.answers[3].put(pb.CompareSetResponse(swapped=False))
    store.answers[4].put(pb.CompareSetResponse(swapped=False, value=b"theirs"))
    assert store.compare_set("lock", None, b"mine") == (False, b"theirs")
