"""A worker whose device fails, or has no memory left, ends and says so; the others go on, with the same bits."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from support.command import command

pytestmark = [
    pytest.mark.needs(what="torch"),
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.skipif(sys.platform != "linux", reason="the launcher ties processes with prctl"),
]

SCRIPT = str(Path(__file__).parent / "device_failures.py")


def train(how: str, once: Path, *bounds: str) -> tuple[list[tuple[str, str]], str]:
    """Returns what each rank said at the end, the size of its world and a digest, and the complaints."""
    with command("run", *bounds, SCRIPT, how, str(once)) as run:
        assert run.wait(150.0) == 0, str(run)
    return re.findall(r"rank \d of (\d): (\w+)", run.stdout), run.complaints


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("memory", "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB."),
        (
            "device",
            r"RuntimeError: cuda:0 \(H200, MIG-7\) has failed: CUDA error: CUDA-capable device\(s\) is/are busy",
        ),
    ],
)
def test_other_workers_go_on_if_one_loses_its_device_or_runs_out_of_memory(
    how: str, error: str, tmp_path: Path
) -> None:
    ((_, expected),), _ = train("never", tmp_path / "never", "-n", "1")
    ended, complaints = train(how, tmp_path / "struck", "-n", "3", "--min", "2")
    assert ended == [("2", expected)] * 2, complaints
    assert re.search(error, complaints), complaints
    assert "ended with exit code 1; 2 of 3 workers are left" in complaints
