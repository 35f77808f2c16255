"""`paceline checkpoint inspect`: shows a checkpoint, verifies it, and saves its arrays whole in one file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline import checkpoint
from paceline._base.terminal import UsageError, printable
from paceline.checkpoint.folder import MANIFEST, SavedFile, read_manifest
from paceline.checkpoint.reading import Reader
from paceline.cli.output import print_json

_MOST_PARTS = 8
"""Most parts that the table lists for one array; of more it shows only the number."""


def inspect_checkpoint(directory: Path, *, verify: bool, consolidate: Path | None, as_json: bool) -> None:
    """Shows a checkpoint; of a folder of checkpoints the one with the greatest tag.

    With `verify` everything is read and compared with its checksum. `consolidate` is where to save the checkpoint
    again, with all arrays whole in one file; that needs memory for all.
    """
    folder = _folder(directory)
    if files := read_manifest(folder).files:
        _inspect_files(folder, files, verify=verify, consolidate=consolidate, as_json=as_json)
        return
    reader = Reader(folder)
    if verify:
        reader.verify()
    made = None
    if consolidate is not None:
        there = len(checkpoint.tags(consolidate))
        made = checkpoint.save(consolidate, reader.state(), reader.tag, keep=there + 1)  # deletes no checkpoint there
    if as_json:
        print_json(_as_dict(reader, verified=verify, made=made))
        return
    arrays = sum(stored.nbytes for stored in reader.arrays.values())
    console = Console()
    title = f"{printable(str(reader.folder))}: generation {reader.tag.generation}, step {reader.tag.step}"
    console.print(Text(title), soft_wrap=True)  # a long path stays on one line
    console.print(_table(reader))
    count, parts = len(reader.arrays), len(reader.parts)
    console.print(f"{count} array{'s'[: count != 1]}, {arrays:,} bytes, in {parts} part{'s'[: parts != 1]}")
    if verify:
        console.print("every checksum is right")
    if made is not None:
        console.print(Text(f"saved in {printable(str(made))}, with all arrays whole"), soft_wrap=True)


def _inspect_files(
    folder: Path, files: Sequence[SavedFile], *, verify: bool, consolidate: Path | None, as_json: bool
) -> None:
    """Shows a checkpoint of replicas, whose arrays only torch reads."""
    if consolidate is not None:
        raise UsageError(
            f"{folder} is a checkpoint of replicas, which torch saves in one file: "
            f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {folder} FILE"
        )
    for file in files if verify else ():
        file.verify(folder)
    tag, total = read_manifest(folder).tag, sum(file.nbytes for file in files)
    if as_json:
        listed = [{"file": file.name, "bytes": file.nbytes} for file in files]
        found = {"folder": str(folder), "generation": tag.generation, "step": tag.step, "files": listed}
        print_json({**found, "bytes": total, "verified": verify})
        return
    console = Console()
    title = f"{printable(str(folder))}: generation {tag.generation}, step {tag.step}"
    console.print(Text(title), soft_wrap=True)
    table = Table("file", "bytes")
    for file in files:
        table.add_row(file.name, f"{file.nbytes:,}")
    console.print(table)
    console.print(f"{len(files)} file{'s'[: len(files) != 1]} of torch.distributed.checkpoint, {total:,} bytes")
    if verify:
        console.print("every checksum is right")


def _folder(directory: Path) -> Path:
    if (directory / MANIFEST).exists():
        return directory
    tags = checkpoint.tags(directory)
    if not tags:
        raise UsageError(f"there is no checkpoint in {directory}")
    return directory / str(tags[-1])


def _as_dict(reader: Reader, *, verified: bool, made: Path | None) -> dict[str, Any]:
    return {
        "folder": str(reader.folder),
        "generation": reader.tag.generation,
        "step": reader.tag.step,
        "parts": [{"file": part.name, "bytes": part.nbytes} for part in reader.parts],
        "arrays": [
            {
                "path": path,
                "dtype": stored.dtype.name,
                "shape": list(stored.shape),
                "bytes": stored.nbytes,
                "parts": [run.part for run in stored.runs],
            }
            for path, stored in sorted(reader.arrays.items())
        ],
        "bytes": sum(stored.nbytes for stored in reader.arrays.values()),
        "verified": verified,
        "consolidated": None if made is None else str(made),
    }


def _table(reader: Reader) -> Table:
    table = Table("array", "dtype", "shape", "bytes", "parts")
    for path, stored in sorted(reader.arrays.items()):
        numbers = [str(run.part) for run in stored.runs]
        parts = ", ".join(numbers) if len(numbers) <= _MOST_PARTS else f"{len(numbers)} parts"
        shape = ", ".join(map(str, stored.shape))
        table.add_row(Text(printable(path)), stored.dtype.name, Text(f"[{shape}]"), f"{stored.nbytes:,}", parts)
    return table
