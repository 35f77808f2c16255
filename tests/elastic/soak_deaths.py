"""Kills k of n workers at one instant, again and again, and measures how soon the others train on: `make soak`.

    python tests/elastic/soak_deaths.py --rounds 20 --seed 1

For each n from 4 to 8 so many rounds, with k from 2 to n - 1 by turns. No launcher reports the deaths: the coordinator
has the ends of the streams and what the survivors report. A time is that from the first SIGKILL until every survivor
has applied a step in a later generation. No round may take as long as silence would (`failure_timeout`); with QUIET=1,
on a machine where nothing else runs, 99 of 100 rounds must take less than 0.6 s.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # tests/, for `support`

from support.elastic.cluster import Cluster, Trainer, cluster

WORLDS = range(4, 9)
FAILURE_TIMEOUT = 3.0
MOST_S = 0.6
"""For 99 of 100 rounds on a machine at rest."""


def main() -> None:
    """Reads the arguments and runs."""
    parser = argparse.ArgumentParser(description="several workers die at one instant")
    parser.add_argument("--rounds", type=int, default=20, help="for each number of workers")
    parser.add_argument("--seed", type=int, default=1)
    wanted = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="paceline-deaths-"))
    try:
        _kill_again_and_again(wanted.rounds, random.Random(wanted.seed), folder, functools.partial(print, flush=True))
    except AssertionError as error:
        (folder / "trace.txt").write_text(str(error))
        raise SystemExit(f"{str(error).partition(chr(10))[0]}: {folder}/trace.txt says more") from None


def _kill_again_and_again(rounds: int, chance: random.Random, folder: Path, say: Callable[[str], None]) -> None:
    times: list[float] = []
    for world in WORLDS:
        place = folder / str(world)
        place.mkdir()
        with cluster(place, most=world, total=1 << 30, pace=0.02, witness=False, failure_timeout=FAILURE_TIMEOUT) as c:
            taken = [_round(c, world, 2 + number % (world - 2), chance) for number in range(rounds)]
            _end(c)
        say(f"{world} workers: {_in_words(taken)}; load {os.getloadavg()[0]:.1f}")
        times += taken
    say(f"all: {_in_words(times)}")
    quiet = os.environ.get("QUIET") == "1"
    worst, most = (_percentile(times, 99), MOST_S) if quiet else (max(times), FAILURE_TIMEOUT)
    assert worst < most, f"{worst:.2f} s, and less than {most} s were asked for"


def _round(c: Cluster, world: int, k: int, chance: random.Random) -> float:
    """Has `world` workers train, kills k of them, and returns the seconds until the others train on."""
    there = _running(c)
    there += c.start(world - len(there))
    c.wait_until(lambda: all(_size(trainer) == world and _generation(trainer) for trainer in there), "all train")
    before = max(map(_generation, there))
    time.sleep(chance.uniform(0.0, 0.1))  # any moment of a step
    victims = chance.sample(there, k)
    left = [trainer for trainer in there if trainer not in victims]
    began = time.monotonic()
    for victim in victims:
        victim.signal(signal.SIGKILL)
    c.wait_until(lambda: all(_generation(trainer) > before for trainer in left), "the others train on")
    for victim in victims:
        victim.process.wait(30.0)
    return max(float(next(e["at"] for e in t.of("applied") if e["generation"] > before)) for t in left) - began


def _end(c: Cluster) -> None:
    for trainer in _running(c):
        trainer.signal(signal.SIGTERM)
    codes = c.wait()
    assert set(codes.values()) == {0, -signal.SIGKILL}, str(c)


def _running(c: Cluster) -> list[Trainer]:
    return [trainer for trainer in c.trainers if trainer.process.poll() is None]


def _generation(trainer: Trainer) -> int:
    """The generation of the last step that it has applied, 0 for none."""
    return trainer.of("applied")[-1]["generation"] if trainer.of("applied") else 0


def _size(trainer: Trainer) -> int:
    """Of the world that it was in last."""
    return (trainer.of("view") or trainer.of("joined"))[-1]["size"] if trainer.of("joined") else 0


def _percentile(times: list[float], percent: int) -> float:
    """The least of these times that at least so many in a hundred do not exceed."""
    return sorted(times)[math.ceil(len(times) * percent / 100) - 1]


def _in_words(times: list[float]) -> str:
    slow, late = sum(taken >= FAILURE_TIMEOUT for taken in times), _percentile(times, 99)
    return (
        f"{len(times)} rounds, median {statistics.median(times):.2f} s, 99th percentile {late:.2f} s, longest "
        f"{max(times):.2f} s, {slow} of {FAILURE_TIMEOUT:g} s or more"
    )


if __name__ == "__main__":
    main()
