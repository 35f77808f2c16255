"""What a member is to hold of a state that is spread, and what of it must come from others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.checkpoint.pieces import Shard
from paceline.checkpoint.reading import Reader
from paceline.elastic.runs import Run
from paceline_protocol import Share

__all__ = ["Resharding"]


class Resharding:
    """A change to another share, prepared: memory for it, with what this member has filled in already.

    Args:
        share: what is to be held.
        own: what this member holds is of the same state.
        targets: the memory, by the arrays' names.
        wanted: what of it must come from others.
        cut: how arrays are cut into so many parts, as `runs.assign` takes it.
        switch: makes it what is held.

    Attributes:
        share, own, wanted, cut, switch: as above.
    """

    def __init__(
        self,
        share: Share,
        own: bool,
        targets: Mapping[str, Shard],
        wanted: list[Run],
        cut: Callable[[int], Mapping[str, tuple[int, int]]],
        switch: Callable[[], None],
    ) -> None:
        self.share = share
        self.own = own
        self.wanted = wanted
        self.cut = cut
        self.switch = switch
        self._targets = targets

    def into(self, run: Run) -> NDArray[Any]:
        """Where elements are to be written, shape [run.count]."""
        target = self._targets[run.name]
        return target.values.reshape(-1)[run.start - target.start :][: run.count]

    def load(self, folder: Path) -> Any:
        """Fills all of it out of a checkpoint, whoever wrote that.

        Returns:
            The rest of the state: nested values, None in place of each array that is spread.

        Raises:
            CheckpointDamaged: other bytes were read than were written.
            SizeMismatch: it is of another model.
        """
        tree = Reader(folder).state(self._targets)
        for name, part in tree["parts"].items():
            for path, leaf in part["arrays"].items():
                if isinstance(leaf, Shard):
                    np.copyto(self._targets[f"parts.{name}.arrays.{path}"].values, leaf.values, casting="same_kind")
                    part["arrays"][path] = None
        self.wanted = []
        return tree
