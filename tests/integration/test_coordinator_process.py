"""The coordinator as a process: it says where it listens, drains on SIGTERM, and numbers grow across restarts (I3)."""

import asyncio
import re
import resource
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from paceline_server._grpc import aio, grpc
from pacelinepb.v1 import store_pb2
from pacelinepb.v1.store_pb2_grpc import StoreServiceStub
from support.coordinator import RawSession, duration, reason_of, refused, run, running
from support.ports import free_port

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@asynccontextmanager
async def process(*arguments: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """`python -m paceline_server` and its address; killed at the end if it still runs."""
    started = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "paceline_server",
        "--listen",
        "127.0.0.1:0",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert started.stdout is not None
        line = (await started.stdout.readline()).decode()
        assert line.startswith("listening on ")
        yield started, line.split()[-1]
    finally:
        if started.returncode is None:
            started.kill()
        await started.communicate()


def test_generations_increase_across_restarts(tmp_path: Path) -> None:
    async def one_run(how_it_ends: signal.Signals) -> int:
        async with process("--state", str(tmp_path / "s.db")) as (server, address):
            async with aio.insecure_channel(address) as channel:
                session = await RawSession.register(channel, least=1, most=1)
                generation = (await session.view()).generation
                await session.leave()
            server.send_signal(how_it_ends)
            await server.wait()
            return generation

    async def main() -> None:
        assert await one_run(signal.SIGTERM) == 1
        assert await one_run(signal.SIGKILL) == 2
        assert await one_run(signal.SIGTERM) == 3

    run(main)


def test_a_full_disk_makes_readyz_fail_until_space_is_free(tmp_path: Path) -> None:
    """Here the longest file is what is full, as in the test of checkpoints."""

    async def main() -> None:
        state = tmp_path / "s.db"
        async with process("--state", str(state), "--http", f"127.0.0.1:{free_port()}") as (server, address):
            assert server.stderr is not None
            while b"the page is at" not in (line := await server.stderr.readline()):
                pass
            async with (
                aiohttp.ClientSession(line.decode().split()[-1]) as http,
                aio.insecure_channel(address) as channel,
            ):

                async def ask(path: str) -> tuple[int, str]:
                    async with http.get(path) as answer:
                        return answer.status, await answer.text()

                async def metric(name: str) -> float:
                    found = re.search(rf"^{name}\S* (\S+)$", (await ask("/metrics"))[1], re.MULTILINE)
                    assert found is not None, name
                    return float(found[1])

                assert await ask("/readyz") == (200, "ok\n")
                resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
                session = await RawSession.register(channel, least=1, most=1)
                while await metric("paceline_store_failures_total") < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                status, text = await ask("/readyz")
                assert status == 503
                assert str(state) in text
                assert await metric("paceline_job_waiting_seconds") > 0.5, "it is not counted anew with each try"
                assert not await metric("paceline_store_commit_seconds_count")
                resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                assert (await session.view()).generation > 1
                while (await ask("/readyz"))[0] != 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                assert await metric("paceline_store_commit_seconds_count") == 1

    run(main)


def test_sigterm_drains_the_coordinator() -> None:
    async def main() -> None:
        async with process() as (server, address), aio.insecure_channel(address) as channel:
            session = await RawSession.register(channel)
            health: Any = health_pb2_grpc.HealthStub(channel)
            watch = health.Watch(health_pb2.HealthCheckRequest(service="pacelinepb.v1.SessionService"))
            assert (await watch.read()).status == SERVING
            request = store_pb2.GetRequest(caller=session.caller, key="never", timeout=duration(60))
            getting = StoreServiceStub(channel).Get(request)
            await health.Check(health_pb2.HealthCheckRequest())  # so the call before it has arrived
            server.send_signal(signal.SIGTERM)
            assert (await watch.read()).status == NOT_SERVING
            with pytest.raises(aio.AioRpcError) as caught:
                await getting
            assert reason_of(caught.value) == "DRAINING"
            assert (await refused(session)).code() == grpc.StatusCode.UNAVAILABLE
            watch.cancel()
            assert await server.wait() == 0

    run(main)


def test_a_coordinator_evicts_no_member_after_its_own_freeze() -> None:
    async def main() -> None:
        async with process() as (server, address), aio.insecure_channel(address) as channel:
            sessions = [await RawSession.register(channel, failure_timeout=2.0) for _ in range(2)]
            for session in sessions:
                await session.view()
                await session.heartbeat()
            server.send_signal(signal.SIGSTOP)
            await asyncio.sleep(3.0)  # the freeze itself: longer than failure_timeout
            server.send_signal(signal.SIGCONT)
            for session in sessions:
                await session.enter_barrier("b")
            for session in sessions:
                await session.barrier_passed()

    run(main)


def test_a_port_in_use_prints_one_error_and_exits_with_1() -> None:
    async def main() -> None:
        async with process() as (_, address):
            second = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "paceline_server", "--listen", address, stderr=asyncio.subprocess.PIPE
            )
            _, stderr = await second.communicate()
            assert second.returncode == 1
            assert f"{address} is in use" in stderr.decode()
            assert "Traceback" not in stderr.decode()

    run(main)


@pytest.mark.parametrize("settle_time", ["0.01", "60"])
def test_the_first_view_waits_settle_time_for_more_workers(settle_time: str) -> None:
    async def main() -> None:
        async with (
            process("--settle-time", settle_time) as (_, address),
            aio.insecure_channel(address) as channel,
        ):
            first = await RawSession.register(channel, least=1, most=2)
            if settle_time == "60":
                assert "waiting up to 60 s for more" in (await first.next("waiting")).reason
                await RawSession.register(channel, least=1, most=2)
            assert (await first.view()).world_size == (2 if settle_time == "60" else 1)

    run(main)


def test_reflection_lists_the_services() -> None:
    async def main() -> None:
        async with running() as channel:
            stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
            call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
            answer = await call.read()
            names = {service.name for service in answer.list_services_response.service}
            assert {"pacelinepb.v1.SessionService", "pacelinepb.v1.StoreService", "grpc.health.v1.Health"} <= names

    run(main)
