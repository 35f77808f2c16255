"""torchrun's rendezvous at a Paceline coordinator.

    torchrun --rdzv-backend paceline --rdzv-endpoint HOST:7400 --nnodes 2 --nproc-per-node 4 train.py

The agents of a run (one torchrun is one agent) are members of a job, and each round of theirs is a view of it. torchrun
starts, stops and counts workers as always. Workers find PACELINE_COORDINATOR, so `init_process_group("paceline")` and
`paceline.join()` need no arguments.

    _terms.py    PURE: what torchrun's flags say
    _round.py    one round as an agent sees it, and how it ends
    _handler.py  what torchrun calls
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["get_handler"]


def get_handler() -> Callable[[Any], Any]:
    """Returns the function that makes a rendezvous handler of torch's `RendezvousParameters`.

    torch calls this (entry point "torchrun.handlers") whatever backend is chosen, so it imports nothing.
    """
    return _create


def _create(parameters: Any) -> Any:
    import os

    from paceline_torchrun._handler import Handler
    from paceline_torchrun._terms import read_terms

    return Handler(read_terms(parameters, os.environ))
