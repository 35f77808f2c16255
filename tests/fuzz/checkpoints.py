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
from paceline.checkpoint.part import Part, index_of
from paceline.checkpoint.reading import Reader
from paceline.checkpoint.tree import join, split
from paceline.errors import CheckpointDamaged
from paceline.testing import run_ranks

__all__ = ["SEEDS", "manifest", "parts", "skeleton"]

_STATE: dict[str, Any] = {
    "model": {"w": np.ones((2, 3), np.float32), "half": np.ones(2, ml_dtypes.bfloat16), "z": np.array([1j])},
    "numbers": [1, 2.5, float("nan"), None, True, b"bytes", ("a", 1)],
    3: np.int16(4),
}


def parts(data: bytes) -> None:
    """What a manifest, or another rank, says of parts: each byte belongs to one element, or it is refused."""
    try:
        described = json.loads(data)
    except (ValueError, RecursionError):
        return
    if not isinstance(described, list):
        return
    try:
        found = [Part.from_tree(tree) for tree in described]
        index = index_of(found)
    except ValueError:
        return
    assert sum(part.nbytes - part.header for part in found) == sum(stored.nbytes for stored in index.values())
    assert [Part.from_tree(part.to_tree()) for part in found] == found
    assert all(0 <= part.checksum(chunk) < 1 << 32 for part in found for chunk in range(part.chunks))


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
            for read in (lambda: Reader(folder).verify(), lambda: checkpoint.load(directory)):
                try:
                    read()
                except CheckpointDamaged:
                    continue


def _body() -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        folder = checkpoint.save(directory, _STATE, (1, 1))
        return str(json.loads((folder / "manifest.json").read_bytes())["body"]).encode()


def _parts() -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        run_ranks(3, lambda group: checkpoint.save_sharded(directory, _STATE, (1, 1), group))
        return json.dumps([part.to_tree() for part in Reader(Path(directory) / "g00000001-s0000000001").parts]).encode()


SEEDS: dict[str, Callable[[], Sequence[bytes]]] = {
    "parts": lambda: [_parts(), b"[]"],
    "skeleton": lambda: [json.dumps(split(_STATE)[0]).encode(), b'{"$array":"w"}'],
    "manifest": lambda: [_body()],
}
