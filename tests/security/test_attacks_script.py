"""`bench/attacks.py` makes all its attacks, and the other job goes on beside each. Times are for a quiet machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "attacks.py"


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_all_attacks_run_and_the_other_job_continues() -> None:
    command = [sys.executable, str(SCRIPT), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert not done.returncode, done.stderr
    barriers = {row["attack"]: row["barriers"] for row in map(json.loads, done.stdout.splitlines())}
    assert len(barriers) == 18
    assert all(barriers.values()), barriers
