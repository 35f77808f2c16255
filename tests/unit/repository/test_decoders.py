"""Everything that takes apart bytes from outside, against random bytes and against valid ones with mistakes in them.

What each decoder promises is in `tests/fuzz`, where a fuzzer that is guided by coverage searches for longer.
"""

from __future__ import annotations

import contextlib
import resource
import time
import tracemalloc
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzz.collectives import N, fuzzed_group, small_arrays
from fuzz.targets import TARGETS, seeds
from fuzz.wire import ScriptedMesh, unpack_frames
from paceline._collectives.objects import decode_object
from paceline._group import Group
from paceline._links.base import LinkTimeout, Purpose
from paceline._links.frame import Frame, FrameKind
from paceline._links.local import local_meshes
from paceline.config import Config
from paceline.errors import PacelineError

MEMORY = 1 << 30
"""Bytes of address space that a test may take: who believes an announced length shall find none."""

quick = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(autouse=True, scope="module")
def little_memory() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@cache
def valid(target: str) -> list[bytes]:
    return list(seeds(target).values())


@st.composite
def damaged(draw: st.DrawFn, target: str) -> bytes:
    """A valid input after a few mistakes: a bit, a cut, an insertion, a splice, an enormous number."""
    data = draw(st.sampled_from(valid(target)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(["flip", "cut", "insert", "splice", "huge"])):
            case "flip":
                data = (
                    data[:at]
                    + bytes(byte ^ 1 << draw(st.integers(0, 7)) for byte in data[at : at + 1])
                    + data[at + 1 :]
                )
            case "cut":
                data = data[:at] + data[at + draw(st.integers(1, 64)) :]
            case "insert":
                data = data[:at] + draw(st.binary(max_size=16)) + data[at:]
            case "splice":
                other = draw(st.sampled_from(valid(target)))
                data = data[:at] + other[draw(st.integers(0, len(other))) :]
            case "huge":
                number = draw(
                    st.sampled_from([b"\xff", b"\xff\xff", b"\xff" * 4, b"\x7f" + b"\xff" * 7, b"\xff" * 8, b"9" * 15])
                )
                data = data[:at] + number + data[at + len(number) :]
    return data


@pytest.mark.parametrize("target", TARGETS)
def test_decoders_accept_valid_input(target: str) -> None:
    for data in valid(target):
        TARGETS[target](data)


@pytest.mark.parametrize("target", TARGETS)
@quick
@given(data=st.binary(max_size=300))
def test_decoders_withstand_random_bytes(target: str, data: bytes) -> None:
    TARGETS[target](data)


@pytest.mark.parametrize("target", TARGETS)
@quick
@given(choice=st.data())
def test_decoders_withstand_damaged_input(target: str, choice: st.DataObject) -> None:
    TARGETS[target](choice.draw(damaged(target)))


@quick
@given(choice=st.data())
def test_decoding_an_object_takes_memory_in_proportion_to_its_bytes(choice: st.DataObject) -> None:
    data = choice.draw(damaged("objects"))
    tracemalloc.start()
    try:
        with contextlib.suppress(ValueError):
            decode_object(data)
        assert tracemalloc.get_traced_memory()[1] < 32 * len(data) + (64 << 10)
    finally:
        tracemalloc.stop()


@settings(max_examples=25, deadline=None)
@given(choice=st.data())
def test_damaged_frames_over_a_link_raise_only_typed_errors_in_time(choice: st.DataObject) -> None:
    frames = list(unpack_frames(choice.draw(damaged("collective"))[2:]))
    meshes = local_meshes(2)
    group = fuzzed_group(meshes[1])
    link = meshes[0].link(1, Purpose.COLLECTIVE)
    with contextlib.suppress(LinkTimeout):
        for frame in frames:
            link.send(frame, time.monotonic())
    x = np.ones(N, np.float32)
    started = time.monotonic()
    with small_arrays():
        with contextlib.suppress(PacelineError):
            group.all_reduce(x, timeout=0.02)
        assert (x == 1).all()
        group.close(0.0)
    assert time.monotonic() - started < 20.0


ENORMOUS = {
    "broadcast": (b"broadcast root=0 uint8[17592186044416]", lambda group: group.broadcast(None, timeout=0.1)),
    "scatter": (b"scatter root=0 uint8[17592186044416]", lambda group: group.scatter(None, timeout=0.1)),
    "broadcast without elements": (
        b"broadcast root=0 float32[0,999999999999999,999999999999999]",
        lambda group: group.broadcast(None, timeout=0.1),
    ),
    "message without elements": (
        b"send tag=0 float32[0,999999999999999,999999999999999]",
        lambda group: group.recv(0, timeout=0.1),
    ),
}


@pytest.mark.parametrize("name", ENORMOUS)
def test_announcing_an_array_beyond_memory_raises_a_typed_error(name: str) -> None:
    signature, call = ENORMOUS[name]
    group = Group(ScriptedMesh([Frame(FrameKind.DATA, 1, 1, 0, signature, memoryview(b""))], 0), Config())
    with pytest.raises(PacelineError):
        call(group)
    group.close(0.0)


def test_announcing_rows_beyond_memory_raises_a_typed_error() -> None:
    counts = (1 << 43).to_bytes(8, "little")
    frame = Frame(FrameKind.DATA, 1, 1, 0, b"all_gather rows=any uint8[]", memoryview(counts))
    group = Group(ScriptedMesh([frame], 0), Config())
    with pytest.raises(PacelineError):
        group.all_gather(np.ones(3, np.uint8), uneven=True, timeout=0.1)
    group.close(0.0)
