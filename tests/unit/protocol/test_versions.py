"""Programs share versions of the protocol, a view speaks one of them, and a program without one is refused."""

from dataclasses import replace

import pytest

from paceline_protocol import OURS, Versions, View, has_our_frames
from paceline_protocol import _versions as versions
from paceline_protocol.coordinator import EndSession, Standing, StoreView, VersionMismatch
from paceline_protocol.coordinator import restore as restored
from paceline_protocol.messages import ViewFormed
from paceline_server.errors import BadRequest
from pacelinepb.v1.errors_pb2 import ErrorReason
from support.coordinator import PureJob, sent

LAST, NEXT = Versions(8, 8), Versions(9, 10)
"""The versions that the last release speaks, and the next one."""


def joined(*programs: Versions) -> PureJob:
    """A job whose first view has workers with these programs."""
    job = PureJob()
    for each in programs:
        job.join(len(programs), 8, versions=each)
    job.pass_time(1.0)
    assert job.state.live is not None
    return job


def view_of(job: PureJob) -> View:
    assert job.state.view is not None
    return job.state.view


def again(job: PureJob) -> PureJob:
    """The job at the next coordinator, which knows what is stored."""
    return PureJob(restored(job.now, "job", generation=job.state.generation, view=job.state.view))


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [(OURS, LAST, True), (OURS, OURS, True), (OURS, NEXT, True), (LAST, NEXT, False), (Versions(8, 12), NEXT, True)],
)
def test_programs_overlap_if_they_have_a_version_in_common(one: Versions, other: Versions, common: bool) -> None:
    assert one.overlap(other) is other.overlap(one) is common


@pytest.mark.parametrize(
    ("programs", "version"),
    [((OURS, OURS), 9), ((OURS, LAST), 8), ((LAST, LAST, OURS), 8), ((NEXT, OURS), 9), ((NEXT, NEXT), 9)],
)
def test_a_view_speaks_the_newest_version_common_to_all(programs: tuple[Versions, ...], version: int) -> None:
    job = joined(*programs)
    assert view_of(job).version == version
    assert all(formed.version == version for _, formed in sent(job.effects, ViewFormed))


def test_a_restored_view_keeps_its_stored_version() -> None:
    """It was formed by a coordinator of the last release, although its members speak more."""
    job = joined(OURS, OURS)
    job.state.view = replace(view_of(job), versions=LAST)
    later = again(job)
    told = [formed for member in ("m1", "m2") for _, formed in sent(later.resume(member, 0), ViewFormed)]
    assert [formed.version for formed in told] == [8, 8]
    assert later.reason == "2 workers are training; their generation speaks version 8 of the protocol"


def test_the_reason_names_members_without_a_newer_version() -> None:
    assert "version" not in joined(OURS, OURS).reason
    job = joined(OURS, LAST, LAST)
    assert "speaks version 8 of the protocol, because rank 1 (host-2), rank 2 (host-3) speak no newer one" in job.reason
    later = again(job)
    later.resume("m1", 1)
    assert later.reason.endswith("their generation speaks version 8 of the protocol"), (
        "nobody knows what the others speak"
    )
    later.resume("m2", 1, versions=LAST)
    assert "their generation speaks version 8 of the protocol" in later.reason
    later.resume("m3", 1)
    assert "because rank 1 (host-2) speaks no newer one" in later.reason


def test_the_reason_does_not_change_with_each_resumed_member() -> None:
    """Each change is a line of log; after a restart the members come back in any order."""
    job = PureJob()
    for _ in range(10):
        job.join(10, 10, versions=LAST)
    later = again(job)
    said = [later.reason]
    for number in (5, 10, 2, 8, 1, 7, 9, 3, 6, 4):
        later.resume(f"m{number}", 1, versions=LAST)
        said.append(later.reason)
    assert len(set(said[1:-1])) == 1
    assert said[-1] != said[-2]
    assert "because rank 0 (host-1), rank 1 (host-2)," in said[-1]
    assert "rank 7 (host-8) and 2 more speak no newer one" in said[-1]


def test_a_newcomer_without_a_common_version_is_refused() -> None:
    job = joined(OURS, LAST)
    before = set(job.state.sessions)
    text = (
        r"the worker at host-3 \(pid 1003\) speaks versions 9 to 10 of the protocol, but the one at host-2 \(pid 1002\)"
        r" speaks version 8: start the worker with that one's release, or drain that one first \(paceline drain\)"
    )
    with pytest.raises(VersionMismatch, match=text):
        job.join(2, 8, versions=NEXT)
    assert set(job.state.sessions) == before
    job.join(2, 8, versions=OURS)


def test_a_dismissed_member_does_not_keep_a_newcomer_out() -> None:
    job = joined(OURS, LAST)
    job.state.sessions["m2"].standing = Standing.DISMISSED
    job.join(2, 8, versions=NEXT)


def test_an_ended_session_does_not_keep_a_newcomer_out() -> None:
    job = PureJob()
    job.join(2, 8, versions=LAST)
    job.leave("m1")
    assert job.state.sessions.all_understand(NEXT)
    job.join(2, 8, versions=OURS)
    assert not job.state.sessions.all_understand(Versions(10, 11))


def test_a_disconnected_candidate_gives_way_to_a_newcomer() -> None:
    job = PureJob()
    job.join(2, 8, versions=LAST)
    job.cut("m1")
    job.join(2, 8, versions=NEXT)
    assert [effect.member_id for effect in job.effects if isinstance(effect, EndSession)] == ["m1"]


def test_a_candidate_cannot_be_drained_so_the_advice_is_to_stop_it() -> None:
    job = PureJob()
    job.join(2, 8, versions=LAST)
    with pytest.raises(VersionMismatch, match="or stop that one first"):
        job.join(2, 8, versions=NEXT)


def test_a_disconnected_member_still_bars_an_incompatible_newcomer() -> None:
    """The coordinator knows the versions that the member told, or the one that all members of its view speak."""
    job = joined(OURS, LAST)
    job.cut("m2")
    for each in (job, again(job)):
        with pytest.raises(VersionMismatch, match=r"the one at host-[12] \(pid 100[12]\) speaks version 8"):
            each.join(2, 8, versions=NEXT)


def test_a_member_that_resumes_without_a_former_version_is_refused() -> None:
    job = joined(OURS, OURS)
    later = again(job)
    with pytest.raises(BadRequest, match="speaks versions 8 to 9 of the protocol, and says version 8 now"):
        later.resume("m1", 1, versions=LAST)
    assert later.state.sessions["m1"].stream is None
    later.resume("m1", 1)
    with pytest.raises(BadRequest, match="speaks versions 8 to 9 of the protocol, and says versions 9 to 10 now"):
        later.resume("m1", 1, versions=NEXT)


def test_a_registration_compares_distinct_versions_not_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    job = PureJob()
    for number in range(600):
        job.join(2_000, 2_000, versions=(OURS, LAST)[number % 2])
        if number % 3 == 0:
            job.cut(f"m{number + 1}")
    compared = 0

    def overlap(one: Versions, other: Versions) -> bool:
        nonlocal compared
        compared += 1
        return honest(one, other)

    honest = Versions.overlap
    monkeypatch.setattr(versions.Versions, "overlap", overlap)
    job.join(2_000, 2_000)
    assert compared == 2
    with pytest.raises(VersionMismatch):
        job.join(2_000, 2_000, versions=NEXT)
    assert compared < 10


def test_a_refused_version_becomes_the_verdict_and_evicts_no_member() -> None:
    job = joined(OURS, OURS)
    said = "rank 1 (host-2): its door does not open: rank 0 speaks version 9 of the protocol, but ..."
    job.report("m1", ErrorReason.ERROR_REASON_VERSION, 1, said)
    job.pass_time(0.5, ["m1", "m2"])
    verdict = job.state.verdict
    assert verdict is not None
    assert (verdict.reason, verdict.culprits, verdict.text) == (ErrorReason.ERROR_REASON_VERSION, (1,), said)
    assert not any(isinstance(effect, EndSession) for effect in job.effects)
    assert set(job.state.sessions) == {"m1", "m2"}


@pytest.mark.parametrize(
    ("said", "told", "alike"),
    [(8, 8, True), (9, 9, True), (8, 9, True), (9, 8, True), (7, 8, False), (10, 9, False), (0, 8, False)],
)
def test_frames_are_the_same_since_version_8(said: int, told: int, alike: bool) -> None:
    assert has_our_frames(said, told) is alike


def test_frames_changed_by_a_version_are_distinguished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "FRAMES_VERSION", 9)
    assert [has_our_frames(*pair) for pair in ((8, 8), (9, 9), (8, 9), (9, 8))] == [True, True, False, False]


def test_a_view_is_stored_with_its_version() -> None:
    job = PureJob()
    job.slow_disk = True
    job.join(2, 2, versions=LAST)
    job.join(2, 2)
    (stored,) = [effect for effect in job.effects if isinstance(effect, StoreView)]
    assert stored.view.version == 8


def test_a_newcomer_of_the_last_release_is_admitted_after_a_restart() -> None:
    """The members have not come back yet, and some never will: what all of them speak is stored with their view."""
    later = again(joined(OURS, OURS))
    later.join(2, 8, versions=LAST)
    assert view_of(joined(OURS, LAST)).versions == LAST
    assert view_of(joined(NEXT, OURS)).versions == Versions(9, 9)
