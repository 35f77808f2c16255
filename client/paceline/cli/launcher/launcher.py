"""The launcher: one loop over its workers' pipes and exits, and over the signals that it gets itself."""

from __future__ import annotations

import contextlib
import itertools
import os
import selectors
import shutil
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from paceline._base.launcher_variables import TORCH_WORLD
from paceline.cli.launcher.console import Console
from paceline.cli.launcher.left_behind import HUNG_S, TELL_S, LeftBehind
from paceline.cli.launcher.leftovers import compile_folder
from paceline.cli.launcher.printed import Printed
from paceline.cli.launcher.spares import SpareSchedule
from paceline.cli.launcher.torch_worlds import TorchWorlds
from paceline.cli.launcher.worker import NEWS, Start, Worker
from paceline.launch._environment import (
    WorkerSettings,
    allowed_cores,
    share_of_cores,
    without_torchruns,
    worker_environment,
)
from paceline.launch._replicas import ReplicaSupervision
from paceline.launch._supervision import DRAIN_S, Exit, Supervision, Terms, likely_cause_first
from pacelinepb.v1.session_pb2 import ProcessIdentity

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals on which the launcher ends the workers; it passes SIGUSR2 on to them."""

_LAST_S = 10.0
"""Seconds after the last end of a worker, when it is said which ones still run: one may hang, or be stopped."""

_START_S = 10.0
"""Seconds after the start when it is said that no worker has done anything yet, since an import may take so long."""

_NAMED = 3
"""Workers that a line names; of more it says how many."""

_DRAIN_S = 1.0
"""Seconds after the last worker's end in which to read on from pipes that a grandchild still holds open."""

_POLL_S = 0.05
"""Seconds between two checks for ended workers, on systems without pidfd."""


class Launcher:
    """Runs workers until all have ended, and restarts those that fail as far as the terms allow.

    It must run on the main thread: signals arrive there, and workers die with the thread that started them.

    Args:
        work: SCRIPT ARGS..., -m MODULE ARGS..., or -- PROGRAM ARGS...; or what starts a worker otherwise.
        terms: how many workers, or replicas, and what to do about those that fail.
        settings: what workers are told of the job.
        console: shows what happens.
        grace: seconds that a failed worker's peers get to end by themselves if the job cannot go on.
        report_exit: tells the coordinator how a process ended, and the last lines that it printed; must not block.
        bind: bind each worker to its share of the cores, if there is one for each (`share_of_cores`).
        spares: how many processes wait with their imports done, to replace failed workers. They need a script or a
            module, and no replicas.
        replica_size: so many workers in a row are the ranks of one replica, and find its world of torch.distributed in
            their environment; None for workers that are members by themselves. If there are no other workers and none
            is restarted, these find a world of all of them: then scripts for torchrun run too.
    """

    def __init__(
        self,
        work: Sequence[str] | Start,
        terms: Terms,
        settings: WorkerSettings,
        console: Console,
        *,
        grace: float,
        report_exit: Callable[[ProcessIdentity, int, str], None],
        bind: bool = True,
        spares: int = 0,
        replica_size: int | None = None,
    ) -> None:
        self._compiled: Path | None = None
        """The folder in which each process has one for what torch compiles there."""
        self._processes = itertools.count()
        self._compiled_by: dict[int, Path] = {}
        """The folder of each process, by pid."""
        self._work = work
        self._started: set[int] = set()  # numbers of workers
        self._count = terms.workers * (replica_size or 1)
        self._replica_size = replica_size
        world_size = replica_size or (terms.workers if terms.alone and not terms.elastic else None)
        self._worlds = None if world_size is None else TorchWorlds(world_size)
        self._cores = allowed_cores() if bind else set()
        self._settings = settings
        self._console = console
        self._report_exit = report_exit
        self._supervision = (
            Supervision(grace, terms) if replica_size is None else ReplicaSupervision(grace, terms, replica_size)
        )
        self._signals: list[signal.Signals] = []
        self._draining = ""  # why `drain` was called
        self._drain_s = DRAIN_S
        self._told_to_drain = False
        self._wakeup: int | None = None
        self._wakeup_lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._pidfds: dict[int, int] = {}
        self._has_pidfds = hasattr(os, "pidfd_open")
        self._drained_by: float | None = None
        self._remark_at: float | None = None  # when to say which workers still run
        self._silent_until: float | None = None  # when to say that no worker has done anything yet; None once one has
        self._elastic = terms.elastic
        self._left_behind = LeftBehind()
        self._look_at_views = False  # True if a worker has sent news, or ended, since the last look
        self._job = ""  # the last whose steps a worker has begun
        self._done: set[str] = set()
        self._schedule = SpareSchedule(spares)
        self._spares: list[Worker] = []  # the oldest first
        self._replaced: list[Worker] = []  # workers whose pipes a grandchild still holds open
        self.workers: list[Worker] = []  # the latest in each slot

    def run(self) -> int:
        """Starts the workers and waits until they have ended; returns the exit code, by `Supervision`'s rule.

        On an OSError one cannot be started, and the others have been killed.
        """
        with self._selector, self._catch_signals(), compile_folder() as self._compiled:
            try:
                for index in range(self._count):
                    self.workers.append(self._worker(index))
                    self._attend(self.workers[index])
                self._silent_until = time.monotonic() + _START_S
                self._obey_signals()  # `drain` may have been called before the pipe existed that wakes this loop
                while self._unfinished():
                    self._turn()
            finally:
                self._abandon()
        if len(self.workers) > 1 and not self.interrupted_by and all(worker.alone for worker in self.workers):
            self._console.say(
                "no worker called paceline.join() or torch.distributed.init_process_group(): each of the "
                f"{len(self.workers)} ran the whole script by itself"
            )
        if self._supervision.summary:
            self._console.say(self._supervision.summary)
        return self._supervision.exit_code

    @property
    def failure(self) -> Exit | None:
        """The failure that determines the exit code; None if none is left."""
        return self._supervision.failure

    @property
    def interrupted_by(self) -> signal.Signals | None:
        """The signal by which the workers were told to end; None if they were not."""
        return self._supervision.interrupted_by

    def drain(self, why: str, seconds: float = DRAIN_S) -> None:
        """Ends the workers as on SIGTERM; any thread may call it at any time, and only the first call counts.

        A SIGTERM after it is the same order: the scheduler says again what a source has said before. `why` completes
        "stopping 2 workers: ...". The workers of an elastic job have `seconds` to leave, until they are killed.
        """
        with self._wakeup_lock:
            if not self._draining:
                self._draining, self._drain_s = why, seconds
            if self._wakeup is not None:
                os.write(self._wakeup, b"\0")

    def _worker(self, index: int) -> Worker:
        """Starts a worker, or turns a spare into one."""
        cores = share_of_cores(index, self._count, self._cores)
        self._bury_spares()
        from_spare = bool(self._spares)
        if from_spare:
            # Even a spare whose imports are not done yet is ahead of a new process.
            worker = self._spares.pop(0)
            worker.begin(index, cores)
        else:
            worker = self._process(index, cores)
        self._schedule.worker_started(time.monotonic(), from_spare)
        return worker

    def _process(self, index: int, cores: Collection[int] | None = None, *, spare: bool = False) -> Worker:
        compiled = None if self._compiled is None else self._compiled / str(next(self._processes))
        base, world = dict(os.environ), dict[str, str]()
        # The job has waited for the first process of each number; it must not wait again because of another one.
        settings = replace(self._settings, at_once=1) if spare or index in self._started else self._settings
        if not spare:
            self._started.add(index)
        if self._worlds is not None:
            base, world = without_torchruns(base), self._worlds.environment(index)
            if self._replica_size is None:
                world[TORCH_WORLD] = "1"
        worker = Worker(
            index,
            self._work,
            lambda fd: worker_environment(base, settings, fd, index, compiled) | world,
            cores,
            spare=spare,
            replica_size=self._replica_size,
        )
        if compiled is not None:
            self._compiled_by[worker.pid] = compiled
        return worker

    def _attend(self, worker: Worker) -> None:
        """Starts to watch a worker's lines and its end."""
        self._supervision.began(worker.index, time.monotonic())
        for stream, fd in worker.streams.items():
            self._selector.register(fd, selectors.EVENT_READ, (worker, stream))
        self._watch_end(worker)

    def _watch_end(self, process: Worker) -> None:
        """Makes the end of a process wake the loop."""
        if self._has_pidfds and process.pid not in self._pidfds:
            self._pidfds[process.pid] = os.pidfd_open(process.pid)
            self._selector.register(self._pidfds[process.pid], selectors.EVENT_READ, None)

    @property
    def _restartable(self) -> int:
        return self._supervision.restartable([worker.index for worker in self.workers if worker.running])

    def _keep_spares(self) -> None:
        """Starts the spares that are due, and ends those that are no longer useful."""
        self._bury_spares()
        while len(self._spares) > self._schedule.wanted(self._restartable):
            self._dismiss(self._spares.pop())
        now = time.monotonic()
        while (due := self._schedule.due_at(len(self._spares), self._restartable)) is not None and due <= now:
            try:
                self._spares.append(self._process(0, spare=True))
                self._watch_end(self._spares[-1])
            except OSError:  # no memory, or too many processes: workers continue without a spare
                self._schedule.failed(now)

    def _bury_spares(self) -> None:
        """Removes spares that have died."""
        for spare in [spare for spare in self._spares if spare.reap() is not None]:
            self._spares.remove(spare)
            self._dismiss(spare)
            self._schedule.failed(time.monotonic())

    def _dismiss(self, spare: Worker) -> None:
        spare.dismiss()
        self._forget(spare.pid)

    def _start_again(self) -> None:
        """Replaces the failed workers whose restart is due."""
        for index in self._supervision.restarts_due(time.monotonic()):
            failed = self.workers[index]
            try:
                self.workers[index] = self._worker(index)
            except OSError as error:  # no memory, or too many processes: this may pass
                self._console.say(f"cannot start a worker in place of {failed}: {error.strerror}")
                end = failed.end()  # with 0 if a mate of its replica has failed
                self._say_what_is_done(replace(end, returncode=end.returncode or 1, follows=False, joined=False))
                continue
            self._replaced = [worker for worker in [*self._replaced, failed] if worker.streams]
            self.workers[index].replaces_another = True
            self._attend(self.workers[index])

    def _unfinished(self) -> bool:
        """True while a worker runs or a restart is pending, or a pipe may hold lines."""
        if self._supervision.restarting or any(worker.running for worker in self.workers):
            return True
        if self._drained_by is None:
            self._drained_by = time.monotonic() + _DRAIN_S
        return (
            any(worker.streams for worker in [*self._replaced, *self.workers]) and time.monotonic() < self._drained_by
        )

    def _turn(self) -> None:
        """Waits for events and handles all that have occurred."""
        next_spare = self._schedule.due_at(len(self._spares), self._restartable)
        outputs = [worker.output_due for worker in self.workers]
        remarks = (self._remark_at, self._silent_until, self._left_behind.deadline)
        deadlines = [
            at
            for at in (self._supervision.deadline, self._drained_by, next_spare, *remarks, *outputs)
            if at is not None
        ]
        timeout = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        if not self._has_pidfds:
            timeout = _POLL_S if timeout is None else min(timeout, _POLL_S)
        pipes: list[tuple[Worker, str]] = []
        for key, _ in self._selector.select(timeout):
            if isinstance(key.data, tuple):
                pipes.append(key.data)
            elif key.data is not None:
                os.read(key.data, 4096)  # empties the wake-up pipe
        # News first, so that lines printed after the view formed are shown with their rank.
        for worker, stream in sorted(pipes, key=lambda pipe: pipe[1] != NEWS):
            self._hand_on(worker, stream, self._read(worker, stream))
        now = time.monotonic()
        for worker in self.workers:
            worker.show_output(now)
        self._reap()
        self._obey_signals()
        self._remark_on_start(now)
        self._remark_on_last()
        self._end_hung(now)
        self._start_again()
        self._keep_spares()

    def _remark_on_start(self, now: float) -> None:
        """Says after some seconds that no worker has done anything yet."""
        if self._silent_until is None or now < self._silent_until:
            return
        self._silent_until = None
        is_python = not callable(self._work) and self._work[0] != "--"
        if self._supervision.interrupted or not is_python or not any(worker.running for worker in self.workers):
            return
        count = len(self.workers)
        who = "the worker has not" if count == 1 else f"none of the {count} workers has"
        self._console.say(f"{who} joined or printed anything yet; imports may take a while")

    def _end_hung(self, now: float) -> None:
        """Says without which workers the job goes on though they run, and ends those that hang."""
        deadline = self._left_behind.deadline
        if not self._elastic or not (self._look_at_views or (deadline is not None and deadline <= now)):
            return
        self._look_at_views = False
        views = sorted(
            (worker.view for worker in self.workers if worker.view is not None), key=lambda view: view.heard_at
        )
        latest = {(view.job, view.generation): view for view in views}
        behind = [worker for worker in self.workers if worker.is_behind(latest.values())]
        self._left_behind.see([worker.index for worker in behind], now)
        for slot in self._left_behind.to_tell(now):
            worker = self.workers[slot]
            job = "the job is done" if self._supervision.job_is_done else "the job goes on"
            how = "is stopped by SIGSTOP" if worker.is_stopped else "hangs, computes for long, or is frozen"
            killed = f"it is killed unless it comes back within {HUNG_S - TELL_S:g} s"
            then = killed if self._supervision.ends_hung(slot) else "it may come back"
            self._console.say(f"{job} without the former {worker} (pid {worker.pid}), which {how}; {then}")
        for slot in self._left_behind.hung(now):
            worker = self.workers[slot]
            # A debugger holds a process for as long as its user wants.
            if not worker.killed_as and self._supervision.ends_hung(slot) and not worker.is_traced:
                worker.killed_as = f"was killed after the job had gone on without it for {HUNG_S:g} s"
                self._supervision.killed_hung(slot)
                worker.signal(signal.SIGKILL)

    def _remark_on_last(self) -> None:
        """Says which workers still run, some seconds after all others have ended in good order."""
        if self._remark_at is None or time.monotonic() < self._remark_at:
            return
        self._remark_at = None
        running = [worker for worker in self.workers if worker.running]
        ended = [worker for worker in self.workers if not worker.running]
        if running and ended and all(worker.succeeded for worker in ended):
            names = ", ".join(
                f"{worker} (pid {worker.pid}{', stopped by SIGSTOP or a debugger' if worker.is_stopped else ''})"
                for worker in running[:_NAMED]
            )
            more = f" and {len(running) - _NAMED} more" if len(running) > _NAMED else ""
            self._console.say(f"all other workers have ended; waiting for {names}{more}")

    def _read(self, worker: Worker, stream: str) -> list[Printed]:
        parts = worker.read(stream)
        if parts is None:
            # First, while it is open: a forked worker may hold a copy of the pipe, for which events would go on.
            self._selector.unregister(worker.streams[stream])
            parts = worker.close(stream)
        return parts

    def _hand_on(self, worker: Worker, stream: str, parts: Sequence[Printed]) -> None:
        for printed in parts:
            self._silent_until = None
            if stream != NEWS:
                self._console.line(worker, stream, printed)
            elif printed.ended and (record := worker.heard(printed.text)) is not None:
                self._console.record(worker, record)
                self._note(worker, record)

    def _note(self, worker: Worker, record: dict[str, Any]) -> None:
        """Takes note of what a worker reports about the job."""
        self._look_at_views = True
        kind, job = record.get("kind"), str(record.get("job"))
        if kind == "loop" and record.get("done") is True:
            self._done.add(job)
        elif kind == "loop" and record.get("unfinished") is True and not (record.get("waits") or record.get("left")):
            self._job = job
        elif kind == "view":  # it was started again
            self._done.discard(job)
        was_done = self._supervision.job_is_done
        self._supervision.job_done(self._job in self._done, time.monotonic())
        if self._supervision.job_is_done and not was_done:
            self._left_behind.begin_anew()
        if worker.replaces_another and worker.rank is not None:
            worker.replaces_another = False
            if worker.position is None:
                self._console.say(f"a new worker has joined as {worker} (pid {worker.pid})")
            elif worker.position == 0:
                self._console.say(f"{worker.member} has joined again")

    def _reap(self) -> None:
        """Handles workers that have ended: first tells the coordinator, where every millisecond counts."""
        ends: dict[Exit, Worker] = {}
        for worker in self.workers:
            if (returncode := worker.reap()) is not None:
                last = [(stream, self._read(worker, stream)) for stream in list(worker.streams)]
                end = worker.end()
                cause = f"\npaceline: this worker {end.words}" if end.words else ""
                self._report_exit(worker.identity, returncode, worker.last_output + cause)
                self._forget(worker.pid)
                for stream, parts in last:  # its last news may name the member over which it failed
                    self._hand_on(worker, stream, parts)
                ends[worker.end()] = worker
        if ends:
            self._look_at_views = True
            self._remark_at = time.monotonic() + _LAST_S
        for end in likely_cause_first(list(ends)):
            expected = end.returncode == 0 or self._supervision.stopping or self._replica_size is not None
            told = self._say_what_is_done(end)
            self._console.ended(ends[end], end, expected or told)

    def _say_what_is_done(self, end: Exit) -> bool:
        sentence = self._supervision.ended(end, time.monotonic())
        if sentence:
            self._console.say(sentence)
        return bool(sentence)

    def _obey_signals(self) -> None:
        now = time.monotonic()
        while self._signals:
            received = self._signals.pop(0)
            if received in _ENDING:
                self._supervision.interrupt(received, now)
            else:  # SIGUSR2 asks for flight records, which the workers have
                asked = [worker for worker in self.workers if worker.ask(received)]
                count = f"{len(self.workers)} worker{'s'[: len(self.workers) != 1]}"
                self._console.say(f"asked {len(asked)} of {count} for a flight record")
        if self._draining and not self._told_to_drain:
            self._told_to_drain = True
            self._supervision.drain(now, self._drain_s)
        if isinstance(self._supervision, ReplicaSupervision):
            for index in self._supervision.mates_to_kill(now):
                self.workers[index].signal(signal.SIGKILL)
        signum = self._supervision.due(now)
        running = [worker for worker in self.workers if worker.running]
        if signum is None or not running:
            return
        verb = "stopping" if signum == signal.SIGTERM else "killing"
        count = f"{len(running)} worker{'s'[: len(running) != 1]}"
        if self._draining:
            self._console.say(f"{verb} {count}: {self._draining}")
        elif self._supervision.interrupted:
            self._console.say(f"{verb} {count}")
        else:
            self._console.say(f"{verb} {', '.join(map(str, running))}, still running after the first failure")
        # All are frozen until each has been signalled, because a worker that outlived another by a moment would report
        # its loss. SIGCONT also wakes workers that were already frozen, which get SIGTERM only then.
        for number in (signal.SIGSTOP, signum, signal.SIGCONT):
            for worker in running:
                worker.signal(number)

    def _abandon(self) -> None:
        """Kills all processes, closes all descriptors and passes on all lines, whatever happened."""
        if self._worlds is not None:
            self._worlds.close()
        for spare in self._spares:
            self._dismiss(spare)
        for worker in [*self._replaced, *self.workers]:
            if worker.running:
                worker.signal(signal.SIGKILL)
                while (returncode := worker.reap()) is None:
                    time.sleep(0.001)  # a killed process takes a moment to die
                self._report_exit(worker.identity, returncode, worker.last_output)
            self._forget(worker.pid)
            for stream in list(worker.streams):
                self._selector.unregister(worker.streams[stream])
                self._hand_on(worker, stream, worker.close(stream))

    def _forget(self, pid: int) -> None:
        """Gives back what is kept for a process that has ended."""
        if (compiled := self._compiled_by.pop(pid, None)) is not None and compiled.exists():
            threading.Thread(target=shutil.rmtree, args=(compiled, True), daemon=True).start()  # may take a second
        if (fd := self._pidfds.pop(pid, None)) is not None:
            self._selector.unregister(fd)
            os.close(fd)

    @contextlib.contextmanager
    def _catch_signals(self) -> Iterator[None]:
        """Queues signals for the loop while the workers run, so that no exception interrupts it."""
        wake, wakeup = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(wakeup, False)
        self._selector.register(wake, selectors.EVENT_READ, wake)

        def note(signum: int, frame: FrameType | None) -> None:
            self._signals.append(signal.Signals(signum))

        before = {signum: signal.signal(signum, note) for signum in (*_ENDING, signal.SIGUSR2)}
        # In its C handler Python writes a byte here, which ends a `select` that has just begun, so no signal is missed.
        previous = signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        with self._wakeup_lock:
            self._wakeup = wakeup
        try:
            yield
        finally:
            with self._wakeup_lock:
                self._wakeup = None
            signal.set_wakeup_fd(previous)
            for signum, handler in before.items():
                signal.signal(signum, handler)
            self._selector.unregister(wake)
            os.close(wake)
            os.close(wakeup)
