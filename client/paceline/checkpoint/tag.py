"""The tag: which state this is. Equal tags are equal bits."""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["Tag"]

_NAME = re.compile(r"g([0-9]{1,20})-s([0-9]{1,20})", re.ASCII)


class Tag(NamedTuple):
    """Generation in which the last step was taken, and its number. Tags are in the order of the training they name.

    A step number alone names nothing: the same step may be taken in two generations, with other bits.
    """

    generation: int
    step: int

    def __str__(self) -> str:
        """The name of a checkpoint's folder; names sort as tags do."""
        return f"g{self.generation:08d}-s{self.step:010d}"

    @classmethod
    def parse(cls, name: str) -> Tag | None:
        """The tag that a folder's name says, None if it says none."""
        match = _NAME.fullmatch(name)
        return None if match is None else cls(int(match[1]), int(match[2]))
