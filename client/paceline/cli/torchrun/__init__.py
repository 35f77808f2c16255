"""`paceline run` with torchrun's flags: launchers are nodes, whose workers make up one world at a time.

A world is fixed before its workers start, so that scripts find RANK, WORLD_SIZE and MASTER_* as under torchrun. When a
worker fails, or a node comes or goes, all workers are stopped and another world is started.

    flags.py    PURE: what the flags mean, and what is refused
    meeting.py  where launchers meet: one of them serves a coordinator there, unless there is one
    world.py    one world as a launcher sees it, and how it hears that it is over
    rounds.py   one world after another
"""

from paceline.cli.torchrun.flags import Flags, Plan, Streams, read_flags, read_streams, token_of
from paceline.cli.torchrun.rounds import Workers, run_worlds

__all__ = ["Flags", "Plan", "Streams", "Workers", "read_flags", "read_streams", "run_worlds", "token_of"]
