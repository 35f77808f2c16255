"""PowerSGD: of each gradient that is a matrix only its largest components travel."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PowerSGD"]


@dataclass(frozen=True)
class PowerSGD:
    """The setting: a gradient of shape [n, m] (all axes behind the first as one) travels as rank * (n + m) numbers.

    The sum over the ranks is projected on `rank` directions, those of the step before turned by one power iteration.
    What is left over counts in the next step (`error_feedback`). Vectors, and matrices that would not become smaller,
    travel as they are. Source: Vogels, Karimireddy, Jaggi, "PowerSGD", NeurIPS 2019, algorithms 1 and 2.

    Attributes:
        rank: how many directions; 1 to 64.
    """

    rank: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= 64:
            raise ValueError(f"want a rank of 1 to 64, not {self.rank!r}")

    def __str__(self) -> str:
        return f"powersgd rank={self.rank}"
