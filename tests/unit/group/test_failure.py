"""Whatever goes wrong in a collective: every rank gets the same typed error, soon, and no array is touched after."""

import time
from time import monotonic
from typing import Any

import numpy as np
import pytest

from paceline._group import Group
from paceline._links.base import LinkEnded, Purpose
from paceline._links.faulty import FaultyMesh
from paceline._links.frame import Frame, FrameKind
from paceline._links.local import local_meshes
from paceline.config import Config
from paceline.errors import (
    CollectiveMismatch,
    OperationTimeout,
    PacelineError,
    PeerBrokeProtocol,
    PeerLost,
    PeerRaised,
)
from paceline.testing import local_groups
from support.parts import be_patient, cut_frames, each
from support.waiting import Background, wait_for

CONFIG = Config(failure_timeout=0.6)
N = 64


def outcomes(world: int, fn: Any, tamper: Any = None, at: int = 0, segment: int = 1 << 20) -> Any:
    """What each rank raises; `tamper` befalls the frames of rank `at`."""
    meshes = local_meshes(world)
    groups = [Group(FaultyMesh(m, tamper) if tamper and m.rank == at else m, CONFIG) for m in meshes]
    for group in groups:
        cut_frames(group, segment)
    ended = each(groups, fn)
    for group in groups:
        group.close()
    return [end if isinstance(end, BaseException) else None for end in ended]


def some_work(group: Group) -> Any:
    """Five collectives: asynchronous and synchronous, several frames each."""
    x = np.ones(N)
    works = [group.all_reduce(x, async_op=True), group.broadcast(x, root=1, async_op=True)]
    group.all_reduce(x, out=x)
    for work in works:
        work.wait()
    group.barrier()


class AtFrame:
    """Does something at the k-th frame that a rank sends or receives, and counts them."""

    def __init__(self, k: int, act: Any) -> Any:
        self.k = k
        self.act = act
        self.count = 0

    def __call__(self, way: str, peer: int, frame: Frame) -> Any:
        self.count += 1
        return self.act(way, frame) if self.count == self.k else frame


def end_link(way: str, frame: Frame) -> Any:
    raise LinkEnded("the test cut it")


def raise_in_rank(way: str, frame: Frame) -> Any:
    raise MemoryError("no room")


def interrupt(way: str, frame: Frame) -> Any:
    raise KeyboardInterrupt


def frames_of_some_work(world: int) -> Any:
    counter = AtFrame(-1, end_link)
    assert outcomes(world, some_work, counter, segment=64) == [None] * world
    return counter.count


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(("act", "kind"), [(end_link, PeerLost), (raise_in_rank, PeerRaised)])
def test_a_failure_at_any_frame_is_the_same_error_on_every_rank(world: int, act: Any, kind: str) -> None:
    for k in range(1, frames_of_some_work(world) + 1):
        errors = outcomes(world, some_work, AtFrame(k, act), segment=64)
        if act is raise_in_rank:
            assert isinstance(errors[0], MemoryError | PeerRaised), "its own error, or the group's thread's news of it"
            errors = errors[1:]
        for error in errors:
            # A rank that was done with everything has nothing to hear of; all others hear the same.
            assert error is None or type(error) is kind, (k, errors)
        texts = {str(error) for error in errors if error is not None}
        assert len(texts) <= 1
        if act is end_link:
            assert errors[0] is not None
            assert errors[0].ranks != ()
            assert "the test cut it" in texts.pop()


def test_later_calls_raise_new_instances_of_the_same_error() -> None:
    def fn(group: Group) -> Any:
        caught = []
        for _ in range(3):
            with pytest.raises(PeerLost) as info:
                group.all_reduce(np.ones(N))
            caught.append(info.value)
        with pytest.raises(PeerLost):
            group.send(np.ones(1), 0)
        with pytest.raises(PeerLost):
            group.recv()
        assert len({str(error) for error in caught}) == 1
        assert len({id(error) for error in caught}) == 3
        raise caught[0]

    errors = outcomes(3, fn, AtFrame(1, end_link))
    assert len({str(error) for error in errors}) == 1


def test_all_survivors_name_a_rank_that_dies() -> None:
    meshes = local_meshes(3)
    groups = [Group(mesh, CONFIG) for mesh in meshes]
    calls = [Background(lambda group=group: group.all_reduce(np.ones(N))) for group in groups[:2]]
    meshes[2].cut()
    for call in calls:
        with pytest.raises(PeerLost, match=r"rank 2 .local. is lost") as info:
            call.result()
        assert (info.value.ranks, info.value.operation, info.value.generation) == ((2,), 1, 1)
    for group in groups:
        group.close()


def test_a_rank_that_has_left_is_named() -> None:
    meshes = local_meshes(2)
    groups = [Group(mesh, CONFIG) for mesh in meshes]
    groups[1].close()
    with pytest.raises(PeerLost, match=r"rank 1 .local. is gone"):
        groups[0].barrier()
    groups[0].close()


def test_a_timeout_names_the_operation_the_waiter_and_the_awaited_rank() -> None:
    meshes = local_meshes(2)
    groups = [Group(mesh, CONFIG) for mesh in meshes]
    started = time.monotonic()
    with pytest.raises(OperationTimeout) as info:
        groups[0].all_reduce(np.ones(N, "f4"), timeout=0.05)
    took = time.monotonic() - started
    before, _, rest = str(info.value).partition(" waited ")
    seconds, _, after = rest.partition(" s ")
    assert before == "operation 1, all_reduce op=sum float32[64]: rank 0 (local)"
    assert 0.05 <= float(seconds) <= took < 5.0
    assert after == "for rank 1 (local) to send frame 1 of 1"
    assert info.value.ranks == (1,)
    with pytest.raises(OperationTimeout):
        groups[1].barrier()
    for group in groups:
        group.close()


def test_an_abort_wakes_a_blocked_call() -> None:
    meshes = local_meshes(2)
    groups = [Group(mesh, CONFIG) for mesh in meshes]
    be_patient(groups[0], 3_600.0)  # by itself it looks around only then
    call = Background(lambda: groups[0].all_reduce(np.ones(N)))
    wait_for(lambda: groups[0]._core.progress().inside)
    meshes[1].cut()
    with pytest.raises(PeerLost):
        call.result()
    for group in groups:
        group.close()


def test_an_interrupt_propagates_and_other_ranks_raise_peer_raised() -> None:
    def fn(group: Group) -> Any:
        group.all_reduce(np.ones(N))  # the others may be done with it when rank 1 is interrupted, but not
        group.barrier()  # with this

    errors = outcomes(3, fn, AtFrame(2, interrupt), at=1)
    assert type(errors[1]) is KeyboardInterrupt
    for error in (errors[0], errors[2]):
        assert isinstance(error, PeerRaised)
        assert error.ranks == (1,)
        assert "rank 1 (local) raised KeyboardInterrupt" in str(error)


def changed(**values: Any) -> Any:
    def act(way: str, frame: Frame) -> Any:
        fields = {name: getattr(frame, name) for name in Frame.__slots__}
        return Frame(**(fields | {name: make(fields[name]) for name, make in values.items()}))

    return act


@pytest.mark.parametrize(
    ("act", "kind", "what"),
    [
        (changed(part=lambda part: part + 1), PeerBrokeProtocol, "frame 1 where frame 0 was due"),
        (changed(generation=lambda _: 7), PeerBrokeProtocol, "generation 7 in generation 1"),
        (changed(payload=lambda data: bytes(data)[:-1]), PeerBrokeProtocol, "511 bytes in frame 0 where 512 were due"),
        (changed(operation=lambda n: n + 5), CollectiveMismatch, "that is operation 6"),
        (changed(signature=lambda _: b"\xff\x00 random"), CollectiveMismatch, "random"),
        (lambda way, frame: None, OperationTimeout, "waited"),
    ],
)
def test_a_wrong_frame_ends_the_generation_with_one_error_on_every_rank(act: Any, kind: str, what: Any) -> None:
    timeout = 0.2 if kind is OperationTimeout else 20.0
    errors = outcomes(2, lambda g: g.all_reduce(np.ones(N), order="rank", timeout=timeout), AtFrame(1, act), at=1)
    for error in errors:
        assert type(error) is kind, errors
        assert what in str(error)
    assert len({str(error) for error in errors}) == 1


@pytest.mark.parametrize(
    "signature", [b"broadcast root=1 float32[3", b"broadcast root=1", b"broadcast root=1 object[3]", b"\xff" * 1024]
)
def test_a_receiver_without_an_array_refuses_a_garbage_signature(signature: Any) -> None:
    def fn(group: Group) -> Any:
        group.broadcast(np.ones(3) if group.rank == 1 else None, root=1)
        group.barrier()

    errors = outcomes(2, fn, AtFrame(1, changed(signature=lambda _: signature)), at=1)
    assert all(isinstance(error, PeerBrokeProtocol | CollectiveMismatch) for error in errors), errors


def test_a_failed_call_does_not_write_to_its_arrays_later() -> None:
    meshes = local_meshes(2)
    groups = [Group(mesh, CONFIG) for mesh in meshes]
    out = np.zeros(N)
    work = groups[0].all_reduce(np.ones(N), out=out, async_op=True)
    with pytest.raises(OperationTimeout):
        work.wait(0.01)
    out[:] = 7
    with pytest.raises(PacelineError):
        groups[1].all_reduce(np.ones(N))
    assert (out == 7).all()
    for group in groups:
        group.close()


@pytest.mark.parametrize(
    "call",
    [
        lambda g: g.broadcast(None, root=1) if g.rank == 0 else _announce(g, "broadcast root=1 uint8[8796093022208]"),
        lambda g: g.scatter(None, root=1) if g.rank == 0 else _announce(g, "scatter root=1 uint8[8796093022208]"),
    ],
    ids=["broadcast", "scatter"],
)
def test_a_rank_that_announces_an_array_larger_than_memory_is_named(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = np.empty

    def empty(shape: Any, *of: Any, **more: Any) -> Any:
        if np.prod(shape) > 1 << 40:
            raise MemoryError
        return real(shape, *of, **more)

    monkeypatch.setattr("paceline._base.arrays.np.empty", empty)
    groups = local_groups(2, CONFIG)
    call(groups[1])
    with pytest.raises(CollectiveMismatch, match=r"rank 1 .* announces .* not enough memory") as caught:
        call(groups[0])
    assert 1 in caught.value.ranks
    for group in groups:
        group.close()


def _announce(group: Group, signature: str) -> None:
    """Sends the first frame of a collective that this rank cannot mean."""
    frame = Frame(FrameKind.DATA, 1, 1, 0, signature.encode(), b"")
    group._core.mesh.link(0, Purpose.COLLECTIVE).send(frame, monotonic() + 1.0)


def test_every_failure_that_ends_the_generation_is_recorded() -> None:
    """Of a message, and of a caller's own interrupt too."""
    for act in (lambda g: g.recv(1), _interrupted):
        groups = local_groups(2, CONFIG)
        told: list[BaseException] = []
        groups[0]._core.on_abort = told.append
        if act is not _interrupted:
            groups[1]._core.mesh.cut()  # type: ignore[attr-defined]
        with pytest.raises((PeerLost, KeyboardInterrupt)):
            act(groups[0])
        assert told
        assert groups[0]._core.recorder.snapshot()[-1]["state"] == "failed"
        for group in groups:
            group.close(0.1)


def _interrupted(group: Group) -> None:
    def interrupt(way: str, peer: int, frame: Frame) -> Frame:
        raise KeyboardInterrupt

    group._core.move(FaultyMesh(group._core.mesh, interrupt))
    group.all_reduce(np.ones(3))
