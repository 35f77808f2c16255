"""The error of a schedule in which something does not hold."""

from __future__ import annotations

__all__ = ["Broken"]


class Broken(AssertionError):
    """An invariant does not hold."""
