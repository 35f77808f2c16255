"""Checks that what a storage has read makes sense as a job. Pure.

A damaged or hostile record would otherwise fail only later, in the middle of an answer about all jobs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from paceline_protocol import Tag
from paceline_server.storage.base import StoredJob
from pacelinepb import RELEASE

_MOST = (1 << 63) - 1
"""The greatest number that a message carries in all fields."""

MOST_SILENCE_S = 86_400.0
"""The longest `failure_timeout` that a coordinator ever accepts, whatever its `max_silence`."""

MOST_VERSION = 1 << 16
"""The greatest version of the protocol that is believed, or of the format of a state."""

_LONGEST_RELEASE = 64


def check_writer(number: object, writer: object, newest: int) -> None:
    """Checks that a state can be read, before anything else of it is; `writer` is the release that wrote it, or empty.

    Raises ValueError if this release does not read it: the text says which format it has, and what to do.
    """
    if not isinstance(number, int) or isinstance(number, bool) or not 0 < number <= MOST_VERSION:
        raise ValueError("its format is no number of ours")
    if not isinstance(writer, str) or len(writer) > _LONGEST_RELEASE or not writer.isprintable():
        raise ValueError("the release that wrote it is none of ours")
    if number > newest:
        by = f", written by {writer}" if writer else ""
        raise ValueError(
            f"it is of format {number}{by}, and this release ({RELEASE}) reads formats up to {newest}: start the "
            "release that wrote it, or a later one"
        )


def check_job(job: StoredJob) -> None:
    """Checks the types of all that a job consists of, its numbers, and that its ranks are in its view."""
    try:
        _check(job, StoredJob, "record")
        _check_relations(job)
    except ValueError as error:
        raise ValueError(f"job {job.name!r} is damaged: {error}") from None


def _check_relations(job: StoredJob) -> None:
    view, verdict = job.view, job.verdict
    size = 0
    if view is not None:
        size = len(view.seats)
        if view.generation > job.generation:
            raise ValueError(f"its view {view.generation} is above its highest number, {job.generation}")
        if not 0 < view.settings.failure_timeout <= MOST_SILENCE_S:
            raise ValueError(f"its failure_timeout is {view.settings.failure_timeout}")
        if [seat.rank for seat in view.seats] != list(range(size)):
            raise ValueError("the seats of its view are not in rank order")
        ranks = view.settings.replica_size
        if ranks < 1 or size % ranks or any(seat.replica_size != ranks for seat in view.seats):
            raise ValueError(f"its view of {size} has replicas of {ranks}")
        _check_ranks(view.newcomers, size, "newcomers")
        if not 0 < view.versions.oldest <= view.versions.newest <= MOST_VERSION:
            raise ValueError(f"its view speaks {view.versions}")
    _check_ranks(job.endings, size, "endings")
    if verdict is not None:
        _check_ranks(verdict.culprits, size, "verdict")


def _check_ranks(ranks: Iterable[int], size: int, name: str) -> None:
    if (most := max(ranks, default=-1)) >= size:
        raise ValueError(f"its {name} name rank {most} in a view of {size} members")


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _check(value: object, expected: Any, name: str) -> None:
    """Checks that a value has the type of its field, down to what it consists of."""
    origin = get_origin(expected)
    if origin is UnionType:  # the other one is None
        if value is not None:
            (kind,) = (each for each in get_args(expected) if each is not NoneType)
            _check(value, kind, name)
        return
    if expected is float and type(value) is int:
        return
    if type(value) is not (origin or expected):
        raise ValueError(f"its {name} is a {type(value).__name__}, not a {getattr(expected, '__name__', expected)}")
    if expected is int:
        least = -_MOST - 1 if name == "record.answers" else 0  # a sum may be below 0
        if not least <= value <= _MOST:  # type: ignore[operator]  # it is an int
            raise ValueError(f"its {name} is {str(value)[:40]}")
    elif isinstance(value, Tag):
        for number in value:
            _check(number, int, name)
    elif isinstance(value, tuple):
        for each in value:
            _check(each, get_args(expected)[0], name)
    elif isinstance(value, dict):
        for key, each in value.items():
            _check(key, get_args(expected)[0], name)
            _check(each, get_args(expected)[1], name)
    elif is_dataclass(value):
        for part, hint in _hints(expected).items():
            _check(getattr(value, part), hint, f"{name}.{part}")
