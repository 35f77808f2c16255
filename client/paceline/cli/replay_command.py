"""`paceline replay`: computes a step again from a checkpoint, and compares it with its receipt."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from paceline import checkpoint
from paceline._base.terminal import UsageError, say
from paceline._microbatch.receipts import Receipt, ReceiptDamaged, read_chain
from paceline._microbatch.replay import VARIABLE, ReplayOrder, ReplayResult
from paceline.checkpoint.reading import Reader
from paceline.cli.output import print_json
from paceline.cli.run import check_command, run_workers

RECEIPTS = "receipts.jsonl"
"""Name of the receipts' file beside the checkpoints, by default."""

_ENDED = 3
"""Exit code if the script ends before the step. 1 means that a receipt does not hold, 2 that the step has none."""


class ReplayPlan(NamedTuple):
    """The step of the checkpoint to begin at (0 for none), and the receipts to compare with."""

    start: int
    receipts: tuple[Receipt, ...]


def replay_step(
    command: Sequence[str], *, step: int, directory: Path, receipts: Path | None, as_json: bool = False
) -> int:
    """Computes a step again; returns 0 if all receipts hold, 1 if one does not, 3 if the script ends before it."""
    check_command(command)
    path = directory / RECEIPTS if receipts is None else receipts
    if not path.is_file():
        raise UsageError(f"there are no receipts in {path}: session.steps(..., receipts=FILE) writes them")
    tags = [tag for tag in checkpoint.tags(directory) if tag.step < step]
    try:
        chain = read_chain(path)
    except ReceiptDamaged as error:
        return _answer(ReplayResult(wrong=str(error)), "", step, as_json=as_json)
    start, wanted = plan(chain, [tag.step for tag in tags], step)
    folder = str(next(directory / str(tag) for tag in reversed(tags) if tag.step == start)) if start else ""
    if folder:
        Reader(Path(folder)).verify()
    with tempfile.TemporaryDirectory(prefix="paceline-replay-") as place:
        order, result = Path(place) / "order.json", Path(place) / "result.json"
        lines = tuple(receipt.to_line() for receipt in wanted)
        ReplayOrder(step, str(Path(folder).resolve()) if folder else "", lines, str(result)).write(order)
        os.environ[VARIABLE] = str(order)
        try:
            code = run_workers(
                command,
                workers=1,
                coordinator=None,
                job="replay",
                minimum=None,
                maximum=None,
                restarts=0,
                spares=None,
                log_dir=None,
            )
        finally:
            del os.environ[VARIABLE]
        if not result.exists():
            ended = f"the script has ended before step {step}, with code {code}"
            say(ended)
            if as_json:
                print_json({"step": step, "holds": None, "error": ended})
            return _ENDED
        return _answer(ReplayResult.read(result), gap_before(chain), step, as_json=as_json)


def plan(chain: Sequence[Receipt], checkpoints: Sequence[int], step: int) -> ReplayPlan:
    """Decides from which of the checkpoints, which are all before the step, to compute it. Pure."""
    steps = [receipt.step for receipt in chain]
    if step not in steps:
        near = sorted(sorted(set(steps), key=lambda other: abs(other - step))[:2])
        which = f"the nearest that have one: {' and '.join(map(str, near))}" if near else "there are none"
        gap = f". {gap_before(chain)}" if step < min(steps, default=0) and gap_before(chain) else ""
        raise UsageError(f"step {step} has no receipt; {which}{gap}")
    start = max(checkpoints, default=0)
    before = [receipt for receipt in chain if receipt.step <= start]
    return ReplayPlan(start, (*before[-1:], *(receipt for receipt in chain if start < receipt.step <= step)))


def gap_before(chain: Sequence[Receipt]) -> str:
    """Returns a sentence if the first receipt of a chain follows one that is not in the file; else an empty text."""
    if not chain or not chain[0].previous:
        return ""
    return f"The chain begins at step {chain[0].step}: the receipt before it is missing, or was changed"


def _answer(result: ReplayResult, gap: str, step: int, *, as_json: bool) -> int:
    if result.wrong:
        say(f"step {step} does not hold: {result.wrong}")
    else:
        count = len(result.held)
        origin = f"from the checkpoint of step {result.began}" if result.began else "from the start of the script"
        say(f"step {step} holds: computed again {origin}, {count} receipt{'s'[: count != 1]} compared")
    if gap:
        say(gap)
    if as_json:
        print_json({"step": step, "holds": not result.wrong, "wrong": result.wrong, "held": result.held, "gap": gap})
    return 1 if result.wrong else 0
