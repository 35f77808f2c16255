"""Trains in a storm of faults for as long as one likes: `make soak SECONDS=600 SEED=1`.

    python tests/elastic/soak.py --seconds 600 --seed 1
    python tests/elastic/soak.py --failover 200 --seed 1  # rounds of faults of several coordinators, etcd and networks

Prints a line for each fault and a summary; what is checked is in `support/elastic/afterwards.py`.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # tests/, for `support`

from support.elastic.soak import soak, soak_failover


def main() -> None:
    """Reads the arguments and runs."""
    parser = argparse.ArgumentParser(description="elastic training in a storm of faults")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--failover", type=int, metavar="ROUNDS", default=0)
    parser.add_argument("--seed", type=int, default=1)
    wanted = parser.parse_args()
    say = functools.partial(print, flush=True)
    folder = Path(tempfile.mkdtemp(prefix="paceline-soak-"))
    try:
        if wanted.failover:
            soak_failover(wanted.failover, wanted.seed, folder, say)
        else:
            soak(wanted.seconds, wanted.seed, folder, say)
    except AssertionError as error:
        raise SystemExit(str(error)[-20_000:]) from None


if __name__ == "__main__":
    main()
