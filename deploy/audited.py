"""Runs a training script as it stands, and records what its worker does; `records.py` reads it.

    paceline run deploy/audited.py FOLDER examples/digits_elastic.py --epochs 300

The script calls `paceline.join` and `session.steps` as ever. Here both are wrapped, so it needs no code for audits.
Each process writes its own file, HOST-PID-TIME.jsonl, one line for each event, which is whole even if the process is
killed right after.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import paceline
from paceline import Session, Step, TrainState


def recorder(folder: Path) -> Callable[..., None]:
    """Returns a function that writes an event and its facts to this process's file."""
    file = os.open(
        folder / f"{socket.gethostname()}-{os.getpid()}-{time.time_ns()}.jsonl",
        os.O_CREAT | os.O_WRONLY | os.O_APPEND,
        0o644,
    )

    def note(event: str, **facts: Any) -> None:
        os.write(file, (json.dumps({"event": event, "at": time.time(), **facts}) + "\n").encode())

    return note


def audit(session: Session, note: Callable[..., None]) -> Session:
    """Notes every view, committed step, attempt (with its samples) and applied step of a session."""
    session.on_view(lambda: note("view", generation=session.generation, rank=session.rank, size=session.size))
    session.on_commit(lambda number: note("committed", step=number))
    plain_steps = session.steps

    def steps(state: TrainState, *, total: int, **options: Any) -> Iterator[Step]:
        sampler = state.sampler
        assert sampler is not None, "an audit counts samples: the state needs an ElasticSampler"
        note("job", steps=total, samples=sampler.n, steps_per_epoch=sampler.steps_per_epoch)
        for step in plain_steps(state, total=total, **options):
            used = step.indices.tolist() if step.weight else []
            note("attempt", step=step.number, generation=step.generation, indices=used)
            yield step
            if step.applied:
                note("applied", step=step.number, generation=step.generation)
        note("ended", step=state.step)

    session.steps = steps  # type: ignore[method-assign]
    return session


def main() -> None:
    """Runs the script that the arguments name, as `python SCRIPT ARGUMENTS` would."""
    folder, script, *arguments = sys.argv[1:]
    plain_join, note = paceline.join, recorder(Path(folder))
    paceline.join = lambda *args, **options: audit(plain_join(*args, **options), note)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).absolute().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
