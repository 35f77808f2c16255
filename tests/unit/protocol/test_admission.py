"""Who may register: every refusal, by its words."""

import pytest

from paceline_protocol.coordinator import EndSession, Standing
from paceline_server.errors import InvalidRank, InvalidWorldSize, RankTaken, SettingsDisagree
from support.coordinator import PureJob


@pytest.mark.parametrize(
    ("least", "most", "text"),
    [(0, 2, "min_workers must be 1 or more, not 0"), (3, 2, r"max_workers \(2\) is below min_workers \(3\)")],
)
def test_impossible_world_sizes_are_refused(least: int, most: int, text: str) -> None:
    job = PureJob()
    with pytest.raises(InvalidWorldSize, match=text):
        job.join(least, most)
    assert not job.state.sessions


def test_explicit_ranks_need_one_world_size() -> None:
    with pytest.raises(InvalidWorldSize, match="explicit ranks need"):
        PureJob().join(1, 2, rank=0)


def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(InvalidRank, match="rank 4 is outside the world of 4: ranks go from 0 to 3"):
        PureJob().join(4, 4, rank=4)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"least": 3, "most": 4}, "min_workers is 3 at host-2 .* but 2 .* host-1"),
        ({"least": 2, "most": 5}, "max_workers is 5 at host-2 .* but 4"),
        ({"least": 2, "most": 4, "timeout": 5.0}, "failure_timeout is 5 s at host-2 .* but 3 s"),
        ({"least": 2, "most": 4, "tuning": "00ff" * 4}, r"schedules .PACELINE_TUNING. is 00ff00ff00ff00ff at host-2"),
    ],
)
def test_disagreement_names_the_setting_and_both_values(other: dict[str, float | str], text: str) -> None:
    job = PureJob()
    job.join(2, 4)
    with pytest.raises(SettingsDisagree, match=text):
        job.join(**other)  # type: ignore[arg-type]
    assert list(job.state.sessions) == ["m1"]


def test_explicit_and_free_ranks_do_not_mix() -> None:
    job = PureJob()
    job.join(4, 4, rank=1)
    with pytest.raises(SettingsDisagree, match=r"explicit \(1\) at host-1 .* left to the coordinator at host-2"):
        job.join(4, 4)


def test_settings_that_differ_from_the_live_view_are_refused() -> None:
    job = PureJob()
    job.form(2)
    with pytest.raises(SettingsDisagree):
        job.join(3, 3)


def test_a_returning_member_can_claim_its_former_rank() -> None:
    """It has moved to another address, and its old stream is not known to have ended."""
    job = PureJob()
    former = job.join(4, 4, rank=1)
    again = job.join(4, 4, rank=1, former=former)
    assert list(job.state.sessions) == [again]


def test_a_former_member_id_without_its_token_ends_no_session() -> None:
    """Ids are in every view; the token proves."""
    job = PureJob()
    former = job.join(4, 4, rank=1)
    with pytest.raises(RankTaken):
        job.join(4, 4, rank=1, former=former, former_token=b"a guess")
    other = job.join(4, 4, rank=2, former=former, former_token=b"a guess")
    assert list(job.state.sessions) == [former, other]


@pytest.mark.parametrize("proved", [True, False])
def test_ending_of_a_silent_member_becomes_sure_only_with_its_token(proved: bool) -> None:
    job = PureJob()
    former, other = job.form(2)
    job.cut(former)
    job.pass_time(4.0, [other])
    assert former not in job.state.sessions
    assert not job.state.endings[0].sure
    job.join(2, 2, former=former, former_token=None if proved else b"a guess")
    assert job.state.endings[0].sure is proved


def test_a_rank_claimed_twice_names_both_hosts() -> None:
    job = PureJob()
    job.join(4, 4, rank=1, host="left")
    with pytest.raises(RankTaken, match=r"rank 1 .* claimed twice: by left .*, and by right"):
        job.join(4, 4, rank=1, host="right")


def test_a_candidate_that_lost_its_stream_gives_its_rank_up() -> None:
    job = PureJob()
    stale = job.join(2, 2, rank=0)
    job.cut(stale)
    job.join(2, 2, rank=0)
    assert [effect.member_id for effect in job.effects if isinstance(effect, EndSession)] == [stale]
    job.join(2, 2, rank=1)
    assert len(job.state.view.seats) == 2


def test_settings_of_a_candidate_without_a_stream_do_not_bind_others() -> None:
    job = PureJob()
    stale = job.join(3, 3)
    job.cut(stale)
    job.join(1, 1)
    assert [effect.member_id for effect in job.effects if isinstance(effect, EndSession)] == [stale]
    assert len(job.state.view.seats) == 1


def test_a_claim_to_the_rank_of_a_suspect_waits_as_candidate() -> None:
    job = PureJob()
    dead = job.join(2, 2, rank=0)
    job.join(2, 2, rank=1)
    job.cut(dead)
    again = job.join(2, 2, rank=0)
    assert job.state.sessions[again].standing is Standing.CANDIDATE
    with pytest.raises(RankTaken):
        job.join(2, 2, rank=0)


def test_settings_are_forgotten_with_the_last_member() -> None:
    job = PureJob()
    for member in job.form(2):
        job.leave(member)
    job.join(3, 5)  # the next run may choose others
    assert job.reason == "waiting for 2 more workers (1 of at least 3)"


HERE, THERE = {"host": "left", "boot_id": "1"}, {"host": "right", "boot_id": "2"}
BESIDE = {"host": "container", "boot_id": "1"}


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    ("local", "far"),
    [
        ({**HERE, "address": "127.0.0.1:5"}, {**THERE, "address": "10.0.0.2:6"}),
        ({**HERE, "address": "[::1]:5"}, {**THERE, "address": "[fd00::2]:6"}),
        ({**HERE, "address": "localhost:5"}, {**THERE, "address": "right:6"}),
        ({**HERE, "address": "127.0.0.1:5"}, {**THERE, "address": "127.0.0.1:6"}),
        ({**HERE, "address": "127.0.0.1:5"}, {**BESIDE, "address": "172.17.0.2:6"}),
        ({"host": "left", "address": "127.0.0.1:5"}, {"host": "right", "address": "127.0.0.1:6"}),
        ({"host": "left", "address": "127.0.0.1:5"}, {**THERE, "address": "10.0.0.2:6"}),
        ({**HERE, "address": "127.0.0.1:5"}, {"host": "left", "boot_id": "2", "address": "10.0.0.2:6"}),
    ],
)
def test_the_second_of_two_hosts_is_refused_if_one_address_is_loopback(
    local: dict[str, str], far: dict[str, str], order: int
) -> None:
    job = PureJob()
    first, second = (local, far)[::order]
    job.join(2, 2, **first)
    with pytest.raises(SettingsDisagree, match="cannot reach: start all workers with an address") as caught:
        job.join(2, 2, **second)
    for member in (local, far):
        assert f"{member['host']} (pid " in str(caught.value)
        assert member["address"] in str(caught.value)
    assert ", a loopback address, which the worker at" in str(caught.value)
    assert list(job.state.sessions) == ["m1"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({**HERE, "address": "127.0.0.1:5"}, {**HERE, "address": "10.0.0.1:6"}),  # two ways to one machine
        ({**HERE, "address": "127.0.0.1:5"}, {**BESIDE, "address": "127.0.0.1:6"}),  # namespaces that share a network
        ({**HERE, "address": "127.0.0.1:5"}, {**HERE, "address": "[::1]:6"}),
        ({**HERE, "address": "10.0.0.1:5"}, {**THERE, "address": "10.0.0.2:6"}),
        ({**HERE, "address": "left:5"}, {**BESIDE, "address": "container:6"}),
        ({"host": "left", "address": "127.0.0.1:5"}, {**HERE, "address": "127.0.0.1:6"}),  # one knows no boot id
    ],
)
def test_workers_that_can_reach_each_other_are_admitted(one: dict[str, str], other: dict[str, str]) -> None:
    job = PureJob()
    job.join(2, 2, **one)
    job.join(2, 2, **other)
    assert len(job.state.view.seats) == 2


def test_a_live_view_refuses_a_newcomer_with_a_loopback_address() -> None:
    job = PureJob()
    job.join(1, 2, **HERE, address="10.0.0.1:1")
    with pytest.raises(SettingsDisagree, match="loopback"):
        job.join(1, 2, **THERE, address="127.0.0.1:2")


def test_a_loopback_candidate_without_a_stream_gives_way_to_a_newcomer() -> None:
    job = PureJob()
    stale = job.join(2, 2, **HERE, address="127.0.0.1:5")
    job.cut(stale)
    job.join(2, 2, **THERE, address="10.0.0.2:6")
    assert [effect.member_id for effect in job.effects if isinstance(effect, EndSession)] == [stale]
