"""`paceline.run`: as the command `paceline run`, for a function of a notebook."""

from __future__ import annotations

import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from paceline._base.waits import has_loop_thread
from paceline._notebook._coordinator import coordinator_process
from paceline._notebook._forked import ForkedFunction, Returned, works_in_a_child
from paceline.cli.launcher import Launcher
from paceline.cli.launcher.console import Console
from paceline.cli.launcher.leftovers import remove_leftovers
from paceline.config import Config
from paceline.errors import UnsupportedOp
from paceline.launch import Terms, WorkerSettings

_JOB = "notebook"

_GRACE_S = 5.0
"""Seconds beyond `failure_timeout` in which the others of a failed worker end by themselves."""


def run(
    function: Callable[..., Any],
    *args: Any,
    n: int,
    min: int | None = None,
    restarts: int = 0,
) -> dict[int, Any]:
    """Runs `function(session, *args)` in `n` workers on this machine, and waits for their end.

    `session` is what `paceline.join` returns; it is left when the function returns. Each worker is a copy of this
    process, made by a fork: the function may use all that was defined before. Changes that it makes stay in its worker;
    only its return value comes back. What workers print appears here, behind their ranks.

    If a worker dies, the others go on, as long as `min` are left. Ctrl-C, or the notebook's "interrupt", tells all
    workers to leave at the end of their step; a second one kills them. `paceline status` and `paceline drain` find the
    job, whose name is "notebook".

    Args:
        function: the training function. What uses a GPU belongs in it.
        args: further arguments for it.
        n: how many workers to start.
        min: the job does not go on with fewer workers; `n` if left out.
        restarts: how many times each worker may be started again. A new one takes the state from the others.

    Returns:
        What the function returned, by rank, for the members of the last generation. It consists of None, bool, int,
        float, str, bytes, list, tuple, dict and NumPy arrays. Workers that died or were drained are missing.

    Raises:
        UnsupportedOp: this process cannot be forked: it runs on another system than Linux, has joined a job itself, has
            used CUDA, or this is not its main thread; the text says which.
        ValueError: an argument or a PACELINE_* variable is invalid.
        RuntimeError: a worker failed, and fewer than `min` came to the end; the text has its rank, its error and the
            line. Or no coordinator could be started; the text above says why.
        OSError: a worker could not be started.
        KeyboardInterrupt: Ctrl-C, after the workers have ended. SIGTERM and SIGHUP end them too, and then this process.
    """
    least = n if min is None else min
    if not 1 <= least <= n or restarts < 0:
        raise ValueError(f"want 1 <= min <= n and restarts >= 0, not min={least}, n={n} and restarts={restarts}")
    _check_this_process()
    grace = Config.from_environment().failure_timeout + _GRACE_S
    terms = Terms(workers=n, minimum=least, elastic=least < n or restarts > 0, restarts=restarts)
    remove_leftovers()
    with tempfile.TemporaryDirectory() as folder, coordinator_process() as served, closing(Console()) as console:
        work = ForkedFunction(function, args, Path(folder))
        settings = WorkerSettings(served.address, _JOB, least, n, token=served.token)
        # Ends are not reported to the coordinator, as that would need grpc here; links and streams show them.
        launcher = Launcher(work, terms, settings, console, grace=grace, report_exit=lambda *_: None)
        launcher.run()
        results = _results(work.returned())
        if (failure := launcher.failure) is not None and len(results) < least and not launcher.interrupted_by:
            raised = work.raised(failure.pid)
            raise RuntimeError(f"{failure}: {raised}" if raised else str(failure))
    if launcher.interrupted_by is not None:
        signal.raise_signal(launcher.interrupted_by)  # now for the handler that this process has
    return results


def _check_this_process() -> None:
    reason = ""
    if sys.platform != "linux":
        reason = f"that does not work on {sys.platform}"
    elif threading.current_thread() is not threading.main_thread():
        reason = "call it on the main thread: signals come there"
    elif has_loop_thread():
        reason = "it has joined a job or asked a coordinator itself, and grpc does not survive a fork: start it again"
    elif _has_used_cuda():
        reason = (
            "it has used CUDA, which does not survive a fork: start it again, and let the function use CUDA. "
            "torch.cuda.is_available() uses it too, and so does backward() on a machine with GPUs"
        )
    if reason:
        raise UnsupportedOp(f"paceline.run cannot fork this process: {reason}")


def _has_used_cuda() -> bool:
    """True if torch could not use CUDA in a child of this process; only a child knows."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch.cuda, "_is_in_bad_fork"):
        return False

    def try_it() -> None:
        torch.ones(1, requires_grad=True).backward()  # raises if autograd has started a thread for a GPU
        if torch.cuda._is_in_bad_fork():
            raise RuntimeError

    return not works_in_a_child(try_it)


def _results(found: list[Returned]) -> dict[int, Any]:
    members = [each for each in found if each.rank >= 0]
    last = max((each.generation for each in members), default=0)
    of_last = [each for each in members if each.generation == last]
    return {each.rank: each.value for each in sorted(of_last, key=lambda each: each.rank)}
