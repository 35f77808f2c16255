"""A rank that leaves out a collective of a step: the others say so, and do not take over what it has made of it."""

from __future__ import annotations

import textwrap
from pathlib import Path

from support.command import command

CONTINUES = """
    import numpy as np
    import paceline

    with paceline.join() as session:
        value = {"sum": np.zeros(1)}
        for step in session.steps(paceline.TrainState(value=value), total=20):
            with step:
                if step.number == 8 and session.rank == 1:
                    continue
                value["sum"] = value["sum"] + session.group.all_reduce(np.ones(1))
"""


def test_a_step_without_all_collectives_is_an_error_of_a_state_without_an_optimizer(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(CONTINUES))
    with command("run", "-n", "2", str(script)) as run:
        assert run.wait(60.0) == 1, str(run)
    assert (
        "other ranks have completed step 8 without all collectives that this rank calls in it, but all ranks must call "
        "the same ones: operation "
    ) in run.stderr
