"""Members that end and that no launcher reports: only the workers of their host can see it, at once or much later."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from support.elastic.cluster import cluster
from support.elastic.faults import kill

pytestmark = pytest.mark.slow


def test_an_unreaped_killed_worker_counts_as_gone(tmp_path: Path) -> None:
    """So it is in a container whose first process reaps nobody: `docker run IMAGE sleep infinity`."""
    where = tmp_path / "checkpoints"
    with cluster(tmp_path, total=40, pace=0.02, witness=False, checkpoint_dir=str(where), checkpoint_every=5) as c:
        (killed,) = c.start(1, [kill(at="forward", rank=0, stored=where)], trainer="support/elastic/unreaped.py")
        c.wait_until(lambda: bool(killed.of("fault")), "it kills itself")
        (late,) = c.start(1, model_seed=77)
        assert late.process.wait(45) == 0, str(c)
        assert killed.process.poll() is None, "its parent is still there"
        assert late.of("applied")[0]["step"] > 5, str(c)
        c.check(count=1)


def test_a_frozen_worker_that_is_killed_later_is_no_longer_waited_for(tmp_path: Path) -> None:
    with cluster(tmp_path, total=12, pace=0.25, witness=False, failure_timeout=0.6) as c:
        (frozen,) = c.start(1)
        c.wait_for_step(2)
        frozen.signal(signal.SIGSTOP)
        c.kill_coordinator()
        c.start_coordinator()
        (late,) = c.start(1, log=True)
        c.wait_until(lambda: "paceline restart job" in late.stderr, "it is looked for, and is still there")
        frozen.signal(signal.SIGKILL)
        assert late.process.wait(45) == 0, str(c)
        c.check(count=1)
