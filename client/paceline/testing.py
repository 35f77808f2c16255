"""Ranks as threads of one process, and the conformance check of links: what tests of distributed code need.

    def rank(group):
        return group.all_reduce(np.full(3, group.rank)).tolist()

    assert run_ranks(4, rank) == [[6, 6, 6]] * 4

Everything here is public, and kept as stable as the rest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import TypeVar

from paceline.config import Config
from paceline.embedded import coordinator
from paceline.errors import PacelineError
from paceline.group import Group
from paceline.links.base import Purpose
from paceline.links.conformance import LinkPair, check_link
from paceline.links.faulty import FaultyMesh, Tamper
from paceline.links.local import LocalMesh, local_meshes, next_meshes

__all__ = [
    "LinkPair",
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
    """The groups of a generation whose ranks are in this process, by rank. Each should be closed.

    Args:
        world: number of ranks, at least 1.
        config: timeouts; the defaults if None.

    Raises:
        InvalidWorldSize: `world` is below 1.
    """
    config = config or Config()
    return [Group(mesh, config) for mesh in local_meshes(world)]


def next_generation(groups: Sequence[Group], tamper: Mapping[int, Tamper] | None = None) -> None:
    """Has the groups of `local_groups` go on in the next generation, over the same links; lasting parts follow.

    What was on its way in the generation before is dropped. To be called when no collective is under way.

    Args:
        groups: all of them.
        tamper: what befalls the frames of some ranks from now on (`paceline.links.faulty`), by rank.
    """
    meshes = []
    for group in groups:
        mesh = group.mesh.inner if isinstance(group.mesh, FaultyMesh) else group.mesh
        assert isinstance(mesh, LocalMesh), "next_generation is for groups of this process"
        meshes.append(mesh)
    for group, mesh in zip(groups, next_meshes(meshes), strict=True):
        act = (tamper or {}).get(mesh.rank)
        group.move(mesh if act is None else FaultyMesh(mesh, act))


@contextmanager
def local_link_pair() -> Iterator[LinkPair]:
    """The two ends of a local link, for `check_link`."""
    a, b = local_meshes(2)
    link = a.link(1, Purpose.COLLECTIVE)
    yield LinkPair(link, b.link(0, Purpose.COLLECTIVE), a.fault, b.fault, link.cut)


def run_ranks(
    world: int, fn: Callable[[Group], _T], *, config: Config | None = None, timeout: float = 60.0
) -> list[_T]:
    """Runs `fn(group)` on every rank, each in a thread of its own.

    Args:
        world: number of ranks, at least 1.
        fn: what each rank does.
        config: timeouts; the defaults if None.
        timeout: seconds for all of it.

    Returns:
        The results by rank.

    Raises:
        Exception: the first error that a rank raised, with a note that names the rank; a rank's own before the others'
            news of it.
        TimeoutError: some ranks were not done in time; the text names them.
    """
    return run_groups(local_groups(world, config), fn, timeout=timeout)


def run_groups(groups: list[Group], fn: Callable[[Group], _T], *, timeout: float = 60.0) -> list[_T]:
    """`run_ranks` for groups that exist already; closes them."""
    results: dict[int, _T] = {}
    failures: list[tuple[int, BaseException]] = []

    def run(group: Group) -> None:
        try:
            results[group.rank] = fn(group)
        except BaseException as error:  # noqa: BLE001  it is raised below
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
    causes = list(failures)  # what closing makes the late ones raise is not among them
    for group in groups if late else []:
        group.close(0.0)  # ends what they wait for
    for thread in threads:
        thread.join(1.0)
    if causes:
        # The cause before its news: a rank's own error reaches the others as one of ours, perhaps sooner.
        rank, first = min(causes, key=lambda failure: isinstance(failure[1], PacelineError))
        first.add_note(f"raised by rank {rank}")
        raise first
    if late:
        raise TimeoutError(f"not done after {timeout} s: {', '.join(late)}")
    return [results[group.rank] for group in groups]
