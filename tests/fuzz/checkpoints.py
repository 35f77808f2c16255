"""What a checkpoint is read from: files that a crash, a disk or a stranger may have changed."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from paceline import checkpoint
from paceline.checkpoint.arrays import decode_arrays, encode_arrays
from paceline.checkpoint.folder import read_folder
from paceline.checkpoint.tree import join, split
from paceline.errors import CheckpointDamaged

__all__ = ["SEEDS", "arrays", "manifest", "skeleton"]

_STATE: dict[str, Any] = {
    "model": {"w": np.ones((2, 3), np.float32), "half": np.ones(2, ml_dtypes.bfloat16), "z": np.array([1j])},
    "numbers": [1, 2.5, float("nan"), None, True, b"bytes", ("a", 1)],
    3: np.int16(4),
}


def arrays(data: bytes) -> None:
    """What is accepted is written and read again with the same bits."""
    try:
        found = decode_arrays(data)
    except ValueError:
        return
    assert sum(array.nbytes for array in found.values()) <= len(data)
    again = decode_arrays(encode_arrays(found))
    assert {name: (a.dtype, a.shape, a.tobytes()) for name, a in again.items()} == {
        name: (a.dtype, a.shape, a.tobytes()) for name, a in found.items()
    }


def skeleton(data: bytes) -> None:
    """Any JSON is a state, or refused."""
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError):
        return
    try:
        join(parsed, {"w": np.ones(3)})
    except ValueError:
        return


def manifest(data: bytes) -> None:
    """Whatever it says, with a checksum that is right or not: no other error is raised."""
    text = data.decode("utf-8", "replace")
    sealed = json.dumps({"blake2b": hashlib.blake2b(text.encode(), digest_size=16).hexdigest(), "body": text})
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory) / "g00000001-s0000000001"
        folder.mkdir()
        (folder / "arrays.safetensors").write_bytes(b"x")
        for content in (data, sealed.encode()):
            (folder / "manifest.json").write_bytes(content)
            for read in (lambda: read_folder(folder), lambda: checkpoint.load(directory)):
                try:
                    read()
                except CheckpointDamaged:
                    continue


def _body() -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        folder = checkpoint.save(directory, _STATE, (1, 1))
        return str(json.loads((folder / "manifest.json").read_bytes())["body"]).encode()


SEEDS: dict[str, Callable[[], Sequence[bytes]]] = {
    "arrays": lambda: [encode_arrays(split(_STATE)[1]), encode_arrays({})],
    "skeleton": lambda: [json.dumps(split(_STATE)[0]).encode(), b'{"$array":"w"}'],
    "manifest": lambda: [_body()],
}
