"""Which of several coordinators is tried next."""

from __future__ import annotations

import pytest

from paceline._base.addresses import CoordinatorAddresses


def test_addresses_are_parsed_with_their_ports() -> None:
    addresses = CoordinatorAddresses.parse("a, b:1,[::1]:2", default_port=7400)
    assert str(addresses) == "a:7400,b:1,[::1]:2"
    assert addresses.several
    assert not CoordinatorAddresses.parse("a:1").several
    with pytest.raises(ValueError, match="not an address"):
        CoordinatorAddresses.parse("a:1,")


def test_addresses_are_tried_in_turn() -> None:
    addresses = CoordinatorAddresses.parse("a:1,b:1,c:1")
    tried = []
    for _ in range(4):
        tried.append(addresses.current.host)
        addresses.turn()
    assert tried == ["a", "b", "c", "a"]


def test_the_leader_named_by_a_standby_is_tried_next() -> None:
    addresses = CoordinatorAddresses.parse("a:1,b:1,c:1")
    addresses.turn("c:1")
    assert addresses.current.host == "c"


def test_an_unlisted_leader_is_never_tried() -> None:
    addresses = CoordinatorAddresses.parse("a:1,b:1")
    addresses.turn("evil:1")
    assert addresses.current.host == "b"


def test_a_leader_that_just_failed_is_retried_after_several_turns() -> None:
    """The standby takes it for the leader until it has taken over itself."""
    addresses = CoordinatorAddresses.parse("a:1,b:1")
    addresses.turn()
    tried = []
    for _ in range(6):
        tried.append(addresses.current.host)
        addresses.turn("a:1")
    assert tried == ["b", "b", "b", "b", "b", "a"]


def test_a_standby_without_a_leader_may_be_named_leader_at_once() -> None:
    addresses = CoordinatorAddresses.parse("a:1,b:1")
    addresses.turn("")
    addresses.turn("a:1")
    assert addresses.current.host == "a"


def test_a_standby_without_a_leader_is_retried_before_a_failed_address() -> None:
    """The leader has resigned and ended, and this standby is about to take over."""
    addresses = CoordinatorAddresses.parse("a:1,b:1,c:1")
    addresses.turn()
    tried = []
    for _ in range(7):
        tried.append(addresses.current.host)
        addresses.turn("")
    assert tried == ["b", "c", "c", "c", "c", "c", "a"]
