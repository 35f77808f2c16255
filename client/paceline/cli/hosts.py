"""Asks plug-ins about the scheduler that has started `paceline run`, and about notices of clouds (decision 22).

Reasons to leave become sources (`DrainSource`): the end of the scheduler's time, and each notice.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points

from paceline._base.terminal import UsageError, printable
from paceline.cli.plug_ins import errors_of
from paceline.launch import Host, Notice

_RESERVE_S = 10.0
"""Seconds before the end of the time in which launchers end and the batch script requeues itself, after the workers."""

_ASK_S = 1.0
"""Seconds between two questions. Google and Azure give 30 s of notice, AWS 2 minutes."""

DrainSource = Callable[[Callable[[str, float], None], threading.Event], None]
"""Watches for a reason to leave in a thread of its own, until the event is set. It calls its first argument with the
reason, and with the seconds that workers have."""


def find_host(points: Iterable[EntryPoint] | None = None) -> Host | None:
    """Returns the host of the first plug-in, by name, that knows who has started this process; None if none does."""
    points = entry_points(group="paceline.hosts") if points is None else points
    for point in sorted(points, key=lambda each: each.name):
        with errors_of(point):
            ask = point.load()
            try:
                host: Host | None = ask()
            except ValueError as error:
                raise UsageError(str(error)) from None
        if host is not None:
            return host
    return None


def find_notices(text: str | None) -> dict[str, Notice]:
    """Returns the notices that --notice names, separated by commas."""
    points = {point.name: point for point in entry_points(group="paceline.notices")}
    names = [] if text is None else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in points:
            raise UsageError(f"there is no provider {name!r} (--notice): the providers are {', '.join(sorted(points))}")
    found: dict[str, Notice] = {}
    for name in names:
        with errors_of(points[name]):
            make = points[name].load()
            try:
                found[name] = make()
            except ValueError as error:
                raise UsageError(str(error)) from None
    return found


def reasons_to_leave(
    host: Host | None,
    drain_before: float,
    notices: Mapping[str, Notice],
    say: Callable[[str], None],
    *,
    ask_s: float = _ASK_S,
) -> Sequence[DrainSource]:
    """Returns what may tell the workers to leave.

    They leave `drain_before` seconds before the end of the host's time, at the latest; 0 for never. Notices are asked
    every `ask_s` seconds.
    """
    sources: list[DrainSource] = [functools.partial(_heed, name, each, say, ask_s) for name, each in notices.items()]
    if host is not None and (at := drain_at(time.time(), host.ends_at, drain_before)) is not None:
        sources.append(functools.partial(_leave_at, at, drain_before, host.title))
    return sources


def drain_at(now: float, ends_at: float | None, before: float) -> float | None:
    """Returns when workers leave because the job's time ends; None for never.

    A job that has less than `before` left when it begins trains until the scheduler's SIGTERM: draining it at once
    would make it useless.
    """
    if ends_at is None or before <= 0 or ends_at - before <= now:
        return None
    return ends_at - before


def drain_seconds(before: float) -> float:
    """Returns how many seconds workers have if they are told to leave `before` seconds before the job's time ends."""
    return before - min(_RESERVE_S, before / 2)


def _leave_at(
    at: float, before: float, title: str, drain: Callable[[str, float], None], ended: threading.Event
) -> None:
    """Drains the workers at a time of the clock, unless they end before (`DrainSource`)."""
    if not ended.wait(max(0.0, at - time.time())):
        drain(f"the time of the {title} ends in {before:g} s", drain_seconds(before))


def _heed(
    name: str,
    notice: Notice,
    say: Callable[[str], None],
    ask_s: float,
    drain: Callable[[str, float], None],
    ended: threading.Event,
) -> None:
    """Asks every `ask_s` seconds, until the machine will be taken or the workers have ended (`DrainSource`)."""
    has_said = False
    while not ended.is_set():
        try:
            if why := notice.ask():
                drain(printable(why), notice.leave_s)
                return
        except Exception as error:  # noqa: BLE001  a plug-in may raise anything; a machine that nobody watches is worse
            if not has_said:
                has_said = True
                words = str(error) if isinstance(error, OSError | ValueError) else repr(error)
                say(f"--notice {name}: {printable(words)}; this launcher keeps asking")
        ended.wait(ask_s)
