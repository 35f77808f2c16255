"""One attempt at one step: entered with its word, let through its gate once, and at its end applied or undone."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.elastic.errand import Errand
from paceline.elastic.state import TrainState
from paceline.elastic.word import Flag, agrees, flags_of
from paceline.errors import DivergenceError, PacelineError, StepOrderError, UnsupportedOp
from paceline.group import Group
from paceline.links.fault import Suspicion
from pacelinepb.v1.errors_pb2 import ErrorReason

__all__ = ["Step", "Steward"]

_log = logging.getLogger("paceline.elastic")

_BARRED = (
    "a collective after optimizer.step() of the same step: the state has changed, and if this failed it could not be "
    "changed back; call it before the update, or after the step"
)


class Steward(Protocol):
    """Whoever runs the steps."""

    def word_completed(self, step: int) -> None:
        """Every member has entered this step: the one before is committed."""

    def about_to_change(self) -> None:
        """The state changes now: nobody may read it any more."""

    def applied(self, step: int) -> None:
        """This step has changed the state."""

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
        steward: Steward,
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
        self.entered = False
        self.updated = self.updates = False
        """The optimizer has run; it was called, and may have been held back at the gate."""
        self._prepared = False
        self._group = group
        self._mesh = group.mesh
        self._state = state
        self._steward = steward
        self._word = word
        self._digest = digest
        self._seed = seed
        self._small = state.small()
        self._open = False
        self._share: tuple[NDArray[np.intp], float] | None = None

    @property
    def indices(self) -> NDArray[np.intp]:
        """This rank's samples of the step, shape [b_r]; one, of weight 0, where it has none.

        Raises:
            UnsupportedOp: the training state has no sampler.
        """
        return self._of_sampler()[0]

    @property
    def weight(self) -> float:
        """What this rank's mean loss counts: b_r / b. For `ddp.backward(dy, step.weight)`; torch's wrapper knows it."""
        return self._of_sampler()[1]

    @property
    def lr_scale(self) -> float:
        """What to multiply the learning rate by: the world's size with `per_rank_batch`, else 1."""
        self._of_sampler()
        assert self._state.sampler is not None
        return self._state.sampler.lr_scale(self.world)

    @property
    def rng(self) -> np.random.Generator:
        """Randomness of (seed, step, rank): the same in every attempt of the same world."""
        return np.random.default_rng([self._seed, self.number, self.rank])

    def rng_for(self, index: int) -> np.random.Generator:
        """Randomness of (seed, step, sample): the same whoever has the sample."""
        return np.random.default_rng([self._seed, self.number, 1 << 40, int(index)])

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
            return
        sums = self._word.wait()
        if not agrees(sums, self.world):
            raise self._diverged()
        self._group.flush()
        self._mesh.fault.check()
        self.flags = flags_of(sums)
        self._steward.word_completed(self.number)
        if self._state.spreads and self.world > 1:
            self._prepared = True  # from here on another may see all second words, and change its state
            self._group.all_reduce(np.zeros(1), label=f"gate-{self.number}")
            self._prepared = False
        self._steward.about_to_change()
        self._group.bar(_BARRED)
        self._open = True

    def __enter__(self) -> Step:
        self.entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False] | bool:
        if error is None:
            try:
                self.open_gate()  # a step in which no optimizer ran: it may have been skipped by all
            except BaseException as failure:  # noqa: BLE001  raised again below, when the step is undone
                error = failure
        self._group.bar("")
        self._group.count(1.0)
        self._word.drop()
        failed = self._mesh.fault.failed
        if self._open and not self.spoiled:
            self.applied = True
            self._state.advance(self.world)
            self._steward.applied(self.number)
        else:
            self.cause = self._why(error) if failed else error
            if self._prepared:
                at_gate = self._state.small()
                self._state.put_back(self._small)
                self._steward.prepared(self, at_gate)
            elif not self.spoiled:
                self._state.undo(self._small)
        if error is None:
            return True
        if failed and isinstance(error, Exception) and not isinstance(error, DivergenceError):
            if self.applied:
                _log.warning("step %d counts, though its block ended with an error", self.number, exc_info=error)
            return True
        self._tell(error)
        if kind is None:
            raise error
        return False

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
            sampler = self._state.sampler
            if sampler is None:
                raise UnsupportedOp("the training state has no sampler: TrainState(sampler=ElasticSampler(...))")
            self._share = sampler.current(self.rank, self.world)
            self._group.count(self._share[1])
        return self._share

    def _diverged(self) -> DivergenceError:
        mine = np.array([self._digest], np.uint64)
        text = f"before step {self.number}, members did not hold the same bits"
        unknown = DivergenceError(text, generation=self.generation)
        try:
            found: Any = self._group.all_gather(mine)
        except PacelineError:  # somebody was faster, and has raised this already
            return unknown
        values, counts = np.unique(found, return_counts=True)
        if 2 * counts.max() <= self.world:  # no majority: nobody can tell who is right
            return unknown
        most = values[np.argmax(counts)]
        odd = tuple(int(rank) for rank in np.flatnonzero(found != most))
        members = ", ".join(str(self._mesh.peers[rank]) for rank in odd)
        text = f"before step {self.number}, {members} did not hold the same bits as the others"
        return DivergenceError(text, ranks=odd, generation=self.generation)


def not_entered(step: Step) -> StepOrderError:
    """The error of a loop that does not enter its steps."""
    return StepOrderError(f"step {step.number} was not entered: write `for step in session.steps(...): with step: ...`")
