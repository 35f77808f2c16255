"""How a member's speed and the speeds of others shape its steps: its shares of the batches, and when it leaves.

`Balance` decides, from speeds that all members tell each other with their step words. This is the shell around it.
"""

from __future__ import annotations

import logging
from statistics import median_low

from paceline._base.shares import Shares
from paceline._elastic.balance import Balance
from paceline._elastic.job_line import JobLine
from paceline._elastic.state import StateCore
from paceline._elastic.step import Step
from paceline._session.launcher_pipe import tell_once

_log = logging.getLogger("paceline.elastic")


class Pace:
    """One member's speed, on the training thread; without a `balance` it is only measured.

    Attributes:
        shares: how the next batch is divided among the ranks; None for equal shares.
        why_leaving: why this member leaves in the meeting that follows; empty if it does not, or was told to.
    """

    def __init__(self, job_line: JobLine, state: StateCore, balance: Balance | None) -> None:
        self.shares: Shares | None = None
        self.why_leaving = ""
        self._straggles = self._has_asked = False
        self._job_line = job_line
        self._state = state
        self._balance = balance
        self._counters = job_line.group._core.counters
        self._is_measured = not state.is_on_device  # the processor does not wait for a GPU
        self._named: set[str] = set()  # the stragglers that were named, by member id
        self._counters.forget_speeds()  # an earlier loop may have trained something else
        self._counters.share = 0.0

    def enter(self, world: int) -> None:
        """Begins a generation."""
        self._counters.stopped()  # its first step says nothing of this member's speed
        if self.shares is not None:  # a speed depends on the share with which it was measured
            self._counters.forget_speeds()
        self.shares, self._straggles, self.why_leaving = None, False, ""
        if self._balance is not None:
            self._balance.enter(world)

    def begin(self, number: int) -> list[float]:
        """Begins a step; returns what this member adds to its word, nothing if the word has no speeds."""
        group, self._has_asked = self._job_line.group, False
        if self._state.sampler is not None:
            shares = self.shares
            self._counters.share = 1 / group.size if shares is None else shares[group.rank] / sum(shares)
        if self._balance is None or not self._balance.has_words(number):
            return []
        return self._balance.word(group.rank, self._counters.new_speed)

    def applied(self, step: Step, *, is_over: bool) -> None:
        """Counts an applied step; `is_over` if its generation is."""
        self._counters.step_applied(step.number, step.samples, has_speed=self._is_measured)
        if is_over:
            self._counters.stopped()

    def passed(self, step: Step) -> None:
        """Divides later batches by the speeds in the word of a step that all have passed, and looks for a straggler."""
        speeds, balance = step._gate.speeds, self._balance
        if balance is None or not speeds or not balance.hear(step.number, speeds):
            return
        self._counters.speed_told()
        if (shares := balance.shares) is not None and shares != self.shares:
            self.shares = shares
            text = "from step %d on rank %d has %d of %d in a batch; shares are %d to %d, speeds %.3g to %.3g samples/s"
            extremes = min(shares), max(shares), min(speeds), max(speeds)
            _log.info(text, step.number + 1, step.rank, shares[step.rank], sum(shares), *extremes)
        self._straggles = False
        if (rank := balance.straggler) is None:
            return
        peers, drains = self._job_line.group.members, self._job_line.config.drain_stragglers
        peer, left, took = peers[rank], len(peers) - 1, balance.took
        may_leave = left >= self._job_line.min_workers and left % max(1, self._state.node_size) == 0
        if peer.member_id not in self._named:
            self._named.add(peer.member_id)
            text = f"{peer} is a straggler: its share takes {took[rank] / median_low(took):.1f} times as long as others"
            stays = "" if may_leave or not drains else ". It stays, because too few workers would be left"
            tell_once(_log, text + stays, key=f"straggler {peer.member_id}")
        self._straggles = drains and may_leave and rank == step.rank

    def ask(self) -> bool:
        """Returns True if this member's next word asks to leave, because it is a straggler."""
        self._has_asked = self._straggles
        return self._has_asked

    def leaves(self, step: Step) -> bool:
        """Returns True if this member leaves behind the step as a straggler: it has asked to, and no other has."""
        self.why_leaving = "this worker is a straggler" if self._has_asked and step._gate.leaving == 1 else ""
        return bool(self.why_leaving)
