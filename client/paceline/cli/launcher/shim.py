"""Runs first in a worker's process: ties its life to the launcher's, then runs the user's script.

    python shim.py LAUNCHER_PID SCRIPT ARGS...
    python shim.py LAUNCHER_PID -m MODULE ARGS...
    python shim.py LAUNCHER_PID -- PROGRAM ARGS...      (becomes a program other than Python)
    python shim.py LAUNCHER_PID --spare FD SCRIPT ...   (does the imports, then waits for its number from FD)

It is started by its path and not as a module, so that the process is tied before it imports Paceline: the import takes
0.2 s, in which a killed launcher would leave an orphan.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from types import TracebackType
from typing import Any

_PR_SET_PDEATHSIG = 1
"""Source: prctl(2), linux/prctl.h."""

_LOCAL_RANK, _NEWS = "PACELINE_LOCAL_RANK", "PACELINE_LAUNCHER_FD"
"""As `environment.LOCAL_RANK` and `LAUNCHER_FD`, which cannot be imported before the process is tied."""


def main() -> None:
    """Becomes the script; returns when it ends."""
    if not sys.flags.safe_path:
        # Python put this file's folder there, but the user's `import run` must not find its modules.
        del sys.path[0]
    launcher, arguments = int(sys.argv[1]), sys.argv[2:]
    die_with(launcher)
    sys.excepthook = report
    go = None
    if arguments[0] == "--spare":
        go, arguments = int(arguments[1]), arguments[2:]
    if arguments[0] == "--":
        os.execvp(arguments[1], arguments[1:])  # noqa: S606  # the user's own; exec keeps the tie

    _prepare(arguments)
    if go is not None:
        _wait_warm(go, launcher, arguments)
    try:
        _run(arguments)
    except SystemExit as end:
        if not end.code:
            _say_if_alone()
        raise
    _say_if_alone()


def _prepare(arguments: list[str]) -> None:
    """Sets sys.path and sys.argv as Python would for the script."""
    is_module = arguments[0] == "-m"
    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd() if is_module else os.path.dirname(os.path.realpath(arguments[0])))
    sys.argv = arguments[1:] if is_module else arguments


def _run(arguments: list[str]) -> None:
    import runpy

    if arguments[0] == "-m":
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(arguments[0], run_name="__main__")


def _say_if_alone() -> None:
    """Tells the launcher that the script did not use torch.distributed, nor processes of its own that may have done so.

    The launcher knows itself whether this process has joined a job.
    """
    import resource

    news = os.environ.get(_NEWS)
    torch = sys.modules.get("torch.distributed.distributed_c10d")
    # torch keeps it when the group is destroyed. A release without it tells nothing, so nothing is said then.
    uses_torch = torch is not None and getattr(torch, "_backend", "unknown") is not None
    had_children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss > 0
    if news is not None and not uses_torch and not had_children:
        with contextlib.suppress(OSError):  # the script has closed it
            os.write(int(news), b'{"kind": "alone"}\n')


def _wait_warm(go: int, launcher: int, arguments: list[str]) -> None:
    """Does the script's imports, and returns when this spare becomes a worker.

    If an import fails, the process restarts as an ordinary worker once it is needed: then the script itself raises the
    error, and no package is left half imported. From the descriptor `go` come a worker's number and a newline, by which
    this process becomes that worker, or the end of file if the launcher is gone.
    """
    import select

    environment = dict(os.environ)  # before imports change it
    os.set_inheritable(go, False)
    try:
        from paceline.cli.warm import warm_up

        warm_up(arguments, lambda: bool(select.select([go], [], [], 0)[0]))
        failed = False
    except BaseException:  # noqa: BLE001  # also sys.exit in a module: the script raises it itself
        failed = True
    told = os.read(go, 32)  # it was written at once, and is far shorter than what a pipe takes at once
    os.close(go)
    if not told:
        os._exit(0)
    environment[_LOCAL_RANK] = os.environ[_LOCAL_RANK] = told.decode().strip()
    if failed:
        again = [sys.executable, __file__, str(launcher), *arguments]
        os.execve(sys.executable, again, environment)  # noqa: S606  # itself


def die_with(launcher: int) -> None:
    """Makes the kernel kill this process when the launcher dies, however it dies. Linux only."""
    if sys.platform != "linux":
        return
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # The launcher may have died before the call above; then this process already has another parent.
    if os.getppid() != launcher:
        os.kill(os.getpid(), signal.SIGKILL)


def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The excepthook: shows Paceline's errors in short, no interrupts, and the script's errors as Python does.

    A Paceline error says who failed, where and how. The stack of a worker that merely noticed it is noise, multiplied
    by the number of workers. PACELINE_TRACEBACK=1 shows it anyway.
    """
    whole = os.environ.get("PACELINE_TRACEBACK", "") not in ("", "0")
    if issubclass(kind, KeyboardInterrupt) and not whole:
        return
    errors = sys.modules.get("paceline.errors")  # only an importer of it can raise a Paceline error
    if errors is not None and isinstance(error, errors.PacelineError):
        _blame(error)
        refused = (errors.CoordinatorUnreachable, errors.NotAuthenticated, errors.NotPermitted)
        if isinstance(error, refused) and not whole and _all_say(error):
            return
        if not whole:
            from paceline._base.uncaught import in_short

            print(in_short(error, trace), file=sys.stderr)
            return
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        trace = trace.tb_next  # the shim's own frames say nothing about the script
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


def _blame(error: Any) -> None:
    """Tells the launcher which ranks the error blames, because its exit code is that of the first to fail."""
    from paceline._session.launcher_pipe import tell_launcher
    from paceline.errors import ReplicaLost

    tell_launcher("error", {"ranks": list(error.ranks), "mate": isinstance(error, ReplicaLost)})


def _all_say(error: Any) -> bool:
    """Lets the launcher say, once for all workers, why no coordinator admits them; False if it cannot."""
    from paceline._session.launcher_pipe import notify_launcher

    return notify_launcher(str(error), key=type(error).__name__)


if __name__ == "__main__":
    main()
