"""Trains in a storm of faults for as long as one likes: `make soak SECONDS=600 SEED=1`.

    python tests/elastic/soak.py --seconds 600 --seed 1

Prints a line for each fault and a summary; what is checked is in `support/elastic/afterwards.py`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # tests/, for `support`

from support.elastic.soak import soak


def main() -> None:
    """Reads the arguments and runs."""
    parser = argparse.ArgumentParser(description="elastic training in a storm of faults")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    wanted = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="paceline-soak-"))
    try:
        soak(wanted.seconds, wanted.seed, folder, lambda line: print(line, flush=True))  # noqa: T201  its task
    except AssertionError as error:
        raise SystemExit(str(error)[-20_000:]) from None


if __name__ == "__main__":
    main()
