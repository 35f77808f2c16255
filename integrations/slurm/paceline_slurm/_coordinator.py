"""The coordinator of a Slurm step: its first launcher serves one for all launchers of the step, until all have left."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Callable, Iterator
from types import FrameType

from paceline import CoordinatorUnreachable, Credentials, OperationTimeout, PacelineError
from paceline.launch import RunningJob, Supervision, Terms, own_coordinator
from paceline_slurm._step import SlurmStep

_SETTLE_S = 1.0
"""Launchers of one step start within about a second of each other; their workers are to be in the first view."""

_PAUSE_S = 0.1
"""Seconds between two questions to the coordinator."""


@contextlib.contextmanager
def coordinator_of_step(step: SlurmStep, job: str, say: Callable[[str], None]) -> Iterator[str]:
    """Yields the coordinator on the step's first node; task 0 serves it, and stays until no worker is left in the job.

    It listens for other hosts if the step has several, else on loopback. All tasks need the same token or certificates
    (ValueError if they have neither), because other users of the node reach loopback, too.
    """
    own = Credentials.from_environment()
    is_alone = len(step.hosts) == 1
    address = f"{'127.0.0.1' if is_alone else step.hosts[0]}:{step.port}"
    if own.token is None and own.cert is None:
        raise ValueError(
            f"the launchers of this step meet at {address}, and everyone who can reach that port could join and read "
            "the model: write export PACELINE_TOKEN=$(openssl rand -hex 32) above srun in the batch script"
        )
    if not step.serves:
        yield address
        return
    # This host's own name often resolves to another address here (127.0.1.1) than elsewhere.
    everywhere = "[::]" if socket.has_dualstack_ipv6() else "0.0.0.0"  # noqa: S104  # other nodes must reach it
    listen = address if is_alone else f"{everywhere}:{step.port}"
    # Other tasks could not be told a token that is made here.
    with own_coordinator(listen=listen, make_token=False, settle_time=_SETTLE_S):
        say(f"the coordinator of this step listens at {address}")
        yield address
        with RunningJob(address, job) as running:
            _stay(running, say)


def _stay(
    job: RunningJob,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], object] = time.sleep,
) -> None:
    """Waits until no worker is left in the job; after a signal, until the launcher would kill workers of its own.

    A coordinator that is slow to answer, as on a busy node, is asked again.
    """
    orders = Supervision(0.0, Terms(elastic=True))
    signals: list[tuple[signal.Signals, float]] = []

    def note(signum: int, frame: FrameType | None) -> None:
        signals.append((signal.Signals(signum), clock()))

    before = {signum: signal.signal(signum, note) for signum in (signal.SIGINT, signal.SIGTERM)}
    has_said = False
    try:
        while True:
            while signals:
                orders.interrupt(*signals.pop(0))
            if orders.due(clock()) is signal.SIGKILL:
                return
            try:
                left: int | None = len(job.status().members)
            except (CoordinatorUnreachable, OperationTimeout):
                left = None
            except PacelineError:  # no worker has ever joined
                return
            if left == 0:
                return
            if left is not None and not has_said:
                has_said = True
                say(f"this launcher serves the coordinator until no worker is left in the job (now {left})")
            pause(_PAUSE_S)
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
