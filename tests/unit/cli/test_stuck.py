"""Who is stuck in what, and since when: found by comparing records."""

from __future__ import annotations

import dataclasses

from unit.protos.flight import done, failed, record, waits

from paceline.cli.debug.stuck import Finding, find_stuck, in_ranks

HALVES = {"": (0, 1, 2, 3), "split1": (0, 1)}
OTHERS = {"": (0, 1, 2, 3), "split1": (2, 3)}


def only(*args: object, **kwargs: object) -> Finding:
    (finding,) = find_stuck(*args, **kwargs).findings  # type: ignore[arg-type]
    return finding


def test_a_late_rank_is_reported_as_missing() -> None:
    late = record(2, done(15, 13.0), done(16, 12.4))
    finding = only([record(rank, done(16, 12.5), waits(17, 12.3)) for rank in (0, 1, 3)] + [late], {})
    assert finding.text == (
        "ranks 0, 1, 3 have waited 12.3 s in all_reduce 17 (op=sum float32[1024]); rank 2 (host-2, pid 102): has not "
        "entered it: its last was all_reduce 16, done 12.4 s ago"
    )
    assert (finding.kind, finding.operation, finding.group) == ("wait", 17, "")
    assert list(finding.waiting) == [0, 1, 3]
    assert list(finding.missing) == [2]


def test_a_dead_rank_is_reported_with_the_failure_of_the_others() -> None:
    there = [
        record(rank, failed(17, 3.0, "PeerLost: rank 2 (host-2, pid 102) was killed by SIGKILL")) for rank in (0, 1, 3)
    ]
    wait, silent = find_stuck(there, {}).findings
    assert wait.text == (
        "ranks 0, 1, 3 have waited 3.0 s in all_reduce 17 (op=sum float32[1024]), which then failed (PeerLost: rank 2 "
        "(host-2, pid 102) was killed by SIGKILL); rank 2: has left no record"
    )
    assert (silent.kind, silent.text) == ("no answer", "rank 2: has left no record")


def test_a_rank_that_does_not_answer_is_reported() -> None:
    text = "(host-2, pid 102) has not answered within 1.0 s"
    wait, silent = find_stuck([record(rank, waits(17, 5.0)) for rank in (0, 1, 3)], {2: text}).findings
    assert wait.missing == {2: text}
    assert silent.text == f"rank 2: {text}"


def test_different_operations_at_one_number_are_a_mismatch() -> None:
    there = [record(rank, waits(17, 5.0), size=3) for rank in (0, 1)]
    other = record(2, waits(17, 4.0, kind="barrier", detail="", array=""), size=3)
    mismatch, wait = find_stuck([*there, other], {}).findings
    assert mismatch.text == (
        "operation 17 differs: ranks 0, 1 called all_reduce op=sum float32[1024], rank 2 called barrier"
    )
    assert wait.missing == {}


def test_an_unknown_array_at_a_broadcast_receiver_is_no_mismatch() -> None:
    root = record(0, waits(17, 5.0, kind="broadcast", detail="root=0"), size=2)
    other = record(1, waits(17, 5.0, kind="broadcast", detail="root=0", array="", bytes=None), size=2)
    assert only([root, other], {}).kind == "wait"


def test_ranks_in_different_operations_are_reported_per_operation() -> None:
    behind, ahead = record(1, waits(16, 7.0), size=3), record(2, done(17, 1.5), size=3)
    first, second = find_stuck([record(0, done(16, 7.0), waits(17, 6.9), size=3), behind, ahead], {}).findings
    assert (first.operation, second.operation) == (16, 17)
    assert first.missing == {
        0: "is already in all_reduce 17 (op=sum float32[1024]), for 6.9 s",
        2: "has finished it",
    }
    assert second.missing == {
        1: "is still in all_reduce 16 (op=sum float32[1024]), for 7.0 s",
        2: "has finished it, 1.5 s ago",
    }


def test_groups_of_one_name_are_distinguished_by_their_members() -> None:
    """Planted: with the name alone, ranks 2 and 3 would count as members that have not entered operation 5."""
    lower, upper = ("split1", 0), ("split1", 2)
    there = [
        record(0, waits(5, 2.0, group=lower), groups=HALVES),
        record(1, waits(8, 2.5), groups=HALVES),
        record(2, done(9, 3.0, group=upper), waits(8, 2.4), groups=OTHERS),
        record(3, done(9, 3.0, group=upper), waits(8, 2.4), groups=OTHERS),
    ]
    whole, part = find_stuck(there, {}).findings
    assert (whole.group, whole.operation, sorted(whole.waiting), list(whole.missing)) == ("", 8, [1, 2, 3], [0])
    assert whole.missing[0] == (
        "has not entered it: it is in all_reduce 5 (op=sum float32[1024]) of group 'split1' (from rank 0), for 2.0 s"
    )
    assert (part.group, part.operation, list(part.waiting)) == ("split1", 5, [0])
    assert part.missing == {1: "has not entered it: it is in all_reduce 8 (op=sum float32[1024]), for 2.5 s"}


def test_a_group_is_named_without_the_digest_of_its_members() -> None:
    group = ("b31087bb0123abcd-tp-1", 0)
    there = [record(0, waits(5, 2.0, group=group), groups={group[0]: (0, 1)}), record(1, groups={group[0]: (0, 1)})]
    found = find_stuck(there, {}).findings[0]
    assert "of group 'tp 1' (from rank 0)" in found.text
    assert found.group == group[0]


def test_a_receive_without_its_message_is_reported() -> None:
    waiting = waits(0, 3.0, kind="recv", detail="from=1 tag=7", array="", bytes=None)
    finding = only([record(0, waiting, size=2), record(1, done(4, 3.0), size=2)], {})
    assert finding.text == "rank 0 (host-0, pid 100) has waited 3.0 s in recv (from=1 tag=7)"


def test_ranks_outside_any_operation_are_idle() -> None:
    finding = only([record(rank, done(16, 4.0 + rank)) for rank in range(4)], {})
    assert finding.kind == "idle"
    assert finding.text == (
        "nobody waits in an operation: ranks 0-3 compute, or wait for something else; the last was all_reduce 16 "
        "(op=sum float32[1024]), which rank 0 (host-0, pid 100) left 4.0 s ago"
    )
    assert only([record(0, size=1)], {}).text == "no rank has called an operation yet"


def test_a_running_job_is_reported_as_moving() -> None:
    """Records are made at different moments, so ranks differ by some operations while nothing is wrong."""
    finding = only([record(0, done(16, 0.02), waits(17, 0.01), size=2), record(1, done(16, 0.0), size=2)], {})
    assert (finding.kind, finding.text) == (
        "moving",
        "ranks 0, 1: moving; the last operation of the slowest ended 0.0 s ago",
    )


def test_records_of_an_older_generation_are_set_apart() -> None:
    old = dataclasses.replace(record(1, waits(4, 60.0), size=2), generation=2)
    report = find_stuck([record(0, done(1, 0.0), size=2), old], {})
    assert (report.generation, report.size) == (3, 2)
    assert [each.kind for each in report.findings] == ["other generation", "moving"]
    assert report.findings[0].text == "rank 1 (host-1, pid 101) is in generation 2, others are in generation 3"


def test_in_ranks_joins_consecutive_ranks_into_ranges() -> None:
    assert in_ranks([2]) == "rank 2"
    assert in_ranks([3, 0, 1]) == "ranks 0, 1, 3"
    assert in_ranks([0, 1, 2, 5, 6, 7]) == "ranks 0-2, 5-7"
