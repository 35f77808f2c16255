"""One world after another, until one is done or no restart is left."""

from __future__ import annotations

import contextlib
import functools
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline._address import Endpoint
from paceline.cli.credentials import worker_credentials
from paceline.cli.embedded import Served, own_coordinator
from paceline.cli.launcher import Launcher, Terms, WorkerSettings
from paceline.cli.launcher.console import Console
from paceline.cli.launcher.reports import ExitReports
from paceline.cli.torchrun.flags import Plan
from paceline.cli.torchrun.meeting import coordinator_at, is_here
from paceline.cli.torchrun.nodes import enter_world, join_seconds, node_waits, wait_until_left
from paceline.cli.torchrun.world import Ending
from paceline.errors import PeerLost

__all__ = ["Workers", "run_worlds"]


@dataclass(frozen=True, slots=True)
class Workers:
    """What a launcher starts in every world.

    Attributes:
        command: what each worker runs, as for `Launcher`.
        grace: seconds that a failed worker's peers get to end by themselves.
        advertise: where other hosts reach them; None to find out.
        bind: each gets its share of the cores.
    """

    command: Sequence[str]
    grace: float
    advertise: str | None = None
    bind: bool = True


def run_worlds(workers: Workers, plan: Plan, console: Console, coordinator: str | None) -> int:
    """Runs this launcher's workers in one world after another.

    A world in which a worker fails ends for all, and another one begins, `max_restarts` times at most; each launcher
    counts for itself. Worlds that end for a newcomer do not count.

    Args:
        workers: what to start.
        plan: what was asked for.
        console: shows what happens.
        coordinator: its address, if there is one already.

    Returns:
        The exit code: 0 if a world was done, 128 + the signal that ended the launcher, else that of the worker that
        failed here first in the last world, or 1 if it failed elsewhere.

    Raises:
        PacelineError, OSError: launchers do not meet, or the coordinator cannot be served.
    """
    failures = 0
    with _meeting(plan, coordinator) as served:
        if not plan.alone:
            console.say(f"meeting the launchers of {_range(plan)} nodes at {served.address}")
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
    """The exit code, if it was the last world."""
    why: str = ""
    told: bool = True
    """`why` is on the terminal already."""


def _run_world(workers: Workers, plan: Plan, console: Console, served: Served, failures: int) -> _End:
    coordinator = served.address
    try:
        world = enter_world(plan, coordinator, failures, workers.advertise)
    except PeerLost as error:  # a launcher that was there a moment ago
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
    """The coordinator: one that is there, at the place where launchers meet, or of this launcher's own."""
    if coordinator is not None:
        yield Served(coordinator)
    elif plan.meeting is None:
        with own_coordinator() as own:
            yield own
    else:
        place = plan.meeting
        if place.host == "localhost" or (plan.alone and is_here(place.host)):  # alone: nobody else is to come
            place = Endpoint("127.0.0.1", place.port)
        with coordinator_at(place, serve=plan.serves, patience=join_seconds()) as here:
            yield Served(str(place))
            if here:
                wait_until_left(plan, str(place))


def _range(plan: Plan) -> str:
    return str(plan.max_nodes) if plan.min_nodes == plan.max_nodes else f"{plan.min_nodes} to {plan.max_nodes}"
