"""The actions of a member that waits for the coordinator: those that time triggers, not a message.

A candidate tests whether it and the members of the running generation can connect. A member that wants to leave says
so. A member that stopped for a planned meeting, and hears nothing because the coordinator is away, goes on with its
generation after a while.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence

from paceline._base.waits import SLICE
from paceline._elastic.job_line import JobLine
from paceline._links.base import Peer
from paceline._links.fault import Suspicion
from paceline._session.inbox import InboxMessage, News, SessionOver
from paceline._session.launcher_pipe import tell_once
from paceline.errors import Dismissed
from paceline_protocol import Meet, MemberState, Phase
from paceline_protocol.messages import Finished
from pacelinepb.v1.errors_pb2 import ErrorReason

_log = logging.getLogger("paceline.elastic")

_PATIENT_S = 1.0
"""Seconds of waiting before the log says what this member waits for, and since when."""

_AGAIN_S = 30.0
"""Seconds until the log repeats it."""


class MeetingWait:
    """The wait of one member for the next generation.

    Attributes:
        planned: True if a step asked for the meeting that this member waits for; nothing has failed then.
        went_on: True if such a meeting did not take place, so that it is still to be held.
    """

    def __init__(self, job_line: JobLine, member: MemberState, send_meet: Callable[[Meet], None]) -> None:
        self.planned = self.went_on = False
        self._job_line = job_line
        self._member = member
        self._send_meet = send_meet
        self._said_at = self._waits_since = time.monotonic()
        self._waits_for = self._told = ""
        self._tell_at = 0.0
        self._away_since: float | None = None
        self._reach: ReachTests | None = None  # set while this member is a candidate that has yet to prove its links

    def as_candidate(self) -> None:
        """Makes this member a candidate: it is in no view, and tests the way to all members before it is admitted."""
        self._reach = ReachTests(random.Random())

    def said(self) -> None:
        """Notes that the coordinator has now been told of the stop."""
        self._said_at = time.monotonic()
        if not self._waits_for:
            self._waits_since = self._said_at

    def view_came(self) -> None:
        """Ends the wait: a view has come, and its members need no test."""
        self.planned = self.went_on = False
        self._reach = self._away_since = None
        self._waits_for = self._told = ""

    def line_runs(self, members: Sequence[Peer] | None) -> None:
        """Learns that training goes on without this member, with these members; None until they are known."""
        if self._reach is not None:
            self._reach.hear(members)

    def waits_for(self, reason: str) -> None:
        """Learns what the coordinator waits for. If nobody trains, a candidate has no member to test, and is ready."""
        if not self._waits_for:
            self._waits_since = time.monotonic()
        self._waits_for = reason
        if self._reach is not None and self._reach.is_alone:
            self._come_in()

    def poll(self) -> None:
        """Carries out what is due now."""
        if self._member.phase is not Phase.MEETING:
            return
        now, inbox = time.monotonic(), self._job_line.inbox
        if inbox.draining and not (self._member.generation or self._member.brings_state):
            raise Dismissed(inbox.draining)  # no member waits for it
        if self._reach is not None:
            self._try_to_reach(now, self._reach)
        if inbox.draining and not self._member.leaving:
            self._member.leaving = True
            self._send_meet(self._member.meet(unproven=self._reach is not None))
        reason = self._waits_for or "the coordinator has not answered yet"
        if now - self._said_at > _PATIENT_S and (reason != self._told or now > self._tell_at):
            self._told, self._tell_at = reason, now + _AGAIN_S
            tell_once(_log, f"{reason}; for {now - self._waits_since:.0f} s now", key=reason)
        self._away_since = None if inbox.connected else self._away_since or now
        if self.planned and not self._job_line.group._core.mesh.fault.failed:
            self._watch_planned_meeting(now, reason)

    def _watch_planned_meeting(self, now: float, reason: str) -> None:
        """Ends the wait in a generation that has not failed, if a member hangs or the coordinator is away."""
        config = self._job_line.config
        if now - self._said_at > config.step_timeout:
            text = f"the members did not meet within {config.step_timeout:g} s: {reason}"
            self._job_line.group._core.mesh.fault.suspect(Suspicion(ErrorReason.ERROR_REASON_TIMEOUT, None, 0, text))
            return
        away = self._away_since is not None and now - self._away_since > config.failure_timeout
        alone = self._job_line.mates.size == 1  # the mates of a replica might not go on
        if away and alone and self._member.may_go_on:
            tell_once(_log, f"the coordinator is away: generation {self._member.generation} continues")
            self.planned, self._member.leaving = False, False
            self.went_on = True
            self._job_line.go_on()
            self._member.go_on()

    def _try_to_reach(self, now: float, reach: ReachTests) -> None:
        """Starts a test if one is due. A candidate is ready when it and every member can reach each other."""
        if (members := reach.due(now)) is not None:
            self._job_line.try_to_reach(members)

    def tried(self, members: Sequence[Peer], troubles: Sequence[str]) -> None:
        """Takes the result of a test of links; ignores it if the line has other members by now."""
        if self._reach is None or not self._reach.is_latest(members):
            return
        if not troubles:
            self._come_in()
            return
        pause = self._reach.failed(time.monotonic())
        _log.warning("cannot join the other members, trying again in %.1f s: %s", pause, "; ".join(troubles))

    def _come_in(self) -> None:
        self._reach = None
        self._send_meet(self._member.meet())


def await_finish(job_line: JobLine) -> InboxMessage | None:
    """Waits until the coordinator knows that the job is done, so that it can tell late comers; gives up after a while.

    Returns a message that says that the line has not ended: other members go on from an earlier state, because they did
    not see this one committed. None if there is nothing more to do.
    """
    deadline = time.monotonic() + job_line.config.failure_timeout
    while (left := deadline - time.monotonic()) > 0:
        message = job_line.inbox.get(min(left, SLICE))
        if isinstance(message, Finished):
            return None
        if isinstance(message, SessionOver):
            break
        if message is not None and not isinstance(message, News):
            return message
    tell_once(_log, "the coordinator did not confirm that the job is done: a worker that joins later may wait for that")
    return None


FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0
"""First and longest pause between two tests. It doubles each time, and is up to a half shorter by chance, so that
candidates that were cut off together do not all test together."""


class ReachTests:
    """Decides when a candidate tests whether it and a generation's members can connect. Pure: takes time and chance.

    Two hosts that cannot connect would break every generation that has both. So a candidate first proves that it
    reaches all members and that all reach it. It repeats the test, with longer and longer pauses, until it succeeds.
    `is_alone` is True while no generation is known to run.
    """

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self.is_alone = True
        self._members: Sequence[Peer] | None = None
        self._pause = FIRST_PAUSE_S
        self._again_at = float("-inf")

    def hear(self, members: Sequence[Peer] | None) -> None:
        """Learns the members of the running generation, None until they are known; tests a changed list at once."""
        self.is_alone = False
        if members is not None:
            known = {member.member_id for member in self._members or ()}
            if self._members is None or {member.member_id for member in members} != known:
                self._members, self._again_at = members, float("-inf")

    def due(self, now: float) -> Sequence[Peer] | None:
        """Returns the members to test now; None if it is too early, or while a test runs."""
        if now < self._again_at or self._members is None:
            return None
        self._again_at = float("inf")
        return self._members

    def is_latest(self, members: Sequence[Peer]) -> bool:
        """True if these are the members of the latest message."""
        return members is self._members

    def failed(self, now: float) -> float:
        """Notes that a test has failed; returns the seconds until the next one."""
        pause = self._chance.uniform(0.5, 1.0) * self._pause
        self._pause = min(LONGEST_PAUSE_S, 2 * self._pause)
        self._again_at = now + pause
        return pause
