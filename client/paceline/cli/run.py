"""`paceline run`: checks the arguments, finds or embeds a coordinator, and launches the workers."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from paceline._base.terminal import UsageError, say
from paceline.cli.access import coordinator_address, endpoint, keep_the_page, say_where_the_page_is
from paceline.cli.hosts import DrainSource, reasons_to_leave
from paceline.cli.launcher import Launcher, Terms, WorkerSettings, worker_bounds
from paceline.cli.launcher.console import Console, LogFiles
from paceline.cli.launcher.leftovers import remove_leftovers
from paceline.cli.launcher.printed import read_streams
from paceline.cli.launcher.reports import ExitReports
from paceline.cli.launcher.spares import default_spares, spares_error
from paceline.cli.plug_ins import errors_of
from paceline.config import ENGINES, Config, plug_in_engines
from paceline.engines._catalogue import missing_package
from paceline.launch import Host, Notice
from paceline.launch._environment import allowed_cores
from paceline.launch._own_coordinator import Served, own_coordinator, own_token, worker_credentials

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
    http: str | None = None,
    host: Host | None = None,
    notices: Mapping[str, Notice] | None = None,
    drain_before: float = 0.0,
    drained_code: int = 0,
    replica_size: int | None = None,
) -> int:
    """Runs workers; returns the exit code. With `spares` None it keeps one spare where that helps.

    With a `replica_size`, so many workers in a row are the ranks of one replica, and the bounds and restarts count
    replicas.

    With `http` ("host:port"), the coordinator that it embeds serves a page there, on a terminal until Enter or Ctrl-C,
    unless the workers were told to end. Without a named coordinator, launchers of one `host` meet at the host's.
    Workers leave when one of the `notices` says that the machine will be taken, and `drain_before` seconds before the
    end of the host's time; the exit code is `drained_code` then.
    """
    check_command(command)
    meets = coordinator is None and host is not None and host.coordinator is not None
    if host is not None:
        everyone = workers // max(1, replica_size or 1) * host.launchers
        minimum = everyone if minimum is None else minimum
        maximum = max(everyone, minimum) if maximum is None else maximum
        # else jobs that share the node would share cores too
        bind = bind and (host.cores is None or len(allowed_cores()) <= host.cores)
    try:
        low, high = worker_bounds(workers, minimum, maximum, replica_size)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if restarts < 0:
        raise UsageError(f"--restarts must be 0 or more, not {restarts}")
    if replica_size is not None and spares:
        raise UsageError(f"--spares {spares} does not go with --replica-size: a replica starts again as a whole")
    if spares is None:
        spares = default_spares(command, restarts) if replica_size is None else 0
    elif wrong := spares_error(command, restarts, spares):
        raise UsageError(wrong)
    if coordinator is None and not meets and low > workers // (replica_size or 1):
        noun = "workers" if replica_size is None else "replicas"
        raise UsageError(
            f"--min {low} with -n {workers} waits for {noun} of other launchers: "
            "give all of them the same coordinator (--coordinator)"
        )
    _check_advertise(advertise, workers)
    if http is not None and coordinator is not None:
        raise UsageError(
            f"--http shows the coordinator that a run starts, but this run joins the one at {coordinator}: start "
            "that with paceline coordinator --http"
        )
    if http is not None and meets:
        raise UsageError("--http shows the coordinator that one launcher starts: start paceline coordinator --http")
    if not 0 <= drained_code <= 255:
        raise UsageError(f"--drained-code must be 0 to 255, not {drained_code}")
    with _coordinator(coordinator, http, host, job) as served:
        with _console(log_dir, job, redirects, tee, workers) as console:
            say_where_the_page_is(served)
            settings = WorkerSettings(served.address, job, low, high, advertise, served.token, at_once=workers)
            outcome = launch(
                command,
                workers,
                settings,
                console,
                restarts=restarts,
                spares=spares,
                alone=coordinator is None and not meets,
                bind=bind,
                sources=reasons_to_leave(host, drain_before, notices or {}, console.say),
                drained_code=drained_code,
                replica_size=replica_size,
            )
        if not outcome.interrupted:
            keep_the_page(served)
        return outcome.code


class LauncherEnd(NamedTuple):
    """The exit code of a launcher, and whether a signal or a source has told its workers to end."""

    code: int
    interrupted: bool


def launch(
    command: Sequence[str],
    workers: int,
    settings: WorkerSettings,
    console: Console,
    *,
    restarts: int = 0,
    spares: int = 0,
    alone: bool = True,
    bind: bool = True,
    sources: Sequence[DrainSource] = (),
    drained_code: int = 0,
    replica_size: int | None = None,
) -> LauncherEnd:
    """Runs workers and tells their coordinator how they end; returns the exit code, and how it came about.

    Args:
        command: SCRIPT ARGS..., -m MODULE ARGS..., or -- PROGRAM ARGS...
        workers: how many workers to start.
        settings: what the workers are told of the job; it is elastic if its minimum is below its maximum.
        console: shows what happens.
        restarts: how often each worker is started again at most; with any, the job is elastic too.
        spares: how many processes wait with their imports done, to replace failed workers.
        alone: no other launcher starts workers for this job.
        bind: bind each worker to its share of the cores, if there is one for each (`share_of_cores`).
        sources: each may tell the workers to leave, once.
        drained_code: the exit code if workers were told to leave and have left in good order.
        replica_size: so many workers in a row are the ranks of one replica; `workers` is a multiple of it, and the
            bounds in `settings` and `restarts` count replicas. None for workers that are members by themselves.

    Raises:
        UsageError: a PACELINE_* variable has an invalid value.
    """
    try:
        grace = Config.from_environment().failure_timeout + _GRACE_S
    except ValueError as error:
        raise UsageError(str(error)) from None
    terms = Terms(
        workers=workers // (replica_size or 1),
        minimum=settings.min_workers,
        elastic=settings.min_workers < settings.max_workers or restarts > 0,
        alone=alone,
        restarts=restarts,
        drained_code=drained_code,
    )
    remove_leftovers()
    with ExitReports(settings, worker_credentials(settings.token)) as reports:
        launcher = Launcher(
            command,
            terms,
            settings,
            console,
            grace=grace,
            report_exit=reports.report,
            bind=bind,
            spares=spares,
            replica_size=replica_size,
        )
        ended = threading.Event()
        for source in sources:  # daemons: one may wait for an answer while this process ends
            threading.Thread(target=source, args=(launcher.drain, ended), name="paceline-drain", daemon=True).start()
        try:
            code = launcher.run()
            return LauncherEnd(code, launcher.interrupted_by is not None)
        finally:
            ended.set()


@contextlib.contextmanager
def engine_for_workers(name: str | None) -> Iterator[None]:
    """Sets the engine of workers that are started inside the block; None leaves it as it is."""
    if name is None:
        yield
        return
    if name not in ENGINES and name not in (plug_ins := plug_in_engines()):
        known = ", ".join((*ENGINES, *plug_ins))
        raise UsageError(f"there is no engine {name!r} (--engine): the engines are {known}")
    if package := missing_package(name):
        raise UsageError(f"the engine {name} (--engine) needs {package}, which is not installed: pip install {package}")
    with variable_for_workers("PACELINE_ENGINE", name):
        yield


@contextlib.contextmanager
def variable_for_workers(name: str, value: str) -> Iterator[None]:
    """Sets a variable of workers that are started inside the block."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def launcher_of(engine: str | None) -> Callable[..., object] | None:
    """Returns what starts the workers of an engine in place of `paceline run`; None if `paceline run` starts them.

    It is an entry point in the group "paceline.engine_launchers" with the engine's name.

    Raises:
        UsageError: the plug-in does not work.
    """
    if engine is None or engine in ENGINES:
        return None
    from importlib.metadata import entry_points

    launch: Callable[..., object] | None = None
    for point in entry_points(group="paceline.engine_launchers", name=engine):
        with errors_of(point):
            launch = point.load()
    return launch


def _check_advertise(advertise: str | None, ports: int) -> None:
    if advertise is not None and ports > 1 and endpoint(advertise, default_port=0).port:
        raise UsageError(f"--advertise {advertise} names one port for {ports} workers: leave the port out")


def check_command(command: Sequence[str]) -> None:
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
        say(f"the lines of the workers are kept in {log_dir}")
    logs = None if log_dir is None else LogFiles(log_dir)
    with contextlib.closing(Console(logs, hidden=streams.hidden)) as console:
        yield console


@contextlib.contextmanager
def _coordinator(address: str | None, http: str | None, host: Host | None, job: str) -> Iterator[Served]:
    """Yields the coordinator that is named, else the host's, else one of this command's own."""
    if address is not None:
        where = coordinator_address(address)
        yield Served(where, own_token(where))  # it may belong to another run of this user, which admits workers
    elif host is not None and host.coordinator is not None:
        with contextlib.ExitStack() as stack:
            try:
                where = stack.enter_context(host.coordinator(job, say))
            except ValueError as error:
                raise UsageError(str(error)) from None
            yield Served(where)
    else:
        with own_coordinator(http=http) as own:
            yield own
