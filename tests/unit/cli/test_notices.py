"""Sentences that all workers say, shown once."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.cli.launcher.notices import Notices


def notice(text: str, key: str = "") -> dict[str, Any]:
    return {"kind": "notice", "text": text, "key": key}


def test_a_notice_of_all_workers_is_shown_once_per_occurrence() -> None:
    notices = Notices()
    assert [notices.read(pid, notice("lost")) for pid in (1, 2, 3)] == ["lost", None, None]
    assert [notices.read(pid, notice("lost")) for pid in (2, 1, 3)] == ["lost", None, None]


def test_notices_with_one_key_count_as_the_same_notice() -> None:
    notices = Notices()
    assert notices.read(1, notice("for 5 s now", "why")) == "for 5 s now"
    assert notices.read(2, notice("for 6 s now", "why")) is None
    assert notices.read(1, notice("for 15 s now", "why")) == "for 15 s now"


def test_only_the_latest_64_notices_are_remembered() -> None:
    notices = Notices()
    for number in range(1000):
        notices.read(1, notice(str(number)))
    assert len(notices._said) == 64
    assert notices.read(2, notice("999")) is None
    assert notices.read(2, notice("0")) == "0"


@pytest.mark.parametrize(
    "record",
    [{}, {"kind": "view", "text": "x"}, {"kind": "notice"}, {"kind": "notice", "text": 7}, notice("x", 7)],  # type: ignore[arg-type]
)
def test_malformed_records_do_not_raise(record: dict[str, Any]) -> None:
    assert Notices().read(1, record) in (None, "x")
