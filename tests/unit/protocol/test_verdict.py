"""Who is to blame, by which evidence, in which words."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_protocol import OURS, JobSettings, Process, Progress, Report, Seat, View
from paceline_protocol._verdict import Case, cover, has_second_witness, judge
from paceline_protocol.coordinator import ExitReported
from pacelinepb.v1.errors_pb2 import ErrorReason

LOST = ErrorReason.ERROR_REASON_PEER_LOST
BROKE = ErrorReason.ERROR_REASON_PEER_BROKE_PROTOCOL
RAISED = ErrorReason.ERROR_REASON_PEER_RAISED
MISMATCH = ErrorReason.ERROR_REASON_COLLECTIVE_MISMATCH
TIMEOUT = ErrorReason.ERROR_REASON_TIMEOUT
VERSION = ErrorReason.ERROR_REASON_VERSION
DIFFERS = ErrorReason.ERROR_REASON_STEP_DIFFERS

SEATS = tuple(
    Seat(rank, f"m{rank}", Process(f"host-{name}", 4711 + rank), "", b"", arrival=rank)
    for rank, name in enumerate("abcd")
)
VIEW = View(3, JobSettings(4, 4, 3.0), False, SEATS, OURS)


def report(reporter: int, reason: int, accused: int | None, text: str = "it ended", operation: int = 17) -> Report:
    return Report(reporter, reason, accused, operation, text)  # type: ignore[arg-type]


def test_a_suspect_with_broken_links_has_died() -> None:
    case = Case(VIEW, (report(1, LOST, 2), report(3, LOST, 2)), suspects={2})
    assert has_second_witness(case)
    verdict = judge(0.0, case)
    assert (verdict.generation, verdict.reason, verdict.culprits, verdict.operation) == (3, LOST, (2,), 17)
    assert verdict.text == "rank 2 (host-c, pid 4713) died: its session and its links to ranks 1, 3 ended"


def test_a_death_takes_precedence_over_a_refused_version() -> None:
    """The next generation has other members, and perhaps another version: the death is what has to be known."""
    refused = (report(1, VERSION, 2, "its door does not open"),)
    alone = judge(0.0, Case(VIEW, refused))
    assert (alone.reason, alone.culprits) == (VERSION, (2,))
    verdict = judge(0.0, Case(VIEW, refused, gone={3: "exited with code 1"}))
    assert (verdict.reason, verdict.culprits) == (LOST, (3,))


def test_there_is_no_second_witness_if_a_broken_link_is_unexplained() -> None:
    """Two have died, and of the second only a link is known to have ended."""
    assert not has_second_witness(Case(VIEW, (report(1, LOST, 2), report(3, LOST, 0)), suspects={2}))
    assert not has_second_witness(Case(VIEW, (report(3, BROKE, 2),), suspects={2})), "no link has ended"


def test_a_known_death_is_blamed_for_all_lost_links() -> None:
    lost = (report(1, LOST, 0), report(3, LOST, 2))
    assert judge(0.0, Case(VIEW, lost, suspects={2})).culprits == (2,)
    assert judge(0.0, Case(VIEW, lost, gone={2: "exited with code 1"})).culprits == (2,)
    assert judge(0.0, Case(VIEW, lost, left={2})).culprits == (2,)
    assert judge(0.0, Case(VIEW, lost)).culprits == (1, 3)


@pytest.mark.parametrize("how", ["gone", "late", "links"])
def test_a_verdict_describes_only_a_few_of_many_culprits(how: str) -> None:
    """Each member gets the text: with all of them it would grow as the square of the members."""
    seats = tuple(Seat(rank, f"m{rank}", Process("h" * 512, rank), "", b"", rank) for rank in range(3_000))
    view = View(3, JobSettings(3_000, 3_000, 3.0), False, seats, OURS)
    if how == "gone":
        case = Case(view, gone=dict.fromkeys(range(1, 3_000), "was killed by SIGKILL"))
    elif how == "late":
        progress = {rank: Progress(3 if rank else 9, 0.0) for rank in range(3_000)}
        case = Case(view, (report(0, TIMEOUT, None, operation=9),), progress=progress)
    else:
        case = Case(view, tuple(report(rank, LOST, 0) for rank in range(1, 3_000)))
    verdict = judge(0.0, case)
    assert len(verdict.culprits) == (1 if how == "links" else 2_999)
    assert f"and {2_989} more" in verdict.text
    assert len(verdict.text.encode()) < 32 << 10


def test_the_breach_that_most_members_saw_is_blamed() -> None:
    broke = (report(1, BROKE, 0, "first"), report(0, BROKE, 2, "second"), report(3, BROKE, 2, "third"))
    assert judge(0.0, Case(VIEW, broke)).culprits == (2,)
    assert judge(0.0, Case(VIEW, broke)).text == "second"
    assert judge(0.0, Case(VIEW, (*broke, report(3, BROKE, 3, "itself")))).culprits == (3,)
    assert judge(0.0, Case(VIEW, broke[:2])).text == "first"


def test_a_suspect_is_blamed_even_if_it_is_the_accuser() -> None:
    verdict = judge(0.0, Case(VIEW, (report(2, LOST, 1),), suspects={2}))
    assert verdict.culprits == (2,)


def test_the_common_end_of_all_broken_links_is_blamed() -> None:
    accused = tuple(report(rank, LOST, 0) for rank in (1, 2, 3))
    accuser = tuple(report(0, LOST, rank) for rank in (1, 2, 3))
    assert judge(0.0, Case(VIEW, accused)).culprits == (0,)
    assert judge(0.0, Case(VIEW, accuser + accused)).culprits == (0,)
    assert judge(0.0, Case(VIEW, accuser)).text == (
        "rank 0 (host-a, pid 4711) was cut off: its links to ranks 1, 2, 3 ended"
    )


def test_a_broken_link_between_two_is_blamed_on_the_younger() -> None:
    assert judge(0.0, Case(VIEW, (report(1, LOST, 0),))).culprits == (1,)


def test_a_member_known_to_be_gone_is_blamed_for_its_links() -> None:
    verdict = judge(0.0, Case(VIEW, (report(0, LOST, 1),), gone={1: "exited with code 1"}))
    assert verdict.culprits == (1,)
    assert verdict.text == "rank 1 (host-b, pid 4712) exited with code 1"


def test_a_member_that_left_while_needed_is_blamed() -> None:
    text = "operation 17, all_reduce: rank 1 is gone, as seen by rank 0: rank 1 left"
    case = Case(VIEW, (report(0, LOST, 1, text),), left={1})
    assert has_second_witness(case)
    verdict = judge(0.0, case)
    assert verdict.culprits == (1,)
    assert verdict.text == (
        "rank 1 (host-b, pid 4712) left the job while rank 0 (host-a, pid 4711) needed it: operation 17, all_reduce"
    )


def test_causes_take_precedence_over_their_consequences() -> None:
    lost = (report(0, LOST, 1), report(2, LOST, 1))
    raised = report(1, RAISED, None, "ValueError: bad batch")
    mismatch = report(3, MISMATCH, 0, "rank 3 calls all_reduce, rank 0 broadcast")
    broke = report(0, BROKE, 3, "a frame of 9 GiB")
    late = report(0, TIMEOUT, 2)

    verdict = judge(0.0, Case(VIEW, (*lost, late, broke, mismatch, raised), suspects={1}))
    assert (verdict.reason, verdict.culprits) == (RAISED, (1,))
    assert verdict.text == "ValueError: bad batch"

    alone = report(3, DIFFERS, None, "rank 3 left the loop")
    verdict = judge(0.0, Case(VIEW, (*lost, late, broke, mismatch, alone)))
    assert (verdict.reason, verdict.culprits, verdict.text) == (DIFFERS, (3,), "rank 3 left the loop")

    verdict = judge(0.0, Case(VIEW, (*lost, late, broke, mismatch)))
    assert (verdict.reason, verdict.culprits, verdict.text) == (MISMATCH, (0, 3), mismatch.text)

    verdict = judge(0.0, Case(VIEW, (*lost, late, broke)))
    assert (verdict.reason, verdict.culprits) == (BROKE, (3,))
    assert verdict.text == "a frame of 9 GiB"

    assert judge(0.0, Case(VIEW, (late, *lost))).reason == LOST


def test_a_timeout_blames_members_that_have_not_entered() -> None:
    progress = {
        0: Progress(16, 40.0, True),  # an old heartbeat: it reports from inside 17
        1: Progress(17, 90.0, True),
        2: Progress(16, 88.0, False),
        3: Progress(0, 0.0, False),
    }
    verdict = judge(100.0, Case(VIEW, (report(0, TIMEOUT, 1, "all_reduce 17 took 10 s"),), progress=progress))
    assert verdict.culprits == (2, 3)
    assert verdict.text == (
        "all_reduce 17 took 10 s; not in operation 17 yet: "
        "rank 2 (host-c, pid 4713) has been out of operation 16 for 12.0 s; "
        "rank 3 (host-d, pid 4714) has entered no operation so far"
    )


def test_a_timeout_in_which_all_have_entered_blames_the_accused() -> None:
    progress = {rank: Progress(17, 90.0, True) for rank in range(4)}
    verdict = judge(100.0, Case(VIEW, (report(0, TIMEOUT, 1, "it took 10 s"),), progress=progress))
    assert (verdict.culprits, verdict.text) == ((1,), "it took 10 s")


@pytest.mark.parametrize(
    ("code", "how"),
    [
        (1, "exited with code 1"),
        (-9, "was killed by SIGKILL"),
        (-200, "was killed by signal 200"),
    ],
)
def test_exit_codes_are_described_in_words(code: int, how: str) -> None:
    assert ExitReported(Process("host", 1), code).how == how


EDGES = st.sets(
    st.tuples(st.integers(0, 6), st.integers(0, 6)).filter(lambda edge: edge[0] != edge[1]).map(frozenset), max_size=8
)


@given(EDGES)
def test_a_cover_covers_every_edge_and_blames_no_bystander(edges: set[frozenset[int]]) -> None:
    blamed = cover(edges, {rank: rank for rank in range(7)})
    assert all(edge & blamed for edge in edges)
    assert blamed <= set(itertools.chain.from_iterable(edges))
