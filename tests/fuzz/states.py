"""What a training state is taken from: descriptions and chunks that another member sends."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from paceline.elastic.compare import difference
from paceline.elastic.offer import HASH_BYTES, Content, Description
from paceline.errors import SettingsMismatch, SizeMismatch
from paceline.links.base import Peer

__all__ = ["SEEDS", "description", "line_manifest"]

_MOST = 1 << 20

_STATE: dict[str, Any] = {
    "step": 3,
    "parts": {"model": {"w": np.ones((2, 3), np.float32), "half": np.ones(2, ml_dtypes.bfloat16)}},
    "rest": [1, 2.5, float("inf"), None, b"bytes", ("a", np.float64(2)), {4: np.zeros((0, 2))}],
}

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
    content = found.allocate({"parts.model.w": np.ones((2, 3), np.float32)})
    assert content.size <= _MOST
    assert content.chunks * HASH_BYTES == len(hashes)
    content.tree()
    again = Description.from_json(found.to_json(), hashes, _MOST)
    assert again.arrays == found.arrays


def line_manifest(data: bytes) -> None:
    """Whatever the line says that it trains, a worker that does not fit gets a typed error."""
    error = difference(_MANIFEST, data, Peer(0, "m", "host"))
    assert isinstance(error, SettingsMismatch | SizeMismatch)


def _described(state: Any) -> bytes:
    sent = Description.of(Content.of(state))
    words = sent.to_json()
    return struct.pack("<H", len(words)) + words + sent.hashes


SEEDS: dict[str, Callable[[], Sequence[bytes]]] = {
    "description": lambda: [_described(_STATE), _described({})],
    "line_manifest": lambda: [_MANIFEST, _MANIFEST.replace(b"[2,3]", b"[2,4]"), _MANIFEST.replace(b'"9"', b'"8"')],
}
