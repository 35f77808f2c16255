"""The limits of the HTTP server that its parts take as an argument."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WebLimits:
    """Limits of the HTTP server for its callers, and of its streams."""

    most_connections: int = 256
    """The most connections at one time, besides streams."""

    handshake_s: float = 5.0
    """Seconds for a TLS handshake."""

    idle_s: float = 15.0
    """Seconds for which a connection may stay open between two requests."""

    remark_s: float = 60.0
    """Seconds between two lines of log about one kind of request that cannot be read."""

    request_rate: float = 200
    """Requests a second that are served to one payer, after `request_burst` at once: they take some 5 % of a core."""

    request_burst: int = 1_000
    """Requests of one payer that may come at once: a page begins with 20."""

    patience_s: float = 0.4
    """The most seconds for which a request waits for its turn: less than a stopping coordinator waits for answers."""

    ready_s: float = 1.0
    """Seconds for the storage to answer."""

    ready_for_s: float = 0.5
    """Seconds for which the storage's answer holds: half the shortest period of a probe in Kubernetes."""

    interval_s: float = 0.5
    """Seconds between two messages of a stream, if they take little to build."""

    longest_s: float = 10.0
    """The most seconds between two messages of a stream."""

    share: float = 0.01
    """The most of a core that building messages takes, all streams together, as long as `longest_s` allows."""

    most_viewers: int = 100
    """The most streams. One payer has as many as it leaves free at most: one alone half of them."""

    most_traced: int = 32
    """The most members of one trace: each answer has 1 MiB at most."""

    most_stacks: int = 1_000
    """The most members whose stacks are asked for at a time; they share `stacks_bytes`."""

    stacks_bytes: int = 32 << 20
    """Bytes of all stacks of one question."""

    most_jobs_asked: int = 4
    """Jobs of which all members are asked at one time: the answers of each are in memory together."""

    stacks_s: float = 13.0
    """Seconds for stacks and for output: less than the page waits (`ASK_S` in dialogs.js)."""

    trace_s: float = 50.0
    """Seconds for a trace: less than the page waits (`TRACE_S` in dialogs.js)."""

    read_s: float = 20.0
    """Seconds for the process that reads answers."""

    read_bytes: int = 64 << 20
    """The most bytes that it makes of them."""

    sending_bytes: int = 128 << 20
    """Bytes of stacks and traces that wait until they are sent. A payer alone may have half: the longest trace."""

    send_s: float = 60.0
    """Seconds to take such an answer: the longest needs some 1 MiB/s."""


USUAL = WebLimits()
