"""One attempt at one step: entered with its word, let through its gate once, and at its end applied or undone."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.elastic.digests import find_minority
from paceline.elastic.errand import Errand
from paceline.elastic.foreign import seed_frameworks
from paceline.elastic.sampler import ElasticSampler
from paceline.elastic.state import TrainState
from paceline.elastic.word import Flag, agrees, flags_of
from paceline.errors import (
    DivergenceError,
    SettingsMismatch,
    SizeMismatch,
    StepOrderError,
    UnsupportedOp,
)
from paceline.group import Group
from paceline.links.fault import Suspicion
from paceline.parallel.agreement import NewcomerDiffers
from pacelinepb.v1.errors_pb2 import ErrorReason

__all__ = ["BETWEEN_STEPS", "Step", "StepRunner"]

_log = logging.getLogger("paceline.elastic")

_BARRED = (
    "a collective after optimizer.step() of the same step: the state has changed, and if this failed it could not be "
    "changed back; call it before the update, or after the step inside session.retry()"
)

_OR_COPY = (
    ". A step with several updates, such as that of a GAN, calls step.keep_copy() before the first: then all of them "
    "are undone together"
)


BETWEEN_STEPS = (
    "a collective between two steps: if a worker were lost in it, nothing would run it again. Call it in "
    "`for attempt in session.retry(): with attempt: ...`, or inside `with step:` before optimizer.step(). "
    "If the loop was left by `break`, close its iterator first, or let go of it"
)
"""Why none may be called there."""


class StepRunner(Protocol):
    """Whoever runs the steps."""

    def word_completed(self, step: int) -> None:
        """Every member has entered this step: the one before is committed."""

    def about_to_change(self) -> None:
        """The state changes now: nobody may read it any more."""

    def applied(self, step: int) -> None:
        """This step has changed the state."""

    def diverged(self, text: str) -> None:
        """This member holds other bits than the majority: what it holds does not count any more.

        Raises:
            DivergenceError: this happens to it again and again.
        """

    def spoiled(self) -> None:
        """An update was interrupted half way: what is held counts for nothing."""

    def prepared(self, step: Step, small: Mapping[str, Any]) -> None:
        """The step has failed here, and others may have applied it: its gradients stay.

        Args:
            step: the step.
            small: small state as it was at the gate; it has been put back.
        """


class Step:
    """One attempt at a step; a context manager around the code that computes it.

    A failure of the group inside the block undoes the step and is swallowed: `applied` is False then, and the step
    comes again under the next generation. An error of the block's own is raised, and the others go on without this
    member.

    When the block begins, torch's generator (`torch.default_generator`, from which dropout draws) is seeded with (seed,
    step, rank), as `rng` is, if torch is loaded. So random numbers of a step are the same in every attempt of the same
    world, and those of a newcomer, or after a start from a checkpoint, follow from the same rule.

    Attributes:
        number: of the step, from 1 over the whole line, whoever was there.
        attempt: how often it was begun here in a row, from 1.
        applied: True after the block if the step counts at this member. Committed steps are `session.on_commit`'s.
        rank, world: this member's place in the view of this attempt.
    """

    def __init__(
        self,
        number: int,
        attempt: int,
        group: Group,
        state: TrainState,
        runner: StepRunner,
        word: Errand,
        digest: int,
        seed: int,
    ) -> None:
        self.number = number
        self.attempt = attempt
        self.applied = False
        self.rank, self.world = group.rank, group.size
        self.generation = group.generation
        self.flags = Flag(0)
        self.cause: BaseException | None = None
        self.spoiled = False
        self.entered = self.left = False
        """Its block has begun; it has ended."""
        self.updated = self.updates = self.updating = False
        """The optimizer has run; it was called, and may have been held back at the gate; it runs now."""
        self.half_updated = False
        """An update was interrupted of which there is a copy."""
        self._prepared = False
        self._group = group
        self._mesh = group.mesh
        self._state = state
        self._runner = runner
        self._word = word
        self._digest = digest
        self._seed = seed
        self._small = state.small()
        self._open = False
        self.keeps_copy = False
        """All that the step changes can be put back until it ends."""
        self._share: tuple[NDArray[np.intp], float] | None = None
        """This rank's, as the sampler has it; None as long as nobody has asked."""
        self._counted: float | None = None
        """What something else than a sampler has said that this rank's samples count."""

    @property
    def indices(self) -> NDArray[np.intp]:
        """This rank's samples of the step, shape [b_r]; one, of weight 0, where it has none.

        Raises:
            UnsupportedOp: the training state has no sampler.
        """
        return self._of_sampler()[0]

    @property
    def weight(self) -> float:
        """What this rank's mean loss counts: b_r / b. For `ddp.backward(dy, step.weight)`; torch's wrapper knows it.

        Raises:
            UnsupportedOp: the training state has no sampler, and `count` was not called.
        """
        return self._of_sampler()[1] if self._counted is None else self._counted

    def count(self, weight: float, of: object) -> None:
        """This rank's samples count so much in the step: for whatever gives samples out without an `ElasticSampler`.

        Args:
            weight: b_r / b, samples of this rank over those of all ranks; 0 if it has none.
            of: what gives them out. It is a part of the training state: so its place is undone with the step, and
                newcomers and checkpoints have it.

        Raises:
            UnsupportedOp: `of` is no part of the training state, or that has a sampler, which counts by itself.
            StepOrderError: the step is over, or has its weight: a step takes one batch.
        """
        name = type(of).__name__
        if not self._state.has(of):
            raise UnsupportedOp(f"this {name} is no part of the training state: give it to TrainState(data=..., ...)")
        if self._state.sampler is not None:
            raise UnsupportedOp(f"the training state has a sampler beside this {name}: leave out one of the two")
        if self.left or self._counted is not None:
            why = "is over" if self.left else "has its batch"
            raise StepOrderError(f"step {self.number} {why}: this {name} gives one in each attempt, inside the block")
        self._counted = weight
        self._group.count(weight)

    @property
    def lr_scale(self) -> float:
        """What to multiply the learning rate by: the world's size with `per_rank_batch`, else 1."""
        return self.sampler.lr_scale(self.world)

    @property
    def sampler(self) -> ElasticSampler:
        """The training state's sampler. In the step's block it is at this step's batch; it moves when the step counts.

        Raises:
            UnsupportedOp: the training state has no sampler.
        """
        if self._state.sampler is None:
            raise UnsupportedOp("the training state has no sampler: TrainState(sampler=ElasticSampler(...))")
        return self._state.sampler

    @property
    def rng(self) -> np.random.Generator:
        """Randomness of (seed, step, rank): the same in every attempt of the same world."""
        return np.random.default_rng([self._seed, self.number, self.rank])

    def rng_for(self, index: int) -> np.random.Generator:
        """Randomness of (seed, step, sample): the same whoever has the sample."""
        return np.random.default_rng([self._seed, self.number, 1 << 40, int(index)])

    def keep_copy(self) -> None:
        """Keeps a copy of the state until the step ends: then it may communicate after an update as well.

        For steps with several updates, each from gradients of its own, or with a collective behind the update:

            with step:
                step.keep_copy()
                optimizer_d.zero_grad()
                loss_of_discriminator().backward()
                optimizer_d.step()
                optimizer_g.zero_grad()
                loss_of_generator().backward()
                optimizer_g.step()

        Whatever fails before the block ends, or raises in it, the copy is put back, and the step has changed nothing.
        Takes memory for the state once more, which stays, and the time to copy it (30 ms for 150 MB).

        Raises:
            StepOrderError: outside of the block, or behind an update.
            UnsupportedOp: the state is spread over the members (FSDP).
        """
        if not self.entered or self.left or self._open:
            raise StepOrderError("step.keep_copy() belongs inside `with step:`, before the first optimizer.step()")
        if self._state.spreads:
            raise UnsupportedOp(
                "step.keep_copy() of a state that is spread over the members: once one of them has applied a step, the "
                "others must be able to finish it alone. So a step has one update there, behind all of its collectives"
            )
        self._state.keep_copy()
        self.keeps_copy = True

    def spoil(self) -> None:
        """An update was interrupted half way: it is undone where there is a copy; else the state counts for nothing."""
        if self.keeps_copy:
            self.half_updated = True
            return
        self.spoiled = True
        self._runner.spoiled()

    def open_gate(self) -> None:
        """Returns when the state may change: all have entered, and all that was called is complete (I1).

        Where the state is spread, it must be so at all members: else some would have a new state, others the old one,
        and nobody all of either. So each says that it has all gradients, in a second word, and whoever does not see it
        complete keeps them.

        Raises:
            PacelineError: the generation has failed.
            DivergenceError: members do not hold the same bits.
        """
        if self._open:
            if self.keeps_copy:  # else it is too late to fail: one of several updates would be missing
                self._check_complete()
            return
        sums = self._word.wait()
        if not agrees(sums, self.world):
            self._find_divergence()
        self._check_complete()
        self.flags = flags_of(sums)
        self._runner.word_completed(self.number)
        if self._state.spreads and self.world > 1:
            self._prepared = True  # from here on another may see all second words, and change its state
            self._group.all_reduce(np.zeros(1), label=f"gate-{self.number}")
            self._prepared = False
        self._runner.about_to_change()
        if not self.keeps_copy:
            self._group.bar(_BARRED if self._state.spreads else _BARRED + _OR_COPY)
        self._open = True

    def _check_complete(self) -> None:
        """Waits for all that was called; raises if any of it has failed."""
        self._group.flush()
        self._mesh.fault.check()

    @property
    def is_open(self) -> bool:
        """True once the state may change."""
        return self._open

    def __enter__(self) -> Step:
        if self.entered:
            raise StepOrderError(f"step {self.number} was entered before: each comes once out of session.steps(...)")
        self._state.is_whole = False
        self.entered = True
        self._group.bar("")
        seed_frameworks(self._seed, self.number, self.rank)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False] | bool:
        self.left = True
        if self.updating and not self.spoiled:  # and what interrupted it was caught, or comes from a signal
            self.spoil()
        if error is None:
            try:
                self.open_gate()  # a step in which no optimizer ran: it may have been skipped by all
            except BaseException as failure:  # noqa: BLE001  raised again below, when the step is undone
                error = failure
        self._group.bar(BETWEEN_STEPS)
        self._group.count(1.0)
        self._word.drop()
        failed = self._mesh.fault.failed
        if self._open and not self.spoiled and not self._takes_back(error):
            self.applied = True
            self._state.advance(self.world)
            self._runner.applied(self.number)
        else:
            self.cause = self._why(error) if failed else error
            if self._prepared:
                at_gate = self._state.small()
                self._state.put_back(self._small)
                self._runner.prepared(self, at_gate)
            elif self._open and self.keeps_copy:
                self._state.undo_updates(self._small)
            elif not self.spoiled:
                self._state.undo(self._small)
        if isinstance(error, NewcomerDiffers) and error.newcomer in self._mesh.peers:  # it ends, and says so
            failed = True
        # What members disagree on they would disagree on again.
        stays = isinstance(error, SettingsMismatch | SizeMismatch) and error.ranks
        swallowed = failed and isinstance(error, Exception) and not (stays or isinstance(error, DivergenceError))
        # A block that ended behind the gate with an error of its own may have had more to change.
        self._state.is_whole = not self.spoiled and (not self.applied or error is None or swallowed)
        if error is None:
            return True
        if swallowed:
            if self.applied:
                _log.warning("step %d counts, though its block ended with an error", self.number, exc_info=error)
            return True
        self._tell(error)
        if kind is None:
            raise error
        return False

    def _takes_back(self, error: BaseException | None) -> bool:
        """True if updates that were made are undone, for the block has not come to its end with all of them."""
        return self.keeps_copy and (self.half_updated or error is not None)

    def _why(self, error: BaseException | None) -> BaseException | None:
        """What ended the generation, which may not be what the block ran into."""
        fault = self._mesh.fault
        return fault.error() if fault.failed else error

    def _tell(self, error: BaseException) -> None:
        """The others shall not wait for a member whose own code has raised."""
        if isinstance(error, GeneratorExit | SystemExit) or not self._mesh.peers:
            return
        me = self._mesh.peers[self.rank]
        text = f"{me} raised {type(error).__name__} in step {self.number}: {error}"[:2000]
        operation = self._group.progress().operation
        self._mesh.fault.suspect(Suspicion(ErrorReason.ERROR_REASON_PEER_RAISED, None, operation, text))

    def _of_sampler(self) -> tuple[NDArray[np.intp], float]:
        if self._share is None:
            self._share = self.sampler.current(self.rank, self.world)
            self._group.count(self._share[1])
        return self._share

    def _find_divergence(self) -> None:
        """Members hold different bits: those that differ from the majority take the state of the others.

        Raises:
            DivergenceError: there is no majority, so nobody can tell who is right; or this member differs from it again
                and again.
            PacelineError: the generation is over, for a few members differ from the others.
        """
        odd, text = find_minority(self._group, self._state, self.number, self._digest)
        _log.error("%s", text)
        operation = self._group.progress().operation
        self._mesh.fault.suspect(Suspicion(ErrorReason.ERROR_REASON_PEER_RAISED, odd[0], operation, text))
        if self.rank in odd:
            self._runner.diverged(text)
        self._mesh.fault.check()


def not_entered(step: Step) -> StepOrderError:
    """The error of a loop that does not enter its steps."""
    return StepOrderError(f"step {step.number} was not entered: write `for step in session.steps(...): with step: ...`")
