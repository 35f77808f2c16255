"""How a member gets the state that it should hold: from others, from a checkpoint, or by finishing a step itself."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from numpy.typing import NDArray

from paceline._elastic.job_line import JobLine
from paceline._elastic.mates import Alone
from paceline._elastic.peer_calls import Holder
from paceline._elastic.reshard_plan import ReshardPlan
from paceline._elastic.saver import Saver, warning_of_frozen
from paceline._elastic.state import StateCore
from paceline._links.fault import Suspicion
from paceline._parallel._parameter import Parameter
from paceline._parallel.sharding._placement import copy_partners
from paceline._session.launcher_pipe import tell_once
from paceline.errors import (
    CheckpointDamaged,
    CheckpointFailed,
    LinkUnavailable,
    OrphanedError,
    PacelineError,
    SizeMismatch,
    StepOrderError,
    UnsupportedOp,
)
from paceline_protocol import Meet, MemberState, Share, Tag, Take, share_of
from pacelinepb.v1.errors_pb2 import ErrorReason

_log = logging.getLogger("paceline.elastic")

_FIRST_S, _MOST_S = 0.05, 1.0
"""Shortest and longest pause in seconds between takes that fail in a row; the coordinator orders retries at once."""

COPIES_VERSION = 9
"""The version of the protocol that has copies of shards: members of an earlier release send none."""

_TRIES, _PATIENCES = 3, 10
"""A member leaves after so many failed takes in that many times `failure_timeout`, because the others wait for it."""


class _Kept(NamedTuple):
    """The data that a member needs to finish a step that others may have applied.

    Attributes:
        at_gate: small state at the gate.
        updated: True if the optimizer was called; False if the block ended without an update.
        gradients: what the update uses.
    """

    at_gate: Mapping[str, Any]
    updated: bool
    gradients: Sequence[tuple[Parameter, NDArray[Any]]]


class StateRecovery:
    """Takes the state of a line from other members or a checkpoint, or finishes a step that others have applied.

    `read_a_checkpoint` says that the state came from a checkpoint; the owner reads and clears it.
    """

    def __init__(self, job_line: JobLine, member: MemberState, state: StateCore, saver: Saver) -> None:
        self._job_line = job_line
        self._member = member
        self._state = state
        self._saver = saver
        self._holders: Sequence[Holder] = ()
        self._told = b""  # the fingerprint of the base
        self._own = saver.tag, saver.fingerprint  # the state that was read from a checkpoint or taken last
        self._failing: Tag | None = None  # the state whose takes have failed lately
        self._failing_since = 0.0
        self._failed = 0  # failed takes in a row
        self._kept: _Kept | None = None
        self.read_a_checkpoint = False

    def learn(self, holders: Sequence[Holder], fingerprint: bytes = b"") -> None:
        """Learns the holders of the base with their shares, and its fingerprint if the tag does not identify it."""
        self._holders, self._told = holders, fingerprint

    def fingerprint(self, meet: Meet) -> bytes:
        """Returns the fingerprint of this member's state if its tag does not identify it; empty if it does.

        Each member builds its own state at (0, 0), and members may have different states of one tag on their disks.
        """
        if meet.tag is None or meet.stored:
            return b""
        if self._own[0] != meet.tag:
            self._own = meet.tag, b""
        if meet.tag.is_origin and not self._own[1]:  # a member that took a share of it knows the fingerprint
            self._own = meet.tag, self._state.fingerprint_of_origin()
        return self._own[1]

    def join_origins(self, mates: Alone) -> None:
        """Replaces the fingerprint of a state that this member has built itself by the whole replica's.

        All mates do this when their loop begins, because later each of them may need it at another moment.
        """
        if mates.size > 1 and self._member.held is not None and self._member.held.is_origin:
            self._own = self._member.held, mates.joint(self._state.fingerprint_of_origin())

    def has_a_base(self) -> None:
        """Notes that all members hold the same state: from now on equal tags mean equal bits."""
        if not self._own[0].is_origin:
            self._own = self._own[0], b""

    def carry_out(self, order: Meet | Take | None) -> Meet | None:
        """Carries out orders of the state machine until it has none; returns what to tell the coordinator then.

        Raises LinkUnavailable if no member gave the state in many tries, and others wait for this member.
        """
        if self._member.prepared is None:
            self._kept = None  # no member has applied that step, so it is undone here too
        while isinstance(order, Take):
            began = time.monotonic()
            try:
                self._take(order)
            except (CheckpointFailed, SizeMismatch, StepOrderError, UnsupportedOp):  # a retry would not help
                raise
            except PacelineError as error:
                _log.info("could not fetch the state %s: %s", order.base, error)
                if self._member.takes_for_view:
                    self._tell_view(order, error)
                found = self._saver.intact() if self._member.stored else self._saver.latest()
                if self._member.stored and found == Tag(0, 0):
                    raise  # there were checkpoints, and all have been removed
                self._failed_again(order, error, began)
                self._member.found(found)
                order = self._member.meet()
            else:
                self._failing = None
                self._own = order.base, self._told
                order = self._member.took()
        return order

    def _tell_view(self, order: Take, error: PacelineError) -> None:
        """Ends the view, so that its members meet again and do not wait for this one in their first step."""
        mesh = self._job_line.group._core.mesh
        text = f"{mesh.peers[mesh.rank]} could not fetch the state {order.base}: {error}"[:2000]
        mesh.fault.suspect(Suspicion(ErrorReason.ERROR_REASON_PEER_RAISED, None, 0, text))

    def _failed_again(self, order: Take, error: PacelineError, began: float) -> None:
        """Pauses before the next try; raises after too many, unless others need what this member holds."""
        now = time.monotonic()
        if order.base != self._failing:
            self._failing, self._failing_since, self._failed = order.base, now, 0
        self._failed += 1
        seconds, patience = now - self._failing_since, _PATIENCES * self._job_line.config.failure_timeout
        tried = self._failed >= _TRIES and seconds > patience and not isinstance(error, CheckpointDamaged)
        if tried and not self._member.is_needed:
            text = f"could not fetch the state {order.base}, {self._failed} times in {seconds:.0f} s"
            raise LinkUnavailable(f"{text}; this member leaves, because the others wait for it: {error}") from error
        if self._failed > 1:  # after the first failure retry at once: the member that failed has mostly gone
            pause = min(_MOST_S, _FIRST_S * 2.0 ** (self._failed - 2))
            time.sleep(max(0.0, began + pause - now))

    def start_from_checkpoint(self, reason: str) -> tuple[int, Meet]:
        """Goes back to the latest checkpoint, because the state is lost; returns its step and the meet to send."""
        found = self._saver.latest()
        if found == Tag(0, 0):
            raise OrphanedError(f"the training state is lost, and there is no checkpoint: {reason}")
        if not self._state.is_sharded:  # a checkpoint is read before the loop begins, together with the mates
            where = f"checkpoint {self._saver.where(found)} (step {found.step})"
            raise OrphanedError(f"the training state is lost: {reason}; start the replicas again, from {where}")
        text = f"the training state is lost: {reason}; continuing from step {found.step} of checkpoint"
        tell_once(_log, f"{text} {self._saver.where(found)}", level=logging.ERROR)
        self._kept = None
        return found.step, self._member.lost(found)

    def keep_gradients(self, at_gate: Mapping[str, Any], *, updated: bool) -> None:
        """Keeps the gradients of a step that may have to be finished later; see `_Kept`."""
        self._kept = _Kept(at_gate, updated, self._state.take_gradients())

    def _take(self, order: Take) -> None:
        """Carries out an order; nothing has changed if it raises PacelineError."""
        if order.finish:
            self._finish(order)
        elif self._state.is_sharded:
            self._reshard(order)
        else:
            rest = self._from_others(order)
            self._job_line.offered.withdraw()  # the take overwrites the state, which others might read
            self._state.load_state_dict(rest)

    def train_on(self, share: Share) -> None:
        """Makes a share that this member holds the live one."""
        if self._state.is_sharded:
            self._state.retire_copies()
            if self._state.shares()[0] != share:
                self._state.switch(self._state.resharding(share))

    def take_copies(self) -> None:
        """Takes copies of others' shares that this member is to have in its view and has not; mostly it has them all.

        Call it before this member says that it has begun a step. It has some of their elements from before, and others
        offer the rest until all have said so.

        Raises:
            PacelineError: a copy could not be fetched.
        """
        group, redundancy = self._job_line.group, self._state.redundancy
        if group._core.mesh.version < COPIES_VERSION:
            redundancy = 1
        if len(self._state.copies) == min(redundancy, group.size) - 1:
            return
        partners = copy_partners(group.rank, group.members, redundancy)
        base = self._member.held
        assert base is not None
        shares = [share_of(rank, group.size, self._state.node_size) for rank in range(group.size)]
        holders = [Holder(peer, (shares[peer.rank],)) for peer in group.members if peer.rank != group.rank]
        plans = [self._state.copying(shares[each.source], each) for each in partners]
        for plan in plans:
            if plan.wanted:
                self._job_line.take_shards(base, holders, plan)
        for plan in plans:
            plan.switch()
        self._member.copied(self._state.copies)

    def _finish(self, order: Take) -> None:
        """Finishes a step that others have applied: runs the optimizer on the gradients that were kept.

        Nothing has changed if it raises PacelineError; after any other error the state is discarded.
        """
        assert self._kept is not None
        kept, rest = self._kept, self._from_others(order)
        self._job_line.offered.withdraw()
        try:
            self._state.put_back(kept.at_gate)
            if kept.updated:
                self._state.update(kept.gradients)
            self._state.load_state_dict(rest)
        except BaseException:
            self._member.spoiled()
            raise
        self._state.clear_gradients()
        self._kept = None
        _log.info("finished step %d here too, which other members have applied", order.base.step)

    def _reshard(self, order: Take) -> None:
        plan = self._state.resharding(order.share, own=order.own)
        rest = self._fill(plan, order) if plan.wanted or not order.own else None
        if not order.own:
            self._job_line.offered.withdraw()
        from_disk = self.read_a_checkpoint and rest is not None
        with warning_of_frozen(self._state, order.base.step) if from_disk else contextlib.nullcontext():
            self._state.switch(plan, rest)

    def _fill(self, plan: ReshardPlan, order: Take) -> Any:
        """Fills a plan from members, or else from a checkpoint; returns the rest of the state, None to keep the own."""
        if any(holder.shares for holder in self._holders):
            try:
                rest = None if order.own else self._from_others(order)
                self._job_line.take_shards(order.base, self._holders, plan)
            except LinkUnavailable as error:
                if not self._saver.has(order.base):
                    raise
                _log.info("reading the state from a checkpoint, because no member sent it: %s", error)
            else:
                return rest
        self.read_a_checkpoint = True
        inbox = self._job_line.inbox
        return self._saver.read(order.base, plan, lambda: inbox.asks or bool(inbox.draining))

    def _from_others(self, order: Take) -> Any:
        donors = [holder.peer for holder in self._holders]
        return self._job_line.take(order.base, donors, self._state.offered()).tree()
