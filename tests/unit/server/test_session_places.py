"""Who holds the places of sessions, whatever happens to these."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_server.errors import LimitMet
from paceline_server.session_places import SessionPlaces
from paceline_server.settings import ServerSettings

TOTAL = 30

JOBS = {"a": "a", "a/nodes": "a", "b": "b", "c": "c"}


class Account:
    """The places, and the sessions that hold them, counted by hand."""

    def __init__(self, **limits: int) -> None:
        self.places = SessionPlaces(ServerSettings(max_sessions=TOTAL, **limits))
        self.sessions: dict[str, tuple[str, str]] = {}
        self._next = 0

    def of_job(self, job: str) -> int:
        return sum(name == job for _, name in self.sessions.values())

    def of_payer(self, payer: str) -> int:
        return sum(who == payer for who, _ in self.sessions.values())

    def open(self, job: str, token: frozenset[str] | None = None, former: str = "") -> str:
        """Opens a session as the dispatcher does; returns its member's id."""
        payer = self.places.payer_of(job, token, former)
        if not former:
            self.places.check(payer, job, self.of_job(job))
        self._next += 1
        member = f"m{self._next}"
        self.places.take(member, payer, job)
        self.sessions[member] = payer, job
        if former:
            self.close(former)
        return member

    def close(self, member: str) -> None:
        self.places.free(member)
        self.sessions.pop(member, None)

    def fill(self, *jobs: str, token: frozenset[str] | None = None) -> int:
        """Opens sessions in turn until all are refused; returns how many there were."""
        count, full = 0, False
        while not full:
            full = True
            for job in jobs:
                try:
                    self.open(job, token)
                except LimitMet:
                    continue
                count, full = count + 1, False
        return count


TOKENS = [None, frozenset("a"), frozenset("ab"), frozenset("c")]


@given(st.lists(st.tuples(st.sampled_from([*JOBS]), st.sampled_from(TOKENS), st.integers(0, 9)), max_size=120))
def test_a_payer_never_opens_more_sessions_than_places_remain_free(
    moves: list[tuple[str, frozenset[str], int]],
) -> None:
    account = Account()
    for job, token, what in moves:
        members = list(account.sessions)
        if what < 7:
            payer = account.places.payer_of(job, token)
            try:
                account.open(job, token)
            except LimitMet:
                assert account.of_payer(payer) + 1 > TOTAL - len(account.sessions) - 1
            else:
                assert account.of_payer(payer) <= TOTAL - len(account.sessions)
        elif what < 9 and members:
            account.close(members[what % len(members)])
        elif members:  # it replaces a session of its job, and takes its place, whoever has paid for it
            former = members[-1]
            payer, its_job = account.sessions[former]
            assert account.sessions[account.open(its_job, token, former)][0] == payer
        assert len(account.places) == len(account.sessions)
    for member in list(account.sessions):
        account.close(member)
    assert account.fill("c") == TOTAL // 2, "all places are free again"


def test_all_jobs_of_one_token_share_its_places() -> None:
    account = Account()
    assert account.fill("a", "a/nodes", token=frozenset("a")) == TOTAL // 2
    assert account.fill("b", token=frozenset("b")) == TOTAL // 4

    account = Account()
    assert account.fill("a", "a/nodes", "b", "b/nodes", token=frozenset("ab")) == TOTAL // 2


def test_a_job_without_a_token_shares_its_places_with_its_launchers() -> None:
    account = Account()
    assert account.fill("a", "a/nodes") == TOTAL // 2
    with pytest.raises(LimitMet, match=r"^job 'a' has 15 sessions, and all jobs have 15 of 30: one token, or one job"):
        account.open("a", frozenset("a"))


def test_sessions_per_job_are_limited() -> None:
    account = Account(max_job_sessions=5)
    assert account.fill("a") == 5
    with pytest.raises(LimitMet, match=r"^job 'a' has 5 sessions, the most that one job may have"):
        account.open("a", frozenset("ab"))


def test_free_job_releases_all_places_of_a_failed_job() -> None:
    account = Account()
    members = [account.open("a"), account.open("a")]
    account.open("a/nodes")
    account.places.free_job("a")
    assert len(account.places) == 1
    account.places.free(members[0])
    assert len(account.places) == 1
