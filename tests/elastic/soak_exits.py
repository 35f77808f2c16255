"""Runs short jobs whose members leave as soon as they are done: each must end well, in whatever order they leave.

    python tests/elastic/soak_exits.py --runs 1000 --at-once 8 --seed 1
    python tests/elastic/soak_exits.py --runs 20 --torch        # on torch's backend "paceline"; needs torch

Each run has 2 to 5 members that join, call one collective (or none) and exit. Jobs that run at one time are the load.
In most runs one member hears late of its view, or all open their links to rank 0 late, so that others have left by
then. Prints a line for each run that failed, and a summary.
"""

from __future__ import annotations

import argparse
import functools
import random
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # tests/, for `support`

from paceline.testing import coordinator
from support.ports import free_port
from support.processes import Worker

WORLDS = (2, 3, 4, 5)

TIMEOUT_S = 60.0
"""For the members of one job. One that takes longer hangs, and writes its stacks before."""

CALLS = {
    "nothing": "pass",
    "broadcast": "assert group.broadcast(np.arange(3.0) if rank == 0 else None)[2] == 2",
    "reduce": "total = group.reduce(np.ones(3)); assert rank or total[0] == world",
    "gather": "rows = group.gather(np.full(1, rank)); assert rank or rows.tolist() == list(range(world))",
    "all_reduce": "assert group.all_reduce(np.ones(3))[0] == world",
    "barrier": "group.barrier()",
}

TORCH_CALLS = {
    "nothing": "pass",
    "broadcast": "t = torch.arange(3.0) * (rank == 0); dist.broadcast(t, 0); assert t[2] == 2",
    "reduce": "t = torch.ones(3); dist.reduce(t, 0); assert rank or t[0] == world",
    "gather": (
        "rows = [torch.empty(1) for _ in range(world)] if rank == 0 else None; "
        "dist.gather(torch.full((1,), float(rank)), rows)"
    ),
    "all_reduce": "t = torch.ones(3); dist.all_reduce(t); assert t[0] == world",
    "barrier": "dist.barrier()",
}

LATE = """
import asyncio, faulthandler
from paceline._links import grpc_mesh
from paceline._session.member import MemberConnection

late_view, late_links = float(os.environ["LATE_VIEW"]), float(os.environ["LATE_LINKS"])
adopt, say_hello = MemberConnection._adopt, grpc_mesh._say_hello

async def adopt_late(member, view):
    await asyncio.sleep(late_view if view.rank == view.world_size - 1 else 0.0)
    await adopt(member, view)

async def say_hello_late(link, *args):
    await asyncio.sleep(late_links if link.peer.rank == 0 else 0.0)
    return await say_hello(link, *args)

MemberConnection._adopt, grpc_mesh._say_hello = adopt_late, say_hello_late
faulthandler.dump_traceback_later(50.0)  # it hangs: this says where
"""

JOIN = """
session = paceline.join()
group, rank, world = session.group, session.rank, session.size
"""

JOIN_TORCH = """
import torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("paceline")
rank, world = dist.get_rank(), dist.get_world_size()
"""


def main() -> None:
    """Reads the arguments and runs."""
    parser = argparse.ArgumentParser(description="members that leave as soon as they are done")
    parser.add_argument("--runs", type=int, default=1000, help="of each call")
    parser.add_argument("--at-once", type=int, default=8, help="jobs that run at one time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--calls", nargs="+", choices=CALLS, default=list(CALLS))
    parser.add_argument("--torch", action="store_true", help='on torch\'s backend "paceline"')
    wanted = parser.parse_args()
    if wanted.torch:
        import torch  # noqa: F401  so that workers are forked from a process that has loaded it
    say = functools.partial(print, flush=True)
    failed: Counter[str] = Counter()
    began = time.monotonic()
    with coordinator() as address, ThreadPoolExecutor(wanted.at_once) as pool:

        def run(number: int) -> None:
            call = wanted.calls[number % len(wanted.calls)]
            chance = random.Random(f"{wanted.seed}/{number}")
            world, leaves = chance.choice(WORLDS), chance.choice([True, False])
            view, links = chance.choice([(0.0, 0.0), (0.0, 0.0), (0.05, 0.0), (0.3, 0.0), (0.0, 0.05), (0.0, 0.3)])
            environment = {"LATE_VIEW": str(view), "LATE_LINKS": str(links), "PACELINE_JOB": f"exits-{number}"}
            if wanted.torch:
                port = str(free_port())
                meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world)}
                code = LATE + JOIN_TORCH + TORCH_CALLS[call] + ("\ndist.destroy_process_group()" if leaves else "")
                each = [{**environment, **meeting, "RANK": str(rank)} for rank in range(world)]
            else:
                job = {"PACELINE_COORDINATOR": address, "PACELINE_MIN_WORKERS": str(world)}
                code = LATE + JOIN + CALLS[call] + ("\nsession.leave()" if leaves else "")
                each = [{**environment, **job}] * world
            if trouble := _trouble_of([Worker(code, environment) for environment in each]):
                failed[call] += 1
                say(f"run {number}: {call}, W = {world}, {environment}, leaves {leaves}: {trouble}")

        list(pool.map(run, range(wanted.runs * len(wanted.calls))))
    say(f"{wanted.runs} runs each of {', '.join(wanted.calls)} in {time.monotonic() - began:.0f} s")
    if failed:
        raise SystemExit("failed: " + ", ".join(f"{count} of {call}" for call, count in failed.items()))


def _trouble_of(members: list[Worker]) -> str:
    """Waits for the members of a job; returns what went wrong, empty if all ended well."""
    try:
        codes = [member.wait(TIMEOUT_S) for member in members]
        how = f"exit codes {codes}" if any(codes) else ""
    except subprocess.TimeoutExpired as error:
        how = str(error)
    for member in members:
        member.close()
    return "\n".join([how, *(member.stderr for member in members)]) if how else ""


if __name__ == "__main__":
    main()
