"""The gate of a step, and the words that the members of a view exchange at it.

Each says with its step word that it has entered the step. The word travels with the first gradients, so it cannot say
how the step ends. A member that makes an update says nothing more: it applies the step. One whose block ends without an
update asks all others whether they skip the step too, in a collective of its own. Where they do it completes, and
nobody has changed anything. Where one makes the update it calls something else, so the calls do not match, and the
text says what the member that stands alone has done, and in which line. docs/decisions/15 lists all collectives of a
step in order.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline._base.uncaught import users_place
from paceline._base.work import Work
from paceline._elastic.differences import find_minority
from paceline._elastic.mates import ALONE, Alone
from paceline._elastic.rounds import Point
from paceline._elastic.state import StateCore
from paceline._group import Group
from paceline._links.fault import Fault, Suspicion
from paceline._microbatch.step_microbatches import StepMicrobatches
from paceline.errors import ReplicaLost, StepOrderError, StepVoid
from paceline_protocol import STEP_WORD_SIZE, StepFlag, agrees, flags_of, members_with
from pacelinepb.v1.errors_pb2 import ErrorReason

_log = logging.getLogger("paceline.elastic")

BARRED = (
    "a collective after optimizer.step() of the same step: the state has changed, and could not be restored if the "
    "collective failed; call it before the update, or after the step inside session.retry()"
)

OR_COPY = (
    ". A step with several updates, such as that of a GAN, calls step.keep_copy() before the first: then all of them "
    "are undone together"
)

HALF_UPDATED = (
    "a collective after an optimizer.step() that was interrupted half way: the other ranks would apply what this one "
    "computes from half an update. Let the error leave the block of the step"
)

BETWEEN_STEPS = (
    "a collective between two steps: if a worker were lost in it, nothing would run it again. All code of a step "
    "belongs inside `with step:`, and a collective between two steps into "
    "`for attempt in session.retry(): with attempt: ...`. "
    "If the loop was left by `break`, close or delete its iterator first"
)
"""The text of the error that refuses a collective between two steps."""


@contextmanager
def acting_alone(fault: Fault, what: str) -> Iterator[None]:
    """Inside the block, calls that do not match are due to what this member does, and the error says that."""
    fault.account = what
    try:
        yield
    finally:
        fault.account = ""


class PendingStepWord:
    """One member's step word while it is summed over the members.

    With `with_gradients`, which is the same on all ranks, it waits for a bucket of gradients. Otherwise it is sent at
    once, in a message of its own, while the step computes.
    """

    def __init__(self, group: Group, values: Sequence[float], step: int, *, with_gradients: bool) -> None:
        self.values = np.array(values, np.float64)
        self._group = group
        self._label = f"step-{step}"
        self._sums: Sequence[float] | None = None
        self._work: Work[NDArray[Any]] | None = None
        if with_gradients:
            group._core.mesh.fault.check()
            group._core.add_piggyback(self)
        else:
            self._work = group.all_reduce(self.values, label=self._label, async_op=True)

    def arrive(self, sums: NDArray[Any]) -> None:
        """See `Piggyback.arrive`."""
        self._sums = sums.tolist()

    def wait(self) -> Sequence[float]:
        """Returns the sums over all members, once all have entered the step.

        Raises:
            StepOrderError: the word should have gone with gradients that were dropped.
        """
        if self._work is not None:
            return self._work.wait().tolist()  # type: ignore[no-any-return]
        if self._sums is None and self._group._core.cancel_piggyback(self):  # there were no gradients in this step
            self._sums = self._group.all_reduce(self.values, label=self._label).tolist()
        if self._sums is None:
            self._group._core.mesh.fault.check()
            raise StepOrderError("the gradients of this step were dropped, and its step word with them")
        return self._sums

    def drop(self) -> None:
        """Withdraws the word from the gradients if it was not sent, because the step is over."""
        self._group._core.cancel_piggyback(self)


class StepRunner(Protocol):
    """The loop that runs a step, as far as the step needs it."""

    def word_completed(self, step: int) -> None:
        """Notes that every member has entered this step, so that the step before is committed."""

    def about_to_change(self) -> None:
        """Notes that the state is about to change: other members may no longer read it."""

    def applied(self, step: int) -> None:
        """Notes that this step has changed the state."""

    def diverged(self, text: str) -> None:
        """Discards this member's state, which differs from the majority's; DivergenceError if it did too often."""

    def spoiled(self) -> None:
        """Discards this member's state, because an update was interrupted half way."""

    def skip_asked(self, step: int, text: str) -> None:
        """Asks all other members to skip the step; `text` names this member, and the line of its script."""

    def prepared(self, step: Any, small: Mapping[str, Any]) -> None:
        """Keeps the gradients of a `Step` that has failed here, because other members may have applied it.

        `small` is the small state as it was at the gate; it has been put back.
        """


class StepGate:
    """The gate of one attempt at a step: it opens once, and until then nothing has changed the state.

    Attributes:
        is_open: True once the state may change.
        flags: what members have said with their words.
        leaving: how many of them want to leave.
        speeds: the rest of the sums, which the loop has added to its word (`Balance.word`).
        is_prepared: True while another member may have seen all second words, and this one has not.
    """

    def __init__(
        self,
        number: int,
        group: Group,
        state: StateCore,
        runner: StepRunner,
        word: PendingStepWord,
        digest: int,
        micro: StepMicrobatches | None,
        mates: Alone = ALONE,
    ) -> None:
        self.is_open = self.is_prepared = False
        self.flags = StepFlag(0)
        self.speeds: Sequence[float] = ()
        self.leaving = 0
        self._number = number
        self._group = group
        self._state = state
        self._runner = runner
        self._word = word
        self._digest = digest
        self._micro = micro
        self._mates = mates

    def open(self, optimizer: object, *, updates: bool, skips: bool, keeps_copy: bool) -> None:
        """Waits until the state may change: all members have entered, and all collectives are complete (I1).

        A sharded state may only change once this is so on all members: otherwise some would have the new state and
        some the old one, and neither would be complete. So each member says in a second word that it has all its
        gradients; a member that does not see this word complete keeps them. The ranks of a replica agree last, since
        nothing may fail at one of them alone after that.
        """
        if self.is_open and not keeps_copy:  # it is too late to fail, since the first update cannot be undone
            return
        if self._mates.size > 1:  # after a failure the rest of the block was for the mates
            self._group._core.mesh.fault.check()
        if self._micro is not None:
            self._micro.check_update(optimizer, updates=updates)
        if self.is_open:
            self._check_complete()
            return
        if self._micro is not None:
            self._micro.compare_twice()
        summed = self._word.wait()
        sums, self.speeds = summed[:STEP_WORD_SIZE], summed[STEP_WORD_SIZE:]
        if not agrees(sums, self._group.size):
            self._find_divergence()
        self._check_complete()
        self.flags, self.leaving = flags_of(sums), members_with(StepFlag.LEAVE, sums)
        self._runner.word_completed(self._number)
        if (self._state.is_sharded or skips) and self._group.size > 1:
            if self._state.is_sharded and not skips:
                self._state.send_gradients(self._group)
            # From here on another member may see the second word complete, and change its state.
            self.is_prepared = self._state.is_sharded
            self._group.all_reduce(np.zeros(1), label=f"{'skip' if skips else 'gate'}-{self._number}")
            self.is_prepared = False
        self._runner.about_to_change()
        point = Point.NO_UPDATE if skips else Point.UPDATE
        if (flags := self._mates.go(point, self.flags)) is None:
            raise StepVoid(f"another rank of this replica has stopped in step {self._number}")
        self.flags = flags
        if not keeps_copy:
            self._group._core.ban_collectives(BARRED if self._state.is_sharded else BARRED + OR_COPY)
        self.is_open = True

    def check(self) -> None:
        """Raises if the step will be undone, which a block may ask before the gate: on all ranks of a replica alike."""
        if self.is_open:
            return
        self._group._core.mesh.fault.check()
        if self._mates.go(Point.INSIDE) is None:
            raise StepVoid(f"another rank of this replica has stopped in step {self._number}")

    def pass_without_update(self, *, skips: bool) -> None:
        """Passes the gate at the end of a block without an update: only if all other members do so too."""
        what = (
            f"{self._me} ended step {self._number} without optimizer.step() ({users_place(sys._getframe())}), "
            "and others did not: step.skip() skips a step on all ranks"
        )
        with acting_alone(self._group._core.mesh.fault, what):
            self.open(None, updates=False, skips=skips, keeps_copy=False)

    def tell(self, error: BaseException) -> None:
        """Tells the other members that this one's code has raised, so that they do not wait for it."""
        mesh = self._group._core.mesh
        if isinstance(error, GeneratorExit | SystemExit | ReplicaLost) or not mesh.peers:
            return  # the coordinator tells which rank of a replica was lost
        text = f"{self._me} raised {type(error).__name__} in step {self._number}: {error}"[:2000]
        operation = self._group._core.progress().operation
        mesh.fault.suspect(Suspicion(ErrorReason.ERROR_REASON_PEER_RAISED, None, operation, text))

    def close(self) -> None:
        """Withdraws the step word if it was not sent, because the step is over."""
        self._word.drop()

    @property
    def _me(self) -> str:
        return str(self._group._core.mesh.peers[self._group.rank])

    def _check_complete(self) -> None:
        """Waits for all collectives that were called; raises if one of them has failed."""
        self._group._core.flush()
        self._group._core.mesh.fault.check()

    def _find_divergence(self) -> None:
        """Finds the members that differ from the majority, has them take the state of the others, and raises."""
        fault = self._group._core.mesh.fault
        odd, text = find_minority(self._group, self._state, self._number, self._digest)
        _log.error("%s", text)
        operation = self._group._core.progress().operation
        fault.suspect(Suspicion(ErrorReason.ERROR_REASON_PEER_RAISED, odd[0], operation, text))
        if self._group.rank in odd:
            self._runner.diverged(text)
        fault.check()
