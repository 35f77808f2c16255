"""What `paceline status JOB` draws, once or again and again (--watch)."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console, RenderableType

from paceline._base.rpc import duration
from paceline.cli.pictures import job_picture, jobs_picture, state_of, step_of
from paceline.cli.watch import Sight, fitting
from pacelinepb.v1 import admin_pb2, session_pb2

LONG_HOST = "ip-10-0-17-231.eu-central-1.compute.internal"


def member(
    rank: int | None,
    *,
    host: str = "host-a",
    silent: float = 0.1,
    attached: bool = True,
    standing: str = "training",
    **progress: Any,
) -> admin_pb2.MemberStatus:
    since = progress.pop("since", 0.0)
    return admin_pb2.MemberStatus(
        member=session_pb2.Member(
            member_id=f"m{rank}", rank=rank or 0, process=session_pb2.ProcessIdentity(host=host, pid=4_194_304)
        ),
        in_view=rank is not None,
        attached=attached,
        silent=duration(silent),
        standing=standing,
        progress=session_pb2.Heartbeat(since=duration(since), **progress),
    )


def job(*members: admin_pb2.MemberStatus, **fields: Any) -> admin_pb2.GetJobResponse:
    totals = admin_pb2.JobTotals(step=123_456, steps_per_second=12.34, members_lost=2, undone=3, goodput=0.982)
    return admin_pb2.GetJobResponse(
        summary=admin_pb2.JobSummary(
            name="digits",
            phase=admin_pb2.JOB_PHASE_RUNNING,
            generation=7,
            world_size=len(members),
            min_workers=2,
            max_workers=8,
            reason="4 of at most 8 workers are in the view, and nobody waits to come in; more may come at any time",
            totals=totals,
        ),
        settings=session_pb2.JobSettings(min_workers=2, max_workers=8, failure_timeout=duration(3.0)),
        members=members,
        totals=totals,
        **fields,
    )


def drawn(picture: RenderableType, width: int = 80, height: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None)
    console.print(picture)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


GONE = admin_pb2.GoneMember(
    member=session_pb2.Member(rank=3, process=session_pb2.ProcessIdentity(host=LONG_HOST, pid=4_194_303)),
    ago=duration(12.0),
    how="was killed by SIGKILL",
    in_view=True,
)


def event(number: int, text: str) -> admin_pb2.JobEvent:
    return admin_pb2.JobEvent(number=number, job="digits", kind="view", text=text)


def test_job_picture_fits_80_columns_without_truncation() -> None:
    said = "rank 3 (ip-10-0-17-231.eu-central-1.compute.internal, pid 4194303) was killed by SIGKILL"
    detail = job(
        member(0, host=LONG_HOST, operation=40, inside=True, since=3.24, doing="reduce_scatter", step=123_456),
        member(1, host=LONG_HOST, operation=39, step=123_455),
        gone=[GONE],
        events=[event(1, "generation 7 has 4 workers"), event(2, said)],
        verdict=session_pb2.Verdict(generation=6, text=said),
    )
    text = drawn(job_picture(detail))
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "…" not in text
    joined = "".join(text.split())  # a cell's text may go on in the next row, beside the other cells
    for whole in (
        *("digits", "running", "generation 7", "2 (2 to 8)", "step 123456", "12.3", "lost 2", "undone 3", "98.2%"),
        "more may come at any time",
        "generation 6 ended: rank 3",
        "generation 7 has 4 workers",
    ):
        assert "".join(whole.split()) in joined, f"{whole}\n{text}"
    for piece in (
        "ip-10-0-17-231.eu-central-",
        "1.compute.internal",
        "waits in reduce_scatter 40",
        "for 3.2 s, for rank 1",
    ):
        assert piece in text, f"{piece}\n{text}"


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (member(0), "training"),
        (member(0, silent=1.2), "silent for 1.2 s"),
        (member(0, silent=4.0, attached=False, standing="silent"), "silent for 4.0 s, and its connection is lost"),
        (member(0, operation=9, inside=True, since=0.2, doing="all_reduce"), "training"),
        (
            member(0, operation=9, inside=True, since=3.21, doing="all_reduce"),
            "waits in all_reduce 9 for 3.2 s, for rank 1",
        ),
        (member(0, operation=8, inside=True, since=3.21, doing="all_reduce"), "waits in all_reduce 8 for 3.2 s"),
        (member(0, operation=8, inside=True, since=3.21), "waits in operation 8 for 3.2 s"),
        (member(None, standing="ready to join"), "waits for the others to end their step"),
        (member(None, standing="spare"), "spare: waits for a seat"),
        (member(0, standing="leaving"), "leaves after its step"),
        (member(0, standing="met at step 12"), "met at step 12"),
    ],
)
def test_state_of_a_member_tells_its_activity_or_its_wait(status: admin_pb2.MemberStatus, words: str) -> None:
    detail = job(status, member(1, operation=8))
    assert state_of(status, detail)[0] == words


def test_a_straggler_is_marked_in_the_job_picture() -> None:
    late = member(1, operation=8)
    detail = job(member(0, operation=9, inside=True, since=3.0), late)
    assert "has been computing for 0.0 s; others wait for it in operation 9" in drawn(job_picture(detail), width=120)


def test_members_show_the_job_s_step_unless_they_lag() -> None:
    """Their last heartbeats are of different moments."""
    alike, late = member(0, operation=9, inside=True, since=3.0, step=123_455), member(1, operation=8, step=7)
    detail = job(alike, late)
    assert step_of(alike, detail) == "123456"
    assert step_of(late, detail, "straggler: ...") == "7"
    assert step_of(member(0, silent=5.0, step=7), detail) == "7"
    assert step_of(member(None, standing="spare"), detail) == "-"
    rows = [line.split() for line in drawn(job_picture(detail), width=120).splitlines() if "host-a" in line]
    assert [row[3] for row in rows] == ["123456", "7"]


def test_rare_heartbeats_are_not_reported_as_silence() -> None:
    detail = job(member(0, silent=2.0))
    detail.settings.failure_timeout.CopyFrom(duration(60.0))
    assert state_of(detail.members[0], detail)[0] == "training"


def test_a_killed_member_stays_in_the_table_with_its_cause() -> None:
    lines = drawn(job_picture(job(member(0), gone=[GONE])), width=120).splitlines()
    row = next(line for line in lines if "4194303" in line)
    assert row.split()[0] == "3"
    assert row.rstrip().endswith("was killed by SIGKILL, 12 s ago")


def test_the_latest_six_events_are_shown_newest_first() -> None:
    events = [event(number, f"event {number}") for number in range(1, 21)]
    text = drawn(job_picture(job(member(0), events=events)))
    assert [line.split()[-1] for line in text.splitlines() if "event" in line] == ["20", "19", "18", "17", "16", "15"]


def test_picture_fits_the_terminal_and_keeps_troubled_members() -> None:
    members = [member(rank, silent=5.0 if rank == 77 else 0.1) for rank in range(100)]
    detail = job(*members, gone=[GONE], events=[event(n, f"event {n}") for n in range(20)])
    console = Console(file=io.StringIO(), width=80, height=24)
    text = drawn(fitting(Sight(detail=detail), console))
    assert len(text.splitlines()) < 24
    assert "silent for 5.0 s" in text
    assert "was killed by SIGKILL" in text.replace("\n", " ")
    assert "more" in text


def test_an_unreachable_coordinator_is_shown_above_the_last_picture() -> None:
    text = drawn(job_picture(job(member(0)), trouble="no coordinator answers at h:1, for 3 s now; still trying"))
    assert text.splitlines()[0].startswith("no coordinator answers")
    assert "training" in text
    assert drawn(jobs_picture((), "no coordinator answers")) == "no coordinator answers\n"


def test_jobs_picture_has_a_row_for_each_job() -> None:
    summary = job(member(0)).summary
    text = drawn(jobs_picture((summary, summary)))
    assert text.count("digits") == 2
    assert "…" not in text
    assert "no job yet" in drawn(jobs_picture(()))


def test_escape_sequences_in_names_are_not_printed() -> None:
    detail = job(member(0, host="evil\x1b[2J"))
    detail.summary.name = "[bold]\x1b[2J"
    text = drawn(job_picture(detail))
    assert "\x1b" not in text
    assert "[bold]" in text


def test_a_job_that_hangs_says_so_instead_of_running() -> None:
    hanging = job(member(0), member(1))
    hanging.summary.stall = "rank 1 (host-b) has not entered all_reduce 200"
    hanging.summary.stalled.FromSeconds(5)
    for picture in (job_picture(hanging), jobs_picture([hanging.summary])):
        text = " ".join(drawn(picture, 160).split())
        assert "stalled for 5 s: rank 1 (host-b) has not entered all_reduce 200" in text
        assert "running" not in text


def test_progress_checkpoints_and_logged_values_are_shown_once_there_are_any() -> None:
    training = job(member(0, cpu=1.44, memory=2_340_000_000), member(1))
    assert "left" not in drawn(job_picture(training), 160)
    training.summary.total = 200_000
    training.summary.totals.MergeFrom(
        admin_pb2.JobTotals(checkpoint_step=123_000, logged={"loss": 0.123456, "lr": float("nan")})
    )
    training.summary.totals.checkpoint_ago.FromSeconds(150)
    text = drawn(job_picture(training), 200)
    assert "step 123456 of 200000  12.3 steps/s  103 min left" in text
    assert "checkpoint 123000, 2 min ago  loss 0.1235  lr nan" in text
    assert "1.4" in text
    assert "2.3 GB" in text


def test_a_job_without_steps_shows_its_collectives() -> None:
    plain = job(member(0))
    plain.summary.totals.CopyFrom(admin_pb2.JobTotals(operations=1000, operations_per_second=78.9))
    assert "79 operations/s" in drawn(job_picture(plain), 160)
