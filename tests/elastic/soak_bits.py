"""Trains in microbatches in a storm of faults, seed after seed, which needs torch.

    python tests/elastic/soak_bits.py --seeds 200 --seconds 6 --model mlp

Each applied step of each run must have the digest of one process without faults. Each seed kills, freezes, adds and
drains workers, kills and restarts the coordinator, ends all workers, and goes on from a checkpoint with another number
of workers, in more faults. What has happened is counted. Without a model, seeds train all of them in turn.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # tests/, for `support`

from support.elastic.microbatch_problem import MODELS, problem_of
from support.elastic.same_bits import BitsSoak

SOAKED = (*MODELS, "mlp/full_shard")


def main() -> None:
    """Reads the arguments and runs."""
    parser = argparse.ArgumentParser(description="the same bits in a storm of faults")
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=6.0, help="of storms, for each seed")
    parser.add_argument("--model", choices=SOAKED, action="append", help="one of several; all if left out")
    parser.add_argument("--balance", action="store_true", help="workers differ in speed, and their shares follow it")
    wanted = parser.parse_args()
    models = wanted.model or SOAKED
    for model in models:
        problem_of(model)  # loads torch for a model of torch, so that workers are forked with it
    soaks = [BitsSoak(model, wanted.seconds, say, balance=wanted.balance) for model in models]
    for seed in range(wanted.first, wanted.first + wanted.seeds):
        soak = soaks[seed % len(soaks)]
        folder = Path(tempfile.mkdtemp(prefix="paceline-bits-"))
        try:
            soak.run(seed, folder)
        except AssertionError as error:
            raise SystemExit(str(error)[-20_000:]) from None
        shutil.rmtree(folder)
        soak.say_so_far()


def say(line: str) -> None:
    """A line at once."""
    print(line, flush=True)  # noqa: T201  its task


if __name__ == "__main__":
    main()
