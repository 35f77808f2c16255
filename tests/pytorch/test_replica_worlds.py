"""`paceline run` gives the ranks of each replica, or workers of a fixed number, a world of torch.distributed."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from support.command import NOT_JOINED, command, wait_until_gone

pytestmark = [
    pytest.mark.needs(what="torch"),
    pytest.mark.timeout(180),
    pytest.mark.skipif(sys.platform != "linux", reason="the launcher ties processes with prctl"),
]

MEETS = """
import os, signal, sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
t = torch.tensor([10.0 ** int(os.environ["LOCAL_RANK"])])
dist.all_reduce(t)
os.write(1, f"pid {os.getpid()} sum {int(t)} of {dist.get_world_size()}\\n".encode())
if os.environ["LOCAL_RANK"] == "1":
    try:
        os.mkdir(sys.argv[1])
    except FileExistsError:
        pass
    else:
        os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(t)  # with a mate that is killed, or comes back
dist.destroy_process_group()
"""


@pytest.mark.newest
def test_a_replica_restarts_with_a_new_master_port_after_a_rank_was_killed(tmp_path: Path) -> None:
    (tmp_path / "meets.py").write_text(MEETS)
    script = (str(tmp_path / "meets.py"), str(tmp_path / "killed"))
    arguments = ("-n", "4", "--replica-size", "2", "--restarts", "1", "--coordinator", "127.0.0.1:1")
    with command("run", *arguments, *script) as run:
        assert run.wait(120.0) == 0, str(run)
    found = re.findall(r"pid (\d+) sum (\d+) of 2", run.stdout)
    sums = [int(total) for _, total in found]
    assert (set(sums), sums.count(1100)) == ({11, 1100}, 2), "each replica sums its own ranks"
    assert sums.count(11) in (3, 4), "the mate of the killed rank may not have got the first sum"
    (said,) = [line for line in run.complaints.splitlines() if line.startswith("paceline: ")]
    assert re.fullmatch(
        r"paceline: restarting replica #0 \(rank 1, pid \d+ was killed by SIGKILL\) as a whole in 0.1 s "
        r"\(its only restart\)",
        said,
    )
    wait_until_gone([int(pid) for pid, _ in found])


def test_a_process_group_made_with_a_store_gets_no_warning(tmp_path: Path) -> None:
    code = """
import os, torch.distributed as dist
rank = int(os.environ["RANK"])
store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, is_master=not rank)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
dist.destroy_process_group()
"""
    (tmp_path / "store.py").write_text(code)
    with command("run", "-n", "2", str(tmp_path / "store.py")) as run:
        assert run.wait(60.0) == 0, str(run)
    assert NOT_JOINED not in run.stderr


@pytest.mark.newest
@pytest.mark.parametrize("backend", ["gloo", "paceline"])
def test_a_script_for_torchrun_runs_under_paceline_run(tmp_path: Path, backend: str) -> None:
    """It has not joined Paceline's job, and nothing is wrong with that."""
    code = f"""
import torch, torch.distributed as dist
import paceline.torch
dist.init_process_group("{backend}")
t = torch.ones(1)
dist.all_reduce(t)
print("sum", int(t), flush=True)
dist.destroy_process_group()  # else Gloo may abort the process at its end
"""
    (tmp_path / "ddp.py").write_text(code)
    with command("run", "-n", "2", str(tmp_path / "ddp.py")) as run:
        assert run.wait(60.0) == 0, str(run)
    assert re.findall(r"sum (\d+)", run.stdout) == ["2", "2"]
    assert NOT_JOINED not in run.stderr


def test_a_torch_script_without_a_process_group_gets_the_warning(tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text("import torch")
    with command("run", "-n", "2", str(tmp_path / "alone.py")) as run:
        assert run.wait(60.0) == 0, str(run)
    assert "each of the 2 ran the whole script by itself" in run.stderr
