"""The news that a loop over steps sends to its launcher."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceline._elastic import launcher_news
from paceline._elastic.launcher_news import tell_new_ranks
from paceline._links.base import Peer


def peers(*names: str) -> list[Peer]:
    return [Peer(rank, name, "host") for rank, name in enumerate(names)]


def said(monkeypatch: pytest.MonkeyPatch, old: Sequence[Peer], new: Sequence[Peer]) -> list[str]:
    told: list[str] = []
    monkeypatch.setattr(launcher_news, "tell_once", lambda log, text, **_: told.append(text))
    tell_new_ranks("digits", 3, old, new, "rank")
    return told


def test_ranks_that_have_changed_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said(monkeypatch, peers(*"abcd"), peers(*"acd")) == [
        "generation 3: rank 2 is now rank 1, rank 3 is now rank 2"
    ]


def test_of_many_changed_ranks_some_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = said(monkeypatch, peers(*"abcdefgh"), peers(*"bcdefgh"))
    assert text.endswith("rank 4 is now rank 3 (and 3 more)")


def test_nothing_is_said_if_members_keep_their_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said(monkeypatch, peers(*"abc"), peers(*"ab")) == []
    assert said(monkeypatch, peers(*"ab"), peers(*"abx")) == [], "a newcomer had no rank"
    assert said(monkeypatch, [], peers(*"ab")) == []
