"""Checks the notes of the demo's workers: whether each sample was used once, and how soon training went on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

Notes = Sequence[dict[str, Any]]
"""The notes of one worker, in order (`train.py`). Times are of the monotonic clock, which all workers share."""


class Recovery(NamedTuple):
    """A change of the members after which the job went on.

    Attributes:
        cause: "killed" or "joined".
        ms: from the kill until all survivors had applied a step, or from the newcomer's `join` to its first.
        text: a sentence for the user.
    """

    cause: str
    ms: float
    text: str


class Ledger:
    """The notes of all workers of a run.

    A step may be attempted in several generations. It counts in the greatest one in which a worker has applied it; the
    other attempts were undone. Workers note what they take before they compute, so a killed worker's samples are known.
    """

    def __init__(self, workers: Iterable[Notes]) -> None:
        self._workers = [notes for notes in map(list, workers) if notes]  # one that was killed at once has none
        self._all = [note for notes in self._workers for note in notes]
        self.counts: dict[int, int] = {}
        """By step: the generation in which it counts."""
        for note in self._all:
            if "applied" in note:
                self.counts[note["step"]] = max(note["generation"], self.counts.get(note["step"], 0))
        self.ends = [note for note in self._all if "digest" in note]
        """The last note of each worker that stayed to the end."""

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Reads the files of all workers; the last line of a killed one may be torn."""
        texts = [file.read_text().rpartition("\n")[0] for file in sorted(folder.iterdir())]
        return cls([json.loads(line) for line in text.splitlines()] for text in texts)

    def faults(self) -> list[str]:
        """Says what is wrong: samples that did not count once in each epoch, and weights that differ; else empty."""
        if not self.ends:
            return ["the workers ended without a result"]
        found = [] if self.samples_once() else ["a sample was not used exactly once in every epoch"]
        return found if self.same_weights() else [*found, "the workers did not all end with the same weights"]

    def same_weights(self) -> bool:
        """True if all members of the last view have noted the same digest of their state."""
        return len(self.ends) == self.ends[0]["world_size"] and len({end["digest"] for end in self.ends}) == 1

    def samples_once(self) -> bool:
        """True if the steps that count used every sample exactly once in every epoch."""
        taken: dict[int, list[int]] = {}
        for note in self._all:
            if "took" in note and self.counts.get(note["step"]) == note["generation"]:
                taken.setdefault(note["step"], []).extend(note["took"])
        end = self.ends[0]
        return all(
            sorted(sample for step in range(first, first + end["steps_per_epoch"]) for sample in taken.get(step, ()))
            == list(range(end["samples"]))
            for first in range(1, end["steps"] + 1, end["steps_per_epoch"])
        )

    def recoveries(self) -> list[Recovery]:
        """Says how long a killed worker and new ones held up the others."""
        found = []
        for kill in (note for note in self._all if "killed" in note):
            later = [note for note in self._all if "applied" in note and note["generation"] > kill["generation"]]
            first = min(((note["generation"], note["step"]) for note in later), default=None)
            back = [note["at"] for note in later if (note["generation"], note["step"]) == first]
            if back:
                after = 1e3 * (max(back) - kill["at"])
                went_on = f"{len(back)} worker{'s'[: len(back) != 1]} went on after {after:.0f} ms"
                text = f"rank {kill['killed']} was killed in step {kill['step']}; {went_on}"
                found.append(Recovery("killed", after, text))
        started = min((note["at"] for note in self._all if "applied" in note), default=0.0)
        for joined, *notes in self._workers:
            first_step = next((note for note in notes if "applied" in note), None)
            if joined["at"] > started and first_step is not None:
                after = 1e3 * (first_step["at"] - joined["at"])
                text = f"a new worker joined; {first_step['world']} train on after {after:.0f} ms"
                found.append(Recovery("joined", after, text))
        return found
