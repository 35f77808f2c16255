"""Receipts of steps: a chain of hashes that says what the state was after each of them (docs/decisions/18).

A receipt is one line of JSON. It names the step, where the sampler stood, what the step depends on, the SHA-256 of the
state after it, and the hash of the receipt before. All members compute the same receipts; rank 0 writes them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

_log = logging.getLogger("paceline.elastic")

EVERY = 10
"""Steps between two receipts, unless told otherwise. SHA-256 of 12 M parameters and Adam's moments takes 0.12 s."""

KEPT = 2
"""Receipts that the state holds. Rank 0 may be lost before it has written step N's, which is committed when all
enter step N + 1; by step N + 2 another rank 0 has taken over."""

_HASH = re.compile(r"[0-9a-f]{64}", re.ASCII)
_TAIL_BYTES = 64 << 10
"""Bytes at the end of a file in which a new writer looks for the lines that it would write."""

_MOST_BYTES = 64 << 10
"""Longest line."""


class ReceiptDamaged(ValueError):
    """A receipt is not what was written; the text names the step."""


@dataclass(frozen=True)
class Receipt:
    """The record of one finished step: one line of the file.

    Attributes:
        epoch, offset: where the sampler stands after the step.
        settings: what the step depends on, beside the state before it: seeds, sampler, script, machine.
        state: SHA-256 of the state after the step, in hexadecimal.
        previous: the hash of the receipt before; empty for the first one of a run.
    """

    step: int
    epoch: int
    offset: int
    settings: Mapping[str, str]
    state: str
    previous: str

    @property
    def hash(self) -> str:
        """SHA-256 of everything above as canonical JSON, in hexadecimal."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def to_line(self) -> str:
        """Returns the receipt and its hash as one line of JSON, without the line's end."""
        return json.dumps({**asdict(self), "hash": self.hash}, separators=(",", ":"))

    @classmethod
    def from_line(cls, line: str) -> Receipt:
        """Reads a line; raises ReceiptDamaged if it is not a receipt, or was changed."""
        try:
            read = json.loads(line)
            told = read.pop("hash")
            receipt = cls(**read)
            receipt._check()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ReceiptDamaged(f"not a receipt: {error!s:.200}") from None
        if told != receipt.hash:
            raise ReceiptDamaged(f"the receipt of step {receipt.step} was changed: it does not have its hash")
        return receipt

    def _check(self) -> None:
        numbers = (self.step, self.epoch, self.offset)
        if any(type(number) is not int or number < 0 for number in numbers):
            raise ValueError(f"step, epoch and offset are {numbers!r:.80}")
        if not isinstance(self.settings, dict) or not all(isinstance(word, str) for word in self.settings.values()):
            raise ValueError("the settings are not text")
        if not _HASH.fullmatch(self.state) or not (self.previous == "" or _HASH.fullmatch(self.previous)):
            raise ValueError("state or previous is not a SHA-256")


def checked_lines(found: object) -> tuple[str, ...]:
    """Checks and returns the receipts that another member or a checkpoint has sent; ReceiptDamaged if they are not."""
    if not isinstance(found, list | tuple) or len(found) > KEPT:
        raise ReceiptDamaged(f"the receipts of the state are not a list of at most {KEPT}")
    for line in found:
        if not isinstance(line, str) or len(line) > _MOST_BYTES:
            raise ReceiptDamaged("a receipt of the state is not a line of text, or is too long")
        Receipt.from_line(line)
    return tuple(found)


def due(step: int, total: int, every: int, checkpoint_every: int | None) -> bool:
    """Returns True if a step gets a receipt: every so many steps, the last one, and those with a checkpoint."""
    return step % every == 0 or step == total or (checkpoint_every is not None and step % checkpoint_every == 0)


def read_chain(path: Path) -> list[Receipt]:
    """Returns the chain that the last receipt in a file belongs to, in order: what it follows, and what follows it.

    The lines may stand in any order, and more than once. If a run went on from a checkpoint with something changed, two
    receipts follow one: the chain goes on to the one that stands behind the other. A line that a crash has cut is left
    out. If a receipt is missing, the chain restarts after the gap: then its first receipt has a `previous`.
    """
    found: dict[str, Receipt] = {}
    following: dict[str, Receipt] = {}
    last = None
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
        try:
            json.loads(line)
        except (ValueError, RecursionError):
            continue
        try:
            last = Receipt.from_line(line)
        except ReceiptDamaged as error:
            raise ReceiptDamaged(f"{path}, line {number}: {error}") from None
        found[last.hash] = following[last.previous] = last
    if last is None:
        return []
    chain = deque([last])
    while (before := found.get(chain[0].previous)) is not None:
        chain.appendleft(before)
    while (after := following.get(chain[-1].hash)) is not None:
        chain.append(after)
    return list(chain)


class ReceiptedState(Protocol):
    """The part of a training state that a `ReceiptBook` uses."""

    step: int
    receipts: tuple[str, ...]

    @property
    def position(self) -> tuple[int, int]:
        """Epoch and offset of the sampler."""

    def fingerprint(self) -> bytes:
        """Returns the SHA-256 of the whole state."""


class ReceiptBook:
    """Makes one member's receipts, and writes them while it is rank 0.

    It makes the file with its folder if it does not exist. `tell` tells the user that receipts cannot be written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        settings: Mapping[str, str],
        *,
        total: int,
        every: int,
        checkpoint_every: int | None,
        tell: Callable[[str], None] = _log.error,
    ) -> None:
        if every < 1:
            raise ValueError(f"receipts_every must be at least 1 step, not {every}")
        self._path = Path(path)
        self._settings = dict(settings)
        self._total, self._every, self._checkpoint_every = total, every, checkpoint_every
        self._tell = tell
        self._generation = 0
        self._last = ""  # the last line that was written in this generation

    def applied(self, state: ReceiptedState) -> None:
        """Adds the receipt of the step that the state has just taken, if one is due."""
        if not due(state.step, self._total, self._every, self._checkpoint_every):
            return
        epoch, offset = state.position
        previous = Receipt.from_line(state.receipts[-1]).hash if state.receipts else ""
        receipt = Receipt(state.step, epoch, offset, self._settings, state.fingerprint().hex(), previous)
        state.receipts = (*state.receipts[-KEPT + 1 :], receipt.to_line())

    def committed(self, state: ReceiptedState, generation: int) -> None:
        """Writes the receipts that are not in the file yet. For rank 0, once the state's last step is committed."""
        if not state.receipts or (generation == self._generation and state.receipts[-1] == self._last):
            return
        try:
            if generation == self._generation and self._last in state.receipts:
                self._append(state.receipts[state.receipts.index(self._last) + 1 :])
            else:  # another rank 0, or an earlier run, may have written some of them
                self._append_missing(state.receipts)
        except OSError as error:  # as with checkpoints, a full disk does not end training
            self._tell(f"receipts cannot be written to {self._path}: {error}")
            self._generation = 0  # a line may have been cut
            return
        self._generation, self._last = generation, state.receipts[-1]

    def _append(self, lines: Sequence[str], start: bytes = b"") -> None:
        with self._path.open("ab") as file:
            file.write(start + "".join(f"{line}\n" for line in lines).encode())

    def _append_missing(self, lines: Sequence[str]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab+") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            tail = file.read()
        there = set(tail.decode(errors="replace").splitlines())
        if missing := [line for line in lines if line not in there]:
            self._append(missing, b"\n" if tail and not tail.endswith(b"\n") else b"")  # a crash has cut the last line
