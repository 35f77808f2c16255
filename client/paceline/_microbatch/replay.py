"""Computes a step again in a script that `paceline replay` has started, and compares it with its receipt."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from paceline._microbatch.machine_bits import MACHINE_SETTINGS
from paceline._microbatch.receipts import Receipt, ReceiptedState
from paceline.errors import Dismissed

VARIABLE = "PACELINE_REPLAY"

SCRIPT = "the script"
"""Name of the setting that has the digest of the script."""

_MAY_DIFFER = frozenset((*MACHINE_SETTINGS, SCRIPT))
"""Settings that may differ, as long as the digest of the state does not."""


@dataclass(frozen=True)
class ReplayOrder:
    """The order that `paceline replay` gives to a script.

    Attributes:
        step: the last step to compute.
        checkpoint: folder of the checkpoint to begin with; empty for the state that the script builds.
        receipts: the receipts to compare with, as lines, up to that step and from that of the checkpoint on; and the
            last one before, if the checkpoint's own step has none.
        result: where to write the result.
    """

    step: int
    checkpoint: str
    receipts: tuple[str, ...]
    result: str

    def write(self, path: Path) -> None:
        """Writes the order for a script."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> ReplayOrder:
        """Reads an order that `write` wrote."""
        found = json.loads(path.read_text())
        return cls(**{**found, "receipts": tuple(found["receipts"])})


@dataclass
class ReplayResult:
    """The result that a replayed script reports.

    Attributes:
        began: the step after whose state it began.
        held: the steps whose receipts hold, the checkpoint's included.
        wrong: a sentence about the first receipt that does not hold; empty if all do.
    """

    began: int = 0
    held: list[int] = field(default_factory=list)
    wrong: str = ""

    def write(self, path: Path) -> None:
        """Writes the result for the command."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> ReplayResult:
        """Reads a result that `write` wrote."""
        return cls(**json.loads(path.read_text()))


def compare(receipt: Receipt, position: tuple[int, int], state: str, words: Mapping[str, str], what: str) -> str:
    """Compares what was found with a receipt; returns a sentence about what differs, empty if it holds.

    `position` is the sampler's, as epoch and offset; `what` names the state, such as "the state after step 4".
    """
    if position != (receipt.epoch, receipt.offset):
        return (
            f"{what}: the sampler stands at epoch {position[0]}, offset {position[1]}, but at epoch {receipt.epoch}, "
            f"offset {receipt.offset} in the receipt"
        )
    if state != receipt.state:
        differ = _differences(receipt, words)
        why = f"; {'; '.join(differ.values())}" if differ else ""
        return f"{what} has the digest {state}, but {receipt.state} in the receipt{why}"
    return ""


def compare_inputs(receipt: Receipt, words: Mapping[str, str]) -> str:
    """Compares what a step depends on with its receipt, before the step is computed.

    Returns a sentence about what differs, beside the machine and the script; empty if nothing does.
    """
    differ = [text for name, text in _differences(receipt, words).items() if name not in _MAY_DIFFER]
    return f"the run of step {receipt.step} had other settings: {'; '.join(differ)}" if differ else ""


def _differences(receipt: Receipt, words: Mapping[str, str]) -> dict[str, str]:
    """Returns a sentence for each setting that differs."""
    return {
        name: f"{name} is {words.get(name, 'not set')} here but {receipt.settings.get(name, 'not set')} there"
        for name in sorted(words.keys() | receipt.settings.keys())
        if words.get(name) != receipt.settings.get(name)
    }


class _Applicable(Protocol):
    applied: bool


_StepT = TypeVar("_StepT", bound=_Applicable)


class Replay:
    """Runs the steps of a script up to one step, and compares each with its receipt.

    `words` say what the steps depend on here; see `Receipt.settings`.
    """

    def __init__(self, order: ReplayOrder) -> None:
        self.step = order.step
        self.checkpoint = order.checkpoint
        self.words: Mapping[str, str] = {}
        self._order = order
        self._receipts = {receipt.step: receipt for receipt in map(Receipt.from_line, order.receipts)}
        self._result = ReplayResult()

    @classmethod
    def of_environment(cls, environment: Mapping[str, str]) -> Replay | None:
        """Returns the replay that this process was started for; None for a usual run."""
        path = environment.get(VARIABLE)
        return cls(ReplayOrder.read(Path(path))) if path else None

    def follow(self, steps: Iterator[_StepT], state: ReceiptedState) -> Iterator[_StepT]:
        """Yields steps until one does not hold, or all are done; then ends the script, so that it writes no results."""
        self._result.began = state.step
        try:
            if self._begins_right(state):
                for step in steps:
                    yield step
                    if step.applied and not self._holds(state, f"the state after step {state.step}"):
                        break
        finally:
            steps.close()  # type: ignore[attr-defined]  # it is a generator
        self._result.write(Path(self._order.result))
        raise Dismissed(f"step {self.step} was computed again")

    def _begins_right(self, state: ReceiptedState) -> bool:
        """Compares the settings of the steps to compute, and the checkpoint, with the receipts."""
        for number, receipt in sorted(self._receipts.items()):
            if number > state.step and (differs := compare_inputs(receipt, self.words)):
                self._result.wrong = differs
                return False
        if not self._order.checkpoint:
            return True
        where = f"the checkpoint {self._order.checkpoint}"
        if not self._holds(state, where):
            return False
        known = [receipt for number, receipt in sorted(self._receipts.items()) if number <= state.step]
        head = Receipt.from_line(state.receipts[-1]).hash if state.receipts else ""
        if known and known[-1].hash != head:
            self._result.wrong = (
                f"{where} was written behind another receipt than that of step {known[-1].step}: its hash is "
                f"{head or 'empty'} there, but {known[-1].hash} here"
            )
        return not self._result.wrong

    def _holds(self, state: ReceiptedState, what: str) -> bool:
        """Compares the state with the receipt of its step, if that has one."""
        receipt = self._receipts.get(state.step)
        if receipt is not None:
            self._result.wrong = compare(receipt, state.position, state.fingerprint().hex(), self.words, what)
            if not self._result.wrong:
                self._result.held.append(state.step)
        return not self._result.wrong
