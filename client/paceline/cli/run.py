"""`paceline run`: checks the arguments, finds or embeds a coordinator, and launches the workers."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

from paceline.cli.access import Served, coordinator_address, endpoint, own_coordinator, own_token, worker_credentials
from paceline.cli.launcher import Launcher, LaunchListener, Terms, WorkerSettings, worker_bounds
from paceline.cli.launcher.console import Console, LogFiles
from paceline.cli.launcher.environment import allowed_cores
from paceline.cli.launcher.reports import ExitReports
from paceline.cli.launcher.supervision import default_spares, spares_error
from paceline.cli.output import UsageError, say
from paceline.cli.torchrun import Flags, Plan, Workers, read_flags, read_streams, run_worlds, token_of
from paceline.config import Config

__all__ = ["launch", "run_nodes", "run_workers"]

_GRACE_S = 5.0
"""Seconds beyond `failure_timeout` within which a failed worker's peers notice the failure, raise, and end."""


def run_workers(
    command: Sequence[str],
    *,
    workers: int,
    coordinator: str | None,
    job: str,
    minimum: int | None,
    maximum: int | None,
    restarts: int,
    spares: int | None,
    log_dir: Path | None,
    advertise: str | None = None,
    bind: bool = True,
    redirects: str | None = None,
    tee: str | None = None,
) -> int:
    """Runs workers and shows their lines on the terminal; with `spares` None it keeps one spare where that helps.

    Returns:
        The exit code, by the rule of `launcher.supervision.Supervision`.

    Raises:
        UsageError: the arguments are invalid.
    """
    _check_command(command)
    try:
        low, high = worker_bounds(workers, minimum, maximum)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if restarts < 0:
        raise UsageError(f"--restarts must be 0 or more, not {restarts}")
    if spares is None:
        spares = default_spares(command, restarts)
    elif wrong := spares_error(command, restarts, spares):
        raise UsageError(wrong)
    if coordinator is None and low > workers:
        raise UsageError(
            f"--min {low} with -n {workers} waits for workers of other launchers: "
            "give all of them one coordinator (--coordinator)"
        )
    _check_advertise(advertise, workers)
    with _coordinator(coordinator) as served, _console(log_dir, job, redirects, tee, workers) as console:
        settings = WorkerSettings(served.address, job, low, high, advertise, token=served.token)
        alone = coordinator is None
        return launch(command, workers, settings, console, restarts=restarts, spares=spares, alone=alone, bind=bind)


def run_nodes(
    command: Sequence[str],
    flags: Flags,
    *,
    coordinator: str | None,
    job: str,
    log_dir: Path | None,
    advertise: str | None = None,
    bind: bool = True,
    redirects: str | None = None,
    tee: str | None = None,
    insecure: bool = False,
) -> int:
    """Runs workers as torchrun's flags say, and shows their lines on the terminal.

    With `insecure`, launchers may meet at a port where every process that reaches it may join.

    Returns:
        The exit code, by the rule of `torchrun.rounds.run_worlds`.

    Raises:
        UsageError: the arguments are invalid.
    """
    _check_command(command)
    if flags.rdzv_endpoint and flags.standalone:
        say("--standalone: nobody is met, at --rdzv-endpoint or elsewhere")
    elif flags.rdzv_endpoint and coordinator is not None:
        raise UsageError("--rdzv-endpoint and --coordinator (PACELINE_COORDINATOR) name one thing: give one")
    try:
        cores = len(allowed_cores()) or os.cpu_count() or 1
        plan = read_flags(flags, job=job, cores=cores, accelerated=any(Path("/dev").glob("nvidia[0-9]*")))
        grace = Config.from_environment().failure_timeout + _GRACE_S
    except ValueError as error:
        raise UsageError(str(error)) from None
    _check_advertise(advertise, plan.workers + (not plan.alone))  # a launcher that meets others has a port too
    address = None if coordinator is None else str(endpoint(coordinator))
    meets_openly = address is None and plan.is_open and not insecure
    with (
        _with_a_secret(plan) if meets_openly else contextlib.nullcontext(),
        _console(log_dir, plan.run_id, redirects, tee, plan.workers) as console,
    ):
        return run_worlds(Workers(command, grace, advertise, bind), plan, console, address)


def launch(
    command: Sequence[str],
    workers: int,
    settings: WorkerSettings,
    listener: LaunchListener,
    *,
    restarts: int = 0,
    spares: int = 0,
    alone: bool = True,
    bind: bool = True,
) -> int:
    """Runs workers and tells their coordinator how they end; returns the exit code.

    Args:
        command: SCRIPT ARGS..., -m MODULE ARGS..., or -- PROGRAM ARGS...
        workers: how many workers to start.
        settings: what the workers are told of the job; it is elastic if its minimum is below its maximum.
        listener: shows what happens.
        restarts: how often each worker is started again at most; with any, the job is elastic too.
        spares: how many processes wait with their imports done, to replace failed workers.
        alone: no other launcher starts workers for this job.
        bind: bind each worker to its share of the cores, if there is one for each (`launcher.environment`).

    Raises:
        UsageError: a PACELINE_* variable has an invalid value.
    """
    try:
        grace = Config.from_environment().failure_timeout + _GRACE_S
    except ValueError as error:
        raise UsageError(str(error)) from None
    terms = Terms(
        workers=workers,
        minimum=settings.min_workers,
        elastic=settings.min_workers < settings.max_workers or restarts > 0,
        alone=alone,
        restarts=restarts,
        spares=spares,
    )
    with ExitReports(settings.coordinator, settings.job, worker_credentials(settings.token)) as reports:
        return Launcher(command, terms, settings, listener, grace=grace, report_exit=reports.report, bind=bind).run()


@contextlib.contextmanager
def _with_a_secret(plan: Plan) -> Iterator[None]:
    """Makes sure that launchers and workers have credentials: those that are set, else a token made from --rdzv-id.

    Raises:
        UsageError: they have neither.
    """
    own = worker_credentials()
    if own.token is not None or own.cert is not None:
        yield
        return
    if (token := token_of(plan.run_id)) is None:
        raise UsageError(
            f"launchers meet at {plan.meeting}, and whoever reaches that port could join and read the model: set "
            "PACELINE_TOKEN to one secret on all nodes (openssl rand -hex 32), or give all a random --rdzv-id (openssl "
            "rand -hex 16); --insecure is for a network where everybody is trusted"
        )
    say("the token is made from --rdzv-id, which users of these machines can see (ps); they cannot see PACELINE_TOKEN")
    os.environ["PACELINE_TOKEN"] = token  # for the coordinator that is served here, and for workers
    try:
        yield
    finally:
        del os.environ["PACELINE_TOKEN"]


def _check_advertise(advertise: str | None, ports: int) -> None:
    if advertise is not None and ports > 1 and endpoint(advertise, default_port=0).port:
        raise UsageError(f"--advertise {advertise} names one port for {ports} workers: leave it out")


def _check_command(command: Sequence[str]) -> None:
    """Checks that the script or program exists, so that the error shows once and not in every worker."""
    if command[0] == "--":
        if shutil.which(command[1]) is None:
            raise UsageError(f"there is no program {command[1]}")
    elif command[0] != "-m" and not Path(command[0]).exists():
        raise UsageError(f"there is no script {command[0]}")


@contextlib.contextmanager
def _console(log_dir: Path | None, job: str, redirects: str | None, tee: str | None, workers: int) -> Iterator[Console]:
    """Opens the console, and log files if lines are kept: in `log_dir`, else in a new folder."""
    try:
        streams = read_streams(redirects, tee, workers)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if log_dir is None and streams.kept:
        log_dir = Path(tempfile.mkdtemp(prefix=f"paceline-{quote(job, safe='')}-"))
        say(f"lines are kept in {log_dir}")
    logs = None if log_dir is None else LogFiles(log_dir)
    with contextlib.closing(Console(logs, hidden=streams.hidden)) as console:
        yield console


@contextlib.contextmanager
def _coordinator(address: str | None) -> Iterator[Served]:
    if address is not None:
        where = coordinator_address(address)
        yield Served(where, own_token(where))  # it may belong to another run of this user, which admits workers
    else:
        with own_coordinator() as own:
            yield own
