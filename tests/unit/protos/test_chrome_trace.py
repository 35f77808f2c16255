"""Flight records as a trace: the whole of a small one, what its arrows mean, and clocks."""

from __future__ import annotations

import dataclasses
import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from unit.protos.flight import NOW, done, failed, record, waits

from pacelinepb.debug.chrome_trace import COORDINATOR, Happened, make_trace
from pacelinepb.debug.clocks import Clock, Sighting, align
from pacelinepb.debug.records import Entered, MemberRecord
from support.chrome_format import check_trace

GOLDEN = Path(__file__).with_name("trace.golden.json")
PAIR = {"": (0, 1)}
KNOWN = {"m0": Clock(0.0, 0.0001), "m1": Clock(0.5, 0.0002)}


def pair(*operations: Any, **fields: Any) -> list[MemberRecord]:
    """Two ranks; each argument is a pair of operations, one for each rank, None for none."""
    return [
        record(rank, *(each[rank] for each in operations if each[rank] is not None), size=2, **fields)
        for rank in (0, 1)
    ]


def arrows(records: list[MemberRecord], clocks: dict[str, Clock] | None = None) -> list[tuple[int, int, str, bool]]:
    """(from, to, name, exact) of each arrow."""
    trace = make_trace(records, (), clocks)
    check_trace(trace)
    events = trace["traceEvents"]
    starts = {each["id"]: each for each in events if each["ph"] == "s"}
    return [
        (starts[each["id"]]["pid"], each["pid"], each["name"], each["args"]["exact"])
        for each in events
        if each["ph"] == "f"
    ]


def test_a_small_trace_equals_the_golden_file() -> None:
    """UPDATE_TRANSCRIPTS=1 writes the file anew: read the difference."""
    steps = (Entered(3, 7, NOW - 2.0), Entered(3, 8, NOW - 1.0))
    queued = dataclasses.replace(done(2, 0.5, 0.3), issued_at=NOW - 1.0)
    lost = failed(3, 0.2, "PeerLost: rank 1 was killed by SIGKILL")
    records = [
        record(0, done(1, 1.2), queued, lost, size=2, steps=steps, groups=PAIR, links=("shm", "tcp")),
        record(1, done(1, 0.7), waits(2, 0.4), size=2, groups=PAIR),
    ]
    events = [
        Happened(NOW - 60.0, "view", 2, "before all records: left out"),
        Happened(NOW - 0.1, "verdict", 3, "rank 1 (host-1, pid 101) was killed by SIGKILL"),
        Happened(NOW - 0.05, "reason", 3, "waiting for 1 more worker"),
    ]
    trace = make_trace(records, events, KNOWN)
    check_trace(trace)
    text = json.dumps(trace, indent=1, sort_keys=True) + "\n"
    if os.environ.get("UPDATE_TRANSCRIPTS"):
        GOLDEN.write_text(text, encoding="ascii")
    assert text == GOLDEN.read_text(encoding="ascii")


def test_slices_are_aligned_to_a_common_clock() -> None:
    """Rank 1's clock is half a second ahead: what it calls 0.7 s ago ended 1.2 s ago."""
    trace = make_trace(pair((done(1, 1.2), done(1, 0.7))), (), KNOWN)
    ends = [round(each["ts"] + each["dur"]) for each in trace["traceEvents"] if each["ph"] == "X"]
    assert ends == [100_000, 100_000]
    assert trace["otherData"]["zero"] == pytest.approx(NOW - 1.3)
    assert [each["uncertainty_s"] for each in trace["otherData"]["clocks"]] == [0.0001, 0.0002]


def test_arrows_from_and_to_a_root_are_exact() -> None:
    broadcast = {"kind": "broadcast", "detail": "root=1"}
    reduce = {"kind": "reduce", "detail": "op=sum root=1"}
    records = pair(
        (done(1, 1.0, **broadcast), done(1, 1.0, **broadcast)), (done(2, 0.5, **reduce), done(2, 0.5, **reduce))
    )
    assert arrows(records) == [(1, 0, "broadcast", True), (0, 1, "reduce", True)]


def test_last_rank_to_enter_has_an_arrow_to_each_other_rank() -> None:
    """Exact only if clocks are known better than the two last are apart."""
    records = pair((done(1, 1.0, 0.4), done(1, 1.0, 0.1)))
    assert arrows(records) == [(1, 0, "all_reduce: the last to enter", False)]
    assert arrows(records, {"m0": Clock(0.0, 0.1), "m1": Clock(0.0, 0.1)})[0][3]
    assert not arrows(records, {"m0": Clock(0.0, 0.2), "m1": Clock(0.0, 0.2)})[0][3]


def test_no_arrow_goes_back_in_time() -> None:
    """Rank 1's clock is a second behind by mistake: it received before rank 0 sent. Perfetto would drop the arrow."""
    records = pair((send(3.0), recv(2.9)))
    assert arrows(records) == [(0, 1, "message", True)]
    assert arrows(records, {"m1": Clock(1.0)}) == []


def test_adjacent_slices_do_not_overlap_after_rounding() -> None:
    """Perfetto cuts off parts of a nanosecond, and drops a slice that then crosses another one."""
    begins = [NOW - 1.0 + each * 0.0010015 for each in range(200)]
    operations = [
        dataclasses.replace(done(number, 0.0), issued_at=begin, began_at=begin, ended_at=end)
        for number, (begin, end) in enumerate(pairwise(begins), 1)
    ]
    trace = make_trace([record(0, *operations), record(1, *operations)])
    check_trace(trace)
    assert len({each["tid"] for each in trace["traceEvents"] if each["ph"] == "X"}) == 2, "one thread for each rank"


def test_many_overlapping_operations_have_a_lane_each_and_the_first_free_lane_is_taken() -> None:
    """2,000 are drawn with a number of comparisons that does not grow with the lanes: those of a heap."""
    compared = 0

    class Counted(float):
        def __le__(self, other: float) -> bool:
            nonlocal compared
            compared += 1
            return float.__le__(self, other)

    together = [
        dataclasses.replace(done(number, 5.0), began_at=NOW - 10.0, ended_at=Counted(NOW - 5.0))
        for number in range(1, 2_001)
    ]
    trace = make_trace([record(0, *together, done(2_001, 3.0), size=1)])
    slices = [each for each in trace["traceEvents"] if each["ph"] == "X" and each["cat"] == "all_reduce"]
    assert len({each["tid"] for each in slices}) == 2_000
    assert slices[-1]["tid"] == slices[0]["tid"]
    assert compared < 20_000


def test_broadcast_of_an_older_generation_has_no_arrows() -> None:
    broadcast = {"kind": "broadcast", "detail": "root=1"}
    old = [dataclasses.replace(done(1, 1.0, **broadcast), generation=2) for _ in range(2)]
    assert arrows(pair(old)) == []


def send(ago: float, to: int = 1, tag: int = 7) -> Any:
    return done(0, ago, kind="send", detail=f"to={to} tag={tag}")


def recv(ago: float, source: object = 0, tag: int = 7) -> Any:
    return done(0, ago, kind="recv", detail=f"from={source} tag={tag}", array="", bytes=None)


def test_messages_are_paired_in_order_by_sender_and_tag() -> None:
    records = pair((send(3.0), recv(2.0)), (send(2.9, tag=8), None), (send(2.8), recv(1.0)), (None, recv(0.9, tag=9)))
    assert arrows(records) == [(0, 1, "message", True)] * 2


def test_ambiguous_messages_have_no_arrows() -> None:
    """Where a record does not reach back, the k-th that is known need not be the k-th."""
    assert arrows(pair((send(3.0), recv(2.0)), (send(2.0), recv(1.0, "any")))) == []
    assert arrows(pair((send(3.0), recv(2.0)), left_out=1)) == []
    full = record(0, *(send(1000.0 - each) for each in range(1000)), size=2)
    assert arrows([full, record(1, recv(1.0), size=2)]) == []


def test_a_member_without_a_rank_gets_a_separate_trace_process() -> None:
    spare = dataclasses.replace(record(1, done(1, 1.0)), rank=None)
    trace = make_trace([record(0, done(1, 1.0)), spare])
    check_trace(trace)
    assert {each["pid"] for each in trace["traceEvents"] if each["ph"] == "X"} == {0, COORDINATOR + 2}


def test_a_step_of_an_old_generation_ends_with_its_last_operation() -> None:
    last = dataclasses.replace(failed(9, 1.0, "PeerLost"), generation=2, ended_at=NOW - 5.0, issued_at=NOW - 6.0)
    steps = (Entered(2, 4, NOW - 6.5), Entered(3, 4, NOW - 1.0))
    trace = make_trace([record(0, last, steps=steps)])
    check_trace(trace)
    found = [(e["ts"] / 1e6, e["dur"] / 1e6) for e in trace["traceEvents"] if e.get("cat") == "step"]
    assert found == [(0.0, 1.5), (5.5, 1.0)]


def test_an_empty_record_makes_an_empty_trace() -> None:
    check_trace(make_trace([record(0)]))
    check_trace(make_trace([]))


def sighting(member: str, ahead: float, there: float, back: float, machine: str = "") -> Sighting:
    """A question that took so long to get there, and an answer that took so long to get back."""
    return Sighting(member, machine, 100.0, 100.0 + there + ahead, 100.1 + there + ahead, 100.1 + there + back)


def test_clock_offset_lies_within_its_bounds_for_uneven_delays() -> None:
    for there, back in ((0.001, 0.001), (0.5, 0.001), (0.001, 0.5)):
        clock = align([sighting("a", 3.0, there, back)])["a"]
        assert clock.uncertainty == pytest.approx((there + back) / 2)
        assert abs(clock.ahead - 3.0) <= clock.uncertainty + 1e-9


def test_members_of_one_machine_share_the_tightest_clock_bounds() -> None:
    clocks = align(
        [sighting("a", 3.0, 0.2, 0.001, "x"), sighting("b", 3.0, 0.001, 0.2, "x"), sighting("c", -1.0, 0.1, 0.1)]
    )
    assert clocks["a"] == clocks["b"]
    assert clocks["a"].uncertainty == pytest.approx(0.001)
    assert clocks["c"].ahead == pytest.approx(-1.0)


def test_conflicting_clocks_of_one_machine_keep_separate_offsets() -> None:
    clocks = align([sighting("a", 3.0, 0.001, 0.001, "x"), sighting("b", 4.0, 0.001, 0.001, "x")])
    assert [round(clocks[each].ahead, 6) for each in "ab"] == [3.0, 4.0]
