"""Timeouts and limits, and the table of PACELINE_* environment variables.

An argument beats the environment, the environment beats the default.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

__all__ = ["ENVIRONMENT", "LINKS", "MAX_STREAMS", "Config", "checked_timeout", "know_link"]

LINKS = ("shm", "tcp", "grpc")
"""Kinds of links between processes that members use by default, the best first: shared memory on one host, raw TCP, and
what goes wherever gRPC goes."""

_known_links = list(LINKS)

MAX_STREAMS = 16
"""TCP connections of one link, for each direction."""

ENVIRONMENT: Mapping[str, str] = {
    "PACELINE_COORDINATOR": "address of the coordinator, host:port; without it the world is torchrun's or this process "
    "alone",
    "PACELINE_JOB": "name of the job (default: 'default')",
    "PACELINE_MIN_WORKERS": "the first view forms with at least this many workers",
    "PACELINE_MAX_WORKERS": "no view has more workers than this",
    "PACELINE_RANK": "explicit rank; PACELINE_WORLD_SIZE must be set too",
    "PACELINE_WORLD_SIZE": "explicit number of workers",
    "PACELINE_ADVERTISE": "host or host:port at which peers reach this worker",
    "PACELINE_TLS_CA": "file with the certificate of the authority that coordinator and members are checked by; with "
    "it everything goes over TLS",
    "PACELINE_TLS_CERT": "file with this worker's certificate, for the name member.paceline",
    "PACELINE_TLS_KEY": "file with the key of that certificate",
    "PACELINE_TOKEN": "token that the coordinator is shown with every call",
    "PACELINE_TOKEN_FILE": "file with the token, looked at again once a second at most; the first one in it counts",
    "PACELINE_LAUNCHER_FD": "set by `paceline run`: a pipe on which workers tell it of their views",
    "PACELINE_FLIGHT_DIR": "where the last operations are written on SIGUSR2 and when a generation fails (default: "
    "paceline-UID/flight in the temporary directory); 'off' for nowhere",
    "PACELINE_TRACEBACK": "1: the stack of a PacelineError under `paceline run`, and of Ctrl-C, is shown too",
    "PACELINE_JOIN_TIMEOUT": "seconds to wait for the first view",
    "PACELINE_FAILURE_TIMEOUT": "seconds of silence after which a member counts as lost",
    "PACELINE_STEP_TIMEOUT": "seconds to wait for a member that has not entered a collective",
    "PACELINE_CALL_TIMEOUT": "seconds for a call to the coordinator: store, barrier",
    "PACELINE_REJOIN_TIMEOUT": "seconds to try to come back to a coordinator that is away",
    "PACELINE_LINKS": "kinds of links that may be used, with commas (default: 'shm,tcp,grpc'); grpc always may",
    "PACELINE_TCP_STREAMS": "TCP connections of one link in each direction, 1 to 16 (default: 1): several carry more "
    "where the delay is long",
    "PACELINE_TUNING": "file with a table of schedules, from `paceline bench --tune`; all members need the same",
}
"""Every variable that Paceline reads, with what it means."""


@dataclass(frozen=True, slots=True)
class Config:
    """Timeouts in seconds, all above 0; and how members talk to each other.

    `failure_timeout` is the one knob for silence. Heartbeats go out six times as often; a failure waits a sixth of it,
    half a second at most, for the coordinator's verdict. It must exceed the longest time for which the process can hold
    the GIL in one call.
    """

    failure_timeout: float = 3.0
    """Silence after which a member counts as lost. All members of a job must agree on it."""

    step_timeout: float = 600.0
    """Default timeout of a collective: how long to wait for a member that computes and has not entered it."""

    call_timeout: float = 30.0
    """Default timeout of a call to the coordinator: barriers by name and the store."""

    join_timeout: float = 60.0
    """Default time to wait for the first view."""

    rejoin_timeout: float = 600.0
    """How long a member that is cut off from the coordinator tries to come back."""

    links: tuple[str, ...] = LINKS
    """Kinds of links that this member may use, where its peers may too. gRPC is always among them."""

    tcp_streams: int = 1
    """TCP connections of one link in each direction, 1 to 16."""

    tuning: str = ""
    """File with a table of schedules (`paceline.collectives.tuning`); all members of a job must have the same.

    Empty for the one that Paceline comes with.
    """

    def __post_init__(self) -> None:
        for name in _SECONDS:
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(f"{name} must be above 0 s, not {value!r}")
        for kind in self.links:
            if kind not in _known_links:
                raise ValueError(f"links are of the kinds {', '.join(_known_links)}; there is no {kind!r}")
        if not 1 <= self.tcp_streams <= MAX_STREAMS:
            raise ValueError(f"tcp_streams must be 1 to {MAX_STREAMS}, not {self.tcp_streams!r}")

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Config:
        """The defaults, overridden by PACELINE_<FIELD> where set.

        Raises:
            ValueError: a variable does not hold what it should; the text names it.
        """
        found: dict[str, Any] = {}
        for name in _SECONDS:
            variable = f"PACELINE_{name.upper()}"
            if text := environ.get(variable):
                try:
                    found[name] = float(text)
                except ValueError:
                    found[name] = 0.0
                if not found[name] > 0:
                    raise ValueError(f"{variable} must be a number of seconds above 0, not {text!r}")
        if text := environ.get("PACELINE_LINKS"):
            found["links"] = tuple(kind.strip() for kind in text.split(","))
        if text := environ.get("PACELINE_TCP_STREAMS"):
            if not text.isdecimal():
                raise ValueError(f"PACELINE_TCP_STREAMS must be a number from 1 to {MAX_STREAMS}, not {text!r}")
            found["tcp_streams"] = int(text)
        if text := environ.get("PACELINE_TUNING"):
            found["tuning"] = text
        return replace(cls(), **found)

    @property
    def heartbeat_interval(self) -> float:
        """Seconds between heartbeats."""
        return self.failure_timeout / 6

    @property
    def verdict_timeout(self) -> float:
        """Seconds to wait for the coordinator's verdict before a failure is raised as this member sees it."""
        return min(0.5, self.failure_timeout / 6)


def know_link(name: str, *, known: bool = True) -> None:
    """Makes a name valid, or invalid, in `Config.links`; `paceline.links.registry` calls this."""
    if known and name not in _known_links:
        _known_links.append(name)
    elif not known:
        _known_links.remove(name)


_SECONDS = tuple(field.name for field in fields(Config) if isinstance(field.default, float))

_LONGEST = 1e8  # three years; a lock waits for no infinity


def checked_timeout(seconds: float) -> float:
    """A timeout that every wait can take: infinity becomes some years.

    Raises:
        ValueError: it is negative or no number.
    """
    if not seconds >= 0:
        raise ValueError(f"a timeout is a number of seconds from 0, not {seconds!r}")
    return min(seconds, _LONGEST)
