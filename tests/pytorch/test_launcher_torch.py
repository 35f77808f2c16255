"""Scripts that were written for torchrun, unchanged, under `paceline run`."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

from support.command import command

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the launcher ties processes with prctl"),
]

SCRIPT = """
    import os
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    x = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(x)
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    print("rank", dist.get_rank(), "of", dist.get_world_size(), "sum", int(x.item()), "attempt", attempt, flush=True)
    if attempt < int(os.environ["TORCHELASTIC_MAX_RESTARTS"]) and dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    return str(tmp_path / "script.py")


def test_a_script_of_torch_s_on_one_node(script: str) -> None:
    with command("run", "--nproc-per-node", "2", script) as run:
        assert run.wait() == 0, str(run)
    assert sorted(run.stdout.splitlines()) == [f"[{r}] rank {r} of 2 sum 3 attempt 0" for r in range(2)]


def test_a_script_of_torch_s_on_two_nodes(script: str) -> None:
    with command("coordinator", "--listen", "127.0.0.1:0") as coordinator:
        coordinator.wait_for("listens on")
        address = coordinator.stderr.split("listens on ")[1].split()[0]
        where = ("--nnodes", "2", "--nproc-per-node", "2", "--coordinator", address)
        with (
            command("run", *where, "--node-rank", "0", script) as one,
            command("run", *where, "--node-rank", "1", script) as two,
        ):
            assert (one.wait(), two.wait()) == (0, 0), f"{one}{two}"
    assert sorted(one.stdout.splitlines()) == [f"[{r}] rank {r} of 4 sum 10 attempt 0" for r in (0, 1)]
    assert sorted(two.stdout.splitlines()) == [f"[{r}] rank {r} of 4 sum 10 attempt 0" for r in (2, 3)]


def test_a_script_of_torch_s_is_started_again(script: str) -> None:
    with command("run", "--nproc-per-node", "2", "--max-restarts", "1", script) as run:
        assert run.wait() == 0, str(run)
    expected = [f"[{r}] rank {r} of 2 sum 3 attempt {a}" for r in range(2) for a in range(2)]
    assert sorted(run.stdout.splitlines()) == expected


@pytest.mark.newest
def test_a_script_of_torch_s_over_paceline(script: str) -> None:
    path = Path(script)
    path.write_text(path.read_text().replace('"gloo"', '"paceline"'))
    with command("run", "--nproc-per-node", "2", "--max-restarts", "1", script) as run:
        assert run.wait() == 0, str(run)
    expected = [f"[{r}] rank {r} of 2 sum 3 attempt {a}" for r in range(2) for a in range(2)]
    assert sorted(run.stdout.splitlines()) == expected
