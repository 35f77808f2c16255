"""One member's messages about its line, on the event loop.

Messages of the training thread about a meeting and the end are sent again after a reconnect, since they are lost if the
stream breaks. Messages of the coordinator go into the `MemberInbox`.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from paceline import errors
from paceline._base.rpc import aio
from paceline._base.waits import LoopThread
from paceline._session.control import ControlStream
from paceline._session.identity import is_gone
from paceline._session.inbox import LineMembers, MemberInbox
from paceline._session.view import MemberLists
from paceline.config import Config
from paceline_protocol import Meet, Process
from paceline_protocol.messages import (
    CatchUp,
    Dismissed,
    Drain,
    Finished,
    Mismatch,
    Missing,
    Running,
    Spare,
    StateLost,
    Summons,
)
from paceline_protocol.translation import write_meet, write_process
from pacelinepb.v1 import session_pb2 as pb
from pacelinepb.v1.session_pb2_grpc import SessionServiceStub

_log = logging.getLogger("paceline.session")


LineMessage = Running | Summons | CatchUp | Mismatch | Missing | Drain | Dismissed | Spare | StateLost | Finished


class LineClient:
    """Connects one member's training thread with the coordinator, for everything that concerns the line.

    `start` starts a coroutine on the loop that ends with the session. `stand_by` makes `join` return without a view; it
    is called with the reason. `control` is set once there is a stream.

    `step` is the last one whose word has completed in this generation, for heartbeats, and `step_at` the monotonic time
    of that. `went_on` is True if this member went on without a meeting, and does not yet know whether the others did.
    `on_first_commit` is called on the training thread when a generation has committed its first step.
    """

    control: ControlStream

    def __init__(
        self,
        job: str,
        config: Config,
        thread: LoopThread,
        inbox: MemberInbox,
        start: Callable[[Coroutine[Any, Any, None]], None],
        stand_by: Callable[[str], None],
        position: int = 0,
    ) -> None:
        self.members = MemberLists(position)
        self.step, self.step_at = 0, 0.0
        self.went_on = False
        self._words = 0  # of this generation
        self.on_first_commit: Callable[[], None] = lambda: None
        self._job = job
        self._config = config
        self._thread = thread
        self._inbox = inbox
        self._start = start
        self._stand_by = stand_by
        self._meet: pb.SessionRequest | None = None  # the last message about a meeting, until a view has formed
        self._finish: pb.SessionRequest | None = None
        self._running: Running | None = None  # the last message about a line that runs without this worker

    # For the training thread.

    def meet(self, meet: Meet) -> None:
        """Tells the coordinator that this member has stopped; repeated after a reconnect until a view has formed."""
        request = pb.SessionRequest(meet=write_meet(meet))

        def send() -> None:
            if meet.generation in (0, self.control.generation):
                self._meet = request
                self.control.send(request)
            else:
                # The worker is another member now, or has been given a later view: a message says so.
                text = (
                    "did not report the stop in generation %d to the coordinator: this worker is in generation %d now"
                )
                _log.info(text, meet.generation, self.control.generation)

        self._thread.loop.call_soon_threadsafe(send)

    def go_on(self) -> None:
        """Stops repeating the last `meet`, because the generation goes on without the meeting."""
        self.went_on = True
        self._thread.loop.call_soon_threadsafe(self.forget_meeting)

    def finish(self, generation: int, step: int) -> None:
        """Tells the coordinator that all steps are done; repeated after a reconnect."""
        request = pb.SessionRequest(finish=pb.Finish(generation=generation, step=step))

        def send() -> None:
            self._finish = request
            self.control.send(request)

        self._thread.loop.call_soon_threadsafe(send)

    def word_completed(self, step: int) -> None:
        """Notes for heartbeats that the word of this step has completed: every member has entered it."""
        self.step_at = time.monotonic()
        self.step = step
        self.went_on = False  # all others have entered it too
        self._words += 1
        if self._words == 2:
            self.on_first_commit()

    def generation_began(self) -> None:
        """Resets the step at the beginning of a generation, in which no word has completed yet."""
        self.step = self._words = 0
        self.went_on = False

    # On the loop.

    def forget_meeting(self) -> None:
        """Stops repeating the last `meet`, because the meeting is over or will not happen."""
        self._meet = self._running = None

    def say_again(self) -> None:
        """Repeats messages that may have been lost with the old stream."""
        self.control.send_again([said for said in (self._meet, self._finish) if said is not None])

    def hear(self, message: LineMessage) -> None:
        """Handles a message of the coordinator about the line."""
        match message:
            case Running():
                size = message.members.world_size
                there = f"job {self._job!r} is training, with {size} rank{'s'[: size != 1]}"
                text = f"{there}, and this worker enters at its first step of session.steps()"
                self._running = message
                self._start(self._learn_members(message))
                self._stand_by(text)
            case Summons(generation):
                self._inbox.summoned = generation
            case Drain(reason):
                self._inbox.draining = reason or "it was drained on request"
            case Missing(processes):
                gone = [process for process in processes if is_gone(process)]
                if gone:
                    self._start(self._report_gone(gone))
            case Finished(step):
                self._finish = None
                self._inbox.done = step
                self._inbox.put(message)
                self._stand_by(f"job {self._job!r} is done: its last step was {step}")
            case _:
                self._inbox.put(message)

    async def _report_gone(self, processes: list[Process]) -> None:
        """Reports silent members whose processes on this host have ended, so that nobody waits for them."""
        for process in processes:
            _log.info("the worker with pid %d of job %r no longer runs on this host", process.pid, self._job)
            request = pb.ReportExitRequest(job=self._job, process=write_process(process), found_gone=True)
            report = functools.partial(_report_exit, request, self._config.call_timeout)
            try:
                await self.control.channel.call(report)
            except aio.AioRpcError as error:  # the coordinator asks again
                _log.warning("could not tell the coordinator that pid %d has ended: %s", process.pid, error.details())

    async def _learn_members(self, running: Running) -> None:
        """Tells the training thread which members of the line it must reach: those that have not ended."""
        self._inbox.put(running)
        while running is self._running:  # otherwise a newer message has come, and its answer is on the way
            try:
                peers = await self.members.fetch(
                    self.control.channel, self._job, running.members, self._config.call_timeout
                )
            except errors.PacelineError as error:
                _log.info("could not fetch the members of generation %d: %s", running.generation, error)
                if isinstance(error, errors.StaleGeneration):  # a message about the newer one will come
                    return
            else:
                if running is self._running:
                    self._inbox.put(LineMembers([peer for peer in peers if peer.rank not in running.ended]))
                return


def _report_exit(request: pb.ReportExitRequest, timeout: float, channel: aio.Channel) -> Awaitable[object]:
    return SessionServiceStub(channel).ReportExit(request, timeout=timeout, wait_for_ready=True)
