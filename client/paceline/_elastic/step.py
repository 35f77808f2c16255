"""One attempt at one step: it begins with a step word, passes the gate at most once, and is applied or undone."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline._base.uncaught import users_place
from paceline._base.work import Work
from paceline._elastic.differences import find_minority
from paceline._elastic.foreign import seed_frameworks
from paceline._elastic.gate import BARRED, BETWEEN_STEPS, HALF_UPDATED, OR_COPY, PendingStepWord, acting_alone
from paceline._elastic.kept_parts import KeptParts, PartProgress
from paceline._elastic.sampler import ElasticSampler
from paceline._elastic.state import TrainState
from paceline._elastic.step_parts import StepPart, part_seed
from paceline._group import Group
from paceline._group.group_core import PartsNotHeld, PartTurn
from paceline._links.fault import Suspicion
from paceline._microbatch.rank_plan import even_plan, held_of_row, plan_ranks
from paceline._microbatch.sum_tree import Node
from paceline._microbatch.twice import ComputedTwice, compare_twice, computed_twice
from paceline._parallel._agreement import NewcomerDiffers
from paceline.errors import (
    DivergenceError,
    SettingsMismatch,
    SizeMismatch,
    StepOrderError,
    StepSkipped,
    UnsupportedOp,
)
from paceline_protocol import StepFlag, Tag, agrees, flags_of
from pacelinepb.v1.errors_pb2 import ErrorReason

_log = logging.getLogger("paceline.elastic")


class StepRunner(Protocol):
    """What a step needs from the loop that runs it."""

    def word_completed(self, step: int) -> None:
        """Notes that every member has entered this step, so that the step before is committed."""

    def about_to_change(self) -> None:
        """Notes that the state is about to change: other members may no longer read it."""

    def applied(self, step: int) -> None:
        """Notes that this step has changed the state."""

    def diverged(self, text: str) -> None:
        """Discards this member's state, because it differs from the state of the majority.

        Raises:
            DivergenceError: this member has differed too often.
        """

    def spoiled(self) -> None:
        """Discards this member's state, because an update was interrupted half way."""

    def skip_asked(self, step: int, text: str) -> None:
        """Asks all other members to skip the step; `text` names this member, and the line of its script."""

    def prepared(self, step: Step, small: Mapping[str, Any]) -> None:
        """Keeps the gradients of a step that has failed here, because other members may have applied it.

        Args:
            step: the step.
            small: small state as it was at the gate; it has been put back.
        """


class Step:
    """One attempt at a step; a context manager around the code that computes it.

    If the group fails inside the block, the step is undone and the error is swallowed: `applied` is False then, and
    the step is tried again in the next generation. Any other error of the block is raised, and the other members go on
    without this one.

    When the block begins, torch's generator (`torch.default_generator`, from which dropout draws) is seeded with (seed,
    step, rank), as `rng` is, if torch is loaded. So random numbers of a step are the same in every attempt of the same
    world, and those of a newcomer, or after a start from a checkpoint, follow from the same rule. If the sampler has
    parts, the rank is left out, and each part seeds the generator again (`StepPart`).

    Attributes:
        number: number of the step, from 1, counted over the whole job.
        attempt: how many times in a row this member has begun it, from 1.
        applied: True after the block if the step has changed the state of this member. `session.on_commit` reports
            committed steps.
        skipped: True after the block if no member makes an update in this step, and the loop goes on behind it: no
            member called `optimizer.step()`, or one called `skip`. `session.stats()` counts the samples.
        rank, world: this member's place in the view of this attempt.
    """

    def __init__(
        self,
        number: int,
        attempt: int,
        group: Group,
        state: TrainState,
        runner: StepRunner,
        word: PendingStepWord,
        digest: int,
        seed: int,
        kept: KeptParts | None = None,
        told: Work[Any] | None = None,
    ) -> None:
        self.number = number
        self.attempt = attempt
        self.applied = self.skipped = False
        self.raised = False
        """Whether its block has raised an error, which the other members were told."""
        self.passed = False
        """Whether the loop goes on behind this step: it was applied, or all members skipped it in this generation."""
        self.left_out = 0
        """This rank's samples in a step that was skipped in this generation."""
        self.rank, self.world = group.rank, group.size
        self.generation = group.generation
        self.flags = StepFlag(0)
        self.cause: BaseException | None = None
        self.spoiled = False
        self.entered = self.left = False
        """Whether its block has begun, and whether it has ended."""
        self.updated = self.updates = self.updating = False
        """Whether the optimizer has run; was called (it may have stopped at the gate); is running now."""
        self.half_updated = False
        """Whether an update was interrupted that the copy can undo."""
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
        """Whether everything that the step changes can be restored until it ends."""
        self._share: tuple[NDArray[np.intp], float] | None = None
        """This rank's indices and weight from the sampler; None until they are read."""
        self._counted: float | None = None
        """This rank's weight as given to `count`; None if `count` was not called."""
        self._parts = 0 if state.sampler is None else state.sampler.parts
        """V; 0 if the sampler has no parts."""
        self._progress = PartProgress(even_plan(self.rank, self.world, self._parts)) if self._parts else None
        self._kept = kept
        """The sums that this rank keeps from an undone attempt; None if no rank keeps any in this job."""
        self._told = told
        """The exchange of what each rank has kept, as rows of `row_of_held`; None after a generation's first step."""
        if self._progress is not None:
            self._progress.divided = told is None
        self._lacks = False
        """Whether a wrapper had none of the sums that this rank has told the others it kept."""
        self._samples_of_parts = 0
        self._twice = self._twice_part()
        self._passes_over = False
        self._checked = False
        """Whether this rank has computed the other rank's part that it checks."""

    @property
    def indices(self) -> NDArray[np.intp]:
        """Indices of this rank's samples in the step, shape [b_r]; a single one of weight 0 if the rank has none.

        Raises:
            UnsupportedOp: the training state has no sampler, or its sampler has parts, which have indices of their own.
        """
        return self._of_sampler()[0]

    @property
    def parts(self) -> tuple[StepPart, ...]:
        """This rank's parts of the step, in order: `for part in step.parts: with part: ...`, inside `with step:`.

        Each takes one forward and one backward pass through the wrapped model. Gradients are set aside after each, and
        are those of the whole batch after the last: clear them before the first, and update after the last. A step with
        several updates goes through its parts once for each, and reads them anew each time: after a failure the first
        loop has only the parts that were lost.

        In the first step of a generation the first reading waits until ranks have told each other what they have kept.

        Raises:
            UnsupportedOp: the training state has no sampler, or its sampler has no parts.
            PacelineError: the generation has failed.
        """
        progress = self._progress
        if progress is None:
            raise UnsupportedOp(f"{self.sampler} has no parts: make it with ElasticSampler(..., parts=8)")
        if not progress.divided:
            self._divide(progress)
        share = progress.share
        mine = [number for node in share.nodes[self.rank] for number in range(*node)]
        checked = () if self._twice is None else (self._twice.number,)
        batch = {number: self.sampler.current_part(number) for number in {*mine, *share.numbers, *checked}}
        self._samples_of_parts = sum(len(indices) for indices, weight in map(batch.__getitem__, mine) if weight)
        turns = [PartTurn(number, share, progress.record) for number in share.numbers]
        if self._checks and not self._open:
            assert self._twice is not None
            turns.insert(0, PartTurn(self._twice.number, share, progress.record, is_check=True))
        return tuple(
            StepPart(self, turn, batch[turn.number], part_seed(self._seed, self.number, turn.number)) for turn in turns
        )

    @property
    def kept_parts(self) -> tuple[int, ...]:
        """The parts whose gradients this rank has kept from an undone attempt, so that they are not in `parts`."""
        kept = () if self._progress is None else self._progress.kept
        return tuple(number for node in kept for number in range(*node))

    def _divide(self, progress: PartProgress) -> None:
        """Divides the parts that no rank has kept among all."""
        assert self._told is not None
        assert self._kept is not None
        rows = self._told.wait()
        held = [self._held_by(rank, row) for rank, row in enumerate(rows)]
        usable = tuple(() if None in held else nodes or () for nodes in held)
        progress.repair(plan_ranks(usable, self._parts)[self.rank], self._kept.record)
        if any(usable):
            mine_now = progress.share.numbers
            _log.info("step %d is repaired: this rank computes part %s", self.number, ", ".join(map(str, mine_now)))

    def _held_by(self, rank: int, row: NDArray[np.int64]) -> tuple[Node, ...] | None:
        """Returns what a rank has kept, None if it refuses any sums; ends the generation if the row cannot be.

        A member finds the breach in its own row, too. It is the best witness.
        """
        try:
            return held_of_row(row)
        except ValueError as error:
            text = f"step {self.number}: {self._mesh.peers[rank]} {error}"
            operation = self._group.progress().operation
            self._mesh.fault.suspect(Suspicion(ErrorReason.ERROR_REASON_PEER_BROKE_PROTOCOL, rank, operation, text))
            raise self._mesh.fault.error() from None

    def keep_parts(self, kept: KeptParts, base: Tag | None) -> None:
        """Keeps what the wrappers hold of this attempt, which was undone, for the next one."""
        if self._progress is None:
            return
        if self._lacks:
            kept.refuse()
        elif self._open or self.spoiled or self._twice is not None:  # a part that is computed twice is digested whole
            kept.drop()
        else:
            kept.keep(base, self._progress)

    def _twice_part(self) -> ComputedTwice | None:
        """Returns the part of this step that several ranks compute, if there is one."""
        if self._state.sampler is None or not self._parts:
            return None
        found = computed_twice(self._seed, self.number, self.world, self._parts, self._state.sampler.check_every)
        if found is not None and found.owner == self.rank and self._progress is not None:
            self._progress.record.digested = found.number
        return found

    @property
    def _checks(self) -> bool:
        """True if this rank computes another rank's part to check it."""
        return self._twice is not None and self.rank in self._twice.checkers

    @property
    def weight(self) -> float:
        """Weight of this rank's mean loss, b_r / b. For `ddp.backward(dy, step.weight)`; torch's wrapper reads it.

        Raises:
            UnsupportedOp: the training state has no sampler, and `count` was not called; or its sampler has parts.
        """
        return self._of_sampler()[1] if self._counted is None else self._counted

    def count(self, weight: float, of: object) -> None:
        """Sets this rank's weight in the step, for data sources other than an `ElasticSampler`.

        Args:
            weight: b_r / b, samples of this rank over those of all ranks; 0 if it has none.
            of: the data source. It must be a part of the training state, so that its position is undone with the step
                and is included in checkpoints and in what newcomers receive.

        Raises:
            UnsupportedOp: `of` is no part of the training state, or the state has a sampler, which sets the weight.
            StepOrderError: the step is over, or has a weight already: a step takes one batch.
        """
        name = type(of).__name__
        if not self._state.has(of):
            raise UnsupportedOp(f"this {name} is no part of the training state: give it to TrainState(data=..., ...)")
        if self._state.sampler is not None:
            raise UnsupportedOp(f"the training state has a sampler beside this {name}: leave out one of the two")
        if self.left or self._counted is not None:
            why = "is over" if self.left else "already has its batch"
            raise StepOrderError(f"step {self.number} {why}: this {name} gives one batch per attempt, inside the block")
        self._counted = weight
        self._group.set_gradient_weight(weight)

    @property
    def samples(self) -> int:
        """Number of this rank's samples in the step; 0 until they were read (`indices`, `weight`, `parts`)."""
        if self._parts:
            return self._samples_of_parts
        return len(self._share[0]) if self._share is not None and self._share[1] else 0

    @property
    def lr_scale(self) -> float:
        """The factor for the learning rate: the world's size with `per_rank_batch`, else 1."""
        return self.sampler.lr_scale(self.world)

    @property
    def sampler(self) -> ElasticSampler:
        """The training state's sampler. In the step's block it is at this step's batch; it moves when the step counts.

        Raises:
            UnsupportedOp: the training state has no sampler.
        """
        if self._state.sampler is None:
            raise UnsupportedOp(
                "the training state has no sampler: give it one, TrainState(sampler=ElasticSampler(...))"
            )
        return self._state.sampler

    @property
    def rng(self) -> np.random.Generator:
        """A random generator seeded with (seed, step, rank): the same in every attempt of the same world.

        Raises:
            UnsupportedOp: the sampler has parts, which have generators of their own.
        """
        self._refuse_with_parts("step.rng", "part.rng")
        return np.random.default_rng([self._seed, self.number, self.rank])

    def rng_for(self, index: int) -> np.random.Generator:
        """Returns a random generator seeded with (seed, step, sample): the same on every rank."""
        return np.random.default_rng([self._seed, self.number, 1 << 40, int(index)])

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
            UnsupportedOp: the state is sharded over the members (FSDP).
        """
        if not self.entered or self.left or self._open:
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
            UnsupportedOp: the batch came from a stream, which would give it again in the next step.
        """
        if not self.entered or self.left or self.updates:
            raise StepOrderError("step.skip() belongs inside `with step:`, before optimizer.step()")
        if self._counted is not None:
            raise UnsupportedOp(
                "step.skip() with a batch from a stream: the stream goes back when a step is undone, so the next step "
                "would get the same batch. Leave out optimizer.step() on all ranks instead"
            )
        text = f"{self._me} called step.skip() in step {self.number} ({users_place(sys._getframe())})"
        self._runner.skip_asked(self.number, text)
        # In place of an operation it names the step: a member may still be in the step before.
        self._mesh.fault.suspect(Suspicion(ErrorReason.ERROR_REASON_STEP_SKIPPED, None, self.number, text))
        raise self._mesh.fault.error()

    def pass_over(self) -> None:
        """Takes the step without its block, as all members do after one of them has asked to skip it."""
        self._passes_over = True
        with self:
            pass

    @property
    def _me(self) -> str:
        return str(self._mesh.peers[self.rank])

    def spoil(self) -> None:
        """Handles an update that was interrupted half way: a copy undoes it later, else the state is discarded."""
        if self.keeps_copy:
            self.half_updated = True
            self._group.ban_collectives(HALF_UPDATED)
            return
        self.spoiled = True
        self._runner.spoiled()

    def _pass_without_update(self) -> None:
        """Passes the gate at the end of a block without an update: only if all other members do so too."""
        self.skipped = self._passes_over or self._state.has_optimizer
        self.left_out = self._own_samples() if self.skipped else 0
        what = (
            f"{self._me} ended step {self.number} without optimizer.step() ({users_place(sys._getframe())}), "
            "and others did not: step.skip() skips a step on all ranks"
        )
        with acting_alone(self._mesh.fault, what):
            self.open_gate()

    def open_gate(self, optimizer: object = None) -> None:
        """Waits until the state may change: all members have entered, and all collectives are complete (I1).

        A sharded state may only change once this is so on all members: otherwise some would have the new state and
        some the old one, and neither would be complete. So each member says in a second word that it has all its
        gradients; a member that does not see this word complete keeps them.

        Args:
            optimizer: what changes the state now; None at the end of the step.

        Raises:
            PacelineError: the generation has failed.
            DivergenceError: members do not hold the same bits.
        """
        if self._open:
            if self.keeps_copy:  # without a copy it is too late to fail, since the first update cannot be undone
                self._check_parts(optimizer)
                self._check_complete()
            return
        self._check_parts(optimizer)
        self._compare_twice()
        sums = self._word.wait()
        if not agrees(sums, self.world):
            self._find_divergence()
        self._check_complete()
        self.flags = flags_of(sums)
        self._runner.word_completed(self.number)
        if (self._state.is_sharded or self.skipped) and self.world > 1:
            # From here on another member may see the second word complete, and change its state.
            self._prepared = self._state.is_sharded
            self._group.all_reduce(np.zeros(1), label=f"{'skip' if self.skipped else 'gate'}-{self.number}")
            self._prepared = False
        self._runner.about_to_change()
        if not self.keeps_copy:
            self._group.ban_collectives(BARRED if self._state.is_sharded else BARRED + OR_COPY)
        self._open = True

    def _check_complete(self) -> None:
        """Waits for all collectives that were called; raises if one of them has failed."""
        self._group.flush()
        self._mesh.fault.check()

    def _check_parts(self, optimizer: object) -> None:
        """Refuses an update with gradients that are not the sum of all parts."""
        progress = self._progress
        if progress is None:
            return
        if (turn := self._group.part) is not None:
            raise StepOrderError(
                f"optimizer.step() in part {turn.number}: the gradients are complete after the last part, so call it "
                "after the loop over step.parts"
            )
        record, numbers = progress.record, progress.share.numbers
        if progress.next != progress.first:
            ended = numbers[numbers.index(progress.next) - 1]
            raise StepOrderError(
                f"step {self.number} ends after part {ended}, but this rank has part {numbers[0]} to part "
                f"{numbers[-1]}: go through all of step.parts"
            )
        if record.waiting:
            raise StepOrderError(f"part {numbers[-1]} had no backward pass, but the parts before it had one")
        if self.updates and not record.summed:
            raise StepOrderError(
                "no wrapper has summed the parts of this step, so its gradients would depend on the number of workers: "
                "compute with DDP in `for part in step.parts: with part: ...`, or in rounds with part_batches()"
            )
        if optimizer is not None:
            if id(optimizer) in record.updated:
                raise StepOrderError(
                    f"a second update by this {type(optimizer).__name__}, but no wrapper has summed the parts again "
                    "since the first: go through step.parts once for each update"
                )
            record.updated.add(id(optimizer))

    def _compare_twice(self) -> None:
        """Compares the gradients of a part that several ranks have computed, before they change anything.

        Raises:
            DivergenceError: this rank has computed other bits than the others; or no majority is right.
            PacelineError: another rank has; or the generation has failed.
        """
        if self._twice is None or self._progress is None or not self._progress.record.summed:
            return
        if self._checks and not self._checked:
            raise StepOrderError(
                f"part {self._twice.number} of rank {self._twice.owner} is checked here in step {self.number}, but was "
                "left out: go through all of step.parts"
            )
        compare_twice(self._group, self._twice, self._progress.record.digests, self.number)

    def enter_part(self, turn: PartTurn, weight: float) -> None:
        """See `PartRunner`."""
        if not self.entered or self.left or self._group.part is not None:
            raise StepOrderError("`with part:` belongs inside `with step:`, one part after the other")
        assert self._progress is not None
        self._mesh.fault.check()  # do not compute a part of a step that will be undone
        self._progress.begin(turn)
        if turn.is_first or turn.is_check:  # later, the ranks are at different parts, so they would not meet
            turn.record.begun = False
            self._state.prepare()
        self._group.set_part(self._parts, turn)
        self._group.set_gradient_weight(weight)

    def leave_part(self, turn: PartTurn, *, whole: bool) -> None:
        """See `PartRunner`."""
        self._group.set_part(self._parts)
        self._group.set_gradient_weight(1.0)
        seed_frameworks(self._seed, self.number)  # what is drawn after the parts does not depend on how many they were
        if whole and self._progress is not None and not turn.record.failed:  # the script may have caught an error
            self._progress.end(turn)
            self._checked = self._checked or turn.is_check
            if self._kept is not None and not turn.is_check:
                self._kept.part_ended(turn.record)

    def _refuse_with_parts(self, what: str, instead: str) -> None:
        if self._parts:
            raise UnsupportedOp(
                f"{what} follows the rank, so the result would depend on the number of workers: the sampler has parts, "
                f"so take {instead} in `for part in step.parts: with part: ...`"
            )

    @property
    def is_open(self) -> bool:
        """True once the state may change."""
        return self._open

    def __enter__(self) -> Step:
        if self.entered:
            raise StepOrderError(f"step {self.number} was entered before: use each step of session.steps(...) once")
        self._state.is_whole = False
        self.entered = True
        self._group.ban_collectives("")
        if self._parts:
            seed_frameworks(self._seed, self.number)
            self._group.set_part(self._parts)
        else:
            seed_frameworks(self._seed, self.number, self.rank)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False] | bool:
        self.left = True
        if self.updating and not self.spoiled:  # the script caught the error that interrupted it, or a signal did
            self.spoil()
        if error is None:
            try:
                if self.updates:
                    self.open_gate()
                else:
                    self._pass_without_update()
            except BaseException as failure:  # noqa: BLE001  raised again below, when the step is undone
                error = failure
        self._group.ban_collectives(BETWEEN_STEPS)
        self._group.set_gradient_weight(1.0)
        if self._parts:
            self._group.set_part(0)
        self._word.drop()
        if isinstance(error, PartsNotHeld):
            self._lacks = True
            self._tell(error)  # ends the generation, so that all take the step again
        failed = self._mesh.fault.failed
        if self._open and not self.spoiled and not self._takes_back(error):
            self.passed, self.applied = True, not self.skipped
            self._state.advance(self.world)
            self._runner.applied(self.number)
        else:
            self.cause = self._why(error) if failed else error
            self.skipped = isinstance(self.cause, StepSkipped) and self.cause.operation == self.number
            if self._prepared:
                at_gate = self._state.small()
                self._state.put_back(self._small)
                self._runner.prepared(self, at_gate)
            elif self._open and self.keeps_copy:
                self._state.undo_updates(self._small)
            elif not self.spoiled:
                self._state.undo(self._small)
        if isinstance(error, NewcomerDiffers) and error.newcomer in self._mesh.peers:  # it ends, and reports why
            failed = True
        # If members disagree on settings or sizes, they would disagree again in the next attempt.
        stays = isinstance(error, SettingsMismatch | SizeMismatch) and error.ranks
        swallowed = failed and isinstance(error, Exception) and not (stays or isinstance(error, DivergenceError))
        # A block that raised after the gate may not have made all of its changes.
        self._state.is_whole = not self.spoiled and (not self.passed or error is None or swallowed)
        if error is None:
            return True
        if swallowed:
            if self.passed:
                _log.warning("step %d was applied, though its block ended with an error", self.number, exc_info=error)
            return True
        self.raised = True
        self._tell(error)
        if kind is None:
            raise error
        return False

    def drop(self) -> None:
        """Drops the step, which was not entered."""
        self._word.drop()

    def _takes_back(self, error: BaseException | None) -> bool:
        """True if the updates are undone from the copy, because the block did not finish."""
        return self.keeps_copy and (self.half_updated or error is not None)

    def _why(self, error: BaseException | None) -> BaseException | None:
        """Returns the error that ended the generation, which may not be the one that the block saw."""
        fault = self._mesh.fault
        return fault.error() if fault.failed else error

    def _tell(self, error: BaseException) -> None:
        """Tells the other members that this one's code has raised, so that they do not wait for it."""
        if isinstance(error, GeneratorExit | SystemExit) or not self._mesh.peers:
            return
        text = f"{self._me} raised {type(error).__name__} in step {self.number}: {error}"[:2000]
        operation = self._group.progress().operation
        self._mesh.fault.suspect(Suspicion(ErrorReason.ERROR_REASON_PEER_RAISED, None, operation, text))

    def _of_sampler(self) -> tuple[NDArray[np.intp], float]:
        self._refuse_with_parts("a rank's share of the batch", "part.indices and part.weight")
        if self._share is None:
            self._share = self.sampler.current(self.rank, self.world)
            self._group.set_gradient_weight(self._share[1])
        return self._share

    def _own_samples(self) -> int:
        """Returns the number of this rank's samples, whether they were read or not."""
        sampler = self._state.sampler
        if sampler is None:
            return 0
        if not self._parts:
            indices, weight = sampler.current(self.rank, self.world)
            return len(indices) if weight else 0
        own = even_plan(self.rank, self.world, self._parts).numbers
        return sum(len(indices) for indices, weight in map(sampler.current_part, own) if weight)

    def _find_divergence(self) -> None:
        """Finds the members that differ from the majority, and has them take the state of the others.

        Raises:
            DivergenceError: there is no majority, so that no member can tell which state is right; or this member has
                differed from it too often.
            PacelineError: the generation is over, because a few members differ from the others.
        """
        odd, text = find_minority(self._group, self._state, self.number, self._digest)
        _log.error("%s", text)
        operation = self._group.progress().operation
        self._mesh.fault.suspect(Suspicion(ErrorReason.ERROR_REASON_PEER_RAISED, odd[0], operation, text))
        if self.rank in odd:
            self._runner.diverged(text)
        self._mesh.fault.check()


def not_entered(step: Step) -> StepOrderError:
    """Returns the error for a loop that does not enter its steps."""
    return StepOrderError(f"step {step.number} was not entered: write `for step in session.steps(...): with step: ...`")
