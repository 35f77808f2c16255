"""One attempt at one step: it begins with a step word, passes the gate at most once, and is applied or undone."""

from __future__ import annotations

import logging
import sys
from types import TracebackType
from typing import Any, Literal, NoReturn

from paceline._base.shares import Shares
from paceline._base.sum_order import SumsNotHeld
from paceline._base.uncaught import users_place
from paceline._base.work import Work
from paceline._elastic.gate import BETWEEN_STEPS, HALF_UPDATED, PendingStepWord, StepGate, StepRunner
from paceline._elastic.mates import ALONE, Alone
from paceline._elastic.state import StateCore
from paceline._elastic.step_batch import StepBatch
from paceline._group import Group
from paceline._links.fault import Suspicion
from paceline._microbatch.kept_sums import KeptSums
from paceline._parallel._agreement import NewcomerDiffers
from paceline.errors import (
    DivergenceError,
    PacelineError,
    ReplicaLost,
    SettingsMismatch,
    SizeMismatch,
    StepOrderError,
    StepSkipped,
    StepVoid,
    UnsupportedOp,
)
from paceline_protocol import Tag
from pacelinepb.v1.errors_pb2 import ErrorReason

_log = logging.getLogger("paceline.elastic")


class Step(StepBatch):
    """One attempt at a step; a context manager around the code that computes it.

    If the group fails inside the block, the step is undone and the error is swallowed: `applied` is False then, and
    the step is tried again in the next generation. Any other error of the block is raised, and the other members go on
    without this one.

    When the block begins, torch's generator (`torch.default_generator`, from which dropout draws) is seeded with (seed,
    step, rank), as `rng` is, if torch is loaded. So random numbers of a step are the same in every attempt of the same
    world, and those of a newcomer, or after a start from a checkpoint, follow from the same rule. If the sampler has
    microbatches, the rank is left out, and each seeds the generator again (`Microbatch`).

    Attributes:
        attempt: how many times in a row this member has begun it, from 1.
        applied: True after the block if the step has changed the state of this member. `session.on_commit` reports
            committed steps.
        skipped: True after the block if no member makes an update in this step, and the loop goes on behind it: no
            member called `optimizer.step()`, or one called `skip`. `session.stats()` counts the samples.
        generation: the generation of this attempt.
        cause: the error that undid this attempt; None if it was not undone.
        keeps_copy: True if `keep_copy` was called: everything that the step changes can be restored until it ends.
    """

    def __init__(
        self,
        number: int,
        attempt: int,
        group: Group,
        state: StateCore,
        runner: StepRunner,
        word: PendingStepWord,
        digest: int,
        seed: int,
        kept: KeptSums | None = None,
        told: Work[Any] | None = None,
        mates: Alone = ALONE,
        shares: Shares | None = None,
    ) -> None:
        super().__init__(number, group, state, seed, kept, told, shares, has_mates=mates.size > 1)
        self.attempt = attempt
        self.applied = self.skipped = False
        self._raised = False
        """Whether its block has raised an error, which the other members were told."""
        self._passed = False
        """Whether the loop goes on behind this step: it was applied, or all members skipped it in this generation."""
        self._left_out = 0
        """This rank's samples in a step that was skipped in this generation."""
        self.generation = group.generation
        self.cause: BaseException | None = None
        self._spoiled = False
        self._updated = self._updates = self._updating = False
        """Whether the optimizer has run; was called (it may have stopped at the gate); is running now."""
        self._half_updated = False
        """Whether an update was interrupted that the copy can undo."""
        self.keeps_copy = False
        self._mesh = group._core.mesh
        self._runner = runner
        self._small = state.small()
        self._epoch = 0 if state.sampler is None else state.sampler.epoch
        self._gate = StepGate(number, group, state, runner, word, digest, self._micro, mates)
        self._mates = mates
        self._passes_over = self._lacks_sums = False

    def __repr__(self) -> str:
        if self.left:
            outcome = "applied" if self.applied else "skipped" if self.skipped else "undone"
        else:
            outcome = "in its block" if self.entered else "not entered"
        again = f", attempt {self.attempt}" if self.attempt > 1 else ""
        return f"<Step {self.number}, epoch {self._epoch}, rank {self.rank} of {self.world}{again}, {outcome}>"

    def keep_copy(self) -> None:
        """Copies the state, so that the step may communicate after an update; the copy is kept until the step ends.

        For steps with several updates, each with its own gradients, or with a collective after the update:

            with step:
                step.keep_copy()
                optimizer_d.zero_grad()
                loss_of_discriminator().backward()
                optimizer_d.step()
                optimizer_g.zero_grad()
                loss_of_generator().backward()
                optimizer_g.step()

        If anything fails or raises before the block ends, the copy is restored, and the step has changed nothing.
        Takes as much memory as the state, which stays allocated, and the time to copy it (30 ms for 150 MB).

        Raises:
            StepOrderError: outside of the block, or after an update.
            UnsupportedOp: the state is sharded over the members (FSDP), or a member is a replica of several ranks.
        """
        self._mates.refuse("step.keep_copy()")
        if not self.entered or self.left or self._gate.is_open:
            raise StepOrderError("step.keep_copy() belongs inside `with step:`, before the first optimizer.step()")
        if self._state.is_sharded:
            raise UnsupportedOp(
                "step.keep_copy() with a state that is sharded over the members: once one of them has applied a step, "
                "the others must be able to finish it alone. So such a step has one update, after all its collectives"
            )
        self._state.keep_copy()
        self.keeps_copy = True

    def skip(self) -> NoReturn:
        """Leaves the block, and skips this step on all members: none makes an update, and its samples are left out.

        For what one rank alone finds out, before its backward pass, such as a loss that is not finite:

            with step:
                loss = loss_of(batch)
                if not torch.isfinite(loss):
                    step.skip()
                loss.backward()
                optimizer.step()

        The other members are interrupted where they are; one that had not finished the step before takes that from the
        others, and its loop does not yield this one. All undo the step, begin a new generation, and go on with the
        next step. `session.stats()` counts the samples that were left out. What all ranks find out alike, such as
        gradients that are not finite after they were summed, needs no call: leave out `optimizer.step()` on all.

        Raises:
            StepSkipped: always; the step's block swallows it.
            StepOrderError: outside of the block, or after an update. If another member makes its update before it hears
                of this, the next step raises it on all members.
            UnsupportedOp: the batch came from a stream, which would give it again in the next step; or a member is a
                replica of several ranks.
        """
        self._mates.refuse("step.skip()")
        if not self.entered or self.left or self._updates:
            raise StepOrderError("step.skip() belongs inside `with step:`, before optimizer.step()")
        if self._counted is not None:
            raise UnsupportedOp(
                "step.skip() with a batch from a stream: the stream goes back when a step is undone, so the next step "
                "would get the same batch. Leave out optimizer.step() on all ranks instead"
            )
        text = (
            f"{self._mesh.peers[self.rank]} called step.skip() in step {self.number} ({users_place(sys._getframe())})"
        )
        self._runner.skip_asked(self.number, text)
        # In place of an operation it names the step: a member may still be in the step before.
        self._mesh.fault.suspect(Suspicion(ErrorReason.ERROR_REASON_STEP_SKIPPED, None, self.number, text))
        raise self._mesh.fault.error()

    def _pass_over(self) -> None:
        """Takes the step without its block, as all members do after one of them has asked to skip it."""
        self._passes_over = True
        with self:
            pass

    def _spoil(self) -> None:
        """Handles an update that was interrupted half way: a copy undoes it later, else the state is discarded."""
        if self.keeps_copy:
            self._half_updated = True
            self._group._core.ban_collectives(HALF_UPDATED)
            return
        self._spoiled = True
        self._runner.spoiled()

    def _open_gate(self, optimizer: object = None) -> None:
        """Waits until the state may change; see `StepGate.open`."""
        self._gate.open(optimizer, updates=self._updates, skips=self.skipped, keeps_copy=self.keeps_copy)

    def _keep_sums(self, base: Tag | None) -> None:
        """Keeps sums of this attempt, which was undone, for the next one; `base` is the state before."""
        if self._micro is not None:
            self._micro.keep(base, usable=not (self._gate.is_open or self._spoiled), lacks=self._lacks_sums)

    def __enter__(self) -> Step:
        if self.entered:
            raise StepOrderError(f"step {self.number} was entered before: use each step of session.steps(...) once")
        self._state.is_whole = False
        self.entered = True
        self._group._core.ban_collectives("")
        self._begin_batch()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False] | bool:
        self.left = True
        if self._updating and not self._spoiled:  # the script caught the error that interrupted it, or a signal did
            self._spoil()
        if error is None:
            try:
                if self._updates:
                    self._open_gate()
                else:
                    self.skipped = self._passes_over or self._state.has_optimizer
                    self._left_out = self._own_samples() if self.skipped else 0
                    self._gate.pass_without_update(skips=self.skipped)
            except BaseException as failure:  # noqa: BLE001  raised again below, when the step is undone
                error = failure
        self._group._core.ban_collectives(BETWEEN_STEPS)
        self._end_batch()
        self._gate.close()
        if isinstance(error, SumsNotHeld):
            self._lacks_sums = True
            self._gate.tell(error)  # ends the generation, so that all take the step again
        failed = self._mesh.fault.failed or isinstance(error, StepVoid)
        takes_back = self.keeps_copy and (self._half_updated or error is not None)  # the block did not finish
        if self._gate.is_open and not self._spoiled and not takes_back:
            self._passed, self.applied = True, not self.skipped
            self._state.advance(self.world)
            self._runner.applied(self.number)
        else:
            self.cause = (
                self._mesh.fault.error() if self._mesh.fault.failed else error
            )  # the block may have seen another
            self.skipped = isinstance(self.cause, StepSkipped) and self.cause.operation == self.number
            if self._gate.is_prepared:
                at_gate = self._state.small()
                self._state.put_back(self._small)
                self._runner.prepared(self, at_gate)
            elif self._gate.is_open and self.keeps_copy:
                self._state.undo_updates(self._small)
            elif not self._spoiled:
                self._state.undo(self._small)
        if isinstance(error, NewcomerDiffers) and error.newcomer in self._mesh.peers:  # it ends, and reports why
            failed = True
        # If members disagree on settings or sizes, they would disagree again in the next attempt.
        stays = isinstance(error, SettingsMismatch | SizeMismatch) and error.ranks
        ends = stays or isinstance(error, DivergenceError | ReplicaLost)
        lost = None
        if isinstance(error, Exception) and not isinstance(error, PacelineError):
            lost = self._mates.loss(error)
        if self._mates.size > 1 and not isinstance(error, PacelineError):
            ends = True  # of the script at this rank alone: its mates may wait in a collective behind this line
        swallowed = failed and isinstance(error, Exception) and not (ends or lost)
        # A block that raised after the gate may not have made all of its changes.
        self._state.is_whole = not self._spoiled and (not self._passed or error is None or swallowed)
        if error is None:
            return True
        if swallowed:
            if self._passed:
                _log.warning("step %d was applied, though its block ended with an error", self.number, exc_info=error)
            return True
        self._raised = True
        if lost is not None:
            raise lost from error
        self._gate.tell(error)
        if kind is None:
            raise error
        return False
