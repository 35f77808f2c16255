"""How a member joins its job: it opens its door, registers with the coordinator, and waits for its first view."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from concurrent import futures
from typing import Any

from paceline import errors
from paceline._base.addresses import is_exhausted
from paceline._session.control import ControlStream
from paceline._session.flight import FlightLog, flight_directory
from paceline._session.leaving import leave
from paceline._session.member import MemberConnection
from paceline._session.stack_file import keep_stack_file

_log = logging.getLogger("paceline.session")


class Joining:
    """One member's way into its job."""

    def __init__(self, member: MemberConnection) -> None:
        self._member = member
        self._registering: asyncio.Task[Any] | None = None

    def join(self, timeout: float) -> MemberConnection:
        """Connects, registers, and waits for the first view; returns the member."""
        member, deadline = self._member, time.monotonic() + timeout
        member.thread.on_failure(member.on_broken)
        try:
            try:
                member.thread.run(self._register(timeout))
            except futures.CancelledError:
                if not member.first_view.is_over:  # otherwise `give_up` cancelled it, and its error is raised below
                    raise
            member.first_view.wait(max(0.0, deadline - time.monotonic()), timeout)
            member.flight = FlightLog(member.group._core.recorder, member.describe, flight_directory(os.environ))
            member.group._core.on_abort = member.flight.on_abort
            member.flight.watch_signal()
            keep_stack_file()
            member.job_mark.show(member.door_key)
            return member
        except BaseException as error:
            try:
                leave(member, exhausted=is_exhausted(error))
            except Exception:  # noqa: BLE001  logged; the first error is the one that matters
                _log.exception("could not close the connections of a failed join")
            raise

    def give_up(self, error: errors.PacelineError) -> None:
        """Ends a `join` that still runs with this error, even while no coordinator answers. On the loop."""
        self._member.first_view.fail(error)
        if self._registering is not None:
            self._registering.cancel()

    async def _register(self, timeout: float) -> None:
        member, first_view = self._member, self._member.first_view
        if first_view.is_over:  # given up already
            return
        self._registering = asyncio.current_task()
        member.tasks.update(filter(None, [self._registering]))  # an interrupted `join` does not wait for it to end
        first_view.begin(timeout)
        unanswered = first_view.reason
        await member.whereabouts.open_door(timeout, first_view.on_trouble)
        first_view.reason = unanswered
        member.sockets.dial(member.coordinators)
        register = member.wanted.register(str(member.whereabouts.address), member.config.failure_timeout)
        control = ControlStream(
            member.coordinators,
            register,
            member.config,
            member,
            member.heartbeat,
            member.credentials,
            member.coordinator_returns,
        )
        member.control = member.line.control = member.generations.control = control
        await control.open(first_view.left())
