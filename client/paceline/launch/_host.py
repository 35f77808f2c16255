"""Values that plug-ins return to `paceline run`: the scheduler that has started it, a cloud's notice (decision 22)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

Say = Callable[[str], None]
"""Shows a sentence of the launcher."""


@dataclass(frozen=True, slots=True)
class Host:
    """A scheduler, as its launchers see it. A field that is left out has the usual default of `paceline run`.

    An entry point in the group "paceline.hosts" names a function without arguments that returns one, or None if this
    process was not started by that scheduler. It raises `ValueError` if what the scheduler says cannot be understood.
    If several plug-ins know the process, the first by name wins.

    Attributes:
        title: the scheduler's word for what it runs, such as "Slurm job".
        job: name of the job.
        workers: how many workers this launcher starts.
        launchers: how many launchers the scheduler has started for the job, each with as many workers; launchers with
            different numbers of workers cannot be told.
        cores: how many processors this launcher has; None if unknown. If the system allows more than these, workers are
            not bound to cores, because others may be bound to the same ones.
        ends_at: when the job's time is over, in seconds since the epoch; None if it has no end, or none that is known.
        coordinator: given the job's name and a function that shows a sentence, yields the address of the coordinator at
            which the launchers meet, and runs it if this launcher is the one to do so; None if each launcher runs its
            own. It raises `ValueError` if it cannot be run safely. It is asked only if the user names no coordinator.
            The launcher that runs it must stay until no worker is left in the job, on other machines either: wait for
            that behind the `yield`.
    """

    title: str
    job: str | None = None
    workers: int | None = None
    launchers: int = 1
    cores: int | None = None
    ends_at: float | None = None
    coordinator: Callable[[str, Say], AbstractContextManager[str]] | None = None


@dataclass(frozen=True, slots=True)
class Notice:
    """A question whether this machine will be taken away, which `paceline run --notice NAME` asks each second.

    An entry point NAME in the group "paceline.notices" names a function without arguments that returns one. It raises
    `ValueError` if a setting of the user's cannot be used.

    Attributes:
        ask: returns why the machine will be taken, as a sentence; empty if it will not. It is called in a thread of its
            own, and raises `OSError` or `ValueError` if there is no answer; the first such text is shown.
        leave_s: seconds that the workers have to leave, from the answer on.
    """

    ask: Callable[[], str]
    leave_s: float
