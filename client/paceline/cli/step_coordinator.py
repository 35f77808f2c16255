"""The coordinator of a Slurm step: its first launcher serves one for all launchers of the step, until all have left."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from types import FrameType

from paceline._base.addresses import Endpoint
from paceline.cli.access import Served, worker_credentials
from paceline.cli.admin import get_job
from paceline.cli.output import UsageError, say
from paceline.cli.slurm import SlurmStep
from paceline.cli.torchrun.meeting import coordinator_at
from paceline.cli.torchrun.rounds import join_seconds
from paceline.errors import CoordinatorUnreachable, OperationTimeout, PacelineError
from paceline.launch._supervision import DRAIN_S, SAME_S

_ANSWER_S, _PAUSE_S = 1.0, 0.1
"""Seconds for the coordinator's answer to a question, and between two questions."""


@contextlib.contextmanager
def coordinator_of_step(step: SlurmStep, job: str) -> Iterator[Served]:
    """Yields the coordinator on the step's first node; task 0 serves it, and stays until no worker is left in the job.

    It listens for other hosts, so all tasks need the same token or certificates.

    Raises:
        UsageError: they have neither.
        OSError: the port is in use.
    """
    own = worker_credentials()
    place = Endpoint(step.hosts[0], step.port)
    if own.token is None and own.cert is None:
        raise UsageError(
            f"the launchers of this step meet at {place}, and everyone who can reach that port could join and read the "
            "model: write export PACELINE_TOKEN=$(openssl rand -hex 32) above srun in the batch script"
        )
    with coordinator_at(place, serve=step.serves, patience=join_seconds()):
        if step.serves:
            say(f"the coordinator of this step listens at {place}")
        yield Served(str(place))
        if step.serves:
            _stay(str(place), job)


def _stay(address: str, job: str) -> None:
    """Waits until no worker is left in the job; after a signal `DRAIN_S` at most, and after a second one no longer.

    Signals within `SAME_S` are one. A coordinator that is slow to answer, as on a busy node, is asked again.
    """
    signals: list[float] = []

    def note(signum: int, frame: FrameType | None) -> None:
        if not signals or time.monotonic() - signals[0] > SAME_S:
            signals.append(time.monotonic())

    before = {signum: signal.signal(signum, note) for signum in (signal.SIGINT, signal.SIGTERM)}
    has_said = False
    try:
        while not signals or (len(signals) == 1 and time.monotonic() < signals[0] + DRAIN_S):
            try:
                left: int | None = len(get_job(address, job, _ANSWER_S).members)
            except (CoordinatorUnreachable, OperationTimeout):
                left = None
            except PacelineError:  # no worker has ever joined
                return
            if left == 0:
                return
            if left is not None and not has_said:
                has_said = True
                say(f"this launcher serves the coordinator until no worker is left in the job (now {left})")
            time.sleep(_PAUSE_S)
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
