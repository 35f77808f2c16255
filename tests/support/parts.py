"""Worlds of local groups whose members act at the same time: for tests of parts of groups."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import monotonic
from typing import Any

import numpy as np

from paceline._group import Group
from paceline._links.base import Mesh
from paceline._links.local import LocalMesh, local_meshes
from paceline.config import Config

__all__ = ["SOON", "at_once", "be_patient", "cut_frames", "each", "local_mesh", "on_hosts", "total", "world_of"]

SOON = Config(failure_timeout=0.6)


def at_once(doings: Sequence[Callable[[], Any]], seconds: float = 15.0) -> list[Any]:
    """Does all of them at the same time; what each returns, or the error that it raises."""
    outcomes: list[Any] = [None] * len(doings)

    def run(i: int) -> None:
        try:
            outcomes[i] = doings[i]()
        except BaseException as error:  # noqa: BLE001  the test looks at it
            outcomes[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(doings))]
    deadline = monotonic() + seconds
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - monotonic()))
    assert not any(thread.is_alive() for thread in threads), "some hang"
    return outcomes


def each(groups: Sequence[Group], do: Callable[[Group], Any]) -> list[Any]:
    """What every rank does at the same time."""
    return at_once([lambda group=group: do(group) for group in groups])


def be_patient(group: Group, patience_s: float) -> None:
    """Sets how long the group's collectives wait before they look around, in this generation."""
    group._core.bound.engine._exchange.patience_s = patience_s


def cut_frames(group: Group, segment_bytes: int) -> None:
    """Sets the length of segments in this generation, so that small arrays are cut as large ones are."""
    group._core.bound.engine.segment_bytes = segment_bytes


def total(group: Group) -> Any:
    """The sum of the members' ranks in the view."""
    return group.all_reduce(np.array([group.global_rank(group.rank)])).tolist()


@contextmanager
def world_of(world: int, hosts: Sequence[str] | None = None) -> Iterator[list[Group]]:
    meshes = local_meshes(world)
    if hosts is not None:
        on_hosts(meshes, hosts)
    groups = [Group(mesh, SOON) for mesh in meshes]
    yield groups
    for group in groups:
        group.close(0.2)


def on_hosts(meshes: Sequence[LocalMesh], hosts: Sequence[str]) -> None:
    for mesh in meshes:
        mesh.peers = [replace(peer, host=host) for peer, host in zip(mesh.peers, hosts, strict=True)]


def local_mesh(mesh: Mesh) -> LocalMesh:
    assert isinstance(mesh, LocalMesh)
    return mesh
