"""send and recv: by tag, from one or from any, to oneself; a timeout consumes nothing and voids nothing."""

from __future__ import annotations

import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from paceline._collectives.mailbox import Mailbox
from paceline._group import Group
from paceline._links.local import local_meshes
from paceline.config import Config
from paceline.errors import OperationTimeout, PeerLost, SizeMismatch
from paceline.testing import local_groups, run_ranks
from support.waiting import Background


def test_a_message_arrives_with_its_dtype_shape_and_source() -> None:
    x = np.arange(6, dtype=np.int16).reshape(2, 3)

    def rank(group: Group) -> Any:
        if group.rank == 0:
            group.send(x, 1)
            return None
        return group.recv(0)

    received, source = run_ranks(2, rank)[1]
    assert source == 0
    assert received.dtype == x.dtype
    np.testing.assert_array_equal(received, x)


@pytest.mark.parametrize(
    "x",
    [
        np.float64(3.5),
        np.empty((0, 4), np.float32),
        np.arange(10)[::3],
        np.arange(4, dtype=">i4"),
        np.array([True, False]),
        np.array([1 + 2j]),
        np.array([1.5, -2], ml_dtypes.bfloat16),
        np.arange(700_000, dtype=np.float32),
    ],
    ids=["0-d", "empty", "strided", "big-endian", "bool", "complex", "bfloat16", "several frames"],
)
def test_any_array_can_be_sent(x: Any) -> None:
    def rank(group: Group) -> Any:
        if group.rank == 1:
            group.send(x, 0, tag=7)
            return None
        return group.recv(1, tag=7)[0]

    np.testing.assert_array_equal(run_ranks(2, rank)[0], x)


def test_recv_matches_tags_in_any_order_and_each_tag_is_fifo() -> None:
    def rank(group: Group) -> Any:
        if group.rank == 0:
            for value, tag in ((1, 5), (2, 6), (3, 5)):
                group.send(np.int64(value), 1, tag=tag)
            return None
        return [int(group.recv(0, tag=tag)[0]) for tag in (6, 5, 5)]

    assert run_ranks(2, rank)[1] == [2, 1, 3]


def test_a_recv_from_any_source_gets_every_message() -> None:
    def rank(group: Group) -> Any:
        if group.rank:
            group.send(np.int64(group.rank), 0)
            return None
        return sorted((int(value), source) for value, source in (group.recv() for _ in range(3)))

    assert run_ranks(4, rank)[0] == [(1, 1), (2, 2), (3, 3)]


def test_a_rank_may_send_to_itself() -> None:
    def rank(group: Group) -> Any:
        group.send(np.arange(3), group.rank)
        return group.recv(group.rank)[0].tolist(), group.recv.__name__

    assert run_ranks(1, rank) == [([0, 1, 2], "recv")]
    assert run_ranks(2, rank) == [([0, 1, 2], "recv")] * 2


def test_messages_do_not_mix_with_collectives() -> None:
    def rank(group: Group) -> Any:
        work = group.all_reduce(np.full(1000, group.rank), async_op=True)
        group.send(np.int64(group.rank), 1 - group.rank)
        value = int(group.recv(1 - group.rank)[0])
        return value, int(work.wait()[0])

    assert run_ranks(2, rank) == [(1, 1), (0, 1)]


def test_a_recv_into_an_array_of_another_shape_is_a_size_mismatch() -> None:
    def rank(group: Group) -> Any:
        if group.rank == 0:
            group.send(np.arange(3.0), 1)
            return None
        with pytest.raises(SizeMismatch):
            group.recv(0, out=np.empty(4))
        out = np.empty(3)
        assert group.recv(0, out=out)[0] is out
        return out.tolist()

    assert run_ranks(2, rank)[1] == [0.0, 1.0, 2.0]


def test_a_recv_that_times_out_consumes_no_message() -> None:
    late = threading.Event()

    def rank(group: Group) -> Any:
        if group.rank == 0:
            assert late.wait(10)
            group.send(np.int64(9), 1)
        else:
            with pytest.raises(OperationTimeout, match="rank 0"):
                group.recv(0, timeout=0.05)
            with pytest.raises(OperationTimeout):
                group.recv(timeout=0.0)
            late.set()
            assert int(group.recv(0)[0]) == 9
        return int(group.all_reduce(np.int64(1)))

    assert run_ranks(2, rank) == [2, 2]


def test_a_recv_names_its_source_if_the_source_dies() -> None:
    meshes = local_meshes(3)
    groups = [Group(mesh, Config(failure_timeout=0.6)) for mesh in meshes]
    call = Background(lambda: groups[0].recv(2, timeout=10.0))
    meshes[2].cut()
    with pytest.raises(PeerLost) as caught:
        call.result()
    assert caught.value.ranks == (2,)
    for group in groups:
        group.close()


def test_memory_of_unreceived_messages_is_bounded() -> None:
    groups = local_groups(2)
    mailbox = groups[1]._core.bound._mailbox = Mailbox(groups[1]._core.mesh, max_waiting_bytes=8 << 10)
    for i in range(30):
        groups[0].send(np.full(100, i), 1, tag=1)
    with pytest.raises(OperationTimeout, match="other tags are waiting"):
        groups[1].recv(0, tag=2, timeout=0.02)
    assert len(mailbox._messages) < 10
    assert [int(groups[1].recv(0, tag=1)[0][0]) for _ in range(30)] == list(range(30))
    for group in groups:
        group.close()


def test_many_threads_may_receive_at_once() -> None:
    groups, sources = local_groups(3), [1 + tag % 3 % 2 for tag in range(12)]
    calls = [
        Background(lambda tag=tag, source=source: groups[0].recv(None if tag % 2 else source, tag=tag, timeout=20.0))
        for tag, source in enumerate(sources)
    ]
    for tag in reversed(range(12)):
        groups[sources[tag]].send(np.int64(tag * 10), 0, tag=tag)
    assert [int(call.result()[0]) for call in calls] == [tag * 10 for tag in range(12)]
    for group in groups:
        group.close()


def test_a_message_sent_before_its_sender_left_is_received() -> None:
    groups = local_groups(3, Config(failure_timeout=0.6))
    for group in groups[1:]:
        group.send(np.int64(group.rank), 0)
        group.close()
    assert sorted(groups[0].recv()[1] for _ in range(2)) == [1, 2]
    with pytest.raises(PeerLost, match="is gone"):
        groups[0].recv(timeout=20.0)
    groups[0].close()
