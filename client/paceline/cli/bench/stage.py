"""Starts every contender's processes, and ends them.

All contenders live side by side, so that their turns lie close together, but only one of them moves at a time.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import BinaryIO, cast

from paceline.cli.bench.ensemble import Ensemble
from paceline.cli.bench.recipes import SOCKET, Recipe

__all__ = ["stage"]

_POLL_S = 0.1
"""How often processes that have not called yet are looked at."""


@contextlib.contextmanager
def stage(recipes: Sequence[Recipe], world: int) -> Iterator[list[Ensemble]]:
    """Runs all contenders for the block; must be entered in the main thread, with which they would end.

    Args:
        recipes: how to start each.
        world: ranks of each.

    Raises:
        ContenderFailed: one cannot start, or does not end well.
        OSError: a process cannot be started.
    """
    ensembles: list[Ensemble] = []
    # In a folder that is nobody else's: whoever can open the socket could pass for a rank.
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder, socket.socket(socket.AF_UNIX) as listener:
        path = str(Path(folder) / "conductor")
        listener.bind(path)
        listener.listen(len(recipes) * world)
        before = signal.signal(signal.SIGTERM, _leave)
        try:
            for recipe in recipes:
                ensembles.append(_start(recipe, path))
            _gather(listener, ensembles, world)
            yield ensembles
            for ensemble in ensembles:
                ensemble.end()
        finally:
            for ensemble in ensembles:
                ensemble.stop()
            signal.signal(signal.SIGTERM, before)


def _leave(signum: int, frame: FrameType | None) -> None:
    """Ends the command as Ctrl-C does: by way of what leaves no process and no file behind."""
    raise SystemExit(128 + signum)


def _start(recipe: Recipe, path: str) -> Ensemble:
    process = subprocess.Popen(
        [path if word == SOCKET else word for word in recipe.command],
        stdin=subprocess.DEVNULL,
        stdout=2,  # standard output has rows, and nothing else
        env={**recipe.environment},
    )
    return Ensemble(recipe.name, recipe.impl, recipe.link, recipe.schedules, process)


def _gather(listener: socket.socket, ensembles: Sequence[Ensemble], world: int) -> None:
    """Waits until all ranks have called; notices those whose process ends instead."""
    by_name = {ensemble.name: ensemble for ensemble in ensembles}
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while missing := [ensemble for ensemble in ensembles if len(ensemble.lines) < world]:
            if selector.select(_POLL_S):
                connection, _ = listener.accept()
                with connection:
                    stream = connection.makefile("rwb")
                if line := stream.readline():  # else it has ended at once, which its process tells
                    hello = json.loads(line)
                    by_name[hello["name"]].lines[hello["rank"]] = cast(BinaryIO, stream)
                continue
            for ensemble in missing:
                if ensemble.process is not None and ensemble.process.poll() is not None:
                    raise ensemble.failed("not all of its ranks started")
