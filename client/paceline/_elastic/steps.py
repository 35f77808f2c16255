"""`session.steps`: the loop over the steps of a job, while workers come and go."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from paceline._elastic.coordination import JobCoordinator
from paceline._elastic.rules import check_complete, no_other_optimizer
from paceline._elastic.saver import JointSaver, Saver
from paceline._elastic.state import TrainState
from paceline._elastic.step import Step
from paceline._elastic.training_loop import TrainingLoop
from paceline.errors import StepOrderError
from paceline_protocol import MemberState, Tag

__all__ = ["make_loop", "run_steps"]


def make_loop(
    coordinator: JobCoordinator,
    state: TrainState,
    total: int,
    *,
    checkpoint_dir: str | os.PathLike[str] | None,
    checkpoint_every: int | None,
    seed: int,
    before: TrainingLoop | None,
) -> TrainingLoop:
    """Makes a member's loop; communicates nothing.

    Raises:
        ValueError: an argument is out of range, or the training state lacks something.
        UnsupportedOp: the state cannot be given to another member.
        StepOrderError: a step or a load of that state was interrupted half way.
        CheckpointDamaged, SizeMismatch: the existing checkpoints are damaged, or of another model.
    """
    if total < 1 or seed < 0:
        raise ValueError(f"want total >= 1 and seed >= 0, not {total} and {seed}")
    if not state.is_whole:
        raise StepOrderError(
            "the training state is half changed: a step or a load was interrupted. Load a checkpoint with "
            "state.load_state_dict(...), or create its objects again"
        )
    state.check_round_trip()
    check_complete(state)
    saver = (JointSaver if state.is_sharded else Saver)(checkpoint_dir, checkpoint_every)
    held = before.held_of(state) if before is not None else None
    stored = False
    if held is None and state.is_sharded:
        held = saver.latest()  # each member reads its share later, when it knows which share that is
        stored = held > Tag(0, 0)
    elif held is None:
        saver.load(state)
        held = saver.tag
    settings: dict[str, object] = {"total": total, "seed": seed, "the script": _script(), "node_size": state.node_size}
    if state.is_sharded:  # members write checkpoints together
        settings |= {"checkpoint_dir": checkpoint_dir is not None, "checkpoint_every": checkpoint_every}
    manifest = state.manifest(**settings)
    return TrainingLoop(
        coordinator,
        state,
        total,
        seed,
        manifest,
        saver,
        MemberState(held, state.node_size, state.shares(), stored=stored),
    )


def run_steps(loop: TrainingLoop, state: TrainState, total: int) -> Iterator[Step]:
    """Yields each step, and again until it is applied; see `Session.steps`."""
    try:
        state.guard(loop.guard)
        with _draining_on_sigterm(loop), no_other_optimizer(state, lambda: loop.guard.is_updating):
            loop.enter()
            while True:
                loop.wait_until_ready()
                if loop.done:
                    return
                if state.step >= total:
                    loop.close()
                elif (step := loop.begin()) is not None:
                    yield step
                    loop.end(step)
    finally:
        state.unguard()
        loop.leave()


def _script() -> str:
    """Returns a digest of the running script, so that workers with different versions of it do not train together."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    if path is None or not Path(path).is_file():
        return "not a file"
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]


@contextmanager
def _draining_on_sigterm(loop: TrainingLoop) -> Iterator[None]:
    """Makes SIGTERM drain this worker: it leaves after the current step. A second SIGTERM ends it at once."""
    if threading.current_thread() is not threading.main_thread() or (
        signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        yield
        return

    def drain(signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        loop.drain("SIGTERM")

    signal.signal(signal.SIGTERM, drain)
    try:
        yield
    finally:
        mine = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is drain
        if mine:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
