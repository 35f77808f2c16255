"""The launchers of a run: members of a job of their own at the coordinator, NAME/nodes.

So they get their numbers like any members, and the death of one is news to the others within milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

import paceline
from paceline._address import parse_endpoint
from paceline.cli.admin import get_job
from paceline.cli.launcher import Place
from paceline.cli.torchrun.flags import Plan
from paceline.cli.torchrun.meeting import free_port
from paceline.cli.torchrun.world import World
from paceline.config import Config
from paceline.errors import PacelineError

__all__ = ["enter_world", "join_seconds", "node_waits", "wait_until_left"]

_JOIN_S = 600.0
"""torchrun's default (join_timeout of its dynamic rendezvous)."""

_ANSWER_S = 1.0
"""How long the coordinator may take to say who is there."""

_GOODBYE_S, _PAUSE_S = 3.0, 0.02
"""How long the one who serves the coordinator waits for others to leave, and how often it looks."""


def enter_world(plan: Plan, coordinator: str, restart: int, advertise: str | None = None) -> World:
    """Meets the other launchers, and settles where everybody's workers stand.

    Args:
        plan: what was asked for.
        coordinator: its address.
        restart: how often worlds have failed so far.
        advertise: where the others reach this launcher; None to find out.

    Raises:
        PacelineError: they do not meet; the text says who is missing.
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
    """Waits a moment for launchers that are about to leave: whoever serves the coordinator goes last."""
    give_up = time.monotonic() + _GOODBYE_S
    with contextlib.suppress(PacelineError):  # there is no such job where nobody was met
        while get_job(coordinator, _job(plan), _ANSWER_S).members and time.monotonic() < give_up:
            time.sleep(_PAUSE_S)


def _job(plan: Plan) -> str:
    return f"{plan.run_id}/nodes"


def join_seconds() -> float:
    """How long launchers wait for each other: PACELINE_JOIN_TIMEOUT, else torchrun's default."""
    return Config.from_environment().join_timeout if os.environ.get("PACELINE_JOIN_TIMEOUT") else _JOIN_S
