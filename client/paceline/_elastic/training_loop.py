"""One member's way through the steps of a job: it reads messages, takes and offers state, begins and ends steps.

Everything here runs on the training thread, between the user's steps. `MemberState` decides what may happen next, the
coordinator's messages arrive in the inbox, and `waiting` acts while there are none.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline._base.waits import SLICE
from paceline._elastic.attempts import BlockOutcome, FailedAttempts, FinishedBlocks
from paceline._elastic.balance import Balance
from paceline._elastic.differences import difference, partial_digest
from paceline._elastic.gate import BETWEEN_STEPS, PendingStepWord, acting_alone
from paceline._elastic.guard import StateGuard
from paceline._elastic.job_line import JobLine
from paceline._elastic.launcher_news import tell_new_ranks, tell_of_loop
from paceline._elastic.pace import Pace
from paceline._elastic.peer_calls import Holder
from paceline._elastic.recovery import StateRecovery
from paceline._elastic.rounds import Point
from paceline._elastic.saver import Saver
from paceline._elastic.state import StateCore
from paceline._elastic.step import Step
from paceline._elastic.waiting import MeetingWait, await_finish
from paceline._links.base import Mesh, Peer
from paceline._links.fault import Suspicion
from paceline._microbatch.kept_sums import KeptSums
from paceline._session.inbox import InboxMessage, LineMembers, ReachResult, SessionOver, SessionReplaced, ViewLinked
from paceline._session.launcher_pipe import tell_once
from paceline.errors import (
    CheckpointFailed,
    Dismissed,
    OperationTimeout,
    OrphanedError,
    PacelineError,
    ReplicaLost,
    StepOrderError,
    StepVoid,
)
from paceline_protocol import WHOLE, Meet, MemberState, MemberView, Phase, StepFlag, Tag, Take, messages, step_word
from pacelinepb.v1.errors_pb2 import ErrorReason

_log = logging.getLogger("paceline.elastic")

_UPDATED = 0x9E3779B9
"""XORed into a word's digest if the optimizer ran in the step before; any number but 0."""

_SKIPPED = (
    "all ranks skip step %d, because none called optimizer.step() in its block. If that was not meant, call it after "
    "the backward pass (a gradient scaler leaves it out if gradients overflow). session.stats() counts skipped steps, "
    "and the samples that they leave out"
)


class TrainingLoop:
    """One member's way through the steps of a job.

    Attributes:
        unfinished: True while it has steps to take: from the beginning of the loop until the job is done, or this
            member is dismissed.
        broken_off: the line of the script that left the loop before its end; empty for none.
        last: number of the last step: `total`, unless a step has stopped the loop.
        mates: the other ranks of this member's replica.
        at_end: called once the loop is over, or at the end of the session if the script keeps the iterator.
    """

    def __init__(
        self,
        job_line: JobLine,
        state: StateCore,
        total: int,
        seed: int,
        manifest: bytes,
        saver: Saver,
        member: MemberState,
        balance: Balance | None = None,
    ) -> None:
        self.done = self.left = self.unfinished = self.raised = False
        self.broken_off = ""
        self.last = total
        self.on_commit: list[Callable[[int], None]] = []
        self.on_view: list[Callable[[], None]] = []
        self.at_end = contextlib.ExitStack()
        self.mates = job_line.mates
        self._job_line = job_line
        self._state = state
        self._total = total
        self._seed = seed
        self._manifest = manifest
        self._manifest_digest = hashlib.sha256(manifest).digest()
        self._saver = saver
        self._member = member
        self._recovery = StateRecovery(job_line, member, state, saver)
        self._meeting_wait = MeetingWait(job_line, member, self._send_meet)
        self._counters = job_line.group._core.counters
        self._counters.total = total
        self._pace = Pace(job_line, state, balance)
        self._committed = member.held.step if member.held is not None else 0
        self._failures = FailedAttempts()
        self._blocks = FinishedBlocks()
        self._overtaken = self._stops = self._has_skipped = False
        self._skipped = 0  # the step that all members have agreed to skip in this generation
        self._last_update = 0
        self._large: list[NDArray[Any]] = []
        self._told_lost = ""
        self._microbatches = 0 if state.sampler is None else state.sampler.microbatches
        keeps_sums = self._microbatches and not state.is_sharded and self.mates.size == 1  # mates compute alike
        self._kept_sums = KeptSums() if keeps_sums else None
        self.guard = StateGuard(job_line, state, member, saver, self._recovery, self._blocks, self._tell_committed)

    def held_of(self, state: StateCore) -> Tag | None:
        """Returns the tag of a state if it is this line's; None if it is another state, or unusable."""
        return self._member.held if state is self._state else None

    # Called by the loop over the steps --------------------------------------------------------------------------------

    def enter(self) -> None:
        """Opens the line, and compares this member's state with the others'."""
        self.at_end.callback(self._tell_left)
        self._job_line.offered.manifest = self._manifest
        self._manifest_digest = self.mates.joint(self._manifest_digest)
        self._recovery.join_origins(self.mates)
        self._job_line.open()
        mesh = self._job_line.group._core.mesh
        if mesh.peers:
            if (
                self._job_line.group._core.has_same_state
            ):  # an earlier loop ran in this generation: the others may be in a step
                self._end_generation("started session.steps() again")
            self._carry_out(self._member.formed(MemberView(mesh.generation, mesh.rank, None, frozenset())))
        else:
            self._meeting_wait.as_candidate()

    def wait_until_ready(self) -> None:
        """Waits until a step may begin, or the job is done.

        Raises:
            Dismissed: this member wanted to leave, or joined after the job was done.
            OrphanedError: the coordinator did not come back.
            PacelineError: this member cannot be in the line; the text says why. Or the generation has failed, and its
                engine (MPI) allows no other.
        """
        if (error := self._job_line.group._core.mesh.fault.own_error) is not None:
            raise error
        self._job_line.group._core.check_renewable()
        while not self.done:
            ready = self._member.phase is Phase.READY
            message = self._job_line.inbox.get(
                0.0 if ready else SLICE
            )  # a view may have come while the generation went on
            if message is not None:
                self._handle(message)
            elif ready:
                return
            if self._member.phase is not Phase.READY and not self.done:
                self._meeting_wait.poll()

    @property
    def overtaken(self) -> bool:
        """True if the others have gone on without this member since its last step: it skips blocks between steps."""
        return self._overtaken

    def begin(self) -> Step | None:
        """Returns the next step, entered with its word; None if the generation failed before the step began."""
        self._overtaken = False
        self._counters.step_begins()
        self.guard.begin()
        if self._job_line.inbox.draining and not self._member.leaving:
            _log.info("leaving after this step: %s", self._job_line.inbox.draining)
        number, group = self._state.step + 1, self._job_line.group
        digest = partial_digest(self._large, number) ^ self._last_update
        attempt = self._failures.begin(f"step {number}", group._core.mesh.peers)
        speeds = self._pace.begin(number)
        # Once gradients were sent in this generation, they carry a word without speeds; all members decide this alike.
        with_gradients = group._core.takes_piggybacks and not speeds
        self._member.begin()
        try:
            if self._state.is_sharded:  # before the word, which says that this member has them
                self._recovery.take_copies()
            if self.mates.size > 1:  # wrappers agree on their models here, and not in the first forward pass
                self._state.prepare()
            self._saver.begin(self._member.held, self._state, group)  # first: the word says whether it writes
            flags = self._flags()
            values = step_word(flags, number, digest) + speeds
            pending = PendingStepWord(group, values, number, with_gradients=with_gradients)
            told = None if self._kept_sums is None else self._kept_sums.tell(group, number, self._microbatches)
            joint = self.mates.go(Point.BEGIN, flags)
            if joint is None:  # last: nothing may fail at one of them alone before the block
                pending.drop()
                raise StepVoid(f"another rank of this replica has stopped before step {number}")
        except ReplicaLost:
            raise
        except PacelineError as error:
            self._failed(error)
            return None
        self._saver.start(self._member.held, self._state, group, writing=bool(joint & StepFlag.WRITES))
        step = self.guard.step = Step(
            number,
            attempt,
            group,
            self._state,
            self.guard,
            pending,
            digest,
            self._seed,
            self._kept_sums,
            told,
            self.mates,
            self._pace.shares,
        )
        group._core.ban_collectives(BETWEEN_STEPS)
        return step

    def passes_over(self, step: Step) -> bool:
        """Takes a step that all members have agreed to skip; returns False if it is not skipped."""
        if step.number != self._skipped:
            if step.number >= self.guard.asked[0]:  # no exchange told the others: its block decides anew
                self.guard.asked = 0, ""
            return False
        step._pass_over()
        return True

    def end(self, step: Step) -> None:
        """Ends a step after its block, and begins a meeting if one is due."""
        self._job_line.group._core.ban_collectives("")
        self.guard.step = None
        if not step.entered:
            self.guard.spoiled()
            raise StepOrderError(
                f"step {step.number} was not entered: write `for step in session.steps(...): with step: ...`"
            )
        over = step.generation != self._member.generation  # a block between the steps was interrupted and run again
        if not over:
            # The next word says whether the optimizer ran, so that a member that skipped it is found at once. Not if
            # another generation has begun since: members that took its base ran no optimizer.
            self._last_update = _UPDATED if step.applied and step._updated else 0
            self._saver.heard(writing=bool(step._gate.flags & StepFlag.WRITES))
            if step._passed:
                self._pace.passed(step)
        if step.applied:
            self._pace.applied(step, is_over=over)
        elif step._passed:
            self._counters.step_skipped(step.number, step._left_out)
            if not self._has_skipped and not step._passes_over:
                tell_once(_log, _SKIPPED % step.number, key="skipped")
            self._has_skipped = True
        else:
            self._counters.step_undone()
        if step._passed and step.number >= self.guard.asked[0]:
            self.guard.asked = 0, ""
        if self._kept_sums is not None:
            if step._passed or over:
                self._kept_sums.step_over()
            else:
                step._keep_sums(self._member.held)
        if not step._passed:
            self._failed(step.cause, meet=not over)
        elif step._gate.flags & StepFlag.STOP and not over:
            self.last = step.number
        elif step._gate.flags & (StepFlag.JOIN | StepFlag.LEAVE) and not over:
            self._meeting_wait.planned = True
            self._member.leaving = self._pace.leaves(step) or bool(self._job_line.inbox.draining)
            self._send_meet(self._member.meet())

    def close(self) -> None:
        """Commits the last step with a closing word, and ends the job."""
        group = self._job_line.group
        try:
            with acting_alone(group._core.mesh.fault, self._left_alone()):
                group.all_reduce(np.array(step_word(StepFlag(0), 0, 0)), label=f"closing-{self._state.step}")
            if self.mates.go(Point.CLOSE) is None:
                raise StepVoid("another rank of this replica has stopped before the end")
            self.mates.closed()
            self._saver.drop_others(self._member.held)
            self.guard.word_completed(self._state.step + 1)
            self._saver.keep(self._member.held, self._state, group)
        except (CheckpointFailed, ReplicaLost):
            raise
        except PacelineError as error:  # all members write a sharded state: the next generation tries again
            self._failed(error)
            return
        self._job_line.finish(self._state.step)
        message = await_finish(self._job_line)
        if message is None:
            self.done = True
        else:  # this member holds the last state, which others have to take
            self._handle(message)

    def _left_alone(self) -> str:
        """Says what this member does if it has left the loop before its end, which others may not have done."""
        if not self.broken_off:
            return ""
        mesh = self._job_line.group._core.mesh
        return (
            f"{mesh.peers[mesh.rank]} left the loop over the steps after step {self._state.step} of {self._total} "
            f"({self.broken_off}), and others did not: session.stop() ends it on all ranks"
        )

    def end_in_order(self) -> None:
        """Says that all steps are taken, or that the job was stopped before."""
        if self._state.step < self._total:
            where = f"step {self._state.step} of {self._total}"
            tell_once(_log, f"job {self._job_line.job!r} has stopped after {where}, as asked")
        self.tell_launcher(unfinished=False)

    def stop(self) -> None:
        """Asks all members to end the loop after the next step."""
        self._stops = True

    def break_off(self) -> None:
        """Ends the job at this step if the script has left the loop before its end, and all other members have too.

        Called at the end of the session, which shows that the script has left the loop even if it keeps the iterator.
        Raises StepOrderError if others go on.
        """
        step = self.guard.step
        if not self.unfinished or self.raised or (step is not None and step._raised):
            return
        self.broken_off = self.broken_off or "in an unknown line"
        self.leave()
        if step is not None and step.entered:
            self.end(step)
        elif step is not None:
            self.guard.step = None
            step._gate.close()
            self._member.step_dropped()
        with contextlib.suppress(Dismissed):
            while not self.done:
                self.wait_until_ready()
                if not self.done:
                    self.close()
            if self._state.step < self._total:
                where = f"step {self._state.step} of {self._total} ({self.broken_off})"
                tell_once(_log, f"all workers of job {self._job_line.job!r} left the loop after {where}: it is done")
        self.tell_launcher(unfinished=False)

    def drain(self, reason: str) -> None:
        """Makes this member leave after its present step."""
        self._job_line.inbox.draining = reason

    def tell_launcher(self, *, unfinished: bool) -> None:
        """Notes whether this worker has steps to take, and tells the launcher."""
        self.unfinished = unfinished
        tell_of_loop(self._job_line.job, unfinished=unfinished, done=self.done)

    def _tell_left(self) -> None:
        tell_of_loop(self._job_line.job, unfinished=self.unfinished, done=self.done, left=True)

    def leave(self) -> None:
        """Ends the loop over the steps, for whatever reason."""
        self.left = True
        self.at_end.close()
        self._job_line.group._core.ban_collectives("")
        self._job_line.offered.withdraw()
        if not self.broken_off:  # else the job is still to be closed, together with the mates
            with contextlib.suppress(ReplicaLost):
                self.mates.leave()
        self._saver.wait()

    def retry(self) -> BlockOutcome:
        """Goes on to the next generation, without newcomers, after a failure in a block between two steps."""
        self._member.closed = True
        if self.mates.size > 1:
            self._await_cause("has stopped in a block between steps: another rank of its replica has")
        barred = self._job_line.group._core.ban_reason
        self._job_line.group._core.ban_collectives("")
        try:
            self._send_meet(self._member.meet())
            self.wait_until_ready()
        except Dismissed:  # it ends the script from the middle of the loop
            self.tell_launcher(unfinished=False)
            raise
        finally:
            self._member.closed = False
            self._job_line.group._core.ban_collectives(barred)
        if self._overtaken:
            return BlockOutcome.OVERTAKEN
        return BlockOutcome.PASSED if self._blocks.passed else BlockOutcome.AGAIN

    def block_done(self) -> None:
        """Counts a finished block between two steps."""
        self._blocks.done()

    def _tell_committed(self, step: int) -> None:
        """Calls the listeners for commits, once for each step up to this one."""
        while self._committed < step:
            self._committed += 1
            self._counters.step_committed(self._committed)
            for hear in self.on_commit:
                hear(self._committed)

    # Messages ---------------------------------------------------------------------------------------------------------

    def _handle(self, message: InboxMessage) -> None:
        match message:
            case ViewLinked(member_id=member_id) if member_id != self._job_line.member_id:
                _log.info("generation %d formed with this worker's former member id", message.view.generation)
            case ViewLinked(view, mesh):
                self._enter_view(view, mesh)
            case messages.CatchUp(generation, base, holders, share, fingerprint):
                self._recovery.learn([Holder(Peer.of(member), shares) for member, shares in holders], fingerprint)
                own = any(member.member_id == self._job_line.member_id for member, _ in holders)
                self._carry_out(self._member.catch_up(generation, base, share or WHOLE, own=own))
            case messages.Spare(reason):
                _log.info("this worker has no place in the next generation and is spare: %s", reason)
                self._become_candidate()
            case messages.StateLost(reason):
                self._committed, meet = self._recovery.start_from_checkpoint(reason)
                self._send_meet(meet)
            case messages.Mismatch(member):
                donor = Peer.of(member)
                raise difference(self._manifest, self._job_line.manifest_of(donor), donor, self.mates.size)
            case messages.Dismissed(last):
                if last:
                    if not self._saver.keeps:
                        number = self._state.step
                        tell_once(
                            _log, f"all members leave, and without checkpoint_dir the state of step {number} is lost"
                        )
                    self._saver.keep_last(self._member.held, self._state, self._job_line.group)
                raise Dismissed(self._job_line.inbox.draining or self._pace.why_leaving or "this worker was drained")
            case messages.Finished(step):
                self._job_done(step)
            case SessionReplaced():
                if self._member.held is None:
                    raise OrphanedError("the training state is lost, and this worker's own state was half changed")
                _log.warning("this worker was declared lost; it rejoins with the state %s", self._member.held)
                self._become_candidate()
            case messages.Running():
                self._meeting_wait.line_runs(None)
            case LineMembers(members):
                self._meeting_wait.line_runs(members)
            case ReachResult(members, troubles):
                self._meeting_wait.tried(members, troubles)
            case messages.Waiting(reason):
                self._meeting_wait.waits_for(reason)
            case SessionOver(error):
                raise error

    def _enter_view(self, view: messages.ViewFormed, mesh: Mesh | None) -> None:
        if view.generation <= self._member.generation:
            return
        world = len(mesh.peers) if mesh is not None else 0
        self.mates.leave()  # no step was begun in the generation before
        if view.base is not None:
            self.mates.enter(view.generation)
        newcomers = frozenset(view.newcomers)
        order = self._member.formed(MemberView(view.generation, view.rank, view.base, newcomers, world or 1))
        if mesh is None:
            self._send_meet(self._member.meet())
            return
        if view.rank not in newcomers:
            noun = "rank" if self.mates.size == 1 else "replica"
            tell_new_ranks(self._job_line.job, view.generation, self._job_line.group._core.mesh.peers, mesh.peers, noun)
        self._job_line.move(mesh)
        self._recovery.learn([Holder(peer, (WHOLE,)) for peer in mesh.peers if peer.rank not in newcomers])
        self._meeting_wait.view_came()
        if view.lost and view.lost != self._told_lost:
            self._told_lost = view.lost
            tell_once(_log, f"job {self._job_line.job!r}: {view.lost}")
        if isinstance(order, Meet) and view.base is not None:  # the others wait for this member in their first step
            self._end_generation(f"holds the state {self._member.held}, but should begin with {view.base}")
        self._carry_out(order)
        if self._member.phase is Phase.READY:
            self._recovery.train_on(self._member.shares[0])
        if self.last < self._total:  # others may not know that a step has stopped the loop
            self.last, self._stops = self._total, True
        self._pace.enter(world)
        self._large = self._state.large()
        self.guard.forget()
        self._last_update = self._skipped = 0
        if self._kept_sums is not None:
            self._kept_sums.enter(None if view.rank in view.newcomers else view.base)
        if view.base is not None:
            self._refuse_half_called_step(view.base.step)
            self._recovery.has_a_base()
            self._job_line.group._core.confirm_same_state()
            if self._skip_was_late(view.base.step):
                return
            if not view.newcomers and not self._compare_blocks():
                return
            if self._recovery.read_a_checkpoint or view.base == self._saver.loaded:
                self._say_resumed(view.base)
            if view.rank in view.newcomers or self._recovery.read_a_checkpoint:
                self._committed, self._recovery.read_a_checkpoint = view.base.step, False
            if view.rank in view.newcomers:
                self._blocks.forget()
                self._overtaken = True  # no newcomer is admitted while members are in a block
            members = f"{world} member{'s'[: world != 1]}"
            _log.info("generation %d continues from step %d with %s", view.generation, view.base.step, members)
            for hear in self.on_view:
                hear()

    def _say_resumed(self, base: Tag) -> None:
        """Says that the members go on from a checkpoint."""
        text = f"job {self._job_line.job!r} resumed from step {base.step} of checkpoint {self._saver.where(base)}"
        over = f", the last of {self._total}: nothing is left to train" if base.step >= self._total else ""
        tell_once(_log, text + over, level=logging.INFO)
        self._saver.loaded = None

    def _end_generation(self, why: str) -> None:
        """Tells the others that this member takes no part in the generation; `why` completes "rank 2 (host-b) ..."."""
        mesh = self._job_line.group._core.mesh
        text, operation = f"{mesh.peers[mesh.rank]} {why}", self._job_line.group._core.progress().operation
        mesh.fault.suspect(Suspicion(ErrorReason.ERROR_REASON_PEER_RAISED, None, operation, text))

    def _await_cause(self, why: str) -> None:
        """Ends the generation with `why` if it has not failed. Before that, a mate's cause says more."""
        mesh = self._job_line.group._core.mesh
        if mesh.peers and not mesh.fault.failed:
            if self.mates.size > 1:
                mesh.fault.await_verdict()
            if not mesh.fault.failed:
                self._end_generation(why)

    def _compare_blocks(self) -> bool:
        """Compares finished blocks. Not called with newcomers: then no member was in a block (`closed`)."""
        if self._member.phase is not Phase.READY:
            return False
        self._failures.begin(f"step {self._state.step + 1}", self._job_line.group._core.mesh.peers)
        asked, _ = self.guard.asked
        try:
            self._skipped = self._blocks.compare(self._job_line.group, asked)
        except PacelineError as error:
            self._failed(error)
            return False
        if asked == self._skipped:  # all know: whatever becomes of this step now, they do it together
            self.guard.asked = asked, ""
        return True

    def _refuse_half_called_step(self, step: int) -> None:
        """Ends this member if others have completed a step with fewer collectives, which it cannot without them.

        Without an optimizer there is no call that shows which ranks make an update: the end of a block counts as one.
        """
        text = self._failures.mismatch_in(f"step {step}")
        if text and not self._state.has_optimizer:
            raise StepOrderError(
                f"other ranks have completed step {step} without all collectives that this rank calls in it, but all "
                f"ranks must call the same ones: {text}"
            )

    def _skip_was_late(self, step: int) -> bool:
        """Ends all members if this one has asked to skip a step that others had applied by then."""
        asked, text = self.guard.asked
        if not text or asked > step:
            return False
        mesh = self._job_line.group._core.mesh
        text += ", but others had made their update: call it before the backward pass, or any collective of the step"
        mesh.fault.suspect(Suspicion(ErrorReason.ERROR_REASON_STEP_DIFFERS, None, 0, text))
        self._failed(mesh.fault.error())
        return True

    def _carry_out(self, order: Meet | Take | None) -> None:
        """Carries out an order of `MemberState`, and those that follow."""
        meet = self._recovery.carry_out(order)
        if meet is not None:
            self._send_meet(meet)

    def _become_candidate(self) -> None:
        """Becomes a candidate; offers shares of a sharded state that others may need at once."""
        # Else the launcher, which knows of newer generations from others, would take this worker for one that hangs.
        tell_of_loop(self._job_line.job, unfinished=self.unfinished, waits=True)
        self.mates.cast_out()  # all mates become candidates
        meet = self._member.cast_out()
        if meet.unproven:
            self._send_meet(meet)
        self._meeting_wait.as_candidate()

    def _send_meet(self, meet: Meet) -> None:
        """Sends a meet, and offers the state to others, since it does not change while this member waits."""
        self._counters.stopped()
        self.mates.leave()
        if meet.stored and (latest := self._saver.latest()) > (meet.tag or latest):
            self._member.found(latest)  # others have written a newer one
            meet = replace(meet, tag=latest)
        fingerprint = self._recovery.fingerprint(meet)
        if meet.tag is not None and not meet.stored:
            self._job_line.offered.offer(meet.tag, self._state.offered())
        self._meeting_wait.said()
        manifest, step_timeout = self._manifest_digest, self._job_line.config.step_timeout
        self._job_line.meet(replace(meet, fingerprint=fingerprint, manifest=manifest, step_timeout=step_timeout))

    def _job_done(self, step: int) -> None:
        if self._member.generation:  # a candidate took no part in it
            self._tell_committed(step)
        if self._state.step < step or self._member.held is None:
            raise self._dismissed(step)
        if not self._job_line.group._core.mesh.peers:  # this worker joined after the end, and has no rank to go on with
            raise self._dismissed(step)
        if step < self.last and not (self.broken_off or self._stops):  # else it knows that the job ends early
            raise StepOrderError(
                f"job {self._job_line.job!r} is done: its last step was {step}, but {self._total} steps are "
                f"asked for. To train on, run `paceline restart {self._job_line.job}`, or give the job another name"
            )
        self.done = True

    def _dismissed(self, step: int) -> Dismissed:
        """Returns the end of a worker that comes when the job is done, and says so: its exit code is 0."""
        job, latest = self._job_line.job, self._saver.latest()
        if self._job_line.group._core.mesh.peers:  # it had a rank once
            text = f"job {job!r} is done (step {step}): the others have finished it without this worker"
            tell_once(_log, text)
            return Dismissed(text)
        text = f"job {job!r} is done (step {step}); `paceline restart {job}` starts it anew"
        if latest > Tag(0, 0):  # which may be the last one: then there is nothing to train
            text = f"{text}, from step {latest.step} of checkpoint {self._saver.where(latest)}"
        tell_once(_log, text)
        return Dismissed(text)

    # Around a step ----------------------------------------------------------------------------------------------------

    def _flags(self) -> StepFlag:
        inbox, flags = self._job_line.inbox, StepFlag.WRITES if self._saver.is_writing else StepFlag(0)
        if self._stops:
            flags |= StepFlag.STOP
        if not inbox.connected:
            return flags
        if (
            inbox.summoned == self._member.generation or self._meeting_wait.went_on
        ):  # again for a meeting that did not happen
            flags |= StepFlag.JOIN
        if inbox.draining or (self._state.step + 1 < self.last and self._pace.ask()):
            flags |= StepFlag.LEAVE
        return flags

    def _failed(self, cause: BaseException | None, *, meet: bool = True) -> None:
        """Undoes a failed attempt, and ends its generation (I1). StepOrderError if the next one would fail alike."""
        with contextlib.suppress(PacelineError):
            self._job_line.group._core.flush()
        fault = self._job_line.group._core.mesh.fault
        if fault.failed and isinstance(final := fault.error(), StepOrderError) and final.ranks:
            raise final
        number = self._state.step + 1
        if meet:
            # The script caught the error that interrupted its update; the others have applied the step, and would wait.
            self._await_cause(f"has not applied step {number}: {cause}"[:2000])
        if isinstance(cause, OperationTimeout):
            tell_once(_log, f"step {number} is run again: {cause}", key=f"step {number} timed out")
        else:
            _log.info("step %d is undone: %s", number, cause)
        self._failures.add(f"step {number}", cause, self._job_line.group._core.mesh.peers)
        if meet:
            self._send_meet(self._member.meet())
