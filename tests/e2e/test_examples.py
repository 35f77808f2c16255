"""The examples, as their first lines say to run them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
AUDITED = Path(__file__).parents[2] / "deploy" / "audited.py"


def run(*command: str) -> str:
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # more of them spin, and gain nothing here
    done = subprocess.run(command, env=os.environ | one_thread, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        pytest.param(["full_shard"], 4, marks=pytest.mark.exhaustive),
        pytest.param(["hybrid_shard", "2"], 2, marks=pytest.mark.slow),
    ],
)
def test_digits_fsdp_trains_under_a_strategy(arguments: list[str], parts: int) -> None:
    paceline = [sys.executable, "-m", "paceline", "run", "-n", "4"]
    lines = run(*paceline, str(EXAMPLES / "digits_fsdp.py"), *arguments).splitlines()
    found = [re.search(r"rank (\d) of 4 trains (\d+) parameters, accuracy ([\d.]+)", line) for line in lines]
    ranks = {int(match[1]): (int(match[2]), match[3]) for match in found if match}
    assert len(ranks) == 4
    assert sum(held for held, _ in ranks.values()) == 4 // parts * 17_226  # as many copies as nodes, no element twice
    assert {accuracy for _, accuracy in ranks.values()} == {ranks[0][1]}
    assert float(ranks[0][1]) >= 0.95


@pytest.mark.parametrize("name", ["digits_numpy.py", pytest.param("digits_fsdp.py", marks=pytest.mark.slow)])
def test_an_example_trains_in_one_process(name: str) -> None:
    accuracy = re.search(r"accuracy ([\d.]+)(?: on .*)?$", run(sys.executable, str(EXAMPLES / name)).strip())
    assert accuracy is not None
    assert float(accuracy[1]) >= 0.95


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    ["ddp", *(pytest.param(spread, marks=pytest.mark.exhaustive) for spread in ("full_shard", "hybrid_shard"))],
)
def test_digits_elastic_trains_while_workers_are_replaced(tmp_path: Path, strategy: str) -> None:
    """Others have all that they held, and no checkpoint could stand in for that."""
    workers, ends = ("4", [120]) if strategy == "hybrid_shard" else ("3", [120, 124])
    command = [sys.executable, "-m", "paceline", "run", "-n", workers, "--min", "1", "--max", "4", "--restarts", "2"]
    script = (EXAMPLES / "digits_elastic.py").read_text()
    assert "with step:" in script
    # The example itself, and one line more: workers that die in the middle of training, when all have come; so they
    # train slowly while somebody is on the way, whose interpreter starts.
    dying = script.replace("        with step:", "        die(step)\n        with step:").replace(
        "with paceline.join() as session:",
        f"def die(step):\n    import os, time\n    once = {str(tmp_path)!r} + f'/died-{{step.number}}'\n"
        f"    time.sleep(0.1 * (step.number < 120 and session.size < {workers}))\n"
        f"    if step.number in {ends} and step.rank == 1 and not os.path.exists(once):\n"
        "        open(once, 'x').close()\n        os.kill(os.getpid(), 9)\n\nwith paceline.join() as session:",
    )
    (tmp_path / "train.py").write_text(dying)
    (tmp_path / "audit").mkdir()
    script_under_audit = [str(AUDITED), str(tmp_path / "audit"), str(tmp_path / "train.py")]
    printed = run(*command, *script_under_audit, "--strategy", strategy)
    assert all((tmp_path / f"died-{step}").exists() for step in ends)
    found = re.search(r"accuracy ([\d.]+) after (\d+) steps", printed)
    assert found
    assert int(found[2]) == 30 * 12
    assert float(found[1]) >= 0.95
    notes = [json.loads(line) for file in (tmp_path / "audit").iterdir() for line in file.read_text().splitlines()]
    assert {note["event"] for note in notes} == {"job", "view", "attempt", "applied", "committed", "ended"}
    applied = {(note["step"], note["generation"]) for note in notes if note["event"] == "applied"}
    redone = [step for step, times in Counter(step for step, _ in applied).items() if times > 1]
    assert not redone, "steps that were applied in more than one generation"


@pytest.mark.slow
def test_an_evaluation_is_repeated_after_a_worker_dies(tmp_path: Path) -> None:
    """It is measured again by the workers that are left, each with a larger share."""
    script = (EXAMPLES / "digits_evaluation.py").read_text()
    where = "            accuracy = int(session.group"
    assert script.count(where) == 1
    dying = script.replace(
        where,
        f"            import os\n            once = {str(tmp_path / 'died')!r}\n"
        "            if session.rank == 1 and not os.path.exists(once):\n"
        f"                open(once, 'x').close()\n                os.kill(os.getpid(), 9)\n{where}",
    )
    (tmp_path / "train.py").write_text(dying)
    printed = run(
        *(sys.executable, "-m", "paceline", "run", "-n", "2", "--restarts", "1"),
        *(str(tmp_path / "train.py"), "--epochs", "10"),
    )
    assert (tmp_path / "died").exists()
    found = re.findall(r"epoch (\d+): accuracy ([\d.]+), (\d) workers", printed)
    assert [epoch for epoch, *_ in found] == ["5", "10"], printed
    assert float(found[-1][1]) >= 0.95
