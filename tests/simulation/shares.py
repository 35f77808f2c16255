"""What a member holds of a spread state, bit by bit: for each of its shares, which state its elements are of.

The state has as many elements as all cuts into up to 7 parts need, so that each share is a run of whole ones: what is
taken comes together from whoever has the elements, not from whoever says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from simulation.broken import Broken

from paceline.elastic.share import Share

__all__ = ["Held", "is_all"]

_ELEMENTS = 420
"""Divisible by 1 to 7."""

Bits = tuple[object, ...]


class Held:
    """The state of one member.

    Attributes:
        bits: the generations in which its steps were applied: equal tuples are equal bits.
        parts: for each share the bits that its elements are of.
    """

    def __init__(self, bits: Bits, shares: Iterable[Share]) -> None:
        self.bits = bits
        self.parts = dict.fromkeys(shares, bits)

    def update(self, generation: int) -> None:
        """The optimizer runs, over what is held."""
        self.bits = (*self.bits, generation)
        self.parts = {share: (*bits, generation) for share, bits in self.parts.items()}

    def keep(self, shares: Iterable[Share]) -> None:
        """Other shares are let go of."""
        self.parts = {share: self.parts[share] for share in shares}

    def spoil(self, how: str, who: str) -> None:
        """It is nothing that counts any more."""
        self.bits, self.parts = (how, who), {}

    def read(self, share: Share, bits: Bits, *, own: bool) -> None:
        """A share of a state comes, beside what is held if that is of the same one."""
        self.bits = bits
        self.parts = {**(self.parts if own else {}), share: bits}

    def take(self, share: Share, givers: Sequence[Held], *, own: bool) -> bool:
        """Takes a share from others; False if they do not have all of it between them.

        Raises:
            Broken: they do not hold the same state.
        """
        found = [item for held in ([self, *givers] if own else givers) for item in held.parts.items()]
        wanted = _elements(share)
        if not wanted <= set().union(*(_elements(there) for there, _ in found)):
            return False
        states = {bits for there, bits in found if _elements(there) & wanted}
        if len(states) > 1:
            raise Broken(f"I5: a share is to be taken of {' and '.join(map(str, states))}")
        self.read(share, states.pop(), own=own)
        return True


def is_all(shares: Iterable[Share]) -> bool:
    """True if all shares of some cut are among these."""
    there = set(shares)
    return any(all(Share(part, parts) in there for part in range(parts)) for parts in {share.parts for share in there})


def _elements(share: Share) -> set[int]:
    assert _ELEMENTS % share.parts == 0, "no share of that size"
    size = _ELEMENTS // share.parts
    return set(range(share.part * size, (share.part + 1) * size))
