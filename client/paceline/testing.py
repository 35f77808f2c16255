"""Helpers for tests of distributed code: ranks as threads, and the conformance checks of links and engines.

    def rank(group):
        return group.all_reduce(np.full(3, group.rank)).tolist()

    assert run_ranks(4, rank) == [[6, 6, 6]] * 4

This module is public API, and as stable as the rest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import TypeVar

from paceline._base.embedded import coordinator
from paceline._group import Group
from paceline._links.base import Purpose
from paceline._links.conformance import LinkPair, check_link
from paceline._links.faulty import FaultyMesh, Tamper
from paceline._links.local import LocalMesh, local_meshes, next_meshes
from paceline.config import Config
from paceline.engines._engine_check import check_engine
from paceline.errors import PacelineError

__all__ = [
    "LinkPair",
    "check_engine",
    "check_link",
    "coordinator",
    "local_groups",
    "local_link_pair",
    "next_generation",
    "run_groups",
    "run_ranks",
]

_T = TypeVar("_T")


def local_groups(world: int, config: Config | None = None) -> list[Group]:
    """Returns the groups of a generation whose ranks are all in this process, by rank. The caller closes each group.

    Args:
        world: number of ranks, at least 1.
        config: settings such as timeouts; the defaults if None.

    Raises:
        InvalidWorldSize: `world` is below 1.
    """
    config = config or Config()
    return [Group(mesh, config) for mesh in local_meshes(world)]


def next_generation(groups: Sequence[Group], tamper: Mapping[int, Tamper] | None = None) -> None:
    """Moves the groups of `local_groups` to the next generation, over the same links; lasting subgroups move too.

    Frames of the last generation that have not arrived are dropped. Call this while no collective is running.

    Args:
        groups: all groups of the generation.
        tamper: for each rank, a function that changes or loses its frames from now on (`paceline._links.faulty`).
    """
    meshes = []
    for group in groups:
        mesh = group._core.mesh.inner if isinstance(group._core.mesh, FaultyMesh) else group._core.mesh
        assert isinstance(mesh, LocalMesh), "next_generation is for groups of this process"
        meshes.append(mesh)
    for group, mesh in zip(groups, next_meshes(meshes), strict=True):
        act = (tamper or {}).get(mesh.rank)
        group._core.move(mesh if act is None else FaultyMesh(mesh, act))


@contextmanager
def local_link_pair() -> Iterator[LinkPair]:
    """Yields the two ends of a local link, for `check_link`."""
    a, b = local_meshes(2)
    link = a.link(1, Purpose.COLLECTIVE)
    yield LinkPair(link, b.link(0, Purpose.COLLECTIVE), a.fault, b.fault, link.cut)


def run_ranks(
    world: int, fn: Callable[[Group], _T], *, config: Config | None = None, timeout: float = 60.0
) -> list[_T]:
    """Runs `fn(group)` on every rank, each in a thread of its own.

    Args:
        world: number of ranks, at least 1.
        fn: called with the rank's group.
        config: settings such as timeouts; the defaults if None.
        timeout: seconds for all ranks together.

    Returns:
        The results by rank.

    Raises:
        Exception: the first error that a rank raised, with a note that names the rank; an error of `fn` itself comes
            before the PacelineErrors that it causes on other ranks.
        TimeoutError: some ranks did not finish in time; the text names them.
    """
    return run_groups(local_groups(world, config), fn, timeout=timeout)


def run_groups(groups: list[Group], fn: Callable[[Group], _T], *, timeout: float = 60.0) -> list[_T]:
    """Runs `fn` as `run_ranks` does, but on groups that exist already, and closes them."""
    results: dict[int, _T] = {}
    failures: list[tuple[int, BaseException]] = []

    def run(group: Group) -> None:
        try:
            results[group.rank] = fn(group)
        except BaseException as error:  # noqa: BLE001  raised below
            failures.append((group.rank, error))
        finally:
            group.close()

    threads = [threading.Thread(target=run, args=(group,), name=f"rank-{group.rank}", daemon=True) for group in groups]
    deadline = monotonic() + timeout
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - monotonic()))
    late = [thread.name for thread in threads if thread.is_alive()]
    causes = list(failures)  # excludes the errors that closing causes in late ranks
    for group in groups if late else []:
        group.close(0.0)  # ends the waits of late ranks
    for thread in threads:
        thread.join(1.0)
    if causes:
        # A rank's own error makes the others raise a PacelineError, perhaps sooner. The rank's own error is raised.
        rank, first = min(causes, key=lambda failure: isinstance(failure[1], PacelineError))
        first.add_note(f"raised by rank {rank}")
        raise first
    if late:
        raise TimeoutError(f"not done after {timeout} s: {', '.join(late)}")
    return [results[group.rank] for group in groups]
