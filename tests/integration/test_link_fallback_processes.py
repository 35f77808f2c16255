"""As in `test_link_fallback`, where it takes processes: descriptors that run out, other users, other namespaces."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from integration.host_coordinator import coordinator_on
from paceline.testing import coordinator
from support.netns import network
from support.processes import Worker, workers

FEW = """
import fcntl, gc, itertools, logging, resource
from contextlib import suppress
from paceline.config import Config
from paceline.errors import PacelineError
from integration.mixed_world import Place, kinds_of, mixed_world, run_all
from support.waiting import wait_for

logging.basicConfig(level=logging.ERROR)
logging.getLogger("grpc").setLevel(logging.CRITICAL)  # it complains at length
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

def open_files():
    gc.collect()
    found = set()
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # that of the listing is closed by now
            fcntl.fcntl(fd, fcntl.F_GETFD)
            found.add(fd)
    return found

def leave(count):
    used = open_files()
    limit = next(n for n in itertools.count(1) if n - sum(fd < n for fd in used) == count)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))

def exchange(group):
    x = group.empty(1_500_001, np.float64)
    x[:] = np.arange(1_500_001) + group.rank
    assert np.array_equal(group.all_reduce(x), 2 * np.arange(1_500_001) + 1)
    if {messages}:
        group.send(x, 1 - group.rank)
        got, _ = group.recv(1 - group.rank)
        assert np.array_equal(got, x + 1 - 2 * group.rank)

def attempt(free):
    doors = []

    def prepare(door):
        doors.append(door)
        if len(doors) == 2:  # both listen, and nobody has called yet
            leave(free)

    try:
        with mixed_world([Place()] * 2, prepare=prepare, patience=0.5) as world:
            try:
                run_all(world.groups, exchange)
                return dict(right=True, kinds=[kind for mesh in world.meshes for kind in kinds_of(mesh).values()])
            except PacelineError as error:
                return dict(right=False, type=type(error).__name__, text=str(error))
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

# gRPC closes its sockets and its poller a moment after the last channel: a count may have some that are about to go.
before = min(attempt(500) and len(open_files()) for _ in range(3))
for free in {numbers}:
    emit("tried", free=free, **attempt(free))
wait_for(lambda: len(open_files()) <= before)
emit("done")
wait_for_go()
"""

ENOUGH = 12
"""Descriptors with which the gRPC streams of two members come about: 8, and some for a busy machine, where gRPC dials
again while the attempt before still holds its own (with 8 one in 60 found too few, six such tests on 2 cores)."""


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("messages", "numbers"), [(False, range(0, 30, 4)), (True, range(ENOUGH, 56, 4))])
@pytest.mark.sampled(2)
def test_too_few_descriptors_cause_a_fallback_or_a_typed_error(messages: bool, numbers: range) -> None:
    """Each number of free descriptors is a number of them too few somewhere else: it works, or the error is typed.

    With enough for gRPC an error says who has too few, and not that a peer is lost, for none is.
    """
    code = FEW.format(messages=messages, numbers=numbers)
    tests = str(Path(__file__).parent.parent)
    worker = Worker(code, {"PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])})
    seen = set()
    try:
        for free in numbers:
            tried = worker.expect("tried", 60.0)
            assert tried["free"] == free
            if tried["right"]:
                seen |= set(tried["kinds"])
            elif free >= ENOUGH and tried["type"] not in ("LimitExceeded", "PeerRaised"):
                assert messages, tried  # whose way in is watched by the loop: it may be there that a descriptor lacks
                assert "Too many open files" in tried["text"], tried
        worker.expect("done")
    finally:
        worker.close()
    assert seen == {"shm", "tcp", "grpc"}
    for complaint in ("never retrieved", "failed unexpectedly", "Exception ignored", "ResourceWarning"):
        assert complaint not in worker.stderr


MEET = """
with paceline.join(job=f"alone-{{os.getpid()}}", min_workers=1):
    pass  # all modules are there now, which another user may not read
if {same}:
    import paceline._session.identity
    paceline._session.identity._node = lambda: "all one"
if {user}:
    os.seteuid(60_000 + int(os.environ["USER_NUMBER"]))
with paceline.join(timeout=20) as session:
    group = session.group
    x = group.empty(1_500_001, np.float64)
    x[:] = np.arange(1_500_001) + group.rank
    total = group.all_reduce(x)
    right = bool(np.array_equal(total, 2 * np.arange(1_500_001) + 1))
    kinds = [link.kind for link in group._core.mesh._dialled]
    emit("met", right=right, kinds=kinds, nodes=len({{member.node for member in group.members}}))
    session.barrier("all have told")
"""


def check_met(started: list[Worker], kind: str, nodes: int) -> None:
    for worker in started:
        met = worker.expect_any(30.0, "met")
        assert (met.get("right"), met.get("kinds"), met.get("nodes")) == (True, [kind], nodes), (met, worker.stderr)


@pytest.mark.parametrize(("links", "kind"), [("shm,tcp,grpc", "shm"), ("tcp", "tcp"), ("grpc", "grpc"), ("shm", "shm")])
def test_paceline_links_selects_the_kinds_of_link(links: str, kind: str) -> None:
    code = MEET.format(same=False, user=False)
    with coordinator() as address, workers(2, code, COORDINATOR=address, MIN_WORKERS="2", LINKS=links) as started:
        check_met(started, kind, 1)


def test_paceline_links_at_one_side_limits_both_sides() -> None:
    code = MEET.format(same=False, user=False)
    with coordinator() as address, ExitStack() as stack:
        started = []
        for links in ("grpc", "shm,tcp,grpc"):
            environment = {"PACELINE_COORDINATOR": address, "PACELINE_MIN_WORKERS": "2", "PACELINE_LINKS": links}
            started.append(Worker(code, environment))
            stack.callback(started[-1].close)
        check_met(started, "grpc", 1)


@pytest.mark.needs(what="root")
@pytest.mark.parametrize("same", [False, True], ids=["by the view", "by the kernel"])
def test_workers_of_different_users_share_no_memory(same: bool) -> None:
    """They are on different nodes; and if they were not, the kernel would tell them apart."""
    if os.geteuid() != 0:
        pytest.skip("another user takes root")
    code = MEET.format(same=same, user=True)
    with coordinator() as address, ExitStack() as stack:
        started = []
        for number in range(2):
            environment = {"COORDINATOR": address, "MIN_WORKERS": "2", "FLIGHT_DIR": "off"}
            variables = {f"PACELINE_{name}": value for name, value in environment.items()}
            started.append(Worker(code, {**variables, "USER_NUMBER": str(number)}))
            stack.callback(started[-1].close)
        check_met(started, "tcp", 1 if same else 2)


@pytest.mark.needs(what="root")
@pytest.mark.parametrize("same", [False, True], ids=["by the view", "by the kernel"])
def test_workers_in_different_network_namespaces_share_no_memory(same: bool) -> None:
    code = MEET.format(same=same, user=False)
    with network(2) as net, coordinator_on(net.hosts[0]) as address, ExitStack() as stack:
        started = []
        for host in net.hosts:
            environment = {"COORDINATOR": address, "MIN_WORKERS": "2", "FLIGHT_DIR": "off"}
            started.append(Worker(code, {f"PACELINE_{name}": value for name, value in environment.items()}, host))
            stack.callback(started[-1].close)
        check_met(started, "tcp", 1 if same else 2)
