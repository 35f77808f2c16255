"""When a standby tries to take over; time passes as the test says."""

from __future__ import annotations

from paceline_server.election import Election
from paceline_server.storage.shared_keys import LeaderRecord

OTHER = LeaderRecord(3, "other", "a:1")


def standby(record: LeaderRecord | None = OTHER, revision: int = 7, now: float = 10.0) -> Election:
    """One that has seen a record."""
    election = Election("me")
    election.saw(now, record, revision)
    return election


def test_no_takeover_is_tried_before_the_record_is_read() -> None:
    assert not Election("me").decide(5.0).tries


def test_a_takeover_is_tried_at_once_without_a_leader_record() -> None:
    assert standby(None, 0).decide(10.0).tries


def test_no_takeover_is_tried_while_the_leader_keeps_storing() -> None:
    election = standby()
    for n in range(20):
        election.saw(10.0 + 0.25 * n, OTHER, 7 + n)
        decision = election.decide(10.0 + 0.25 * n + 0.9)
        assert not decision.tries
        assert decision.due == 10.0 + 0.25 * n + 1.0
    assert decision.why == "a:1 leads in epoch 3"


def test_a_takeover_is_tried_after_a_second_without_a_leader_write() -> None:
    election = standby()
    election.saw(10.5, OTHER, 7)  # the same revision again is no sign of life
    assert not election.decide(10.99).tries
    decision = election.decide(11.0)
    assert decision.tries
    assert decision.why == "the leader at a:1 has stored nothing for 1.0 s"


def test_a_takeover_is_tried_at_once_when_the_leader_resigns() -> None:
    decision = standby(LeaderRecord(3, "other", "")).decide(10.0)
    assert decision.tries
    assert decision.why == "the leader of epoch 3 has resigned"


def test_a_standby_does_not_wait_for_its_own_record() -> None:
    election = standby(LeaderRecord(3, "me", "b:1"))
    assert election.decide(10.0).tries
    assert election.leader == ""


def test_the_highest_epoch_is_kept_when_the_record_falls_back() -> None:
    election = standby()
    election.saw(10.5, LeaderRecord(2, "other", "a:1"), 7)  # etcd was restored, and has counted to the same revision
    assert election.record is not None
    assert election.record.epoch == 2
    election.saw(10.6, None, 0)
    assert election.highest == 3


def test_a_refused_connection_allows_a_takeover_until_the_leader_stores() -> None:
    election = standby()
    election.reached("a:1")
    election.refused(10.6, "a:1")
    assert election.decide(10.6).tries
    election.saw(10.7, OTHER, 8)  # it has stored something, so it lives
    assert not election.decide(10.7).tries


def test_a_refused_connection_early_in_an_epoch_is_ignored() -> None:
    election = standby()
    election.reached("a:1")
    election.refused(10.4, "a:1")
    assert not election.decide(10.4).tries


def test_a_refused_connection_to_another_address_is_ignored() -> None:
    election = standby()
    election.reached("a:1")
    election.reached("b:1")
    election.refused(11.0 - 0.1, "b:1")
    assert not election.decide(10.9).tries


def test_a_refusal_is_ignored_if_the_leader_was_not_reached_this_epoch() -> None:
    """The leader may be well: its address is wrong, or behind a firewall."""
    election = standby()
    election.refused(10.6, "a:1")
    assert not election.decide(10.6).tries
    election.reached("a:1")
    election.saw(10.7, LeaderRecord(4, "other", "a:1"), 8)
    election.refused(11.5, "a:1")
    assert not election.decide(11.5).tries
    assert election.decide(11.7).tries  # it has stored nothing for a second
