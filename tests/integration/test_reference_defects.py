"""What must hold where the reference, and systems like it, go wrong: a regression test or more for each known defect.

Numbers are those of the reference's list of weaknesses. What other tests hold already:

1   issue order, `Work`: unit/test_group_order; frames of a generation that is over: integration/test_grpc_door.
2   over local links, worlds of 2, 3 and 5: unit/test_group_mismatch; processes: integration/test_failures.
3   a frame that is wrong in any way ends the generation: unit/test_group_failure.
4   a failure at every single frame is the same error on every rank: unit/test_group_failure; over gRPC with the
    coordinator's verdict: integration/test_failures.
6   of processes, by SIGKILL and SIGSTOP, and while nobody communicates: integration/test_failures.
8   unit/test_group_values, test_reference_rows.
10  every dtype and op against NumPy: unit/test_group_values, unit/collectives/test_ops.
13  overlap and segments: unit/collectives/test_program.
20  strangers, wrong tickets, garbage, what is too long: integration/test_grpc_door, unit/links/test_frame; two that
    claim one rank: integration/test_coordinator_sessions.
21  arrays of the other byte order, alone: unit/test_group_messages, unit/test_group_values.
23  the recorder by itself: unit/test_recorder; records of processes: integration/test_flight_records.
24  what README.md says is run: integration/test_readme.
"""

from __future__ import annotations

import ast
import socket
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

import paceline
from paceline._loop import loop_thread
from paceline.collectives.programs import SCHEDULES
from paceline.errors import (
    CollectiveMismatch,
    OperationTimeout,
    PacelineError,
    PeerBrokeProtocol,
    PeerLost,
    PeerRaised,
)
from paceline.group import Group
from paceline.links.base import Peer
from paceline.links.fault import Fault
from paceline.links.frame import Frame
from paceline.links.grpc_door import Door
from paceline.links.grpc_mesh import GrpcMesh
from paceline.links.local import LocalMesh
from paceline.testing import local_groups, next_generation, run_groups
from support.grpc_pair import JOB, grpc_world
from support.worlds import LINKS, SOON, errors_over, run_over, scheduled, world_over

X = np.ones(4, np.float32)
MIB = 1 << 20


@pytest.fixture(params=LINKS)
def link(request: pytest.FixtureRequest) -> str:
    """A kind of link; each test that asks for it runs over every one."""
    return str(request.param)


def every(collective: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("schedule", SCHEDULES[collective])


class Background:
    """A call in a thread of its own; `result` waits for it and raises what it raised."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._value: Any = None
        self._error: BaseException | None = None
        self.ended = 0.0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._call()
        except BaseException as error:  # noqa: BLE001  it is raised by `result`
            self._error = error
        finally:
            self.ended = time.monotonic()

    def result(self) -> Any:
        self._thread.join(20)
        assert not self._thread.is_alive(), "it hangs"
        if self._error is not None:
            raise self._error
        return self._value


def wait_for(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.001)


def states(group: Group) -> list[tuple[str, str]]:
    return [(entry["operation"], entry["state"]) for entry in group.recorder.snapshot()]


# 1. Untagged channels: two collectives in flight swapped data silently (269 of 300 runs of a prefetch were wrong, and
# 247 of 300 of an overlapped gradient sync), and a message that came late was taken by the next collective.


@pytest.mark.parametrize("world", [2, 3])
def test_1_collectives_of_one_size_in_flight_keep_their_data(world: int, link: str) -> None:
    def rank(group: Group) -> None:
        for turn in range(10):
            gathers = [group.all_gather(np.full(5, 10 * i + group.rank + turn), async_op=True) for i in range(4)]
            sums = [group.all_reduce(np.full(5, i + turn), async_op=True) for i in range(4)]
            for i in reversed(range(4)):
                expected = np.repeat([10 * i + peer + turn for peer in range(world)], 5)
                np.testing.assert_array_equal(gathers[i].wait(), expected)
                np.testing.assert_array_equal(sums[i].wait(), [world * (i + turn)] * 5)

    run_over(link, world, rank)


def test_1_overlapping_groups_messages_and_barriers_share_no_stream(link: str) -> None:
    """All at once, all of one size: the view, parts of it in threads of their own, messages in both directions."""

    def rank(group: Group) -> None:
        me = group.rank
        whole = group.subgroup(range(3), name="whole")
        pair = group.subgroup([0, 1]) if me < 2 else group.subgroup([2])

        def in_part(part: Group, base: int) -> None:
            for turn in range(10):
                expected = sum(base + peer for peer in part.ranks) + part.size * turn
                assert int(part.all_reduce(np.array([base + me + turn]))[0]) == expected
                part.barrier()

        def in_messages() -> None:
            for turn in range(10):
                group.send(np.array([1000 * me + turn]), (me + 1) % 3)
                got, source = group.recv((me + 2) % 3)
                assert (int(got[0]), source) == (1000 * source + turn, (me + 2) % 3)

        others = [
            Background(lambda: in_part(whole, 100)),
            Background(lambda: in_part(pair, 200)),
            Background(in_messages),
        ]
        in_part(group, 300)
        for other in others:
            other.result()

    run_over(link, 3, rank)


def test_1_after_a_timeout_no_later_call_takes_the_late_message(link: str) -> None:
    """By the reference rank 0's second sum was 10 + 2: rank 1's late 10 of the first was taken for it."""
    with world_over(link, 2) as groups:
        with pytest.raises(OperationTimeout):
            groups[0].all_reduce(np.array([1.0]), timeout=0.05)
        late = Background(lambda: groups[1].all_reduce(np.array([10.0])))
        with pytest.raises(OperationTimeout):
            groups[0].all_reduce(np.array([2.0]))
        with pytest.raises(OperationTimeout):
            late.result()


@every("all_reduce")
def test_1_what_comes_late_from_a_generation_that_is_over_is_dropped(schedule: str) -> None:
    groups = local_groups(2, SOON)
    for group in groups:
        group.choose = scheduled("all_reduce")[schedule]
    with pytest.raises(OperationTimeout):
        groups[1].all_reduce(np.full(3, 10.0), timeout=0.05)  # rank 1's 10 is on its way
    next_generation(groups)
    assert [result.tolist() for result in run_groups(groups, lambda g: g.all_reduce(np.full(3, 2.0)))] == [[4] * 3] * 2


def test_1_a_message_later_than_its_recv_goes_to_whoever_asks_for_its_tag(link: str) -> None:
    def rank(group: Group) -> Any:
        if group.rank == 0:
            with pytest.raises(OperationTimeout):
                group.recv(1, tag=1, timeout=0.02)
            group.barrier()
            second = int(group.recv(1, tag=2)[0])
            return second, int(group.recv(1, tag=1)[0]), int(group.all_reduce(np.int64(5)))
        group.barrier()
        group.send(np.int64(1), 0, tag=1)
        group.send(np.int64(2), 0, tag=2)
        group.all_reduce(np.int64(6))
        return None

    assert run_over(link, 2, rank)[0] == (2, 1, 11)


# 2. Op, dtype, shape, root and order were never compared: [2,2] with [4], and a sum with a mean, passed silently.

DISAGREE: dict[str, tuple[Callable[[Group], object], Callable[[Group], object], str, str]] = {
    "op": (lambda g: g.all_reduce(X), lambda g: g.all_reduce(X, op="mean"), "op=sum", "op=mean"),
    "shape of the same size": (lambda g: g.all_reduce(X), lambda g: g.all_reduce(X.reshape(2, 2)), "[4]", "[2,2]"),
    "one is empty": (lambda g: g.all_reduce(X), lambda g: g.all_reduce(X[:0]), "[4]", "[0]"),
    "dtype of the same size": (
        lambda g: g.all_reduce(X),
        lambda g: g.all_reduce(X.view(np.int32)),
        "float32[4]",
        "int32[4]",
    ),
    "order": (lambda g: g.all_reduce(X), lambda g: g.all_reduce(X, order="rank"), "op=sum float32", "order=rank"),
    "root of a broadcast": (
        lambda g: g.broadcast(X, root=0),
        lambda g: g.broadcast(X, root=1),
        "root=0",
        "root=1",
    ),
    "root of a reduce": (lambda g: g.reduce(X, root=0), lambda g: g.reduce(X, root=1), "root=0", "root=1"),
    "root of a gather": (lambda g: g.gather(X, root=0), lambda g: g.gather(X, root=1), "root=0", "root=1"),
    "root of a scatter": (
        lambda g: g.scatter([X, X], root=0),
        lambda g: g.scatter([X, X], root=1),
        "root=0",
        "root=1",
    ),
    "op of a reduce_scatter": (
        lambda g: g.reduce_scatter(X),
        lambda g: g.reduce_scatter(X, op="mean"),
        "op=sum",
        "op=mean",
    ),
    "length of an all_gather": (lambda g: g.all_gather(X), lambda g: g.all_gather(X[:3]), "[4]", "[3]"),
    "evenness of an all_gather": (
        lambda g: g.all_gather(X),
        lambda g: g.all_gather(X, uneven=True),
        "all_gather float32",
        "rows=any",
    ),
    "dtype of an all_to_all": (
        lambda g: g.all_to_all(X),
        lambda g: g.all_to_all(X.view(np.int32)),
        "float32[4]",
        "int32[4]",
    ),
    "counts of an all_to_all": (
        lambda g: g.all_to_all(X),
        lambda g: g.all_to_all(X, send_counts=[2, 2]),
        "all_to_all float32[4]",
        "counts=any",
    ),
    "collective": (lambda g: g.all_gather(X), lambda g: g.all_reduce(X), "all_gather", "all_reduce"),
    "a barrier": (lambda g: g.barrier(), lambda g: g.all_reduce(X), "barrier", "all_reduce"),
    "asynchronous": (
        lambda g: g.all_reduce(X, async_op=True).wait(),
        lambda g: g.all_reduce(X, op="max", async_op=True).wait(),
        "op=sum",
        "op=max",
    ),
}


@pytest.mark.parametrize("name", DISAGREE)
def test_2_ranks_that_disagree_are_told_both_sides(name: str, link: str) -> None:
    first, second, one, two = DISAGREE[name]

    def call(group: Group) -> None:
        (second if group.rank else first)(group)
        group.barrier()

    with mock.patch("paceline.collectives.exchange.PATIENCE", 0.05):
        raised = errors_over(link, 2, call)
    for error in raised:
        assert isinstance(error, CollectiveMismatch), raised
        for fact in (one, two, "rank 0", "rank 1"):
            assert fact in str(error)
        assert error.ranks
        assert set(error.ranks) <= {0, 1}
        assert (error.operation, error.generation) == (1, 1)


def test_2_counts_that_do_not_fit_name_the_rank_that_sends_others(link: str) -> None:
    def call(group: Group) -> None:
        group.all_to_all(X, send_counts=[2, 2], recv_counts=[2, 3] if group.rank else [2, 2])
        group.barrier()

    for error in errors_over(link, 2, call):
        assert isinstance(error, CollectiveMismatch)
        assert "2 rows" in str(error)
        assert "expects 3" in str(error)


# 3. After a wrong length or a timeout in the middle of a frame the stream was out of step, and stayed in use.


def test_3_a_send_that_times_out_half_way_leaves_the_link_in_step(link: str) -> None:
    sent = threading.Event()

    def rank(group: Group) -> Any:
        if group.rank == 0:
            with pytest.raises(OperationTimeout, match=r"rank 1 .*did not take"):
                group.send(np.zeros(80 * MIB, np.uint8), 1, timeout=0.2)
            sent.set()
            group.send(np.int64(5), 1)
            return int(group.all_reduce(np.int64(1)))
        assert sent.wait(20)
        return int(group.recv(0)[0]), int(group.all_reduce(np.int64(1)))

    assert run_over(link, 2, rank) == [2, (5, 2)]


def test_3_a_recv_that_times_out_half_way_leaves_the_link_in_step(link: str) -> None:
    whole, go = np.arange(MIB, dtype=np.int32), threading.Event()  # 4 frames

    def hold(way: str, peer: int, frame: Frame) -> Frame:
        if way == "send" and frame.part == 2:
            assert go.wait(20)
        return frame

    def rank(group: Group) -> Any:
        if group.rank == 0:
            group.send(whole, 1)
            group.send(np.int32(7), 1)
            return None
        with pytest.raises(OperationTimeout):
            group.recv(0, timeout=0.1)  # some frames are there, the rest is not
        go.set()
        np.testing.assert_array_equal(group.recv(0)[0], whole)
        return int(group.recv(0)[0])

    with world_over(link, 2, tamper={0: hold}) as groups:
        assert run_groups(groups, rank)[1] == 7


@pytest.mark.parametrize("cut", [lambda data: data[:-1], lambda data: data + b"\0", lambda data: b""])
def test_3_a_length_that_is_wrong_ends_the_generation_for_good(cut: Callable[[bytes], bytes], link: str) -> None:
    def shorten(way: str, peer: int, frame: Frame) -> Frame:
        if way == "send" and len(frame.payload):
            frame.payload = cut(bytes(frame.payload))
        return frame

    def rank(group: Group) -> None:
        for _ in range(2):  # the second finds nothing to go on with
            with pytest.raises(PeerBrokeProtocol) as caught:
                group.all_reduce(X, order="rank")  # rank 0 answers what it has understood
            assert caught.value.ranks == (1,)

    with world_over(link, 2, tamper={1: shorten}) as groups:
        run_groups(groups, rank)


# 4. Failures were not collective: some ranks succeeded, some timed out; nothing was poisoned.


def test_4_all_that_is_in_flight_fails_with_one_error_and_so_does_all_that_follows(link: str) -> None:
    def fail(way: str, peer: int, frame: Frame) -> Frame:
        raise ZeroDivisionError("in the code of rank 1")

    issued = threading.Barrier(3)

    def rank(group: Group) -> None:
        if group.rank == 1:
            issued.wait(20)
            with pytest.raises(ZeroDivisionError):
                group.all_reduce(X)
            with pytest.raises(PeerRaised, match="ZeroDivisionError"):
                group.all_reduce(X)
            return
        works = [group.all_reduce(X, async_op=True) for _ in range(3)]
        issued.wait(20)
        calls: list[Callable[[], object]] = [*(work.wait for work in works), group.barrier]
        calls += [lambda: group.send(X, 0), lambda: group.recv(0, timeout=0), lambda: group.subgroup([group.rank])]
        texts = set()
        for call in calls:
            with pytest.raises(PeerRaised, match="ZeroDivisionError") as caught:
                call()
            texts.add(str(caught.value))
            assert (caught.value.ranks, caught.value.operation, caught.value.generation) == ((1,), 1, 1)
        assert len(texts) == 1

    with world_over(link, 3, tamper={1: fail}) as groups:
        run_groups(groups, rank)


# 5. No timeout held while sending: a ring blocked for 8 s with a timeout of 0.5 s; 0 meant another thing on each
# backend; 50 ms were told as "0s".


@pytest.mark.parametrize("call", ["broadcast", "all_reduce", "send"])
def test_5_a_timeout_holds_while_sending_to_a_live_peer_that_takes_nothing(call: str, link: str) -> None:
    big = np.zeros((80 if call == "send" else 64) * MIB, np.uint8)
    calls: dict[str, Callable[[Group], object]] = {
        "broadcast": lambda g: g.broadcast(big, root=0, timeout=0.5),
        "all_reduce": lambda g: g.all_reduce(big, timeout=0.5),
        "send": lambda g: g.send(big, 1, timeout=0.5),
    }
    with world_over(link, 2) as groups:
        started = time.monotonic()
        with pytest.raises(OperationTimeout, match=r"[01]\.\d+ s") as caught:
            calls[call](groups[0])
        assert 0.5 <= time.monotonic() - started < 1.5
        assert caught.value.ranks == (1,)


@pytest.mark.parametrize("call", ["all_reduce", "barrier", "broadcast", "all_gather", "recv"])
def test_5_a_timeout_of_0_waits_for_nothing_everywhere(call: str, link: str) -> None:
    calls: dict[str, Callable[[Group], object]] = {
        "all_reduce": lambda g: g.all_reduce(X, timeout=0),
        "barrier": lambda g: g.barrier(timeout=0),
        "broadcast": lambda g: g.broadcast(X, root=1, timeout=0),
        "all_gather": lambda g: g.all_gather(X, timeout=0),
        "recv": lambda g: g.recv(1, timeout=0),
    }
    with world_over(link, 2) as groups:
        started = time.monotonic()
        with pytest.raises(OperationTimeout):
            calls[call](groups[0])
        assert time.monotonic() - started < 0.3


def test_5_nothing_to_wait_for_is_no_timeout(link: str) -> None:
    def rank(group: Group) -> Any:
        group.barrier(timeout=0)
        group.send(X, 0, timeout=0)
        return group.recv(0, timeout=0)[0].tolist(), group.all_reduce(X, timeout=0).tolist()

    assert run_over(link, 1, rank) == [([1] * 4, [1] * 4)]


# 6. A dead peer was not seen: closure was never reported, and no read meant no news.


def die(group: Group, doors: list[Door]) -> None:
    """What the death of the member's process does to its links: they end without a word."""
    mesh = group.mesh
    if isinstance(mesh, LocalMesh):
        mesh.cut()
        return
    assert isinstance(mesh, GrpcMesh)
    loop_thread().run(mesh.end())
    server = doors[mesh.rank]._server
    assert server is not None
    loop_thread().run(server.stop(None))


@pytest.mark.parametrize("call", ["all_reduce", "recv"])
def test_6_a_death_is_news_to_whoever_waits(call: str, link: str) -> None:
    calls: dict[str, Callable[[Group], object]] = {
        "all_reduce": lambda g: g.all_reduce(X),
        "recv": lambda g: g.recv(1, timeout=20.0),
    }
    with ExitStack() as stack:
        doors: list[Door] = []
        if link == "local":
            groups = local_groups(2, SOON)
        else:
            made = stack.enter_context(grpc_world(2))
            doors, groups = made.doors, [Group(mesh, SOON) for mesh in made.meshes]
        for group in groups:
            stack.callback(group.close, 0.2)
        talk_both_ways(groups)
        waiting = Background(lambda: calls[call](groups[0]))
        wait_for(lambda: states(groups[0])[-1] == (call, "running"))
        killed = time.monotonic()
        die(groups[1], doors)
        with pytest.raises(PeerLost) as caught:
            waiting.result()
        assert waiting.ended - killed < 1.0
        assert caught.value.ranks == (1,)


def talk_both_ways(groups: list[Group]) -> None:
    """So that all links are up."""
    other = Background(lambda: (groups[1].barrier(), groups[1].send(X, 0), groups[1].recv(0)))
    groups[0].barrier()
    groups[0].send(X, 1)
    groups[0].recv(1)
    groups[0].hand_over()
    other.result()


# 8. Panics for user errors, and 9. all errors flattened to one type with a text, on which the callers then matched.


MISTAKES: dict[str, Callable[[Group], object]] = {
    "no such rank": lambda g: g.global_rank(7),
    "half a member": lambda g: g.subgroup([g.rank, 0.5]),  # type: ignore[list-item]
    "a member in words": lambda g: g.subgroup([g.rank, "1"]),  # type: ignore[list-item]
    "no member": lambda g: g.subgroup([g.rank, None]),  # type: ignore[list-item]
    "half a tag": lambda g: g.send(X, 1 - g.rank, tag=1.5),  # type: ignore[arg-type]
    "a truth for a tag": lambda g: g.send(X, 1 - g.rank, tag=True),
    "a tag too large": lambda g: g.send(X, 1 - g.rank, tag=1 << 63),
    "a truth for a rank": lambda g: g.send(X, True),
    "uneven rows": lambda g: g.reduce_scatter(np.ones((3, 2))),
    "counts that do not add up": lambda g: g.all_to_all(X, send_counts=[2, 1]),
    "counts that are no whole numbers": lambda g: g.all_to_all(X, send_counts=[1.5, 2.5]),  # type: ignore[list-item]
    "a short out": lambda g: g.all_reduce(X, out=X[:2].copy()),
    "text": lambda g: g.all_reduce(np.array(["x"])),
    "objects": lambda g: g.all_reduce(np.array([None])),
    "an object that cannot travel": lambda g: g.all_gather_object(g),
    "a root without an array": lambda g: g.broadcast(None, root=g.rank),
    "too few parts": lambda g: g.scatter([X], root=g.rank),
    "parts that are none": lambda g: g.scatter(5, root=g.rank),
    "an op that is no name": lambda g: g.all_reduce(X, op=[1]),
    "one count for all": lambda g: g.all_to_all(X, send_counts=1),
    "counts that are none": lambda g: g.all_to_all(X, send_counts=[float("nan"), None]),
    "a list to receive into": lambda g: g.recv(0, out=[1.0]),
}


@pytest.mark.parametrize("name", list(MISTAKES))
def test_8_a_mistake_is_a_typed_error_at_the_call_and_costs_nothing(name: str, link: str) -> None:
    def rank(group: Group) -> int:
        with pytest.raises(PacelineError) as caught:
            MISTAKES[name](group)
        assert isinstance(caught.value, ValueError | TypeError), "and not the generation's end"
        return int(group.all_reduce(np.int64(1)))

    assert run_over(link, 2, rank) == [2, 2]


def test_9_errors_have_types_and_attributes(link: str) -> None:
    def times_out(group: Group) -> None:
        group.barrier()
        if group.rank == 0:
            group.all_reduce(X, timeout=0.05)
        else:
            group.recv(0, timeout=20.0)

    def disagrees(group: Group) -> None:
        group.barrier()
        group.barrier()
        group.all_reduce(X, op="max" if group.rank else "min")

    for call, kind, operation in ((times_out, OperationTimeout, 2), (disagrees, CollectiveMismatch, 3)):
        for error in errors_over(link, 2, call):
            assert type(error) is kind
            assert isinstance(error, TimeoutError) == (kind is OperationTimeout)
            assert (error.operation, error.generation) == (operation, 1)
            assert set(error.ranks) <= {0, 1}
            assert error.ranks


def test_9_nothing_matches_on_the_text_of_an_error() -> None:
    """`x in str(error)`, `str(error).startswith(x)`, `error.args[0] == x`, in any `except X as error`."""
    found = []
    for path in sorted(Path(paceline.__file__).parent.rglob("*.py")):
        for handler in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ExceptHandler)):
            texts = {
                f"str({handler.name})",
                f"{handler.name}.args[0]",
                f"{handler.name}.details()",
                f"{handler.name}.args",
            }
            for node in ast.walk(handler):
                sides: list[ast.expr] = []
                if isinstance(node, ast.Compare):
                    sides = [node.left, *node.comparators]
                elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    sides = [node.func.value] if node.func.attr in ("startswith", "endswith", "find", "count") else []
                if texts & {ast.unparse(side) for side in sides}:
                    found.append(f"{path.name}:{handler.lineno}")
    assert found == []


# 10. Sum and mean alone, of float32 and float64 alone; a mean overflowed where the mean fits (3e38 and 3e38 gave inf).

BF16 = np.dtype(ml_dtypes.bfloat16)
NEAR_THE_END = [  # dtype, value, and how far off the mean of three may be: two rounded sums and a division
    ("f2", 60000, 2**-10),
    (BF16, 3e38, 3 * 2**-8),
    ("f4", 3e38, 3 * 2**-24),
    ("f8", 1.7e308, 3 * 2**-53),
    ("c8", complex(3e38, -3e38), 3 * 2**-24),
    ("c16", complex(1.7e308, -1.7e308), 3 * 2**-53),
]


def reals(x: Any) -> Any:
    """The numbers, complex ones as two, in float64."""
    return (x.view(x.real.dtype) if x.dtype.kind == "c" else x).astype(np.float64)


@pytest.mark.parametrize(
    ("collective", "schedule"),
    [(name, schedule) for name in ("all_reduce", "reduce", "reduce_scatter") for schedule in SCHEDULES[name]],
)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_10_a_mean_that_fits_does_not_overflow(collective: str, schedule: str, world: int) -> None:
    def rank(group: Group) -> None:
        for dtype, value, digits in NEAR_THE_END:
            x = np.full(world, value, dtype)
            result = getattr(group, collective)(x, op="mean")
            if result is None:
                continue  # not the root
            assert result.dtype == x.dtype
            if world != 3:
                assert (result == x[: result.size]).all(), (dtype, result)
            got, due = (reals(array[: result.size]) for array in (result, x))
            assert (abs(got / due - 1) <= digits).all(), (dtype, result)

    run_over("local", world, rank, choose=scheduled(collective)[schedule])


def test_10_a_mean_that_fits_does_not_overflow_on_any_link(link: str) -> None:
    def rank(group: Group) -> list[float]:
        result: list[float] = group.all_reduce(np.full(3, 3e38, np.float32), op="mean").tolist()
        return result

    assert run_over(link, 2, rank) == [[float(np.float32(3e38))] * 3] * 2


@every("all_reduce")
@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", BF16, "f4", "f8"])
def test_10_all_ops_keep_the_type(dtype: Any, schedule: str) -> None:
    values = [np.array([3, 1, 2], dtype), np.array([1, 5, 2], dtype), np.array([2, 2, 7], dtype)]
    expected = {"sum": [6, 8, 11], "prod": [6, 10, 28], "min": [1, 1, 2], "max": [3, 5, 7]}
    if values[0].dtype.kind in "iu":
        expected |= {"band": [0, 0, 2], "bor": [3, 7, 7], "bxor": [0, 6, 7]}

    def rank(group: Group) -> None:
        for op, result in expected.items():
            got = group.all_reduce(values[group.rank], op=op)
            assert got.dtype == values[0].dtype
            assert got.astype(float).tolist() == result, op

    run_over("local", 3, rank, choose=scheduled("all_reduce")[schedule])


def test_10_large_integers_lose_no_digit(link: str) -> None:
    big = np.array([2**62, -(2**62), 2**53 + 1], np.int64)
    assert run_over(link, 2, lambda g: g.all_reduce(big // 2).tolist()) == [[2**62, -(2**62), 2**53]] * 2


@pytest.mark.parametrize(("dtype", "first", "world"), [("f2", 2048, 5), (BF16, 256, 5), ("f2", 2048, 3)])
@pytest.mark.parametrize(
    ("collective", "schedule"),
    [(name, schedule) for name in ("all_reduce", "reduce", "reduce_scatter") for schedule in SCHEDULES[name]],
)
def test_10_small_terms_count_in_rank_order(collective: str, schedule: str, dtype: Any, first: int, world: int) -> None:
    """2048 + 1 is 2048 in float16: one after the other, none of the ones would count."""

    def rank(group: Group) -> None:
        x = np.full(world, 1 if group.rank else first, dtype)
        result = getattr(group, collective)(x, op="sum", order="rank")
        if result is not None:
            assert result.dtype == x.dtype
            assert set(result.astype(float)) == {float(first + world - 1)}

    run_over("local", world, rank, choose=scheduled(collective)[schedule])


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("dtype", ["f2", BF16, "f4", "c8"])
def test_10_rank_order_gives_the_same_bits_at_every_size(dtype: Any, world: int) -> None:
    """Whatever schedule the rules take for the size: ((x_0 + x_1) + x_2) + ..., of half precision in float32."""
    rng = np.random.default_rng(world)
    terms = [(rng.standard_normal(60) * 10.0 ** rng.integers(-3, 4, 60)).astype(dtype) for _ in range(world)]
    wide = np.dtype(np.float32) if terms[0].dtype.itemsize == 2 else terms[0].dtype
    total = terms[0].astype(wide)
    for term in terms[1:]:
        total = total + term.astype(wide)
    bits = total.astype(dtype).tobytes()

    def rank(group: Group) -> None:
        for copies in (1, 100, 20_000):
            x = np.tile(terms[group.rank], copies)
            assert group.all_reduce(x, order="rank").tobytes() == bits * copies

    run_over("local", world, rank)


# 11. Two writes a frame and delayed acknowledgements: 88 ms for a star of 1 KiB, 88 ms for a barrier.


@pytest.mark.parametrize("world", [2, 3])
def test_11_a_small_call_over_loopback_waits_for_no_acknowledgement(world: int) -> None:
    x = np.ones(256, np.float32)

    def rank(group: Group) -> dict[str, float]:
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: group.all_reduce(x),
            "barrier": group.barrier,
            "messages": lambda: (
                group.send(x, (group.rank + 1) % world),
                group.recv((group.rank - 1) % world),
            ),
        }
        medians = {}
        for name, call in calls.items():
            call()
            took = []
            for _ in range(30):
                started = time.perf_counter()
                call()
                took.append(time.perf_counter() - started)
            medians[name] = statistics.median(took)
        return medians

    for medians in run_over("grpc", world, rank):
        assert all(median < 0.02 for median in medians.values()), medians


# 12. Rank 0 moved 2(W-1) arrays, and all others 2. 13. A new thread for each step of a ring.


@pytest.mark.parametrize("world", [2, 3, 4])
def test_12_nobody_moves_more_than_its_share_of_a_large_array(world: int, link: str) -> None:
    x = np.ones(3 * MIB // 4, np.float32)  # 3 MiB: divisible by 2, 3 and 4
    share = x.nbytes * (world - 1) / world

    def rank(group: Group) -> dict[str, float]:
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: group.all_reduce(x),
            "in rank order": lambda: group.all_reduce(x, order="rank"),
            "reduce_scatter": lambda: group.reduce_scatter(x),
            "all_gather": lambda: group.all_gather(x[: x.size // world]),
            "all_to_all": lambda: group.all_to_all(x),
        }
        moved = {}
        for name, call in calls.items():
            before = group.bytes_sent
            call()
            moved[name] = (group.bytes_sent - before) / share
        return moved

    for moved in run_over(link, world, rank):
        assert moved == pytest.approx(
            {"all_reduce": 2, "in rank order": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1}, rel=0.01
        )


@every("broadcast")
def test_12_no_root_sends_to_all(schedule: str) -> None:
    x = np.ones(7 * MIB // 8)

    def rank(group: Group) -> float:
        group.broadcast(x, root=0)
        return group.bytes_sent / x.nbytes

    moved = run_over("local", 8, rank, choose=scheduled("broadcast")[schedule])
    assert max(moved) <= 2.0, "not 7, as the star's root"
    assert sum(moved) == pytest.approx(7, rel=0.2)


def test_13_no_operation_starts_a_thread(link: str) -> None:
    x = np.ones(MIB // 4, np.float32)
    names: list[str] = []
    start = threading.Thread.start

    def watched(thread: threading.Thread) -> None:
        names.append(thread.name)
        start(thread)

    with world_over(link, 3) as groups:

        def work(group: Group) -> None:
            group.all_reduce(x)
            group.all_reduce(X)
            group.broadcast(x)
            group.all_gather(x)
            group.reduce_scatter(np.ones(3))
            group.all_to_all(np.ones(3))
            group.barrier()
            group.send(X, (group.rank + 1) % 3)
            group.recv((group.rank - 1) % 3)

        def in_line(group: Group) -> None:
            for task in [group.all_reduce(x, async_op=True) for _ in range(5)]:
                task.wait()

        go = threading.Barrier(4)

        def member(group: Group) -> None:
            work(group)
            in_line(group)  # from now on the group has its one thread
            go.wait(20)
            go.wait(20)
            for _ in range(5):
                work(group)
                in_line(group)

        members = [Background(lambda group=group: member(group)) for group in groups]
        go.wait(20)
        with mock.patch.object(threading.Thread, "start", watched):
            go.wait(20)
            for each in members:
                each.result()
    assert names == []


# 14. One lock for both directions: a send waited 513 ms behind a receive of the same pair.


def test_14_a_send_does_not_wait_behind_a_receive_on_the_same_pair(link: str) -> None:
    with world_over(link, 2) as groups:
        talk_both_ways(groups)
        waiting = Background(lambda: groups[0].recv(1, tag=3, timeout=20.0))
        wait_for(lambda: states(groups[0])[-1] == ("recv", "running"))
        started = time.monotonic()
        for _ in range(3):
            groups[0].send(np.ones(MIB // 8), 1, timeout=10.0)
        assert time.monotonic() - started < 0.3
        for _ in range(3):
            groups[1].recv(0, timeout=10.0)
        groups[1].send(np.int64(1), 0, tag=3)
        assert int(waiting.result()[0]) == 1


def test_14_a_collective_does_not_wait_behind_a_receive_on_the_same_pair(link: str) -> None:
    def rank(group: Group) -> int:
        waiting = Background(lambda: group.recv(1 - group.rank, tag=3, timeout=20.0))
        wait_for(lambda: ("recv", "running") in states(group))
        total = int(group.all_reduce(np.ones(MIB // 2, np.int32))[-1])
        group.send(np.int64(total), 1 - group.rank, tag=3)
        return int(waiting.result()[0])

    assert run_over(link, 2, rank) == [2, 2]


def test_14_two_ranks_may_send_much_to_each_other_before_either_receives(link: str) -> None:
    x = np.ones(24 * MIB, np.uint8)

    def rank(group: Group) -> int:
        group.send(x, 1 - group.rank, timeout=20.0)
        return int(group.recv(1 - group.rank, timeout=20.0)[0].sum())

    assert run_over(link, 2, rank) == [x.size] * 2


# 20. A silent connection blocked the rendezvous for ever.


@pytest.mark.parametrize(
    "said", [b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\xff" * 8], ids=["nothing", "half", "length"]
)
def test_20_connections_that_say_nothing_more_hold_nobody_up(said: bytes) -> None:
    """The last is the reference's length of a frame: 2**64 - 1 bytes to come."""
    with grpc_world(2) as made, ExitStack() as stack:
        for peer in made.meshes[0].peers:
            host, port = peer.address.split(":")
            for _ in range(5):
                stranger = stack.enter_context(socket.create_connection((host, int(port))))
                stranger.sendall(said)
        results = run_groups([Group(mesh, SOON) for mesh in made.meshes], lambda g: g.all_reduce(X).tolist())
    assert results == [[2] * 4] * 2


# 21. IPv4 alone; the same byte order assumed everywhere.


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
def test_21_links_over_ipv6() -> None:
    thread = loop_thread()
    doors = [Door(JOB) for _ in range(2)]
    with ExitStack() as stack:
        for door in doors:
            stack.callback(lambda door=door: thread.run(door.close()))
        ports = [thread.run(door.start("::1", 0)) for door in doors]
        peers = [Peer(rank, f"member-{rank}", "host", f"[::1]:{ports[rank]}", 100 + rank) for rank in range(2)]
        meshes = [GrpcMesh(JOB, 1, rank, peers, Fault(1, rank, 0.05), thread, 3.0) for rank in range(2)]
        for door, mesh in zip(doors, meshes, strict=True):
            thread.loop.call_soon_threadsafe(door.enter, mesh)
        results = run_groups([Group(mesh, SOON) for mesh in meshes], lambda g: g.all_reduce(X).tolist())
    assert results == [[2] * 4] * 2


@pytest.mark.parametrize("dtype", ["i2", "i8", "f4", "f8", "c16"])
def test_21_ranks_of_either_byte_order_understand_each_other(dtype: str, link: str) -> None:
    values = np.array([1, 2, 300, 40, 5, 6])

    def rank(group: Group) -> None:
        x = values.astype(np.dtype(dtype).newbyteorder("<>"[group.rank]))
        for result, expected in (
            (group.all_reduce(x), 2 * values),
            (group.reduce_scatter(x), 2 * values[3 * group.rank : 3 * group.rank + 3]),
            (group.all_gather(x), np.tile(values, 2)),
            (group.broadcast(x, root=1), values),
            (group.all_to_all(x), np.tile(values[3 * group.rank : 3 * group.rank + 3], 2)),
        ):
            assert result.dtype == np.dtype(dtype)
            np.testing.assert_array_equal(result, expected)
        group.send(x, 1 - group.rank)
        np.testing.assert_array_equal(group.recv(1 - group.rank)[0], values)

    run_over(link, 2, rank)


# 23. No log of operations, no counters.


def test_23_the_recorder_tells_of_every_operation(link: str) -> None:
    def rank(group: Group) -> None:
        part = group.subgroup([0, 1], name="data")
        group.all_reduce(np.ones((2, 3), np.float32), op="mean")
        part.all_gather(np.ones(5, np.int16))
        group.all_reduce(np.ones(4, np.float64), async_op=True).wait()
        group.send(np.ones(7, np.uint8), group.rank, tag=3)
        group.recv(group.rank, tag=3)
        group.barrier()
        with pytest.raises(CollectiveMismatch):
            group.all_reduce(X, op="sum" if group.rank else "max")
        entries = group.recorder.snapshot()
        columns = ("number", "operation", "detail", "dtype", "shape", "bytes", "state")
        assert [tuple(entry[name] for name in columns) for entry in entries if not entry["group"]] == [
            (1, "all_reduce", "op=mean", "float32", [2, 3], 24, "done"),
            (2, "all_reduce", "op=sum", "float64", [4], 32, "done"),
            (0, "send", f"to={group.rank} tag=3", "uint8", [7], 7, "done"),
            (0, "recv", f"from={group.rank} tag=3", None, None, None, "done"),
            (3, "barrier", "", None, None, None, "done"),
            (4, "all_reduce", f"op={'sum' if group.rank else 'max'}", "float32", [4], 16, "failed"),
        ]
        (of_part,) = (entry for entry in entries if entry["group"])
        assert (of_part["number"], of_part["operation"], of_part["bytes"]) == (1, "all_gather", 10)
        assert "data" in of_part["group"]
        assert entries[-1]["error"].startswith("CollectiveMismatch: operation 4")
        assert [entry["error"] for entry in entries[:-1]] == [None] * 6
        for entry in entries:
            issued, began, ended = (datetime.fromisoformat(entry[f"{at}_at"]) for at in ("issued", "began", "ended"))
            assert issued <= began <= ended
            assert entry["waited_s"] >= 0
            assert entry["took_s"] >= 0

    run_over(link, 2, rank)


def test_23_bytes_are_counted(link: str) -> None:
    x = np.ones(MIB // 4, np.float32)

    def rank(group: Group) -> None:
        sent = group.bytes_sent
        group.send(x, 1 - group.rank)
        group.recv(1 - group.rank)
        assert group.bytes_sent - sent == pytest.approx(x.nbytes, rel=0.01)
        sent = group.bytes_sent
        group.send(x, group.rank)  # goes nowhere
        group.recv(group.rank)
        assert group.bytes_sent == sent
        part = group.subgroup([0, 1])
        part.all_gather(x)
        assert group.bytes_sent - sent == pytest.approx(x.nbytes, rel=0.01)
        assert part.bytes_sent == group.bytes_sent

    run_over(link, 2, rank)
