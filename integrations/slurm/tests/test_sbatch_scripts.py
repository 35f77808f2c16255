"""What the scripts of deploy/slurm ask of Slurm. Its commands and the clock are replaced by scripts that take notes."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[3] / "deploy" / "slurm"

SRUN = """#!/bin/bash
echo "$@" > "$NOTES/srun"
echo "${SRUN_CPUS_PER_TASK-none}" > "$NOTES/cpus"
echo "$ENDS_AT" > "$NOTES/now"
exit "$CODE"
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a script did.

    Attributes:
        code: its exit code.
        srun: the arguments of srun.
        cpus: SRUN_CPUS_PER_TASK as srun finds it; "none" if it is not set.
        requeued: the arguments of scontrol; empty if it was not called.
    """

    code: int
    srun: str
    cpus: str
    requeued: str


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    commands = {
        "srun": SRUN,
        "scontrol": '#!/bin/bash\necho "$@" >> "$NOTES/scontrol"\n',
        "date": '#!/bin/bash\ncat "$NOTES/now"\n',
        "openssl": "#!/bin/bash\necho a-token\n",
    }
    (tmp_path / "bin").mkdir()
    for name, text in commands.items():
        path = tmp_path / "bin" / name
        path.write_text(text)
        path.chmod(0o755)
    return tmp_path


def submit(notes: Path, script: str, *, code: int, ends_at: int = 1000, **variables: str) -> Outcome:
    """Runs a script as a job that begins at 1000 and whose srun ends at `ends_at`."""
    (notes / "now").write_text("1000")
    environment = {
        "PATH": f"{notes / 'bin'}:{os.environ['PATH']}", "NOTES": str(notes),
        "CODE": str(code), "ENDS_AT": str(ends_at),
        "SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "4600", "PACELINE_COORDINATOR": "login1:7400",
    } | variables  # fmt: skip
    done = subprocess.run(
        ["bash", str(SCRIPTS / script), "train.py"], env=environment, capture_output=True, text=True, timeout=30
    )
    assert not done.stderr
    requeued = (notes / "scontrol").read_text().strip() if (notes / "scontrol").exists() else ""
    return Outcome(
        done.returncode, (notes / "srun").read_text().strip(), (notes / "cpus").read_text().strip(), requeued
    )


@pytest.mark.parametrize(
    ("code", "ends_at", "variables", "requeued"),
    [
        (75, 2000, {}, True),
        (0, 4590, {}, False),
        (137, 2000, {}, False),  # it failed by itself
        (137, 4550, {}, True),  # the others were leaving
        (137, 4300, {"PACELINE_DRAIN_BEFORE": "300.5"}, True),
        (137, 4300, {}, False),
        (1, 1001, {"SLURM_JOB_END_TIME": "1030"}, False),  # the job is shorter than that from its start
        (143, 1026, {"SLURM_JOB_END_TIME": "1030"}, True),
    ],
)
def test_a_job_that_drained_before_its_time_limit_is_requeued(
    notes: Path, code: int, ends_at: int, variables: dict[str, str], requeued: bool
) -> None:
    outcome = submit(notes, "train.sbatch", code=code, ends_at=ends_at, **variables)
    assert outcome.code == code
    assert outcome.requeued == ("requeue 7" if requeued else "")


@pytest.mark.parametrize("script", ["train.sbatch", "workers.sbatch"])
def test_srun_gets_cores_per_task_only_if_the_job_requests_them(notes: Path, script: str) -> None:
    assert submit(notes, script, code=0).cpus == "none", "with --exclusive srun gives a task all cores"
    assert submit(notes, script, code=0, SLURM_CPUS_PER_TASK="8").cpus == "8"


@pytest.mark.parametrize("script", ["train.sbatch", "workers.sbatch"])
def test_srun_options_keep_other_tasks_running_when_one_ends(notes: Path, script: str) -> None:
    words = submit(notes, script, code=0).srun.split()
    assert {"--wait=0", "--kill-on-bad-exit=0"} <= set(words)
