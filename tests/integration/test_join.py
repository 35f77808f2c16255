"""Joining: bounds, explicit ranks, the environment, and every way in which it is refused or fails."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import paceline
from paceline.config import Config
from paceline.errors import OperationTimeout
from paceline.testing import coordinator

QUICK = Config(failure_timeout=1.0, join_timeout=10.0)


def joined(address: str, count: int, **arguments: object) -> list[paceline.Session]:
    """Joins `count` members from threads of this process; sorted by rank."""
    arguments = {"min_workers": count, "config": QUICK, **arguments}
    with ThreadPoolExecutor(count) as pool:
        sessions = list(pool.map(lambda _: paceline.join(address, **arguments), range(count)))  # type: ignore[arg-type]
    return sorted(sessions, key=lambda session: session.rank)


def leave(sessions: list[paceline.Session]) -> None:
    with ThreadPoolExecutor(len(sessions)) as pool:
        list(pool.map(lambda session: session.leave(), sessions))


def on_all(sessions: list[paceline.Session], act: object) -> list[object]:
    with ThreadPoolExecutor(len(sessions)) as pool:
        return list(pool.map(act, sessions))  # type: ignore[arg-type]


def test_a_failure_timeout_above_an_hour_is_accepted() -> None:
    """Nobody could start it with another `max_silence`."""
    with coordinator() as address:
        leave(joined(address, 1, config=Config(failure_timeout=7_200.0, join_timeout=10.0)))


def test_members_meet_and_communicate() -> None:
    with coordinator() as address:
        sessions = joined(address, 3, job="meet")
        assert [session.rank for session in sessions] == [0, 1, 2]
        assert {session.size for session in sessions} == {3}
        assert {session.generation for session in sessions} == {1}
        assert [peer.rank for peer in sessions[0].members] == [0, 1, 2]
        totals = on_all(sessions, lambda session: session.group.all_reduce(np.full(5, session.rank + 1.0)).tolist())
        assert totals == [[6.0] * 5] * 3
        on_all(sessions, lambda session: session.barrier("epoch-1", timeout=5.0))
        on_all(sessions, lambda session: session.barrier("epoch-1", timeout=5.0))
        leave(sessions)


def test_members_get_their_explicit_ranks() -> None:
    with coordinator() as address, ThreadPoolExecutor(3) as pool:
        order = [2, 0, 1]
        sessions = list(
            pool.map(lambda rank: paceline.join(address, job="fixed", rank=rank, world_size=3, config=QUICK), order)
        )
        assert [session.rank for session in sessions] == order
        leave(sessions)


def test_two_claims_to_one_rank_raise_settings_mismatch() -> None:
    with coordinator() as address, ThreadPoolExecutor(1) as pool:
        first = pool.submit(paceline.join, address, job="twice", rank=0, world_size=2, config=QUICK)
        wait_for_candidates(address, "twice", 1)
        with pytest.raises(paceline.SettingsMismatch, match="rank 0") as caught:
            paceline.join(address, job="twice", rank=0, world_size=2, config=QUICK)
        assert str(caught.value).count(socket.gethostname()) == 2
        other = paceline.join(address, job="twice", rank=1, world_size=2, config=QUICK)
        leave([first.result(), other])


@pytest.mark.parametrize(
    ("mine", "theirs", "setting"),
    [
        ({"min_workers": 2}, {"min_workers": 3}, "min_workers"),
        ({"min_workers": 2, "max_workers": 4}, {"min_workers": 2, "max_workers": 5}, "max_workers"),
        ({"rank": 0, "world_size": 2}, {"rank": 1, "world_size": 3}, "world_size|workers"),
    ],
)
def test_a_settings_mismatch_names_the_setting(mine: dict[str, int], theirs: dict[str, int], setting: str) -> None:
    with coordinator() as address, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(paceline.join, address, job="disagree", timeout=30.0, config=QUICK, **mine)  # type: ignore[arg-type]
        wait_for_candidates(address, "disagree", 1)
        with pytest.raises(paceline.SettingsMismatch, match=setting):
            paceline.join(address, job="disagree", config=QUICK, **theirs)  # type: ignore[arg-type]
        fitting = mine | ({"rank": 1} if "rank" in mine else {})
        other = paceline.join(address, job="disagree", config=QUICK, **fitting)  # type: ignore[arg-type]
        leave([waiting.result(), other])


def wait_for_candidates(address: str, job: str, count: int) -> None:
    """Asks the coordinator until so many candidates wait; each answer is an event, so no time is guessed."""
    from paceline._base.rpc import grpc
    from pacelinepb.v1 import admin_pb2, admin_pb2_grpc

    deadline = time.monotonic() + 10.0
    with grpc.insecure_channel(address) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        while time.monotonic() < deadline:
            jobs = {entry.name: entry for entry in stub.ListJobs(admin_pb2.ListJobsRequest(), timeout=5.0).jobs}
            if job in jobs and jobs[job].waiting >= count:
                return
    raise AssertionError(f"{job} has no {count} candidates")


def test_invalid_join_arguments_raise_before_connecting() -> None:
    nowhere = "127.0.0.1:1"
    with pytest.raises(paceline.InvalidRank):
        paceline.join(nowhere, rank=4, world_size=4)
    with pytest.raises(paceline.InvalidRank, match="together"):
        paceline.join(nowhere, rank=1)
    with pytest.raises(paceline.InvalidWorldSize):
        paceline.join(nowhere, rank=0, world_size=0)
    with pytest.raises(paceline.InvalidWorldSize):
        paceline.join(nowhere, min_workers=3, max_workers=2)
    for rank in ("0", 1.5, True):
        with pytest.raises(paceline.InvalidRank, match="whole number"):
            paceline.join(nowhere, rank=rank, world_size=4)  # type: ignore[arg-type]
    with pytest.raises(paceline.InvalidWorldSize, match="whole number"):
        paceline.join(nowhere, min_workers=2.0)  # type: ignore[arg-type]
    for job in ("", "x" * 129, 5):
        with pytest.raises(ValueError, match="job's name"):
            paceline.join(nowhere, job=job)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="address"):
        paceline.join("host:port")
    with pytest.raises(paceline.InvalidWorldSize, match="PACELINE_COORDINATOR"):
        paceline.join(min_workers=2)


def test_an_address_that_refuses_raises_coordinator_unreachable() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        start = time.monotonic()
        with pytest.raises(paceline.CoordinatorUnreachable, match=r"tried for \d\.\d s; Connection refused") as caught:
            paceline.join(address, timeout=0.6)
    assert address in str(caught.value)
    assert time.monotonic() - start < 10.0


def test_an_advertised_port_in_use_raises_link_unavailable() -> None:
    with coordinator() as address, socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(paceline.LinkUnavailable, match="in use"):
            paceline.join(address, job="port", advertise=where, config=QUICK)


def test_joining_at_a_web_server_raises_coordinator_unreachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(5.0)

        def answer() -> None:
            try:
                while True:
                    client, _ = server.accept()
                    client.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")
                    client.close()
            except OSError:
                return

        web = threading.Thread(target=answer)
        web.start()
        with pytest.raises(paceline.CoordinatorUnreachable, match="no coordinator answers"):
            paceline.join(f"127.0.0.1:{server.getsockname()[1]}", timeout=1.0)
        server.shutdown(socket.SHUT_RDWR)
        web.join()


def test_joining_at_a_workers_address_raises_coordinator_unreachable() -> None:
    with coordinator() as address:
        (session,) = joined(address, 1, job="mistaken")
        with pytest.raises(paceline.CoordinatorUnreachable, match="not a Paceline coordinator"):
            paceline.join(session.members[0].address, timeout=3.0)
        session.leave()


def test_a_join_timeout_names_the_number_of_missing_workers() -> None:
    with coordinator() as address, pytest.raises(paceline.OperationTimeout, match="2 more workers"):
        paceline.join(address, job="small", min_workers=3, timeout=0.8, config=QUICK)


def test_a_job_can_be_joined_again_after_a_join_timeout() -> None:
    with coordinator() as address:
        for timeout in (0.3, 1.2):  # the second outlasts every timer that the first may have left
            with pytest.raises(paceline.OperationTimeout, match="1 more worker"):
                paceline.join(address, job="retry", min_workers=2, timeout=timeout, config=QUICK)
        leave(joined(address, 2, job="retry"))


def test_join_without_arguments_makes_a_world_of_one() -> None:
    with paceline.join() as session:
        assert (session.rank, session.size) == (0, 1)
        assert session.group.all_reduce(np.arange(3)).tolist() == [0, 1, 2]
        session.barrier("alone")
        session.store.set("k", b"v")
        assert session.store.get("k") == b"v"
        assert session.store.add("n", 2) == 2
        assert session.store.compare_set("k", b"x", b"y") == (False, b"v")
        with pytest.raises(paceline.OperationTimeout):
            session.store.get("missing", timeout=0.01)
    with pytest.raises(paceline.PacelineError):
        session.barrier("over")


def test_a_barrier_timeout_lists_the_missing_ranks() -> None:
    with coordinator() as address:
        sessions = joined(address, 3, job="late")
        with pytest.raises(paceline.OperationTimeout, match="rank 1") as caught:
            on_all([sessions[0], sessions[2]], lambda session: session.barrier("x", timeout=0.3))
        assert caught.value.ranks == (1,)
        assert socket.gethostname() in str(caught.value)
        leave(sessions)


def test_members_share_the_store_and_can_wait_for_keys() -> None:
    with coordinator() as address, ThreadPoolExecutor(1) as pool:
        one, two = joined(address, 2, job="store")
        waiting = pool.submit(one.store.get, "key", timeout=10.0)
        two.store.set("key", b"value")
        assert waiting.result() == b"value"
        assert [one.store.add("n", 2), two.store.add("n", 3)] == [2, 5]
        assert one.store.compare_set("c", None, b"1") == (True, b"1")
        assert two.store.compare_set("c", b"0", b"2") == (False, b"1")
        two.store.wait(["key", "c"], timeout=5.0)
        with pytest.raises(paceline.OperationTimeout, match="'never'"):
            one.store.wait(["never", "key"], timeout=0.1)
        assert one.store.delete("c")
        assert not one.store.delete("c")
        with pytest.raises(paceline.LimitExceeded):
            one.store.set("big", bytes((1 << 20) + 1))
        with pytest.raises(paceline.LimitExceeded):
            one.store.set("far too big", bytes(8 << 20))
        store = one.store
        leave([one, two])
        with pytest.raises(paceline.PacelineError):
            store.set("key", b"from the grave")


def test_a_job_starts_its_next_generation_after_all_members_left() -> None:
    with coordinator() as address:
        for generation in (1, 2, 3):
            sessions = joined(address, 2, job="again")
            assert {session.generation for session in sessions} == {generation}
            leave(sessions)


def test_jobs_are_isolated_from_each_other() -> None:
    with coordinator() as address:
        a, b = joined(address, 2, job="a"), joined(address, 3, job="b")
        a[0].store.set("k", b"a")
        with pytest.raises(paceline.OperationTimeout):
            b[0].store.get("k", timeout=0.05)
        totals = on_all([*a, *b], lambda session: int(session.group.all_reduce(np.int64(1))))
        assert totals == [2, 2, 3, 3, 3]
        leave(a)
        leave(b)


@pytest.fixture
def of_torchrun(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The variables that torchrun sets for one of two workers."""
    for name, value in (("TORCHELASTIC_RUN_ID", "run"), ("WORLD_SIZE", "2"), ("RANK", "1")):
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_a_torchrun_worker_takes_its_rank_from_torchrun(of_torchrun: pytest.MonkeyPatch) -> None:
    with coordinator() as address:
        with pytest.raises(OperationTimeout, match="waiting for rank 0 of 2"):
            paceline.join(address, timeout=0.5)
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(paceline.join, address, rank=0, world_size=2, config=QUICK)
            with paceline.join(address, config=QUICK) as session, other.result():
                assert (session.rank, session.size, session._all_start_again) == (1, 2, True)


def test_a_torchrun_worker_with_min_workers_joins_an_elastic_job(of_torchrun: pytest.MonkeyPatch) -> None:
    of_torchrun.setenv("PACELINE_MIN_WORKERS", "1")
    with coordinator() as address, paceline.join(address) as session:
        assert (session.rank, session.size, session._all_start_again) == (0, 1, False)


def test_a_second_join_of_one_thread_is_refused_at_once_and_another_thread_may_join() -> None:
    with coordinator() as address, ThreadPoolExecutor(1) as pool:
        first = paceline.join(address, job="again", min_workers=1, max_workers=2, config=QUICK)
        begun = time.monotonic()
        with pytest.raises(paceline.ConcurrentUse, match=r"in job 'again' already, .*rank 0 of 1.*session\.close\(\)"):
            paceline.join(address, job="again", min_workers=1, max_workers=2, config=QUICK)
        assert time.monotonic() - begun < QUICK.join_timeout / 2
        with paceline.join(address, job="another", config=QUICK):
            pass
        of_other_thread = pool.submit(paceline.join, address, job="again", min_workers=1, max_workers=2, config=QUICK)
        wait_for_candidates(address, "again", 1)
        first.close()
        held = of_other_thread.result()
        later = pool.submit(paceline.join, address, job="again", min_workers=1, max_workers=2, config=QUICK)
        wait_for_candidates(address, "again", 1)  # on the thread of the one before, which any thread may close
        held.close()
        later.result().close()
        paceline.join(address, job="again", min_workers=1, max_workers=2, config=QUICK).close()


def test_a_thread_can_join_again_after_its_last_step() -> None:
    with coordinator() as address:
        first = paceline.join(address, job="again", config=QUICK)
        state = paceline.TrainState(x={"a": np.zeros(1)})
        for step in first.steps(state, total=1):
            with step:
                pass
        paceline.join(address, job="again", config=QUICK).close()  # the job is done, so this is not refused
        first.close()


def test_a_second_join_in_the_block_of_the_first_is_refused_on_any_thread() -> None:
    def nested(address: str) -> None:
        with paceline.join(address, job="again", min_workers=1, max_workers=2, config=QUICK):
            paceline.join(address, job="again", min_workers=1, max_workers=2, config=QUICK)

    with coordinator() as address, ThreadPoolExecutor(1) as pool, pytest.raises(paceline.ConcurrentUse):
        pool.submit(nested, address).result()


def test_a_closed_session_says_so() -> None:
    session = paceline.join()
    with contextlib.closing(session):
        session.barrier("here")
    session.close()
    with pytest.raises(paceline.SessionClosed):
        session.barrier("there")
