"""A rank in a call whose peer is the fuzzer: a right result or a typed error, in time, and nothing else written to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from threading import Thread
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from fuzz.decoders import SEGMENT
from fuzz.wire import ScriptedMesh, pack_frames, unpack_frames
from paceline._base.arrays import Array
from paceline._collectives.mailbox import Mailbox
from paceline._group import Group
from paceline._links.base import Mesh
from paceline._links.faulty import FaultyMesh
from paceline._links.frame import Frame
from paceline._links.local import local_meshes
from paceline.config import Config
from paceline.errors import LimitExceeded, OperationTimeout, PacelineError, SizeMismatch, UnsupportedOp
from support.parts import be_patient, cut_frames

__all__ = ["SEEDS", "collective", "fuzzed_group", "receive", "small_arrays"]

N = 640
"""Elements of each float32 argument: 2,560 bytes, three frames."""

_PAD = 16
_GUARD = -77.0
_TIMEOUT = 0.002
_X = np.arange(N, dtype=np.float32)


class _Call(NamedTuple):
    """A collective as rank 1 calls it, and as rank 0 does, for seeds."""

    mine: Callable[[Group, Array, Array], Any]
    theirs: Callable[[Group], Any]
    out: int = N
    """Elements of the result that goes to `out`; 0 for a call without one."""


_CALLS: tuple[_Call, ...] = (
    _Call(lambda g, x, o: g.all_reduce(x, out=o, timeout=_TIMEOUT), lambda g: g.all_reduce(_X)),
    _Call(lambda g, x, o: g.all_reduce(x, op="mean", out=o, timeout=_TIMEOUT), lambda g: g.all_reduce(_X, op="mean")),
    _Call(lambda g, x, o: g.broadcast(x, root=0, out=o, timeout=_TIMEOUT), lambda g: g.broadcast(_X)),
    _Call(lambda g, x, o: g.broadcast(None, root=0, timeout=_TIMEOUT), lambda g: g.broadcast(_X), 0),
    _Call(lambda g, x, o: g.broadcast(x, root=1, out=o, timeout=_TIMEOUT), lambda g: g.broadcast(None, root=1)),
    _Call(lambda g, x, o: g.scatter(None, root=0, timeout=_TIMEOUT), lambda g: g.scatter([_X, _X]), 0),
    _Call(lambda g, x, o: g.scatter(None, root=0, out=o, timeout=_TIMEOUT), lambda g: g.scatter([_X, _X])),
    _Call(lambda g, x, o: g.reduce(x, root=1, out=o, timeout=_TIMEOUT), lambda g: g.reduce(_X, root=1)),
    _Call(lambda g, x, o: g.reduce_scatter(x, out=o, timeout=_TIMEOUT), lambda g: g.reduce_scatter(_X), N // 2),
    _Call(lambda g, x, o: g.all_gather(x, out=o, timeout=_TIMEOUT), lambda g: g.all_gather(_X), 2 * N),
    _Call(lambda g, x, o: g.all_gather(x, uneven=True, timeout=_TIMEOUT), lambda g: g.all_gather(_X, uneven=True), 0),
    _Call(
        lambda g, x, o: g.gather(x, root=1, uneven=True, timeout=_TIMEOUT),
        lambda g: g.gather(_X, root=1, uneven=True),
        0,
    ),
    _Call(lambda g, x, o: g.all_to_all(x, out=o, timeout=_TIMEOUT), lambda g: g.all_to_all(_X)),
    _Call(
        lambda g, x, o: g.all_to_all(x, send_counts=[600, 40], timeout=_TIMEOUT),
        lambda g: g.all_to_all(_X, send_counts=[320, 320]),
        0,
    ),
    _Call(lambda g, x, o: g.barrier(timeout=_TIMEOUT), lambda g: g.barrier(), 0),
    _Call(lambda g, x, o: g.broadcast_object(timeout=_TIMEOUT), lambda g: g.broadcast_object({"a": [1, "b"]}), 0),
    _Call(lambda g, x, o: g.all_gather_object(7, timeout=_TIMEOUT), lambda g: g.all_gather_object({"a": 1}), 0),
)


@contextlib.contextmanager
def small_arrays() -> Iterator[None]:
    """No array is large."""
    with (
        mock.patch("paceline._base.arrays.MAX_ARRAY_BYTES", 4 << 20),
        mock.patch("paceline._collectives.gather_tasks.MAX_ARRAY_BYTES", 4 << 20),
    ):
        yield


def fuzzed_group(mesh: Mesh) -> Group:
    """A group with short frames, and little patience."""
    group = Group(mesh, Config())
    group._core.bound._mailbox = Mailbox(mesh, segment_bytes=SEGMENT)
    be_patient(group, 0.0005)
    cut_frames(group, SEGMENT)
    return group


def collective(data: bytes) -> None:
    """Byte 0 picks the call, byte 1 what comes after the peer's last frame; then its frames."""
    if len(data) < 2:
        return
    call = _CALLS[data[0] % len(_CALLS)]
    mesh = ScriptedMesh(list(unpack_frames(data[2:])), data[1] % 4)
    group = fuzzed_group(mesh)
    memory = np.full(call.out + 2 * _PAD, _GUARD, np.float32)
    x = _X.copy()
    with small_arrays():
        try:
            call.mine(group, x, memory[_PAD : _PAD + call.out])
        except PacelineError as error:
            _check_failed(group, error)
    assert np.array_equal(x, _X), "the argument was written to"
    assert (memory[:_PAD] == _GUARD).all(), "written before the result"
    assert (memory[_PAD + call.out :] == _GUARD).all(), "written behind the result"
    group.close(0.0)


def _check_failed(group: Group, error: PacelineError) -> None:
    """The generation has ended, for all later calls too, and the error names a member."""
    assert set(error.ranks) <= {0, 1}
    assert group._core.mesh.fault.failed, f"the generation goes on after {error!r}"
    try:
        group.barrier(timeout=_TIMEOUT)
    except PacelineError:
        return
    raise AssertionError("a later call went through")


def receive(data: bytes) -> None:
    """Byte 0 picks the arguments of `recv`, byte 1 what comes after the peer's last frame; then its frames."""
    if len(data) < 2:
        return
    mesh = ScriptedMesh(list(unpack_frames(data[2:])), data[1] % 4)
    group = fuzzed_group(mesh)
    memory = np.full(N + 2 * _PAD, _GUARD, np.float32)
    out = memory[_PAD : _PAD + N] if data[0] & 1 else None
    src = 0 if data[0] & 2 else None
    with small_arrays():
        for _ in range(3):
            try:
                array, source = group.recv(src, tag=data[0] >> 2 & 3, out=out, timeout=_TIMEOUT)
            except (OperationTimeout, SizeMismatch, UnsupportedOp, LimitExceeded):  # of this call alone
                continue
            except PacelineError as error:
                _check_failed(group, error)
                break
            assert source == 0
            assert out is None or array is out
    assert (memory[:_PAD] == _GUARD).all(), "written before the result"
    assert (memory[_PAD + N :] == _GUARD).all(), "written behind the result"
    group.close(0.0)


def _conversation(theirs: Callable[[Group], Any], mine: Callable[[Group], Any]) -> list[Frame]:
    """What rank 0 sends to rank 1 in a call that goes well."""
    frames: list[Frame] = []

    def note(way: str, peer: int, frame: Frame) -> Frame:
        if way == "send":
            frames.append(Frame(frame.kind, 1, frame.operation, frame.part, frame.signature, bytes(frame.payload)))
        return frame

    meshes = local_meshes(2)
    groups = [fuzzed_group(FaultyMesh(meshes[0], note)), fuzzed_group(meshes[1])]
    with small_arrays():
        other = Thread(target=theirs, args=(groups[0],), daemon=True)
        other.start()
        mine(groups[1])
        other.join(10.0)
    for group in groups:
        group.close()
    return frames


def _collective_seeds() -> Sequence[bytes]:
    found = []
    with mock.patch(f"{__name__}._TIMEOUT", 10.0):
        for number, call in enumerate(_CALLS):
            out = np.empty(call.out, np.float32)
            frames = _conversation(call.theirs, lambda g, call=call, out=out: call.mine(g, _X, out))
            found += [bytes([number, ending]) + pack_frames(frames) for ending in range(3)]
    return found


def _receive_seeds() -> Sequence[bytes]:
    arrays = [_X, np.ones((2, 3), np.int16), np.zeros((0, 4))]
    frames = _conversation(
        lambda g: [g.send(array, 1, tag=tag) for tag, array in enumerate(arrays)],
        lambda g: [g.recv(0, tag=tag, timeout=10.0) for tag in range(3)],
    )
    return [bytes([how, ending]) + pack_frames(frames) for how in (0, 1, 2, 6, 8) for ending in range(4)]


SEEDS: dict[str, Callable[[], Sequence[bytes]]] = {"collective": _collective_seeds, "receive": _receive_seeds}
