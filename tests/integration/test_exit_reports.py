"""A launcher's last report reaches the coordinator that leads, also if the first one of the list is frozen."""

from __future__ import annotations

import socket
from concurrent.futures import Future
from typing import Any

from paceline._base.rpc import aio
from paceline._base.waits import loop_thread
from paceline.cli.launcher.reports import ExitReports
from paceline.credentials import IN_THE_CLEAR
from paceline.launch import WorkerSettings
from pacelinepb.v1 import session_pb2 as pb
from pacelinepb.v1.session_pb2_grpc import SessionServiceServicer, add_SessionServiceServicer_to_server


class Leader(SessionServiceServicer):
    def __init__(self) -> None:
        self.told: Future[pb.ReportExitRequest] = Future()

    async def ReportExit(self, request: pb.ReportExitRequest, context: Any) -> pb.ReportExitResponse:
        self.told.set_result(request)
        return pb.ReportExitResponse(known=True)


def test_an_exit_report_reaches_the_leader_past_a_frozen_coordinator() -> None:
    leader = Leader()

    async def serve() -> tuple[aio.Server, int]:
        server = aio.server()
        add_SessionServiceServicer_to_server(leader, server)  # type: ignore[no-untyped-call]
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, port

    server, port = loop_thread().run(serve())
    with socket.create_server(("127.0.0.1", 0)) as frozen:  # the kernel accepts connections; nobody answers
        addresses = f"127.0.0.1:{frozen.getsockname()[1]},127.0.0.1:{port}"
        with ExitReports(WorkerSettings(addresses, "job", 1, 1), IN_THE_CLEAR) as reports:
            reports.report(pb.ProcessIdentity(host="h", pid=7), -9)
        assert leader.told.done()
        assert leader.told.result().process.pid == 7
    loop_thread().run(server.stop(0))
