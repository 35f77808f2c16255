"""One checkpoint on disk: a folder that is there whole, or not at all.

    DIR/g00000003-s0000000120/arrays.safetensors
    DIR/g00000003-s0000000120/manifest.json         checksums of the rest, and of itself

It is written under another name, synced file by file, and renamed: a crash at any instant leaves the last good one.
Source: Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014, section 2 (atomic replacement via rename).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.checkpoint.tag import Tag
from paceline.errors import CheckpointDamaged

__all__ = ["HIDDEN", "check_sizes", "hidden_name", "read_folder", "write_folder"]

MANIFEST = "manifest.json"
_FORMAT = 1
_FILE = re.compile(r"[a-z][a-z0-9._-]{0,99}", re.ASCII)
"""Names of files in a checkpoint: no way out of its folder, and fit for any file system."""
HIDDEN = ".writing-"
"""What the name of a folder begins with while it is written, or removed; then host and process id."""


def write_folder(directory: Path, tag: Tag, files: Mapping[str, bytes], facts: Mapping[str, Any]) -> Path:
    """Writes a checkpoint; returns its folder when it is durable.

    Args:
        directory: where checkpoints are kept; made if it is not there.
        tag: which state this is.
        files: contents by name.
        facts: JSON for the manifest.

    Raises:
        OSError: the disk refused; nothing of it stays.
    """
    directory.mkdir(parents=True, exist_ok=True)
    body = {
        "format": _FORMAT,
        "tag": list(tag),
        "files": {name: {"bytes": len(data), "blake2b": _digest(data)} for name, data in files.items()},
        **facts,
    }
    text = json.dumps(body, separators=(",", ":"))
    manifest = json.dumps({"blake2b": _digest(text.encode()), "body": text}).encode()
    hidden = directory / hidden_name(str(tag))
    hidden.mkdir()
    try:
        for name, data in {**files, MANIFEST: manifest}.items():
            _write_durably(hidden / name, data)
        _sync(hidden)
        folder = directory / str(tag)
        if folder.exists():  # of an attempt before, and damaged: whoever calls this has looked
            os.rename(folder, directory / hidden_name(f"{tag}-damaged"))
        try:
            os.rename(hidden, folder)
        except OSError:
            if not folder.exists():
                raise
            shutil.rmtree(hidden, ignore_errors=True)  # another has just written it: equal tags are equal states
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise
    _sync(directory)
    return folder


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The manifest's body, and the contents of all files by name.

    Raises:
        CheckpointDamaged: a file is missing, cut, or has other bytes than were written; the text names it.
    """
    body, told = _manifest(folder)
    files = {}
    for name, (size, digest) in told.items():
        path = folder / name
        data = _read(path)
        if len(data) != size:
            raise CheckpointDamaged(f"{path} has {len(data)} bytes, not {size}")
        if _digest(data) != digest:
            raise CheckpointDamaged(f"{path} has other bytes than were written")
        files[name] = data
    return body, files


def check_sizes(folder: Path) -> None:
    """Checks what a crash can spoil, without reading it all.

    Raises:
        CheckpointDamaged: the manifest is damaged, or a file is missing or cut.
    """
    for name, (size, _) in _manifest(folder)[1].items():
        path = folder / name
        if not path.exists() or path.stat().st_size != size:
            raise CheckpointDamaged(f"{path} is missing, or has not {size} bytes")


def hidden_name(name: str) -> str:
    """A name that no reader looks at, and that tells whose it is."""
    return f"{HIDDEN}{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}-{name}"


def _manifest(folder: Path) -> tuple[dict[str, Any], dict[str, tuple[int, str]]]:
    """The manifest's body; size and checksum of each file."""
    manifest = _read(folder / MANIFEST)
    try:
        outer = json.loads(manifest)
        text = outer["body"]
        if _digest(text.encode()) != outer["blake2b"]:
            raise ValueError("its checksum is wrong")
        body: dict[str, Any] = json.loads(text)
        if body["format"] != _FORMAT:
            raise ValueError(f"it is of format {body['format']}, not {_FORMAT}")
        told = {str(name): (int(entry["bytes"]), str(entry["blake2b"])) for name, entry in body["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointDamaged(f"{folder / MANIFEST} is damaged: {error}") from error
    for name in told:
        if not _FILE.fullmatch(name):
            raise CheckpointDamaged(f"{folder / MANIFEST} names {name!r}, which is no file of this folder")
    return body, told


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise CheckpointDamaged(f"{path} is missing") from None


def _write_durably(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Makes the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
