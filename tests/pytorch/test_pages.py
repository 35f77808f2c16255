"""What README.md and docs/ tell users of PyTorch to type runs as it stands, alone and among workers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import paceline
from paceline import checkpoint
from support.blocks import PAGES, ROOT, Terminal, as_program, blocks, scripts
from support.ports import free_port

pytestmark = [pytest.mark.needs(what="torch"), pytest.mark.timeout(120)]

(LOOP,) = (block.code for block in scripts(ROOT / "docs/tutorials/elastic-torch.md", torch=True))
(REST,) = (block.code for block in scripts(ROOT / "docs/how-to/torch-training-run.md", torch=True))
OTHERS = [block for page in PAGES for block in scripts(page, torch=True) if block.code not in (LOOP, REST)]
TYPED = [
    page for page in PAGES if any(block.language == "console" and "torch" in block.flags for block in blocks(page))
]
LAUNCHERS = {
    "paceline run": ["-m", "paceline", "run", "-n", "2"],
    "paceline run --min 1": ["-m", "paceline", "run", "-n", "2", "--min", "1"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],  # a port of its own
}


def run(code: str, directory: Path, launcher: str | None = None) -> str:
    """What it prints, without the launcher's prefixes; alone if there is no launcher."""
    (directory / "train.py").write_text(code)
    done = subprocess.run(
        [sys.executable, *LAUNCHERS.get(launcher or "", []), str(directory / "train.py")],
        cwd=directory,
        env={**os.environ, "TMPDIR": str(directory)},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    return re.sub(r"^\[\d\] ", "", done.stdout, flags=re.MULTILINE)


def test_loop_and_how_to_run_in_one_process(tmp_path: Path) -> None:
    """In one process, for it takes seconds to load torch."""
    same_objects = REST.partition("    for step in")[0]
    load = "    state.load_state_dict(paceline.checkpoint.load(runs).state)\n"
    compare = "    assert all(torch.equal(a, torch.load(runs / 'model.pt')[n]) for n, a in net.state_dict().items())\n"
    check_the_rest(run(LOOP + REST + same_objects + load + compare, tmp_path), tmp_path)


SAY = "print(f'of {session.size}\\n', end='', flush=True)\n"  # one write: torchrun's workers share the stream


def test_loop_runs_under_paceline_run(tmp_path: Path) -> None:
    printed = run(LOOP + SAY, tmp_path, "paceline run").splitlines()
    assert [line for line in printed if not line.startswith("step ")] == ["of 2", "of 2"]
    assert sum(line.startswith("step ") for line in printed) == 4, "rank 0 prints its loss"


def test_how_to_runs_under_paceline_run(tmp_path: Path) -> None:
    check_the_rest(run(REST, tmp_path, "paceline run"), tmp_path)


def test_loop_and_how_to_run_under_torchrun(tmp_path: Path) -> None:
    """In one world of two, and not in two of one."""
    printed = run(LOOP + SAY + REST + SAY, tmp_path, "torchrun")
    assert printed.count("of 2") == 4, printed
    check_the_rest(printed, tmp_path)


def test_a_world_of_one_under_torchrun_needs_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("TORCHELASTIC_RUN_ID", "run"), ("RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    with paceline.join() as session:
        assert session.size == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    with paceline.join(min_workers=1) as session:  # whoever says so is alone all the same
        assert session.size == 1


def test_other_scripts_run_alone_and_in_two_workers(tmp_path: Path) -> None:
    program = as_program(OTHERS)
    run(program, tmp_path)
    run(program, tmp_path, "paceline run")


DIES = """
            if step.number == 71:
                if (step.world, step.rank) == (2, 1):
                    import os, signal
                    os.kill(os.getpid(), signal.SIGKILL)
                print(f"evaluated by {step.world}", flush=True)
"""


def test_early_stopping_counts_an_evaluation_once_if_a_worker_dies_in_its_step(tmp_path: Path) -> None:
    (code,) = (block.code for block in blocks(ROOT / "docs/how-to/stop-and-skip.md") if block.title == "torch_early.py")
    before, mark, after = code.partition("            if evaluates and ")
    # What was counted is undone with the step, although it is counted before the death here.
    counts, update, end = (mark + after).partition("        if best[")
    backward = before.index("            loss = ")
    printed = run(
        before[:backward] + counts + DIES + before[backward:] + update + end, tmp_path, "paceline run --min 1"
    )
    assert "evaluated by 1" in printed
    assert re.search(r"^rank 0: stopped after step 92, best loss 0.35\d, 9 skipped$", printed, re.MULTILINE)


@pytest.mark.parametrize("page", TYPED, ids=lambda page: str(page.relative_to(ROOT)))
def test_console_blocks_of_a_page_run(page: Path, tmp_path: Path) -> None:
    """From the top of the page to its end, in one folder."""
    with Terminal(tmp_path, {"7400": str(free_port())}) as terminal:
        for block in blocks(page):
            if "torch" in block.flags:
                terminal.show(block)


def check_the_rest(printed: str, directory: Path) -> None:
    """Each step was logged once; what was exported is the model of the last checkpoint."""
    import torch

    lines = re.findall(r"^(\d+) ([\d.]+)$", printed, re.MULTILINE)
    assert [int(step) for step, _ in lines] == list(range(1, 21)), printed
    assert float(lines[-1][1]) < float(lines[0][1])
    runs = directory / "runs"
    exported = torch.load(runs / "model.pt", weights_only=True)
    net = torch.nn.Linear(4, 2)
    net.load_state_dict(exported)
    saved = checkpoint.load(runs)
    assert saved is not None
    for name, array in saved.state["parts"]["model"]["arrays"].items():
        assert torch.equal(exported[name], torch.from_numpy(array))
