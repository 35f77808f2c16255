"""`session.steps`: the loop over the steps of a job, while workers come and go."""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from paceline._base.numbers import checked_whole
from paceline._base.uncaught import is_let_go, takers, users_place
from paceline._elastic.balance import Balance
from paceline._elastic.job_line import JobLine
from paceline._elastic.mates import Alone, Mates
from paceline._elastic.replica_saver import ReplicaSaver
from paceline._elastic.rules import check_complete, no_other_optimizer
from paceline._elastic.sampler import CHECK_EVERY
from paceline._elastic.saver import JointSaver, Saver, warning_of_frozen
from paceline._elastic.state import StateCore
from paceline._elastic.step import Step
from paceline._elastic.training_loop import TrainingLoop
from paceline._group import Group
from paceline._microbatch.machine_bits import machine_words
from paceline._microbatch.receipts import EVERY, ReceiptBook
from paceline._microbatch.replay import SCRIPT, Replay
from paceline._session.launcher_pipe import tell_once
from paceline.checkpoint.reading import Reader
from paceline.errors import Dismissed, StepOrderError, UnsupportedOp
from paceline_protocol import MemberState, Tag

_log = logging.getLogger("paceline.elastic")

_SAME_S = 1.0
"""Seconds within which two SIGTERMs are one order."""


def make_loop(
    job_line: JobLine,
    state: StateCore,
    total: int,
    *,
    checkpoint_dir: str | os.PathLike[str] | None,
    checkpoint_every: int | None,
    seed: int,
    before: TrainingLoop | None,
    receipts: str | os.PathLike[str] | None = None,
    receipts_every: int = EVERY,
    balance: bool = False,
    replay: Replay | None = None,
) -> TrainingLoop:
    """Makes a member's loop; communicates only with mates. With a `replay`, it begins there, and writes nothing."""
    total, seed = checked_whole("total", total, 1), checked_whole("seed", seed, 0)
    if not state.is_whole:
        raise StepOrderError(
            "the training state is half changed: a step or a load was interrupted. Load a checkpoint with "
            "state.load_state_dict(...), or create its objects again"
        )
    _check_microbatches(state, job_line.group)
    _check_batch(state)
    _check_replica(job_line.mates, state, receipts=receipts is not None)
    balancer = _make_balance(job_line.mates, state) if balance else None
    if job_line.config.drain_stragglers and not balance:
        tell_once(_log, "no straggler will be drained: that needs session.steps(..., balance=True)")
    state.check_round_trip()
    check_complete(state)
    if replay is not None:
        saver: Saver = _ReplaySaver(replay.checkpoint)
    else:
        saver = _make_saver(job_line, state, checkpoint_dir, checkpoint_every)
    if before is not None:  # the script may have changed the state since, and copies of shards would be old
        state.retire_copies()
        state.keep_updated_shares()
    held = before.held_of(state) if before is not None else None
    stored = False
    if held is None and state.is_sharded:
        held = saver.intact()  # each member reads its share later, when it knows which share that is
        stored = held > Tag(0, 0)
    elif held is None:
        saver.load(state)
        held = saver.tag
        if held == Tag(0, 0):
            held = Tag(0, state.step)  # the script may have loaded what was trained elsewhere
    settings: dict[str, object] = {"total": total, "seed": seed, SCRIPT: _script(), "node_size": state.node_size}
    if state.sampler is not None and state.sampler.same_bits:
        settings |= machine_words()
    book = None
    if receipts is not None or replay is not None:
        _check_receipts(state)
        assert state.sampler is not None
        depends_on = {**settings, **state.sampler.settings}
        changes_nothing = ("total", "node_size", CHECK_EVERY)
        words = {name: str(value) for name, value in depends_on.items() if name not in changes_nothing}
        if replay is not None:
            replay.words = words
        elif receipts is not None:
            book = ReceiptBook(
                receipts,
                words,
                total=total,
                every=receipts_every,
                checkpoint_every=checkpoint_every,
                tell=partial(tell_once, _log, level=logging.ERROR),
            )
            # The receipts are part of the state, so all members must make the same ones.
            settings |= {"receipts_every": receipts_every, "checkpoint_every": checkpoint_every}
    if balance:
        settings["balance"] = True
    if job_line.mates.size > 1:
        settings["replica_size"] = job_line.mates.size
    if state.is_sharded:  # members write checkpoints together
        settings |= {"checkpoint_dir": checkpoint_dir is not None, "checkpoint_every": checkpoint_every}
    manifest = state.manifest(**settings)
    loop = TrainingLoop(
        job_line,
        state,
        total,
        seed,
        manifest,
        saver,
        MemberState(held, state.node_size, state.shares(), stored=stored),
        balancer,
    )
    loop.guard.receipts = book
    return loop


def _check_microbatches(state: StateCore, group: Group) -> None:
    """Checks that the microbatches of a step can be divided among all members."""
    microbatches = 0 if state.sampler is None else state.sampler.microbatches
    if not microbatches:
        return
    if microbatches < (most := group._core.most_members):
        raise ValueError(
            f"ElasticSampler(..., microbatches={microbatches}) has too few for a job of at most {most} workers: each "
            "needs one"
        )
    if state.uses_fsdp and state.sampler is not None and state.sampler.check_every:
        raise UnsupportedOp("check_every with FSDP, which has no gradients of one microbatch to compare: leave it out")


def _check_batch(state: StateCore) -> None:
    """Warns of a batch that is larger than an epoch, which may be meant, as in a test with few samples."""
    sampler = state.sampler
    if sampler is not None and (size := sampler.batch_size(1)) > sampler.n:
        tell_once(
            _log,
            f"{sampler}: a batch of {size} is larger than an epoch of {sampler.n} samples, so each step takes all "
            f"{sampler.n}. Give the sampler the number of samples, not of batches, or a smaller batch",
        )


def _make_balance(mates: Alone, state: StateCore) -> Balance:
    """Returns the shares that follow the speeds of the workers, in units of the state's sampler."""
    mates.refuse("balance=True")  # they would measure different speeds, and share one batch
    if (sampler := state.sampler) is None:
        raise UnsupportedOp(
            "balance=True without a sampler, whose batch is divided: give the training state an ElasticSampler"
        )
    if state.is_on_device:
        raise UnsupportedOp(
            "balance=True with a model on a GPU: speeds are measured on the processor, which does not wait for the GPU"
        )
    if (least := min(sampler.n, sampler.batch_size(1))) < sampler.microbatches:
        raise UnsupportedOp(
            f"balance=True with {sampler.microbatches} microbatches of {least} samples: a rank may get only empty ones"
        )
    return Balance(lambda world: sampler.microbatches or min(sampler.n, sampler.batch_size(world)))


def _make_saver(
    job_line: JobLine, state: StateCore, directory: str | os.PathLike[str] | None, every: int | None
) -> Saver:
    counters, mates = job_line.group._core.counters, job_line.mates
    if isinstance(mates, Mates) and not state.is_sharded:
        return ReplicaSaver(directory, every, counters, mates)
    return (JointSaver if state.is_sharded else Saver)(directory, every, counters)


def _check_replica(mates: Alone, state: StateCore, *, receipts: bool) -> None:
    """Refuses what needs a state that one rank of a replica has whole, or that spreads over replicas."""
    if mates.size == 1 and (spread := state.spread_by_torch):
        raise UnsupportedOp(
            f"{spread}, a DTensor, is spread over several ranks, but this worker has joined alone: "
            "paceline.join(replica=dist.group.WORLD) says which ranks hold the model together"
        )
    if receipts:
        mates.refuse("receipts")
    if state.uses_fsdp or state.is_sharded:
        mates.refuse("paceline.FSDP")


def _check_receipts(state: StateCore) -> None:
    """Checks that the steps can have receipts: the state follows from its steps alone, and a member has it whole."""
    if state.sampler is None or not state.sampler.same_bits:
        raise UnsupportedOp(
            "receipts need steps whose result does not depend on the workers: give the training state a sampler with "
            "microbatches, ElasticSampler(..., microbatches=8), and leave same_bits=True"
        )
    if state.is_sharded:
        raise UnsupportedOp("receipts of a state that is sharded over the members (FSDP): no member can digest it all")


class _ReplaySaver(Saver):
    """Gives the checkpoint of one folder, if there is one, and writes none."""

    def __init__(self, folder: str) -> None:
        super().__init__(None, None)
        self._folder = folder

    def load(self, state: StateCore) -> None:
        """See `Saver.load`."""
        if self._folder:
            reader = Reader(Path(self._folder))
            saved: Any = reader.state()
            with warning_of_frozen(state, reader.tag.step):
                state.load_state_dict(saved)
            self.tag = reader.tag

    def where(self, tag: Tag) -> str:
        """See `Saver.where`."""
        return self._folder


def run_steps(loop: TrainingLoop, state: StateCore) -> Iterator[Step]:
    """Yields each step, and again until it is applied; see `Session.steps`."""
    taken_by = takers(sys._getframe())
    try:
        state.guard(loop.guard)
        _drain_on_sigterm(loop)
        with no_other_optimizer(state, lambda: loop.guard.is_updating):
            loop.tell_launcher(unfinished=True)
            loop.enter()
            while True:
                loop.wait_until_ready()
                if loop.done:
                    loop.end_in_order()
                    return
                if state.step >= loop.last:
                    loop.close()
                elif (step := loop.begin()) is not None:
                    if not loop.passes_over(step):
                        yield step
                    loop.end(step)
    except GeneratorExit:
        if is_let_go(sys._getframe(), taken_by):
            loop.broken_off = users_place(sys._getframe())
        else:
            loop.raised = True
        raise
    except Dismissed:  # it was told to leave, or has nothing to do
        loop.tell_launcher(unfinished=False)
        raise
    except BaseException:
        loop.raised = True
        raise
    finally:
        state.unguard()
        loop.leave()


def _script() -> str:
    """Returns a digest of the running script, so that workers with different versions of it do not train together."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    if path is None or not Path(path).is_file():
        return "not a file"
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]


def _drain_on_sigterm(loop: TrainingLoop) -> None:
    """Makes SIGTERM drain this worker until the loop is over: it leaves after the current step.

    A second SIGTERM ends it at once. One that comes within `_SAME_S` is the first one again: Slurm signals all
    processes of a job, and so does the launcher, which is one of them.
    """
    if threading.current_thread() is not threading.main_thread() or (
        signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        return

    first: float | None = None

    def drain(signum: int, frame: FrameType | None) -> None:
        nonlocal first
        if first is None:
            first = time.monotonic()
            loop.drain("SIGTERM")
        elif time.monotonic() - first > _SAME_S:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    def give_back() -> None:
        mine = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is drain
        if mine:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, drain)
    loop.at_end.callback(give_back)
