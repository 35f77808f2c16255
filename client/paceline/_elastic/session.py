"""The user's session: a member's place in a job, from `join` to `leave`."""

from __future__ import annotations

import abc
import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from paceline import errors
from paceline._base.processes import check_process
from paceline._elastic.mates import ALONE, Alone
from paceline._group import Group
from paceline._links.base import Peer
from paceline._links.local import local_meshes
from paceline._session.launcher_pipe import tell_once
from paceline._session.store import MemoryStore, Store
from paceline.config import Config

if TYPE_CHECKING:
    from paceline._elastic.job_line import JobLine
    from paceline._elastic.retry import Attempt
    from paceline._elastic.step import Step
    from paceline._elastic.step_parts import Loader, StepParts
    from paceline._elastic.train_state import TrainState
    from paceline._elastic.training_loop import TrainingLoop
    from paceline._session.member import MemberConnection

T = TypeVar("T")

MAX_NAME_BYTES = 256
"""Longest name of a barrier (session.proto)."""

_DO_WITHOUT = (
    "A script must not depend on it before its steps. Put work for one worker of each host, such as a download, into "
    "`with paceline.once_per_host(path) as first: if first: ...`"
)

_log = logging.getLogger("paceline.session")


class Session(abc.ABC):
    """One member's registration in a job. `paceline.join` makes it; a context manager that leaves at its end.

    Attributes:
        job: name of the job.
        group: the object that collectives are called on; the same object for the session's life.
        store: the job's key-value store.
    """

    job: str
    group: Group
    store: Store
    _all_start_again = False  # True if all restart once one fails, as under torchrun: no worker joins later
    _line: TrainingLoop | None = None
    _mates: Alone = ALONE
    _left = False
    _thread: threading.Thread | None = None  # the one that has to go on, or the session does not end
    _at_end = False  # True once the script is past all that it does with the session
    _asked_early = ""  # "rank" or "size", if the script read it before the first loop over steps
    _on_commit: list[Callable[[int], None]]
    _on_view: list[Callable[[], None]]

    @property
    def rank(self) -> int:
        """This member's rank in the current view; another member may have this rank in the next view.

        Raises:
            StepOrderError: this worker is in no view yet. A worker that joins a job whose steps are running, as every
                replacement does, gets its rank in its first step.
        """
        return self._in_view("rank").rank

    @property
    def size(self) -> int:
        """Number of members in the current view.

        Raises:
            StepOrderError: as for `rank`.
        """
        return self._in_view("size").size

    @property
    def replica(self) -> int:
        """Number of this worker's replica in the current view, from 0; the same as `rank`.

        Raises:
            StepOrderError: as for `rank`.
        """
        return self._in_view("replica").rank

    @property
    def replicas(self) -> int:
        """Number of replicas in the current view; the same as `size`, since `group` has one rank of each replica.

        Raises:
            StepOrderError: as for `rank`.
        """
        return self._in_view("replicas").size

    def _in_view(self, asked: str) -> Group:
        if self._line is None:
            self._asked_early = self._asked_early or asked
        if not self.members:
            if (over := self._over()) is not None:
                raise over
            raise errors.StepOrderError(
                f"session.{asked} is not known: {self.group._core.mesh.fault.error()}. {_DO_WITHOUT}"
            )
        return self.group

    def _over(self) -> errors.Dismissed | None:
        """Returns the end of a worker that has come after the last step; None if the job is not done."""
        return None

    def _end_loop(self, cause: BaseException | None) -> BaseException | None:
        """Ends the job if the script has left the loop early, like all others; returns the error if it cannot."""
        if self._line is not None:
            self._line.at_end.close()
        in_order = cause is None or (isinstance(cause, SystemExit) and cause.code in (None, 0))
        if not in_order or self._line is None:
            return None
        if not (self._at_end or self._line.left):  # the script leaves alone, inside the loop
            self._line.tell_launcher(unfinished=False)
            return None
        try:
            self._line.break_off()
        except BaseException as error:  # noqa: BLE001  raised at the end of `leave`
            return error
        return None

    @property
    def generation(self) -> int:
        """Number of the current view; it only grows. 0 before the first view."""
        return self.group.generation

    @property
    @abc.abstractmethod
    def members(self) -> Sequence[Peer]:
        """The members of the current view in rank order; empty while this worker is in no view."""

    def steps(
        self,
        state: TrainState,
        *,
        total: int,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_every: int | None = None,
        seed: int = 0,
        receipts: str | os.PathLike[str] | None = None,
        receipts_every: int = 10,
        balance: bool = False,
    ) -> Iterator[Step]:
        """Yields each step of the job, and again until it commits; workers may die, freeze, join and leave meanwhile.

            for step in session.steps(state, total=1000):
                with step:
                    dy = loss_gradient(ddp(x[step.indices]), t[step.indices])
                    optimizer.zero_grad()
                    ddp.backward(dy, step.weight)
                    optimizer.step()
                if step.applied:
                    log(...)

        A failure of the group inside the block undoes the step on every member, and the loop yields the same number
        again in the next generation. All state that the block changes must be in `state`. Output to the screen and to
        files happens once for each attempt (`on_commit` reports each committed step once). Collectives belong before
        `optimizer.step()`, or between steps into `retry()`, or in a step with several updates after `step.keep_copy()`.
        They are refused elsewhere. The first three steps of the job check that no state changes outside of the block,
        or before `optimizer.step()`; learning rates and `requires_grad` may change.

        A worker that joins later receives the state from the others, and begins with their next step. SIGTERM and
        `paceline drain` make a worker leave after its step: `Dismissed` (a SystemExit) ends its script with code 0. It
        also ends the script of a worker that comes when all steps are done.

        Args:
            state: all that training changes.
            total: number of the last step.
            checkpoint_dir: where checkpoints are kept, and looked for at the start; the same on all workers. If the
                state is sharded (`FSDP`), or the workers are ranks of replicas, it must lie on a disk that all workers
                share, since they write together; replicas write with torch.distributed.checkpoint, which reads it too.
            checkpoint_every: steps between two checkpoints; with a directory alone, only the last state is kept.
            seed: seed of `step.rng`, and of torch's generator, which each step seeds with (seed, step, rank), or each
                microbatch with (seed, step, microbatch).
            receipts: a file to which rank 0 appends a receipt of every tenth step, and of each step with a checkpoint:
                one line of JSON with the SHA-256 of the state, and of the receipt before. `paceline replay` computes a
                step again and compares. Needs a sampler with microbatches.
            receipts_every: steps between two receipts. A receipt takes as long as the SHA-256 of the whole state.
            balance: lets each worker's share of the batch follow its speed, so that a slow worker does not hold up the
                others. Speeds are compared every fourth step, and shares change if that makes the slowest worker at
                least 10 % faster. With microbatches whole ones move, and the bits stay the same; without, weights
                follow the shares. Needs a sampler; the same on all workers. `stats` has a worker's share and speed.

        Raises:
            Dismissed: this worker has nothing more to do.
            StepVoid: a step failed five times in a row; the text has the causes.
            TypeError: `total` or `seed` is no whole number.
            ValueError: an argument is out of range, or `state` lacks a model that its optimizers train, or a scheduler.
            StepOrderError: a collective came after `optimizer.step()` or between steps, or `optimizer.step()` outside
                of a step; the state changed where it must not, or by an optimizer that is no part of it; or the state
                is half changed, because an earlier loop was interrupted in a step: load a checkpoint, or make its
                objects anew.
            SettingsMismatch, SizeMismatch: this worker trains something else than the others; the text says what.
            DivergenceError: members hold different bits.
            OrphanedError: the coordinator did not come back; or some shards of the state are lost, and there is no
                checkpoint to continue from.
            CheckpointFailed: the last checkpoint could not be written, or one that others see does not appear.
            LinkUnavailable: no member gave this worker the state, in many tries.
            CheckpointDamaged: all checkpoints are damaged.
            InvalidWorldSize: the model is sharded over nodes, and the workers of a fixed world do not fill whole nodes.
            UnsupportedOp: the state cannot be given to another member; or receipts of a state that follows from the
                number of workers (no microbatches), or that no member has whole (FSDP); or a replica of several ranks
                with receipts, `balance` or `paceline.FSDP`; or `balance` without a sampler, or with a model on a GPU,
                whose time is not measured.
        """
        from paceline._elastic.steps import make_loop, run_steps
        from paceline._microbatch.replay import Replay

        check_process()
        if self._line is not None and not (self._line.done or self._line.left):
            raise errors.StepOrderError("session.steps() is running already: a session has one line of steps")
        if self._asked_early and self._line is None and not self._all_start_again:
            tell_once(
                _log,
                f"session.{self._asked_early} was read before session.steps(): a worker that is restarted would end "
                f"there with StepOrderError, because it gets a rank only in its first step. {_DO_WITHOUT}",
            )
        self._thread = threading.current_thread()
        replay = Replay.of_environment(os.environ)
        self._line = make_loop(
            self._job_line(),
            state._core,
            total if replay is None else replay.step,
            checkpoint_dir=checkpoint_dir,
            checkpoint_every=checkpoint_every,
            seed=seed,
            before=self._line,
            receipts=receipts,
            receipts_every=receipts_every,
            balance=balance,
            replay=replay,
        )
        self._line.on_commit = self._on_commit
        self._line.on_view = self._on_view
        if replay is not None:
            return replay.follow(run_steps(self._line, state._core), state._core)
        return run_steps(self._line, state._core)

    def batches(self, state: TrainState, loader: Loader[T], *, total: int, **options: Any) -> StepParts[T]:
        """Returns the parts of each step's samples, for code whose loop is over batches: `steps`, part by part.

            loader = paceline.torch.ElasticBatches(DataLoader(dataset, 32), per_step=4)
            batches = session.batches(state, loader, total=1000)
            for part in batches:
                with batches.step, contextlib.nullcontext() if batches.is_last else replicated.no_sync():
                    (loss_of(part.batch) * part.scale / 4).backward()
                    if batches.is_last:
                        optimizer.step()
                        optimizer.zero_grad()

        A step begins when the loop asks for its first part, and ends with the block of its last part. If it fails in a
        block, the loop goes on with the first part of the next attempt. The body's code behind the block runs in undone
        attempts too.

        Args:
            state: as for `steps`.
            loader: an object with `parts(step)`, which returns a list of this rank's parts, equally long on all ranks.
            total: as for `steps`.
            options: as for `steps`.

        Raises:
            StepOrderError: a part was not used in its block.
            PacelineError, SystemExit: as for `steps`.
            Exception: the loader raised it.
        """
        from paceline._elastic.step_parts import StepParts

        return StepParts(self.steps(state, total=total, **options), loader)

    def retry(self) -> Iterator[Attempt]:
        """Yields attempts at a block between two steps that changes no state, such as an evaluation.

        All members must call it alike: decide by `step.number`, not by `step.applied`, which may differ by member.

            for attempt in session.retry():
                with attempt:
                    score = group.all_reduce(evaluate(...), op="mean")

        A failure of the group ends the attempt, and the next one runs in the next generation. A worker left out of the
        new generation skips the block.

        State that the block changes differs between members then. The first three steps of the job look for such
        changes, only in objects of the `TrainState`; nothing checks variables of your own. So give the `TrainState` a
        dict with what you count from step to step (such as evaluations without a better score), and change it inside
        the block of a step: it is rolled back with that step, and a worker that joins receives it.

        Raises:
            PacelineError: a failure that `steps` cannot recover from, because it has not begun or has ended.
        """
        from paceline._elastic.retry import attempts

        return attempts(self._line, self.group, self._mates)

    def stop(self) -> None:
        """Ends the loop on all members after the next step, as if that were its last: one call, on any rank, is enough.

            for step in session.steps(state, total=1000):
                with step:
                    ...
                if step.applied and is_good_enough(state):
                    session.stop()

        The next step carries the request. The last checkpoint is written, and the job is done: workers that come later
        are dismissed. If a member is lost in that step, the loop may end one step later. A request is lost if all that
        have asked die before the next step is complete, so ask again in each step while the condition holds. A `break`
        on all ranks at the same step ends the job too, at the end of the session, and a `break` on some of them is a
        `StepOrderError` on all.

        Raises:
            StepOrderError: no loop over steps runs.
        """
        if self._line is None or self._line.done or self._line.left:
            raise errors.StepOrderError("session.stop() ends the loop over session.steps(), and none is running")
        self._line.stop()

    def log(self, /, **values: float) -> None:
        """Shows values of this worker on the page, and in `paceline status`, `/metrics` and `stats`; no collective.

            session.log(loss=loss.item(), lr=scheduler.get_last_lr()[0])

        The last value of each name counts, until the same name is logged again. It travels with the next heartbeat,
        several times a second. What is shown is the mean over the workers that log the name. A step that is undone and
        run again logs again.

        Args:
            values: numbers, or what `float` takes, by name; for other names `session.log(**{"val/loss": 0.3})`. A
                tensor on a GPU is waited for.

        Raises:
            TypeError: a value is no number.
            ValueError: a name is too long (64 bytes), or has characters that cannot be printed, or this worker has
                logged more than 32 names.
        """
        self.group._core.counters.log(values)

    def stats(self) -> dict[str, float]:
        """Returns what this worker has counted since it joined, in one flat dict of numbers, as loggers take it.

            wandb.log(session.stats())
            for name, value in session.stats().items(): writer.add_scalar(name, value, step.number)

        Returns:
            `steps`: steps that it has committed; `undone`: steps that it began and that were undone, to be taken again;
            `samples`: of its own share in the committed steps, 0 without an `ElasticSampler`; `share`: its part of a
            batch now, 0 to 1; `speed`: samples that it computes in a second, without the time in which it waits in
            collectives: the median of the last steps, 0 until it is known, and for a model on a GPU; `skipped`:
            committed steps in which no member made an update; `skipped_samples`: of its share in them; `goodput`: the
            share, 0 to 1, of the seconds since its own first step that went into steps which were applied (`paceline
            status` shows the job's, from its first worker on); `collective_seconds`: seconds that its threads have
            waited in collectives; `sent_bytes`: bytes that it has sent to other workers; `sent_bytes/shm`,
            `sent_bytes/tcp`, `sent_bytes/grpc`: the same by kind of link; `checkpoints`: checkpoints that it has
            written, `checkpoint_step`: step of the last one, `checkpoint_seconds`: seconds that all of them took,
            `checkpoint_failures`: checkpoints that it could not write (the lowest rank of each host writes; a sharded
            state counts at rank 0); `state_bytes` and `state_seconds`: what it has fetched of the training state from
            other workers, and how long that took; `logged/NAME`: what `log` was given last; `generation`, `rank` and
            `size`: its place in the current view,
            without `rank` while it is in none. A step counts as committed once the next one has begun, so right after
            its block `steps` is one less than `step.number`. None of the sums ever falls.
        """
        group = self.group
        counted = group._core.counters.read(group._core.mesh.sent_bytes)
        sent = {kind: counted.sent_bytes.get(kind, 0) for kind in ("shm", "tcp", "grpc", *counted.sent_bytes)}
        return {
            "steps": counted.committed,
            "undone": counted.undone,
            "samples": counted.samples,
            "share": counted.share,
            "speed": counted.speed,
            "skipped": group._core.counters.skipped,
            "skipped_samples": group._core.counters.left_out,
            "goodput": group._core.counters.goodput,
            "collective_seconds": counted.in_collectives,
            "sent_bytes": sum(sent.values()),
            **{f"sent_bytes/{kind}": size for kind, size in sent.items()},
            "checkpoint_step": counted.checkpoint_step,
            "checkpoints": counted.checkpoints,
            "checkpoint_failures": counted.checkpoint_failures,
            "checkpoint_seconds": counted.checkpoint_time,
            "state_bytes": counted.state_bytes,
            "state_seconds": counted.state_time,
            **{f"logged/{name}": value for name, value in counted.logged.items()},
            "generation": self.generation,
            "size": len(self.members),
            **({"rank": group.rank} if self.members else {}),
        }

    def on_commit(self, hear: Callable[[int], None]) -> None:
        """Registers a function that the training thread calls with the number of each committed step, once, in order.

        A step is committed when every member has applied it, which the next step finds out.
        """
        self._on_commit.append(hear)

    def on_view(self, hear: Callable[[], None]) -> None:
        """Registers a function that the training thread calls when a view begins; `rank` and `size` are new by then."""
        self._on_view.append(hear)

    @abc.abstractmethod
    def _job_line(self) -> JobLine:
        """Returns the part of this session that steps use."""

    @abc.abstractmethod
    def barrier(self, name: str, *, timeout: float | None = None) -> None:
        """Waits until every member of the view has called it with this name, as often as this member has.

        Args:
            name: 1 to 256 bytes.
            timeout: seconds; None for `call_timeout`. If the coordinator is away, it has 5 s more to return and answer.

        Raises:
            OperationTimeout: some members did not arrive; the text lists them (rank, host, since when).
            PeerLost: a member was lost; the text names it.
            StepOrderError: it was called in a microbatch of a step.
        """

    def _refuse_in_microbatch(self) -> None:
        if refusal := self.group._core.order.refusal("a barrier"):
            raise errors.StepOrderError(refusal)

    @abc.abstractmethod
    def leave(self, cause: BaseException | None = None) -> None:
        """Ends the session: delivers what was sent, then tells the others. Idempotent.

        If the script has left the loop over the steps by `break`, the job is done at that step, provided that all have.
        A call inside the loop leaves alone, and the others go on.

        Args:
            cause: the error that makes this member leave; the others' errors will name it.

        Raises:
            StepOrderError: this member has left the loop over the steps, and others have not, or the reverse.
            PacelineError: that could not be found out, or the last checkpoint could not be written.
        """

    def close(self) -> None:
        """Ends the session without an error: `leave()`, under the name by which Python closes things.

        Raises:
            StepOrderError, PacelineError: as for `leave`.
        """
        self.leave()

    def __repr__(self) -> str:
        group = getattr(self, "group", None)  # None while the session is being made
        if self._left or group is None:
            place = "closed" if self._left else "not joined"
        else:
            place = f"rank {group.rank} of {group.size}" if group.size else "in no view"
        generation = f", generation {group.generation}" if group is not None and group.generation else ""
        return f"<Session {place}, job {getattr(self, 'job', '')!r}{generation}>"

    def __enter__(self) -> Self:
        self._thread = threading.current_thread()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._at_end = True
        self.leave(error)


class SoloSession(Session):
    """A world of one without a coordinator: the result of `join` when no PACELINE_* variable is set."""

    def __init__(self, job: str, config: Config, mates: Alone = ALONE) -> None:
        self._mates = mates
        self.job = job
        (mesh,) = local_meshes(1)
        self.group = Group(mesh, config)
        self.store = MemoryStore(config.call_timeout)
        self._members = tuple(mesh.peers)
        self._left = False
        self._config = config
        self._on_commit, self._on_view = [], []

    def _job_line(self) -> JobLine:
        from paceline._elastic.job_line import SoloLine

        return SoloLine(self.job, self.group, self._config, self._mates)

    @property
    def members(self) -> Sequence[Peer]:
        """See `Session.members`."""
        return self._members

    def barrier(self, name: str, *, timeout: float | None = None) -> None:
        """See `Session.barrier`: returns at once, since there are no other members."""
        self._refuse_in_microbatch()
        if self._left:
            raise errors.SessionClosed("the session has ended")

    def leave(self, cause: BaseException | None = None) -> None:
        """See `Session.leave`."""
        if not self._left:
            self._left = True
            failure = self._end_loop(cause)
            self.group.close()
            if failure is not None:
                raise failure


class CoordinatedSession(Session):
    """A session with a coordinator."""

    def __init__(self, connection: MemberConnection, config: Config, mates: Alone = ALONE) -> None:
        self._mates = mates
        self._connection = connection
        self._config = config
        self.job = connection.job
        self.group = connection.group
        self.store = connection.store
        self._leave_lock = threading.Lock()
        here = threading.current_thread()
        # A pool of threads may join on one and go on on any: nothing is known until a block or steps begin.
        self._thread = here if here is threading.main_thread() else None
        self._left = False
        self._on_commit, self._on_view = [], []
        self._after: Callable[[], None] = lambda: None
        """Called when the session has ended, so that code which serves only this session can stop."""
        atexit.register(self._leave_at_exit)

    def _needs_this_thread(self) -> bool:
        """True if the session does not end before the current thread goes on."""
        over = self._left or self._connection.inbox.done is not None or self.group._core.mesh.fault.failed
        if self._line is not None:
            over = over or self._line.done or self._line.left
        return not over and self._thread is threading.current_thread()

    def _over(self) -> errors.Dismissed | None:
        step = self._connection.inbox.done
        if self._line is not None or step is None:
            return None
        text = f"job {self.job!r} is done (step {step}); `paceline restart {self.job}` starts it anew"
        tell_once(_log, text)
        return errors.Dismissed(text)

    def _job_line(self) -> JobLine:
        from paceline._elastic.job_line import JobLine

        return JobLine(self._connection, self._config, self._mates)

    @property
    def members(self) -> Sequence[Peer]:
        """See `Session.members`."""
        return self._connection.mesh.peers

    def barrier(self, name: str, *, timeout: float | None = None) -> None:
        """See `Session.barrier`."""
        check_process()
        self._refuse_in_microbatch()
        if not 0 < len(name.encode()) <= MAX_NAME_BYTES:
            raise ValueError(f"a barrier's name has 1 to {MAX_NAME_BYTES} bytes, not {len(name.encode())}")
        if self._left:
            raise errors.SessionClosed("the session has ended")
        self._connection.barrier(name, self._config.call_timeout if timeout is None else timeout)

    def leave(self, cause: BaseException | None = None) -> None:
        """See `Session.leave`."""
        from paceline._session.leaving import leave

        check_process()
        with self._leave_lock:
            if self._left:
                return
            self._left = True
        atexit.unregister(self._leave_at_exit)
        start = time.monotonic()
        failure = self._end_loop(cause)
        cause = failure or cause
        # An error that the failed generation raised here is known to the others; one of this member's own is not.
        fault = self._connection.mesh.fault
        own = cause is not None and not isinstance(cause, SystemExit) and (fault.is_own or not fault.failed)
        try:
            leave(self._connection, f"{type(cause).__name__}: {cause}".rstrip(": ") if own else "")
        finally:
            self._after()
        _log.debug("left job %r in %.3f s", self.job, time.monotonic() - start)
        if failure is not None:
            raise failure

    def _leave_at_exit(self) -> None:
        try:
            check_process()
        except errors.ForkedSession:
            return  # a forked child that exits: the session is the parent's
        # The interpreter sets this when an uncaught exception ends a script; the others must be told of it. In an
        # interactive session it is any earlier error, which ended nothing.
        interactive = sys.flags.interactive or hasattr(sys, "ps1")
        self._at_end = True
        self.leave(None if interactive else getattr(sys, "last_value", None))
