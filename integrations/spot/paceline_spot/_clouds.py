"""Asks a cloud's metadata service whether this machine will be taken away, as `paceline run --notice` does.

Sources: AWS "Spot Instance interruption notices" and IMDSv2; Google Cloud "Handle preemption" and "maintenance-event";
Azure "Scheduled Events for Linux VMs".
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

_TIMEOUT_S = 2.0
"""Seconds for one answer: the service is on the machine's own host."""

_MOST_BYTES = 1 << 16

_AWS_TOKEN = "X-aws-ec2-metadata-token"  # noqa: S105  # the name of a header

_AWS_TOKEN_S = 21_600
"""Seconds for which a token of IMDSv2 is good, the most that AWS gives; another one is fetched on 401."""


def aws_notice(body: str, machine: str = "") -> str:
    """Returns why the machine will be taken, by the answer of spot/instance-action; empty if it will not."""
    found = _object(body)
    action = found.get("action")
    if action not in ("terminate", "stop", "hibernate"):
        raise ValueError(f"it has no action: {body[:100]!r}")
    return f"AWS will {action} this spot instance at {found.get('time')}"


def gcp_notice(body: str, machine: str = "") -> str:
    """Returns why the machine will be taken, by the answer of instance/preempted or instance/maintenance-event."""
    return {
        "TRUE": "Google Cloud preempts this machine",
        "TERMINATE_ON_HOST_MAINTENANCE": "Google Cloud will stop this machine for maintenance of its host",
    }.get(body.strip(), "")


def azure_notice(body: str, machine: str) -> str:
    """Returns why the machine will be taken, by the answer of scheduledevents; empty if it will not.

    The answer lists events of all machines of a scale set.
    """
    events = _object(body).get("Events")
    if not isinstance(events, list):
        raise ValueError(f"it has no Events: {body[:100]!r}")
    for event in events:
        if (
            isinstance(event, dict)
            and event.get("EventType") == "Preempt"
            and machine in (event.get("Resources") or ())
        ):
            return f"Azure will take this spot machine at {event.get('NotBefore') or 'any moment'}"
    return ""


def _object(body: str) -> dict[str, object]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"it is no JSON object: {body[:100]!r}")
    return found


@dataclass(frozen=True, slots=True)
class Provider:
    """How one cloud tells a machine that it will be taken.

    Attributes:
        paths: what to ask, each in turn; 404 means that there is no notice.
        notice: why the machine will be taken, by an answer and the machine's name; empty if it will not.
        leave_s: seconds that workers have after the notice: the cloud's, less what the question and the end take.
        headers: sent with each question.
        token_path: a PUT there gives the token that questions must show; empty if they need none.
        name_path: what gives the machine's name; empty if nobody needs it.
        base: the service's address, which is the same on all machines.
    """

    paths: tuple[str, ...]
    notice: Callable[[str, str], str]
    leave_s: float
    headers: Mapping[str, str] = field(default_factory=dict)
    token_path: str = ""
    name_path: str = ""
    base: str = "http://169.254.169.254"


AWS = Provider(
    ("/latest/meta-data/spot/instance-action",),
    aws_notice,
    leave_s=100.0,
    token_path="/latest/api/token",  # noqa: S106  # a path
)
GCP = Provider(
    ("/computeMetadata/v1/instance/preempted", "/computeMetadata/v1/instance/maintenance-event"),
    gcp_notice,
    leave_s=25.0,
    headers={"Metadata-Flavor": "Google"},
)
AZURE = Provider(
    ("/metadata/scheduledevents?api-version=2020-07-01",),
    azure_notice,
    leave_s=25.0,
    headers={"Metadata": "true"},
    name_path="/metadata/instance/compute/name?api-version=2021-02-01&format=text",
)


class Metadata:
    """The metadata service of this machine, which is asked whether the machine will be taken away."""

    def __init__(self, provider: Provider, base: str | None = None) -> None:
        self._provider = provider
        self._base = (base or provider.base).rstrip("/")
        self._headers = dict(provider.headers)
        self._machine = ""
        # No proxy: the address means this machine's own host, and another machine's notice would be worse than none.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def ask(self) -> str:
        """Asks once; returns why the machine will be taken, else an empty string; ValueError for no usable answer."""
        try:
            return self._ask()
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise ValueError(f"the metadata service at {self._base} gives no usable answer ({error})") from error

    def _ask(self) -> str:
        provider = self._provider
        if provider.token_path and _AWS_TOKEN not in self._headers:
            ttl = {f"{_AWS_TOKEN}-ttl-seconds": str(_AWS_TOKEN_S)}
            self._headers[_AWS_TOKEN] = self._request(provider.token_path, ttl, "PUT").strip()
        if provider.name_path and not self._machine:
            self._machine = self._request(provider.name_path, self._headers).strip()
        for path in provider.paths:
            try:
                body = self._request(path, self._headers)
            except urllib.error.HTTPError as error:
                if error.code == http.HTTPStatus.NOT_FOUND:
                    continue
                self._headers.pop(_AWS_TOKEN, None)  # it may have expired; the next question fetches another
                raise
            if why := provider.notice(body, self._machine):
                return why
        return ""

    def _request(self, path: str, headers: Mapping[str, str], method: str = "GET") -> str:
        request = urllib.request.Request(self._base + path, headers=dict(headers), method=method)  # noqa: S310
        try:
            with self._opener.open(request, timeout=_TIMEOUT_S) as answer:
                body: bytes = answer.read(_MOST_BYTES)
                return body.decode()
        except urllib.error.HTTPError as error:
            error.close()
            raise
