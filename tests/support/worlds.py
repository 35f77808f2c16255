"""The groups of one generation in one process, over each kind of link: what every link must do alike is tested on all.

with world_over("grpc", 3) as groups: ...

assert run_over("grpc", 3, lambda group: int(group.all_reduce(np.int64(1)))) == [3] * 3
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

import pytest

from paceline._collectives.choose import choose as choose_by_rules
from paceline._collectives.choose import only
from paceline._collectives.exchange import PATIENCE
from paceline._collectives.schedules import SCHEDULES
from paceline._group import Group
from paceline._links.faulty import FaultyMesh, Tamper
from paceline.config import Config
from paceline.errors import PacelineError
from paceline.testing import local_groups, run_groups
from support.grpc_pair import grpc_world
from support.parts import be_patient

__all__ = [
    "EACH_LINK",
    "LINKS",
    "SOON",
    "errors_over",
    "local_world",
    "member_groups",
    "run_over",
    "scheduled",
    "world_over",
]

T = TypeVar("T")

SOON = Config(failure_timeout=0.6)
"""Timeouts for tests in which something fails."""


@contextmanager
def local_world(world: int, config: Config = SOON) -> Iterator[list[Group]]:
    """Groups over local links, by rank; closed at the end."""
    with _closed(local_groups(world, config)) as groups:
        yield groups


@contextmanager
def member_groups(kind: str, world: int, config: Config = SOON) -> Iterator[list[Group]]:
    """Groups over links between members, by rank; closed at the end.

    There is no coordinator, and so no verdict: a failure is what each rank saw itself, or was told along the links.
    """
    with grpc_world(world, kind=kind) as made, _closed([Group(mesh, config) for mesh in made.meshes]) as groups:
        yield groups


LINKS: Mapping[str, Callable[[int, Config], AbstractContextManager[list[Group]]]] = {
    "local": local_world,
    **{kind: partial(member_groups, kind) for kind in ("shm", "tcp", "grpc")},
}
"""Kind of link to what makes a world of it."""

_LATER = {"grpc": [pytest.mark.slow], "tcp": [pytest.mark.exhaustive]}

EACH_LINK = [pytest.param(kind, marks=_LATER.get(kind, [])) for kind in LINKS]
"""For tests over every kind; over gRPC among the slow ones, over TCP among the exhaustive, for both are sockets."""


@contextmanager
def world_over(
    link: str,
    world: int,
    *,
    config: Config = SOON,
    choose: Callable[..., Any] = choose_by_rules,
    tamper: Mapping[int, Tamper] | None = None,
) -> Iterator[list[Group]]:
    """Groups over one kind of link.

    Args:
        link: a key of `LINKS`.
        world: number of ranks.
        config: timeouts.
        choose: picks schedules.
        tamper: what befalls the frames of some ranks, by rank.
    """
    with LINKS[link](world, config) as groups:
        for group in groups:
            group._core.choose = choose
            if tamper is not None and group.rank in tamper:
                group._core.move(FaultyMesh(group._core.mesh, tamper[group.rank]))
        yield groups


def run_over(
    link: str,
    world: int,
    fn: Callable[[Group], T],
    *,
    config: Config = SOON,
    choose: Callable[..., Any] = choose_by_rules,
    timeout: float = 30.0,
) -> list[T]:
    """Runs `fn(group)` on every rank, each in a thread of its own (`run_groups`), over one kind of link."""
    with world_over(link, world, config=config, choose=choose) as groups:
        return run_groups(groups, fn, timeout=timeout)


def errors_over(
    link: str, world: int, fn: Callable[[Group], object], *, patience_s: float = PATIENCE, timeout: float = 30.0
) -> list[PacelineError | None]:
    """What each rank raises, None for one that does not; each looks around when it has waited for `patience_s`."""

    def rank(group: Group) -> PacelineError | None:
        be_patient(group, patience_s)
        try:
            fn(group)
        except PacelineError as error:
            return error
        return None

    return run_over(link, world, rank, timeout=timeout)


def scheduled(collective: str) -> dict[str, Callable[..., Any]]:
    """For each schedule of a collective what makes a group take it."""
    return {name: partial(choose_by_rules, rules=only(collective, name)) for name in SCHEDULES[collective]}


@contextmanager
def _closed(groups: list[Group]) -> Iterator[list[Group]]:
    """Closes them at the end, if they are not closed yet; a member waits for no other that is gone."""
    with ExitStack() as stack:
        for group in groups:
            stack.callback(group.close, 0.2)
        yield groups
