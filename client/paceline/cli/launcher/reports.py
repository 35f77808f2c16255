"""Reports the ends of processes to the coordinator. No evidence of a death is surer or faster."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future, wait
from types import TracebackType

from paceline._grpc import aio
from paceline._loop import loop_thread
from paceline._rpc import CHANNEL_OPTIONS, backoff, is_transient
from paceline.credentials import Credentials
from pacelinepb.v1.session_pb2 import ProcessIdentity, ReportExitRequest
from pacelinepb.v1.session_pb2_grpc import SessionServiceStub

__all__ = ["ExitReports"]

_TIMEOUT_S = 5.0
"""Seconds for one report. A coordinator that is away for longer notices the death by the member's silence."""

_LAST_S = 1.0
"""Seconds that the launcher waits at its end for reports that are still on their way."""


class ExitReports:
    """Tells a coordinator of ended processes without making the launcher wait; a context manager.

    Args:
        coordinator: its address.
        job: name of the job.
        credentials: the credentials for calls to the coordinator.
    """

    def __init__(self, coordinator: str, job: str, credentials: Credentials) -> None:
        self._job = job
        self._credentials = credentials
        self._pending: set[Future[None]] = set()
        self._channel = loop_thread().run(self._open(coordinator))

    def __enter__(self) -> ExitReports:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        wait(set(self._pending), timeout=_LAST_S)
        loop_thread().run(self._channel.close(None))

    def report(self, process: ProcessIdentity, returncode: int) -> None:
        """Sends a report; returns at once."""
        request = ReportExitRequest(job=self._job, process=process, exit_code=returncode)
        future = loop_thread().start(self._send(request))
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)

    async def _open(self, coordinator: str) -> aio.Channel:
        return self._credentials.coordinator_channel(coordinator, CHANNEL_OPTIONS)  # a channel must be made on its loop

    async def _send(self, request: ReportExitRequest) -> None:
        """Sends a report, and again if that fails; the coordinator accepts repeated reports.

        If all attempts fail, the coordinator still detects the death by itself, only later.
        """
        deadline = time.monotonic() + _TIMEOUT_S
        report = SessionServiceStub(self._channel).ReportExit
        attempt = 0
        while True:
            try:
                await report(request, timeout=max(0.1, deadline - time.monotonic()), wait_for_ready=True)
            except aio.AioRpcError as error:
                if not is_transient(error) or time.monotonic() >= deadline:
                    return
            else:
                return
            await asyncio.sleep(backoff(attempt))
            attempt += 1
