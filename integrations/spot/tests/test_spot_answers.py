"""Which answers of the clouds mean that the machine will be taken."""

from __future__ import annotations

import json

import pytest

import paceline_spot
from paceline_spot._clouds import aws_notice, azure_notice, gcp_notice


def test_an_aws_notice_names_the_action_and_the_time() -> None:
    body = json.dumps({"action": "terminate", "time": "2026-11-25T08:22:00Z"})
    assert aws_notice(body) == "AWS will terminate this spot instance at 2026-11-25T08:22:00Z"


@pytest.mark.parametrize("body", ["", "[]", "{}", '{"action": "dance"}', "<html>", "[" * 5000])
def test_invalid_aws_answers_raise_value_error(body: str) -> None:
    with pytest.raises(ValueError, match="it "):
        aws_notice(body)


@pytest.mark.parametrize(
    ("body", "taken"),
    [("TRUE\n", True), ("FALSE", False), ("NONE", False), ("TERMINATE_ON_HOST_MAINTENANCE", True),
     ("MIGRATE_ON_HOST_MAINTENANCE", False), ("", False)],
)  # fmt: skip
def test_gcp_notice_recognizes_preemption_and_termination(body: str, taken: bool) -> None:
    assert bool(gcp_notice(body)) is taken


def event(kind: str, *machines: str) -> str:
    events = [{"EventType": kind, "Resources": list(machines), "NotBefore": "Wed, 25 Nov 2026 08:22:00 GMT"}]
    return json.dumps({"DocumentIncarnation": 1, "Events": events})


def test_azure_notice_counts_only_preemption_of_this_machine() -> None:
    assert "08:22:00" in azure_notice(event("Preempt", "vmss_0", "vmss_1"), "vmss_1")
    assert azure_notice(event("Preempt", "vmss_0"), "vmss_1") == ""
    assert azure_notice(event("Reboot", "vmss_1"), "vmss_1") == ""
    assert azure_notice('{"Events": []}', "vmss_1") == ""
    with pytest.raises(ValueError, match="Events"):
        azure_notice("{}", "vmss_1")


@pytest.mark.parametrize(("cloud", "seconds"), [("aws", 100.0), ("gcp", 25.0), ("azure", 25.0)])
def test_each_cloud_sets_the_time_that_workers_have_to_leave(
    monkeypatch: pytest.MonkeyPatch, cloud: str, seconds: float
) -> None:
    monkeypatch.setenv("PACELINE_NOTICE_URL", "http://127.0.0.1:1")
    notice = getattr(paceline_spot, cloud)()
    assert notice.leave_s == seconds
    with pytest.raises(ValueError, match=r"the metadata service at http://127\.0\.0\.1:1 gives no usable answer"):
        notice.ask()
