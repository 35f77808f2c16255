"""What a training state is taken from: descriptions and chunks that another member sends."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from google.protobuf.message import DecodeError

from paceline._elastic.differences import difference
from paceline._elastic.offer import HASH_BYTES, Content, Description
from paceline._elastic.reshard_plan import ElementRun
from paceline._links.base import Peer
from paceline.checkpoint.pieces import Shard
from paceline.errors import PacelineError, SettingsMismatch, SizeMismatch
from pacelinepb.v1 import peer_pb2

__all__ = ["SEEDS", "description", "line_manifest", "wanted_runs"]

_MOST = 1 << 20

_STATE: dict[str, Any] = {
    "step": 3,
    "parts": {"model": {"w": np.ones((2, 3), np.float32), "half": np.ones(2, ml_dtypes.bfloat16)}},
    "rest": [1, 2.5, float("inf"), None, b"bytes", ("a", np.float64(2)), {4: np.zeros((0, 2))}],
}

_SPREAD = Content.of({"a": Shard(np.arange(4, 10), 4, (3, 5))}, [{"a": Shard(np.arange(2), 0, (3, 5))}])

_MANIFEST = b'{"settings":{"total":"9"},"parts":{"model":["model",[["w","float32",[2,3]]]]}}'


def description(data: bytes) -> None:
    """Two bytes of length, JSON, hashes: a description or a ValueError; what is taken can be held and told again."""
    if len(data) < 2:
        return
    (length,) = struct.unpack_from("<H", data)
    words, hashes = data[2 : 2 + length], data[2 + length :]
    try:
        found = Description.from_json(words, hashes, _MOST)
    except ValueError:
        return
    content, _ = found.allocate({"parts.model.w": np.ones((2, 3), np.float32)})
    assert content.size <= _MOST
    assert content.chunks * HASH_BYTES == len(hashes)
    content.tree()
    again = Description.from_json(found.to_json(), hashes, _MOST)
    assert again.arrays == found.arrays


def wanted_runs(data: bytes) -> None:
    """What a member is asked for: it gives the elements that it has, or refuses; never more than it may."""
    try:
        request = peer_pb2.GetRunsRequest.FromString(data)
    except DecodeError:
        return
    runs = [ElementRun(run.array, run.start, run.count) for run in request.runs]
    try:
        found = _SPREAD.select(runs, _MOST)
    except PacelineError:
        return
    assert sum(array.nbytes for array in found) <= _MOST
    for run, array in zip(runs, found, strict=True):
        np.testing.assert_array_equal(array, np.arange(run.start, run.start + run.count))


def line_manifest(data: bytes) -> None:
    """Whatever the line says that it trains, a worker that does not fit gets a typed error."""
    error = difference(_MANIFEST, data, Peer(0, "m", "host"))
    assert isinstance(error, SettingsMismatch | SizeMismatch)


def _described(state: Any) -> bytes:
    sent = Description.of(Content.of(state))
    words = sent.to_json()
    return struct.pack("<H", len(words)) + words + sent.hashes


def _request(*runs: tuple[str, int, int]) -> bytes:
    elements = [peer_pb2.ElementRun(array=name, start=start, count=count) for name, start, count in runs]
    return peer_pb2.GetRunsRequest(job="j", to_member="m", runs=elements).SerializeToString()


SEEDS: dict[str, Callable[[], Sequence[bytes]]] = {
    "description": lambda: [_described(_STATE), _described({})],
    "wanted_runs": lambda: [_request(("a", 4, 6)), _request(("a", 0, 2), ("a", 5, 1)), _request(("b", 0, 1))],
    "line_manifest": lambda: [_MANIFEST, _MANIFEST.replace(b"[2,3]", b"[2,4]"), _MANIFEST.replace(b'"9"', b'"8"')],
}
