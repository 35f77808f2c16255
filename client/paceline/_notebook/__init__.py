"""Workers for a function of a notebook or of an interactive Python: `paceline.run` (decision 22)."""

from __future__ import annotations

from paceline._notebook._run import run

__all__ = ["run"]
