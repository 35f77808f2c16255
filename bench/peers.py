"""Runs the ranks of Gloo and Open MPI for `compare.py --vs`.

    python peers.py SOCKET gloo WORLD            a rank, started by `paceline run`
    python peers.py SOCKET openmpi WORLD         becomes mpirun, which starts
    python peers.py SOCKET openmpi-rank WORLD    for each rank

Gloo's ranks call torch.distributed on float32 tensors, with one thread for arithmetic in each process, as Paceline's
ranks do. They get their numbers from a file beside the conductor's socket, and find each other through files there.
Open MPI's ranks call mpi4py on NumPy arrays. mpirun gets three options: --oversubscribe allows more ranks than
processors, and then lets them yield while they wait, which is Open MPI's default for that number; with --bind-to none,
ranks bind themselves to the same share of the cores as the ranks of all implementations; root needs
--allow-run-as-root. Everything else is the default.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from conductor import ONE_THREAD, SOCKET, Recipe, clean_environment, tied
from contenders import Call, Lacking, RankSide, arrays_of, serve
from jobs import ROOT
from paceline._base.terminal import UsageError
from paceline.cli.launcher import shim
from paceline.launch._environment import allowed_cores, share_of_cores

PEERS = ("gloo", "openmpi")
"""The other implementations that can be measured beside Paceline."""


def peer_recipe(impl: str, world: int) -> Recipe:
    """Makes the recipe for another implementation.

    Args:
        impl: one of `PEERS`.
        world: number of ranks.
    """
    ranks = [__file__, SOCKET, impl, str(world)]
    if impl == "openmpi":
        return Recipe(impl, impl, "shm", tied(ranks), clean_environment(ONE_THREAD))
    # By default Gloo resolves the host's name, which may have no address. All ranks are on this host.
    variables = {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}
    command = tied(["-m", "paceline", "run", "-n", str(world), *ranks])
    return Recipe(impl, impl, "tcp", command, clean_environment(variables))


def check_peer(impl: str) -> None:
    """Checks that another implementation is installed; otherwise the error says how to install it."""
    if impl not in PEERS:
        raise UsageError(f"there is no {impl!r} to compare with: choose from {', '.join(PEERS)}")
    if impl == "gloo" and find_spec("torch") is None:
        raise UsageError("--vs gloo needs PyTorch, which is not installed: pip install torch")
    if impl == "openmpi":
        if find_spec("mpi4py") is None:
            raise UsageError("--vs openmpi needs mpi4py, which is not installed: pip install mpi4py")
        if not _has_mpirun():
            raise UsageError(
                "--vs openmpi needs Open MPI's mpirun, which is not installed: apt-get install openmpi-bin"
            )


def _has_mpirun() -> bool:
    """True if mpirun belongs to Open MPI; MPICH's has the same name but other options."""
    if shutil.which("mpirun") is None:
        return False
    said = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return "Open MPI" in said.stdout


class GlooRanks(RankSide):
    """A rank of torch.distributed's default process group. Only this contender's processes load the module torch."""

    def __init__(self, torch: Any) -> None:
        self._torch, self._dist = torch, torch.distributed
        self.rank, self.world = self._dist.get_rank(), self._dist.get_world_size()

    def barrier(self) -> None:
        """Calls the process group's barrier."""
        self._dist.barrier()

    def links(self, collective: str) -> Sequence[str]:
        """Returns TCP, Gloo's only transport here, even between processes of one host."""
        return ["tcp"]

    def lacks(self, error: RuntimeError) -> bool:
        """True if Gloo lacks the collective; it raises this at all ranks, before it sends anything."""
        return isinstance(error, NotImplementedError) or "not support" in str(error)

    def make_call(self, collective: str, size: int, place: str = "usual") -> Call:
        """Makes a call; all_reduce, reduce and broadcast are in place, because torch.distributed has no other form."""
        dist, rank, world = self._dist, self.rank, self.world
        if collective == "all_reduce" and place == "out":
            raise Lacking("torch.distributed sums in place only")
        # The older functions warn at every call, which costs as much as a small collective.
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        torch, in_place = self._torch, collective in ("all_reduce", "reduce")

        def empty(n: int) -> Any:
            return torch.empty(n, dtype=torch.float32).numpy()

        given, result = arrays_of(collective, size, rank, world, in_place=in_place, empty=empty)
        x, out = (None if array is None else torch.from_numpy(array) for array in (given, result))

        def parts(whole: Any) -> Any:
            return None if whole is None else list(whole.chunk(world))

        xs, outs = parts(x), parts(out)

        def shift() -> None:
            works = (dist.isend(x, (rank + 1) % world), dist.irecv(out, (rank - 1) % world))
            for work in works:
                work.wait()

        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(x),
            "reduce": lambda: dist.reduce(x, ROOT),
            "reduce_scatter": lambda: reduce_scatter(out, x),
            "broadcast": lambda: dist.broadcast(x, ROOT),
            "scatter": lambda: dist.scatter(out, xs, src=ROOT),
            "all_gather": lambda: all_gather(out, x),
            "gather": lambda: dist.gather(x, outs, dst=ROOT),
            "all_to_all": lambda: dist.all_to_all_single(out, x),
            "send_recv": shift,
            "barrier": dist.barrier,
        }
        return Call(calls[collective], result, in_place)


class OpenMpiRanks(RankSide):
    """A rank of MPI_COMM_WORLD (`rank.RankSide`)."""

    def __init__(self) -> None:
        from mpi4py import MPI  # starts MPI, which only a rank may do

        self._comm, self._in_place = MPI.COMM_WORLD, MPI.IN_PLACE
        self.rank, self.world = self._comm.Get_rank(), self._comm.Get_size()
        if (cores := share_of_cores(self.rank, self.world, allowed_cores())) is not None:
            os.sched_setaffinity(0, cores)

    def barrier(self) -> None:
        """Calls MPI's barrier."""
        self._comm.Barrier()

    def links(self, collective: str) -> Sequence[str]:
        """Returns shared memory, through which processes of one host communicate (the vader BTL)."""
        return ["shm"]

    def make_call(self, collective: str, size: int, place: str = "usual") -> Call:
        """Makes a call, in place only for Bcast, which has no other form, and for Allreduce if `place` is "in"."""
        comm, rank, world = self._comm, self.rank, self.world
        in_place = collective == "all_reduce" and place == "in"
        x, out = arrays_of(collective, size, rank, world, in_place=in_place)
        to, of = (rank + 1) % world, (rank - 1) % world
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: comm.Allreduce(self._in_place if in_place else x, out),
            "reduce": lambda: comm.Reduce(x, out, root=ROOT),
            "reduce_scatter": lambda: comm.Reduce_scatter_block(x, out),
            "broadcast": lambda: comm.Bcast(x, root=ROOT),
            "scatter": lambda: comm.Scatter(x, out, root=ROOT),
            "all_gather": lambda: comm.Allgather(x, out),
            "gather": lambda: comm.Gather(x, out, root=ROOT),
            "all_to_all": lambda: comm.Alltoall(x, out),
            "send_recv": lambda: comm.Sendrecv(x, to, recvbuf=out, source=of),
            "barrier": comm.Barrier,
        }
        return Call(calls[collective], out, in_place)


def mpirun_command(path: str, world: int, pid: int, *, root: bool) -> list[str]:
    """Returns the command line of mpirun, see the module. The ranks die with the process `pid`, which is mpirun's."""
    options = ["--oversubscribe", "--bind-to", "none", *(["--allow-run-as-root"] if root else [])]
    rank = [sys.executable, str(shim.__file__), str(pid), __file__, path, "openmpi-rank"]
    return ["mpirun", *options, "-n", str(world), *rank, str(world)]


def main(path: str, role: str, world: int) -> None:
    """Serves the conductor as a rank until it ends the benchmark; or becomes mpirun, which keeps this process's id."""
    if role == "openmpi":
        command = mpirun_command(path, world, os.getpid(), root=os.geteuid() == 0)
        os.execvp(command[0], command)
    if role == "openmpi-rank":
        serve(path, "openmpi", OpenMpiRanks())
        return
    import torch
    import torch.distributed as dist

    folder = Path(path).parent
    rank = dist.FileStore(str(folder / "gloo-ranks"), world).add("ranks", 1) - 1
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=(folder / "gloo").as_uri(), rank=rank, world_size=world)
    try:
        serve(path, "gloo", GlooRanks(torch))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
