"""Processes that hold a state of 1 GB between them.

Those of `line` take parts of it from each other as they are told; those of `job` train, as far as a coordinator knows.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from time import perf_counter
from typing import Any

import numpy as np

import paceline
from paceline._base.waits import loop_thread
from paceline._elastic.offer import OfferedState
from paceline._elastic.peer_calls import Holder, take_shards
from paceline._elastic.train_state import TrainState
from paceline._group import Group
from paceline._links.base import Peer
from paceline._links.grpc_door import Door
from paceline._links.nowhere import NoMesh
from paceline._parallel._parameter import Parameter
from paceline._session.identity import process_identity
from paceline.checkpoint import Tag
from paceline.config import Config
from paceline.credentials import IN_THE_CLEAR
from paceline_protocol import Share

__all__ = ["job", "line"]

TAG = Tag(1, 1)
UNITS = 8
STATE_BYTES = 1_000_000_000
ELEMENTS = STATE_BYTES // (12 * UNITS)
"""float32 parameters of a unit: each has two moments."""


class Layers:
    """Units of parameters, which nobody runs here."""

    def __init__(self, group: Group) -> None:
        self.inner: list[Any] = [paceline.FSDP(Layer(unit), group) for unit in range(UNITS)]

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        for n, layer in enumerate(self.inner):
            for path, parameter in layer.named_parameters():
                yield f"{n}.{path}", parameter


class Layer:
    def __init__(self, number: int) -> None:
        self.weight = Parameter(np.arange(ELEMENTS, dtype=np.float32) + number)

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        yield "weight", self.weight


def member(rank: int, world: int, pipe: Connection) -> None:
    """One process: it holds its share of `world`, gives, and takes other shares as it is told."""
    group = Group(NoMesh("a benchmark"), Config())
    model = paceline.FSDP(Layers(group), group)  # type: ignore[arg-type]
    optimizer = paceline.optim.Adam(model)
    state = TrainState(model=model, optimizer=optimizer)
    state._core.switch(state._core.resharding(Share(rank, world)))
    state._core.keep_updated_shares()
    fill(optimizer, Share(rank, world))
    offered, door = OfferedState(), Door("job", IN_THE_CLEAR)
    offered.offer(TAG, state._core.offered())
    port = loop_thread().run(door.start("127.0.0.1", 0))
    door.window.member_id, door.window.source = f"member-{rank}", offered
    here = process_identity()
    pipe.send((port, here.pid, here.start_ticks))
    while (order := pipe.recv()) is not None:
        share, own, ports = order
        holders = [
            Holder(Peer(r, f"member-{r}", "host", f"127.0.0.1:{port}", pid, "", ticks), [Share(r, world)])
            for r, (port, pid, ticks) in ports.items()
        ]
        start = perf_counter()
        plan = state._core.resharding(Share(*share), own=own)
        wanted = sum(plan.into(run).nbytes for run in plan.wanted)
        loop_thread().run(take_shards("job", TAG, holders, plan, 10.0, IN_THE_CLEAR))
        if own:
            state._core.switch(plan)
        seconds = perf_counter() - start
        if own:
            check(state, Share(*share))
            state._core.switch(state._core.resharding(Share(rank, world)))
            state._core.keep_updated_shares()
        pipe.send((seconds, wanted))
    loop_thread().run(door.close(0.0))


def fill(optimizer: Any, share: Share) -> None:
    """Gives the share that is held moments by which they are known."""
    for unit in range(UNITS):
        first = share.part * -(-ELEMENTS // share.parts)
        for name in ("mean", "square"):
            held = optimizer.live_arrays()[f"{unit}.weight/{name}"]
            held[:] = np.arange(first, first + held.size, dtype=np.float32) - unit


def check(state: TrainState, share: Share) -> None:
    size = -(-ELEMENTS // share.parts)
    first = share.part * size
    expected = np.arange(first, min(first + size, ELEMENTS), dtype=np.float32)
    for path, leaf in state._core.content()["parts"]["model"]["arrays"].items():
        np.testing.assert_array_equal(leaf.values, expected + int(path[0]))
    for path, leaf in state._core.content()["parts"]["optimizer"]["arrays"].items():
        np.testing.assert_array_equal(leaf.values, expected - int(path[0]))


@contextmanager
def line(world: int) -> Iterator[tuple[dict[int, Connection], dict[int, tuple[int, int, int]]]]:
    """Processes that hold a state between them; and port, pid and start time by which each is asked for it."""
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        pipes: dict[int, Connection] = {}
        for rank in range(world):
            pipes[rank], theirs = context.Pipe()
            process = context.Process(target=member, args=(rank, world, theirs))
            process.start()
            stack.callback(process.join, 20)
            stack.callback(pipes[rank].send, None)
        yield pipes, {rank: pipe.recv() for rank, pipe in pipes.items()}


def trainer(address: str, world: int, pipe: Connection) -> None:
    """One process of a job that begins with `world`: its steps compute nothing, so that time goes to what is between.

    It sends "ready" in the middle of the first view, and once it has trained on in one of fewer members for how many
    seconds no step was committed: from the last commit in the first view to the first in the other.
    """
    environment = {"COORDINATOR": address, "MIN_WORKERS": str(world - 1), "MAX_WORKERS": str(world)}
    os.environ.update({f"PACELINE_{name}": value for name, value in environment.items()})
    with paceline.join() as session:
        model = paceline.FSDP(Layers(session.group), session.group)  # type: ignore[arg-type]
        optimizer = paceline.optim.Adam(model)
        state = TrainState(model=model, optimizer=optimizer)
        committed: dict[int, float] = {}
        session.on_commit(lambda number: committed.__setitem__(number, perf_counter()))
        last, first = 0.0, 0
        for step in session.steps(state, total=1 << 30):
            with step:
                if step.number == 1:
                    fill(optimizer, Share(step.rank, step.world))
                if step.number == 50:
                    pipe.send("ready")
                if step.world == world:
                    last = max(committed.values(), default=0.0)
                elif not first:
                    first = step.number
                elif step.number == first + 10:
                    check(state, Share(step.rank, step.world))
                    pipe.send(committed[first] - last)
                optimizer.step()


@contextmanager
def job(address: str, world: int) -> Iterator[list[tuple[BaseProcess, Connection]]]:
    """So many trainers of one job, and what each tells; they are killed in the end."""
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        started: list[tuple[BaseProcess, Connection]] = []
        for _ in range(world):
            pipe, theirs = context.Pipe()
            process = context.Process(target=trainer, args=(address, world, theirs))
            process.start()
            stack.callback(process.join, 20)
            stack.callback(process.kill)
            started.append((process, pipe))
        yield started
