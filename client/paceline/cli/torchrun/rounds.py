"""Runs one world after another, until one is done or no restart is left.

The launchers of a run are members of a separate job at the coordinator, NAME/nodes. So they get ranks like any members,
and when one dies, the others learn of it within milliseconds.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import paceline
from paceline._base.addresses import Endpoint, parse_endpoint
from paceline.cli.access import Served, own_coordinator, worker_credentials
from paceline.cli.admin import get_job
from paceline.cli.launcher import Launcher, Place, Terms, WorkerSettings
from paceline.cli.launcher.console import Console
from paceline.cli.launcher.reports import ExitReports
from paceline.cli.torchrun.flags import Plan
from paceline.cli.torchrun.meeting import coordinator_at, free_port, is_here
from paceline.cli.torchrun.world import Ending, World
from paceline.config import Config
from paceline.errors import PacelineError, PeerLost

_JOIN_S = 600.0
"""torchrun's default (join_timeout of its dynamic rendezvous)."""

_ANSWER_S = 1.0
"""Seconds in which the coordinator must say which launchers are there."""

_GOODBYE_S, _PAUSE_S = 3.0, 0.02
"""Seconds for which the launcher that serves the coordinator waits for others to leave, and seconds between checks."""


def enter_world(plan: Plan, coordinator: str, restart: int, advertise: str | None = None) -> World:
    """Meets the other launchers, and computes the place of this launcher's workers in the world.

    Args:
        plan: what the flags ask for.
        coordinator: its address.
        restart: how often worlds have failed so far.
        advertise: where the others reach this launcher; None to detect it.

    Raises:
        PacelineError: the launchers do not meet; the text says which are missing.
        OSError: --master-port is not free.
    """
    if plan.alone:
        place = Place(
            workers=plan.workers,
            world_size=plan.workers,
            first_rank=0,
            node=0,
            nodes=1,
            master_addr=plan.master_addr or "127.0.0.1",
            master_port=free_port(plan.master_port),
            run_id=plan.run_id,
            restart=restart,
            max_restarts=plan.max_restarts,
        )
        return World(place)
    bounds: dict[str, Any] = {"min_workers": plan.min_nodes, "max_workers": plan.max_nodes}
    if plan.node is not None:
        bounds = {"rank": plan.node, "world_size": plan.max_nodes}
    session = paceline.join(coordinator, job=_job(plan), timeout=join_seconds(), advertise=advertise, **bounds)
    try:
        port = free_port(plan.master_port) if session.rank == 0 else 0
        told: list[list[int]] = session.group.all_gather_object([plan.workers, port, restart])
        counts = [workers for workers, _, _ in told]
        place = Place(
            workers=plan.workers,
            world_size=sum(counts),
            first_rank=sum(counts[: session.rank]),
            node=session.rank,
            nodes=session.size,
            master_addr=plan.master_addr or parse_endpoint(session.members[0].address).host,
            master_port=told[0][1],
            run_id=plan.run_id,
            restart=max(count for _, _, count in told),  # a newcomer has not seen the earlier ones
            max_restarts=plan.max_restarts,
        )
    except BaseException as error:
        session.leave(error)
        raise
    return World(place, session)


def node_waits(plan: Plan, coordinator: str) -> bool:
    """True if a launcher waits for the next world."""
    try:
        return get_job(coordinator, _job(plan), _ANSWER_S).summary.waiting > 0
    except PacelineError:
        return False


def wait_until_left(plan: Plan, coordinator: str) -> None:
    """Waits a moment for launchers that are about to leave, because the one that serves the coordinator ends last."""
    give_up = time.monotonic() + _GOODBYE_S
    with contextlib.suppress(PacelineError):  # there is no such job if launchers never met
        while get_job(coordinator, _job(plan), _ANSWER_S).members and time.monotonic() < give_up:
            time.sleep(_PAUSE_S)


def _job(plan: Plan) -> str:
    return f"{plan.run_id}/nodes"


def join_seconds() -> float:
    """Returns the seconds for which launchers wait for each other: PACELINE_JOIN_TIMEOUT, else torchrun's default."""
    return Config.from_environment().join_timeout if os.environ.get("PACELINE_JOIN_TIMEOUT") else _JOIN_S


@dataclass(frozen=True, slots=True)
class Workers:
    """What a launcher starts in every world.

    Attributes:
        command: what each worker runs, as for `Launcher`.
        grace: seconds that a failed worker's peers get to end by themselves.
        advertise: where other hosts reach them; None to detect it.
        bind: bind each worker to its share of the cores.
    """

    command: Sequence[str]
    grace: float
    advertise: str | None = None
    bind: bool = True


def run_worlds(workers: Workers, plan: Plan, console: Console, coordinator: str | None) -> int:
    """Runs this launcher's workers in one world after another.

    When a worker fails, its world ends for all launchers and another begins, at most `max_restarts` times, which each
    launcher counts for itself. Worlds that end because another launcher comes do not count.

    Args:
        workers: what to start.
        plan: what the flags ask for.
        console: shows what happens.
        coordinator: its address, if there is one already.

    Returns:
        The exit code: 0 if a world was done; 128 + the signal that ended the launcher; else that of the worker that
        failed first here in the last world, or 1 if it failed elsewhere.

    Raises:
        PacelineError, OSError: launchers do not meet, or the coordinator cannot be served.
    """
    failures = 0
    with _meeting(plan, coordinator) as served:
        if not plan.alone:
            console.say(f"waiting for the launchers of {_range(plan)} nodes at {served.address}")
        while True:
            end = _run_world(workers, plan, console, served, failures)
            if end.ending is Ending.GROWN:
                console.say(f"starting all workers again: {end.why}")
            elif end.ending is Ending.FAILED and failures < plan.max_restarts:
                failures += 1
                console.say(f"starting all workers again, {failures} of {plan.max_restarts}: {end.why}")
            else:
                if not end.told:
                    console.say(end.why)
                return end.code


@dataclass(frozen=True, slots=True)
class _End:
    """How a world ended for this launcher."""

    ending: Ending | None
    """None: the launcher was told to end."""
    code: int
    """The launcher's exit code if this was the last world."""
    why: str = ""
    told: bool = True
    """True if the terminal already shows `why`."""


def _run_world(workers: Workers, plan: Plan, console: Console, served: Served, failures: int) -> _End:
    coordinator = served.address
    try:
        world = enter_world(plan, coordinator, failures, workers.advertise)
    except PeerLost as error:  # another launcher died just after it joined
        return _End(Ending.FAILED, 1, str(error), told=False)
    size = world.place.world_size
    settings = WorkerSettings(coordinator, plan.run_id, size, size, workers.advertise, world.place, served.token)
    with ExitReports(coordinator, plan.run_id, worker_credentials(served.token)) as reports:
        launcher = Launcher(
            workers.command,
            Terms(workers=plan.workers, minimum=plan.workers),
            settings,
            console,
            grace=workers.grace,
            report_exit=reports.report,
            bind=workers.bind,
        )
        grows = world.place.node == 0 and world.place.nodes < plan.max_nodes
        with world.watched(launcher.stop, functools.partial(node_waits, plan, coordinator) if grows else None):
            code = launcher.run()
    if launcher.interrupted:
        world.interrupted(signal.Signals(code - 128))
        return _End(None, code)
    ending, why = world.end("" if launcher.failure is None else str(launcher.failure))
    if ending is Ending.DONE:
        return _End(ending, 0)
    return _End(ending, code or 1, why, told=launcher.failure is not None)


@contextlib.contextmanager
def _meeting(plan: Plan, coordinator: str | None) -> Iterator[Served]:
    """Yields the coordinator: the named one, the one at which launchers meet, or one that this launcher embeds."""
    if coordinator is not None:
        yield Served(coordinator)
    elif plan.meeting is None:
        with own_coordinator() as own:
            yield own
    else:
        place = plan.meeting
        if place.host == "localhost" or (plan.alone and is_here(place.host)):  # alone: no other launcher comes
            place = Endpoint("127.0.0.1", place.port)
        with coordinator_at(place, serve=plan.serves, patience=join_seconds()) as here:
            yield Served(str(place))
            if here:
                wait_until_left(plan, str(place))


def _range(plan: Plan) -> str:
    return str(plan.max_nodes) if plan.min_nodes == plan.max_nodes else f"{plan.min_nodes} to {plan.max_nodes}"
