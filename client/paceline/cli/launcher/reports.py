"""Reports the ends of processes to the coordinator. No evidence of a death is surer or faster."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future, wait
from types import TracebackType

from paceline._base.addresses import CoordinatorAddresses
from paceline._base.rpc import CHANNEL_OPTIONS, aio, backoff, is_transient, leader_named_by
from paceline._base.waits import loop_thread
from paceline.credentials import Credentials
from paceline.launch._environment import WorkerSettings
from pacelinepb.v1.session_pb2 import ProcessIdentity, ReportExitRequest
from pacelinepb.v1.session_pb2_grpc import SessionServiceStub

_TIMEOUT_S = 5.0
"""Seconds for one report. A coordinator that is away for longer notices the death by the member's silence."""

_EACH_S = 1.0
"""Seconds for one try at one of several coordinators: it may be frozen."""

_LAST_S, _LAST_OF_SEVERAL_S = 1.0, 4.0
"""Seconds that the launcher waits at its end for reports that are still on their way: the first of several coordinators
may be frozen, and the next one may have to take over."""


class ExitReports:
    """Tells a coordinator of ended processes without making the launcher wait; a context manager."""

    def __init__(self, settings: WorkerSettings, credentials: Credentials) -> None:
        self._settings = settings
        self._credentials = credentials
        self._pending: set[Future[None]] = set()
        self._addresses = CoordinatorAddresses.parse(settings.coordinator)
        self._channel = loop_thread().run(self._open())

    def __enter__(self) -> ExitReports:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        wait(set(self._pending), timeout=_LAST_OF_SEVERAL_S if self._addresses.several else _LAST_S)
        loop_thread().run(self._channel.close(None))

    def report(self, process: ProcessIdentity, returncode: int, output: str = "") -> None:
        """Sends a report, with the last lines that the process printed; returns at once."""
        launch = self._settings.launch_id if self._settings.at_once > 1 else ""
        request = ReportExitRequest(
            job=self._settings.job, process=process, exit_code=returncode, launch_id=launch, output=output
        )
        future = loop_thread().start(self._send(request))
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)

    async def _open(self) -> aio.Channel:
        # a channel must be made on its loop
        return self._credentials.coordinator_channel(str(self._addresses.current), CHANNEL_OPTIONS)

    async def _turn(self, failed: aio.Channel, leader: str | None) -> None:
        """Goes to another coordinator, unless another report has gone there meanwhile."""
        if self._channel is failed:
            self._addresses.turn(leader)
            self._channel = await self._open()
            await failed.close(None)

    async def _send(self, request: ReportExitRequest) -> None:
        """Sends a report, and again if that fails; the coordinator accepts repeated reports.

        If all attempts fail, the coordinator still detects the death by itself, only later.
        """
        deadline = time.monotonic() + _TIMEOUT_S
        several = self._addresses.several
        attempt = 0
        while True:
            channel, left = self._channel, max(0.1, deadline - time.monotonic())
            report = SessionServiceStub(channel).ReportExit
            try:
                await report(request, timeout=min(left, _EACH_S) if several else left, wait_for_ready=not several)
            except aio.AioRpcError as error:
                if time.monotonic() >= deadline or not (is_transient(error) or several):
                    return
                if several:
                    await self._turn(channel, leader_named_by(error))
            except asyncio.CancelledError:  # another report has closed the channel
                task = asyncio.current_task()
                if channel is self._channel or (task is not None and task.cancelling()):
                    raise
            else:
                return
            await asyncio.sleep(backoff(attempt))
            attempt += 1
