"""`paceline run` with torchrun's flags: launchers are nodes, and their workers form one world at a time.

A world is fixed before its workers start, so scripts find RANK, WORLD_SIZE and MASTER_* as under torchrun. When a
worker fails, or a node joins or leaves, the launchers stop all workers and start another world.

    flags.py    PURE: what the flags mean, and which are refused
    meeting.py  the coordinator at which launchers meet; one of them serves it, unless there is one
    world.py    one world as a launcher sees it, and how the launcher learns that it is over
    rounds.py   runs one world after another
"""

from paceline.cli.torchrun.flags import Flags, Plan, Streams, read_flags, read_streams, token_of
from paceline.cli.torchrun.rounds import Workers, run_worlds

__all__ = ["Flags", "Plan", "Streams", "Workers", "read_flags", "read_streams", "run_worlds", "token_of"]
