"""Open MPI's ranks in `paceline bench --vs openmpi`, and the mpirun that starts them.

    python -m paceline.cli.bench.openmpi SOCKET NAME mpirun WORLD    becomes mpirun, which starts
    python -m paceline.cli.bench.openmpi SOCKET NAME rank            for each rank

mpirun is told three things. --oversubscribe: more ranks than processors are allowed, and then give way while they wait,
as it is Open MPI's default for such a number. --bind-to none: ranks take the share of the cores that everybody's ranks
have (`launcher.cores`) by themselves. --allow-run-as-root, for root. All else is as it comes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import numpy as np

from paceline.arrays import Array
from paceline.cli.bench.calls import Call
from paceline.cli.bench.rank import Lacking, Ranks, serve
from paceline.cli.bench.sizes import ELEMENT_BYTES
from paceline.cli.bench.values import ROOT, given
from paceline.cli.launcher import shim
from paceline.cli.launcher.cores import allowed_cores, share_of_cores

__all__ = ["OpenMpiRanks", "main", "mpirun_command"]


class OpenMpiRanks(Ranks):
    """A rank of MPI_COMM_WORLD (`rank.Ranks`): mpi4py's calls on NumPy's arrays."""

    def __init__(self) -> None:
        from mpi4py import MPI  # starts MPI, which only a rank may do

        self._comm, self._in_place = MPI.COMM_WORLD, MPI.IN_PLACE
        self.rank, self.world = self._comm.Get_rank(), self._comm.Get_size()
        if (cores := share_of_cores(self.rank, self.world, allowed_cores())) is not None:
            os.sched_setaffinity(0, cores)

    def barrier(self) -> None:
        """MPI's own."""
        self._comm.Barrier()

    def links(self, collective: str) -> Sequence[str]:
        """Processes of one host share memory (the vader BTL)."""
        return ["shm"]

    def make_call(self, collective: str, size: int, place: str = "usual") -> Call:
        """None is in place, but for Bcast, which is never otherwise, and an Allreduce that is asked to be."""
        comm, rank, world, at_root = self._comm, self.rank, self.world, self.rank == ROOT
        n = size // ELEMENT_BYTES
        part = n // world

        def full(n: int) -> Array:
            return np.full(n, given(rank, world, in_place=False), np.float32)

        def empty(n: int) -> Array:
            return np.full(n, 0.0, np.float32)  # written to at once, as in `calls.make_call`

        match collective:
            case "all_reduce" if place == "in":
                out = np.full(n, given(rank, world, in_place=True), np.float32)
                return Call(lambda: comm.Allreduce(self._in_place, out), out, in_place=True)
            case "all_reduce":
                x, out = full(n), empty(n)
                return Call(lambda: comm.Allreduce(x, out), out)
            case "reduce":
                x, at = full(n), empty(n) if at_root else None
                return Call(lambda: comm.Reduce(x, at, root=ROOT), at)
            case "reduce_scatter":
                x, out = full(n), empty(part)
                return Call(lambda: comm.Reduce_scatter_block(x, out), out)
            case "broadcast":
                x = full(n)
                return Call(lambda: comm.Bcast(x, root=ROOT), x)
            case "scatter":
                xs, out = full(n) if at_root else None, empty(part)
                return Call(lambda: comm.Scatter(xs, out, root=ROOT), out)
            case "all_gather":
                x, out = full(part), empty(n)
                return Call(lambda: comm.Allgather(x, out), out)
            case "gather":
                x, at = full(part), empty(n) if at_root else None
                return Call(lambda: comm.Gather(x, at, root=ROOT), at)
            case "all_to_all":
                x, out = full(n), empty(n)
                return Call(lambda: comm.Alltoall(x, out), out)
            case "send_recv":
                x, out = full(n), empty(n)
                to, of = (rank + 1) % world, (rank - 1) % world
                return Call(lambda: comm.Sendrecv(x, to, recvbuf=out, source=of), out)
            case "barrier":
                return Call(comm.Barrier, None)
        raise Lacking(f"there is no {collective}")


def mpirun_command(path: str, name: str, world: int, pid: int, *, root: bool) -> list[str]:
    """The command line of mpirun; see the module.

    Args:
        path: of the conductor's socket.
        name: of this contender.
        world: number of ranks.
        pid: mpirun's process id, with whose end the ranks end.
        root: the user is root.
    """
    options = ["--oversubscribe", "--bind-to", "none", *(["--allow-run-as-root"] if root else [])]
    rank = [sys.executable, str(shim.__file__), str(pid), "-m", "paceline.cli.bench.openmpi", path, name, "rank"]
    return ["mpirun", *options, "-n", str(world), *rank]


def main(path: str, name: str, role: str, *, world: int) -> None:
    """Becomes mpirun, which keeps this process's id and its tie to the bench; or serves the conductor as a rank."""
    if role == "mpirun":
        command = mpirun_command(path, name, world, os.getpid(), root=os.geteuid() == 0)
        os.execvp(command[0], command)  # noqa: S606 - no shell is the point
    serve(path, name, OpenMpiRanks())


if __name__ == "__main__":
    main(*sys.argv[1:4], world=int(sys.argv[4]) if sys.argv[4:] else 0)
