"""Measures what attacks on a coordinator do to another job: how long its barriers take, and what the coordinator takes.

    python bench/attacks.py [--seconds 8] [--runs 1] [--crowd 600] [--only TEXT]

It prints a table in markdown: for each attack the p50, p99 and maximum of the other job's barriers, by how much the
coordinator's memory grew at most, and its processor time (1.0 is one core). The other job has 4 members in a process of
its own, which enter a barrier 10 ms after the last one. Each attack has a coordinator of its own, with a state file,
tokens and HTTP, and 600 sessions, jobs, connections or calls at a time (`--crowd`). What an attacker prepares counts
for the memory, but not for the barriers.

Once it has prepared, the attacker is a process that the kernel runs only where nothing else wants to run (SCHED_IDLE).
So on 2 cores what delays the barriers is the coordinator, and not an attacker that takes its processor. It speaks
HTTP/2 by hand, which is so cheap that it sends more than the coordinator takes. As root, the coordinator and the other
job run before whatever else the machine does; the numbers still mean little there unless it is idle.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # for `support`, which a script does not find

from google.protobuf.message import Message
from security.siege import Attacker

from paceline_server._grpc import aio
from pacelinepb import PROTOCOL_VERSION, checks
from pacelinepb.pieces import MESSAGE_BYTES, cut, in_messages
from pacelinepb.v1 import admin_pb2, store_pb2
from pacelinepb.v1 import session_pb2 as pb
from support.coordinator import RawSession, duration
from support.http2 import claimed, framed

__all__ = ["ATTACKS", "main"]

MINE, THEIRS, READING, ANY = (f"a-token-for-{who}-0123456789" for who in ("the-neighbour", "them", "reading", "any"))
TOKENS = f"{MINE} neighbour\n{THEIRS} attacker\n{READING} role=read\n{ANY}\n"

_NICE = -20
"""Of the coordinator and the other job, so that what else runs on the machine matters less."""

MEMBERS = 4
PAUSE_S = 0.01
CONNECTIONS = 4

SESSION = "/pacelinepb.v1.SessionService/Session"
ADMIN = "/pacelinepb.v1.AdminService"
STORE = "/pacelinepb.v1.StoreService"


# The attacks ---------------------------------------------------------------------------------------------------------


class Target(NamedTuple):
    """The coordinator that is attacked.

    Attributes:
        address: of the coordinator.
        http: its port for HTTP.
        crowd: how many sessions, or calls at one time, an attack has.
    """

    address: str
    http: int
    crowd: int

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def attacker(self, token: str) -> Attacker:
        return Attacker(self.address, token)

    def one_job(self) -> Attacker:
        """Opens all sessions, as members of one job."""
        return self._joined(THEIRS, [first("attacker", at, self.crowd) for at in range(self.crowd)])

    def many_jobs(self) -> Attacker:
        """Opens all sessions, each in a job of its own."""
        return self._joined(ANY, [first(f"job {at}", at, 1) for at in range(self.crowd)])

    def _joined(self, token: str, requests: list[bytes]) -> Attacker:
        made = self.attacker(token)
        made.open(SESSION, requests, CONNECTIONS)
        until = time.monotonic() + 60.0
        while made.heard < 2 * len(requests):  # each is told that it is registered, and then of its view
            made.press(0.05)
            assert time.monotonic() < until, "the sessions were not opened"
        return made


Attack = Callable[[Target], Iterator[None]]
"""Prepares, yields, and then does a part of the attack in each turn, up to a tenth of a second."""


def first(job: str, number: int, members: int) -> bytes:
    """The first message of a session."""
    register = pb.Register(
        job=job,
        protocol_version=PROTOCOL_VERSION,
        process=pb.ProcessIdentity(host="host", pid=number + 1),
        address="127.0.0.1:1",
        settings=pb.JobSettings(min_workers=members, max_workers=members, failure_timeout=duration(600)),
    )
    return said(0, register=register)


def said(place: int, **event: Any) -> bytes:
    """A message of a session's stream."""
    data = checks.with_check(pb.SessionRequest(**event).SerializeToString(), place)
    return claimed(len(data)) + data


def request(message: Message) -> bytes:
    """A request, in as many messages as it takes."""
    return b"".join(framed(each) for each in in_messages(message))


def never_whole(size: int) -> bytes:
    """A message whose last byte never comes."""
    return claimed(size) + bytes(size - 1)


def calls(token: str, method: str, data: bytes) -> Attack:
    """Calls, each made again when it has ended."""

    def attack(target: Target) -> Iterator[None]:
        made = target.attacker(token)
        yield
        made.open(method, [data] * target.crowd, CONNECTIONS, again=True)
        yield from pressed(made)

    return attack


def pressed(made: Attacker) -> Iterator[None]:
    while True:
        made.press(0.1)
        yield


def beside(prepare: Callable[[Target], object], attack: Attack) -> Attack:
    """An attack for which something is prepared."""

    def both(target: Target) -> Iterator[None]:
        kept = prepare(target)
        yield from attack(target)
        del kept

    return both


def nothing(_: Target) -> Iterator[None]:
    while True:
        yield
        time.sleep(0.1)


def all_say(event: Callable[[], dict[str, Any]], silent: int = 0) -> Attack:
    """All members but some say the same over and over, as fast as it is taken."""

    def attack(target: Target) -> Iterator[None]:
        made = target.one_job()
        place = 1
        yield
        while True:
            said_now = b"".join(said(place + more, **event()) for more in range(50))
            made.say(said_now, but=silent)
            place += 50
            while made.saying:
                made.press(0.1)
                yield

    return attack


def meet(generation: int) -> dict[str, Any]:
    tag = pb.Tag(generation=generation - 1, step=0) if generation > 1 else pb.Tag()
    return {"meet": pb.Meet(generation=generation, tag=tag, holds_base=True, manifest=b"m" * 32, fingerprint=b"f" * 32)}


def generations(target: Target) -> Iterator[None]:
    """All members meet, and a view forms, over and over."""
    made = target.one_job()
    generation = 1
    yield
    while True:
        heard = made.heard
        made.say(said(generation, **meet(generation)))
        while made.heard < heard + target.crowd:
            made.press(0.1)
            yield
        generation += 1


def ends_at_once(target: Target) -> Iterator[None]:
    """All sessions are opened, and all their connections closed."""
    made = target.one_job()
    yield
    while True:
        made.close()
        yield
        made = target.attacker(THEIRS)
        made.open(SESSION, [first("attacker", at, target.crowd) for at in range(target.crowd)], CONNECTIONS)
        for _ in range(20):
            made.press(0.1)
            yield
            if made.heard >= target.crowd:
                break


def registrations(target: Target) -> Iterator[None]:
    """Sessions that register and leave, over and over."""
    leave = said(1, leave=pb.Leave())
    made = target.attacker(THEIRS)
    yield
    made.open(SESSION, [first("attacker", at, 1) + leave for at in range(target.crowd)], CONNECTIONS, again=True)
    yield from pressed(made)


def connections(port: Callable[[Target], int], says: bytes) -> Attack:
    """Connections that say something and then nothing; there are always as many, and the oldest is replaced."""

    def attack(target: Target) -> Iterator[None]:
        there: list[socket.socket] = []
        yield
        while True:
            for _ in range(50):
                with suppress(OSError):
                    there.append(socket.create_connection(("127.0.0.1", port(target)), 1.0))
                    there[-1].send(says)
                if len(there) > target.crowd:
                    there.pop(0).close()
            yield

    return attack


def http_requests(path: str) -> Attack:
    """Requests with a token, each on a connection of its own."""
    says = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {READING}\r\n\r\n".encode()
    return connections(lambda target: target.http, says)


def stored(size: int) -> Attack:
    """A member that stores values of this size."""

    def attack(target: Target) -> Iterator[None]:
        async def register() -> store_pb2.Caller:
            async with aio.insecure_channel(target.address) as channel:
                one = await RawSession.register(channel, "attacker", least=1, most=1, token=THEIRS, failure_timeout=600)
                await one.view()
                return one.caller

        caller = asyncio.run(register())
        value = cut(bytes(size))
        sets = [request(store_pb2.SetRequest(caller=caller, key=str(at), value=value)) for at in range(100)]
        made = target.attacker(THEIRS)
        yield
        made.open(f"{STORE}/Set", [sets[at % 100] for at in range(target.crowd)], CONNECTIONS, again=True, whole=True)
        yield from pressed(made)

    return attack


GET_JOB = request(admin_pb2.GetJobRequest(job="attacker"))
LIST_JOBS = request(admin_pb2.ListJobsRequest())
LIST_EVENTS = request(admin_pb2.ListEventsRequest())
HALF = b"GET /api/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Never"

ATTACKS: dict[str, Attack] = {
    "none": nothing,
    "`GetJob` of the large job, `read` token": beside(Target.one_job, calls(READING, f"{ADMIN}/GetJob", GET_JOB)),
    "`ListJobs` of many jobs, `read` token": beside(Target.many_jobs, calls(READING, f"{ADMIN}/ListJobs", LIST_JOBS)),
    "`ListEvents`, `read` token": beside(Target.many_jobs, calls(READING, f"{ADMIN}/ListEvents", LIST_EVENTS)),
    "`/metrics` of many jobs, `read` token": beside(Target.many_jobs, http_requests("/metrics")),
    "members meet, view after view": generations,
    "members say the same `Meet` without a pause": all_say(lambda: meet(1), silent=1),
    "members send heartbeats without a pause": all_say(lambda: {"heartbeat": pb.Heartbeat(step=1, samples=1)}),
    "sessions register and leave, over and over": registrations,
    "all streams end at once, over and over": ends_at_once,
    "values of 1 MiB are stored": stored(1 << 20),
    "values of 100 bytes are stored": stored(100),
    "sessions whose first message is too long": calls(THEIRS, SESSION, never_whole(1 << 20)),
    "messages that never end": calls(THEIRS, SESSION, never_whole(MESSAGE_BYTES)),
    "calls without a token": calls("", f"{ADMIN}/GetJob", GET_JOB),
    "health checks that never end, without a token": calls("", "/grpc.health.v1.Health/Check", b""),
    "connections that say nothing, without a token": connections(lambda target: target.port, b""),
    "half requests over HTTP, without a token": connections(lambda target: target.http, HALF),
}


def _attack(name: str, address: str, http: str, crowd: str) -> None:
    turns = ATTACKS[name](Target(address, int(http), int(crowd)))
    next(turns)  # before the clock starts, so it need not wait for others
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in turns:  # until we are killed
        pass


# The job that is measured --------------------------------------------------------------------------------------------


async def _neighbour(address: str) -> None:
    """Makes barriers from the first line that it reads to the second, and says how long each took."""
    loop, lines = asyncio.get_running_loop(), asyncio.Queue[str]()
    loop.add_reader(sys.stdin, lambda: lines.put_nowait(sys.stdin.readline()))
    channels = [aio.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) for _ in range(MEMBERS)]
    sessions = [
        await RawSession.register(
            channel, "neighbour", least=MEMBERS, most=MEMBERS, pid=pid, token=MINE, failure_timeout=120.0
        )
        for pid, channel in enumerate(channels, start=1)
    ]
    await asyncio.gather(*(session.view() for session in sessions))
    print("ready", flush=True)
    await lines.get()
    waits: list[float] = []
    while lines.empty():
        began = time.monotonic()
        await asyncio.gather(*(session.enter_barrier("step", len(waits), timeout=120.0) for session in sessions))
        for session in sessions:
            while (await session.read()).WhichOneof("event") != "barrier_passed":
                pass
        waits.append(time.monotonic() - began)
        await asyncio.sleep(PAUSE_S)
    print(json.dumps(waits), flush=True)
    os._exit(0)


# The measurement -----------------------------------------------------------------------------------------------------


class Found(NamedTuple):
    """The result of one attack.

    Attributes:
        waits: seconds of each barrier, in order.
        grown: bytes that the coordinator had more than before, at most.
        cores: processor time of the coordinator for each second.
    """

    waits: list[float]
    grown: int
    cores: float


def measure(name: str, seconds: float, crowd: int) -> Found:
    """Starts a coordinator, the other job and an attacker, and looks on."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        tokens = folder / "tokens"
        tokens.touch(0o600)
        tokens.write_text(TOKENS)

        def start(*words: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=(folder / "log").open("a"),
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            with suppress(PermissionError):  # only root may
                os.setpriority(os.PRIO_PROCESS, process.pid, _NICE)
            return process

        def line(process: subprocess.Popen[str]) -> str:
            assert process.stdout is not None
            text = process.stdout.readline().strip()
            assert text, (folder / "log").read_text()[-5_000:]
            return text

        where = ["--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--state", str(folder / "state.db")]
        coordinator = start("-m", "paceline_server", *where, "--token-file", str(tokens))
        address, url = line(coordinator).split()[-1], line(coordinator)
        neighbour = start(__file__, "neighbour", address)
        assert line(neighbour) == "ready"
        before = most = _resident(coordinator.pid)
        attacker = start(__file__, "attack", name, address, url.rpartition(":")[2].strip("/"), str(crowd))
        assert line(attacker) == "ready"
        for each in (neighbour, attacker):
            _go(each)
        began, used = time.monotonic(), _processor_s(coordinator.pid)
        while time.monotonic() < began + seconds:
            time.sleep(0.05)
            most = max(most, _resident(coordinator.pid))
        cores = (_processor_s(coordinator.pid) - used) / (time.monotonic() - began)
        assert attacker.poll() is None, (folder / "log").read_text()[-5_000:]
        _go(neighbour)
        return Found(sorted(json.loads(line(neighbour))), most - before, cores)


def _go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def row(name: str, runs: Sequence[Found]) -> str:
    """A line of the table: the medians of all runs, and the greatest maximum."""
    p50, p99 = (
        1e3 * statistics.median(found.waits[int(part * len(found.waits))] for found in runs) for part in (0.5, 0.99)
    )
    longest = 1e3 * max(found.waits[-1] for found in runs)
    grown = max(found.grown for found in runs) / (1 << 20)
    cores = statistics.median(found.cores for found in runs)
    return f"| {name} | {p50:.1f} ms | {p99:.0f} ms | {longest:.0f} ms | {grown:.0f} MiB | {cores:.2f} |"


def main(arguments: Sequence[str]) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=8.0, help="for which each attack lasts")
    parser.add_argument("--runs", type=int, default=1, help="of each attack, in turn; medians are printed")
    parser.add_argument("--crowd", type=int, default=600, help="sessions, connections or calls at a time")
    parser.add_argument("--only", default="", help="the attacks whose names have this text")
    parser.add_argument("--quick", action="store_true", help="see only whether everything runs: no times")
    asked = parser.parse_args(arguments)
    names = [name for name in ATTACKS if asked.only in name]
    if asked.quick:
        for name in names:
            found = measure(name, 0.3, 40)
            print(json.dumps({"attack": name, "barriers": len(found.waits), "grown": found.grown}), flush=True)
        return
    runs: dict[str, list[Found]] = {name: [] for name in names}
    for _ in range(asked.runs):
        for name in names:
            runs[name].append(measure(name, asked.seconds, asked.crowd))
            print(f"{row(name, runs[name][-1:])} {len(runs[name][-1].waits)} barriers", file=sys.stderr, flush=True)
    print("| Attack | Barrier p50 | p99 | longest | Memory | Cores |\n| --- | --- | --- | --- | --- | --- |")
    for name in names:
        print(row(name, runs[name]))
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    print(f"\n{asked.crowd} sessions, connections or calls; {len(os.sched_getaffinity(0))} cores, load {load}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["neighbour"]:
        asyncio.run(_neighbour(*sys.argv[2:]))
    elif sys.argv[1:2] == ["attack"]:
        _attack(*sys.argv[2:])
    else:
        main(sys.argv[1:])
