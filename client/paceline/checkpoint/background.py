"""One rank's part, written behind the caller: a thread copies the pieces, then writes the copies.

The copy is made while the caller computes, not before: between two updates nothing changes what is saved. So who knows
when the next update comes calls `settle` just before it, and finds the copy made; who does not calls it at once, and
waits for the copy. The memory of the copies stays for the next time: a second state's worth, and no more.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from paceline._wait import Latch
from paceline.checkpoint.part import Part
from paceline.checkpoint.pieces import Piece
from paceline.checkpoint.writing import write_part
from paceline.errors import StepOrderError
from paceline_protocol import Tag

__all__ = ["PartWriter"]


class PartWriter:
    """Writes parts, one after the other. For one thread.

    writer.begin(directory, tag, attempt, rank, world, pieces)
    ...                   # computes; the arrays of the pieces do not change
    writer.settle()       # they may change from here on
    ...
    part = writer.wait()
    """

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)
        self._thread: threading.Thread | None = None
        self._settled = Latch()
        self._settled.set()
        self._part: Part | None = None
        self._error: Exception | None = None

    def begin(self, directory: Path, tag: Tag, attempt: str, number: int, parts: int, pieces: Sequence[Piece]) -> None:
        """Starts to copy and write; arguments as those of `write_part`.

        Raises:
            StepOrderError: nobody has asked with `wait` what became of the part before.
        """
        if self._thread is not None:
            raise StepOrderError("a part of a checkpoint is still being written: wait() for it first")
        self._settled = Latch()
        self._part = self._error = None
        arguments = directory, tag, attempt, number, parts, pieces
        thread = threading.Thread(target=self._run, args=arguments, name="paceline-checkpoint")
        try:
            thread.start()
        except BaseException:
            self._settled.set()  # nobody copies anything
            raise
        self._thread = thread

    def settle(self) -> None:
        """Waits until the arrays may change: a copy at the speed of memory, of which most is done by then."""
        self._settled.wait()

    @property
    def is_writing(self) -> bool:
        """False once `wait` would return, or raise, at once."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> Part:
        """Waits until the part is durable.

        Raises:
            OSError: it could not be written.
            StepOrderError: nothing was begun, or it was asked for before.
        """
        if self._thread is None:
            raise StepOrderError("no part of a checkpoint is being written")
        self._thread.join()
        self._thread = None
        if self._error is not None:
            raise self._error
        assert self._part is not None
        return self._part

    def _run(self, directory: Path, tag: Tag, attempt: str, number: int, parts: int, pieces: Sequence[Piece]) -> None:
        try:
            copies = self._copy(pieces)
            self._settled.set()
            self._part = write_part(directory, tag, attempt, number, parts, copies)
        except Exception as error:  # noqa: BLE001  raised by `wait`
            self._error = error
        finally:
            self._settled.set()

    def _copy(self, pieces: Sequence[Piece]) -> list[Piece]:
        size = sum(piece.values.nbytes for piece in pieces)
        if self._memory.size < size:
            self._memory = np.empty(0, np.uint8)  # not both at once
            self._memory = np.empty(size, np.uint8)
        copies, start = [], 0
        for piece in pieces:
            data = self._memory[start : start + piece.values.nbytes]
            data[...] = piece.values.view(np.uint8)
            copies.append(piece._replace(values=data.view(piece.values.dtype)))
            start += data.size
        return copies
