"""Runs in microbatches through faults, whose state after each step must have the digest of one undisturbed process."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from support.elastic.cluster import Cluster, cluster
from support.elastic.faults import kill
from support.elastic.storm import FAILURE_TIMEOUT, MOST, Storm

__all__ = ["BitsSoak", "check_bits", "come_and_go", "find_the_one_that_flips", "in_microbatches", "one_process_bits"]

_TRAINER = "support/elastic/microbatch_trainer.py"
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""As `paceline run` gives each worker."""


def in_microbatches(
    folder: Path, model: str, *, variables: Mapping[str, str] | None = None, **plan: Any
) -> AbstractContextManager[Cluster]:
    """A cluster of workers that train a model of `microbatch_problem`."""
    return cluster(folder, trainer=_TRAINER, model=model, variables={**_ONE_THREAD, **(variables or {})}, **plan)


def one_process_bits(folder: Path, model: str, total: int, microbatches: int = 8) -> dict[int, str]:
    """The digest after each step of a run in one process, without a coordinator."""
    brake = str(folder / "no-brake")
    plan = {
        "model": model,
        "total": total,
        "microbatches": microbatches,
        "faults": [],
        "brake": brake,
        "join_timeout": 30.0,
        "digest_every": 1,
    }
    command = [sys.executable, str(Path(__file__).parent.parent.parent / _TRAINER), json.dumps(plan)]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")} | _ONE_THREAD
    done = subprocess.run(command, input="\n", capture_output=True, text=True, env=variables, check=False)
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    return {event["step"]: event["digest"] for event in events if event.get("digest")}


def check_bits(
    c: Cluster, folder: Path, model: str, expected: Mapping[int, str] | None = None, microbatches: int = 8
) -> int:
    """Compares each digest that any worker has told; returns the number of the last step.

    `expected` are the digests of one process; None to train it here, with so many microbatches.
    """
    told = [event for trainer in c.trainers for kind in ("applied", "digest", "done") for event in trainer.of(kind)]
    told = [event for event in told if event["digest"]]
    assert told, f"nobody has told a digest\n{c}"
    last = max(event["step"] for event in told)
    known = one_process_bits(folder, model, last, microbatches) if expected is None else expected
    odd = [event for event in told if event["digest"] != known[event["step"]]]
    first = min((event["step"] for event in odd), default=0)
    assert not odd, f"other bits than in one process, first in step {first}\n{c}"
    return last


def applied_steps(c: Cluster) -> list[dict[str, Any]]:
    """What all workers told of the steps that they have applied."""
    return [event for trainer in c.trainers for event in trainer.of("applied")]


def come_and_go(
    model: str,
    folder: Path,
    *,
    begin: int = 3,
    join: int = 2,
    worlds: Sequence[int] = (2, 3, 4),
    reference: str = "",
    total: int = 40,
    **plan: Any,
) -> None:
    """The world has 3, 2, 3, 4 and 3 members: with 8 microbatches they have subtrees of all sizes.

    Args:
        model: what is trained.
        folder: for the files of the run.
        begin: number of workers at the start.
        join: number of workers that join, one after the other.
        worlds: sizes that occur.
        reference: the model of the one process, if it is another.
        total: the last step.
        plan: more for every trainer.

    Raises:
        AssertionError: a step has other bits than in one process.
    """
    with in_microbatches(folder, model, total=total, pace=0.04, **plan) as c:
        first = c.start(begin, [kill(at="forward", rank=1, step=4)])
        c.wait_for_step(6)
        for _ in range(join):
            (new,) = c.start(1)
            c.wait_for_step(1, [new])
        next(trainer for trainer in first if trainer.process.poll() is None).signal(signal.SIGTERM)
        codes = c.wait()
        assert sorted(codes.values()) == [-9, *[0] * (begin - 1 + join)], str(c)
        found = {event["world"] for trainer in c.trainers for event in trainer.of("applied")}
        assert found >= set(worlds), f"worlds {found}\n{c}"
        assert check_bits(c, folder, reference or model) == total


def find_the_one_that_flips(model: str, folder: Path) -> None:
    """Three workers check a microbatch in each step; one of them flips a bit of its gradients from step 5 on.

    Raises:
        AssertionError: another one was named, or none; or a step has other bits than in one process.
    """
    with in_microbatches(folder, model, most=3, total=16, check_every=1) as c:
        (*_, wrong) = trainers = [*c.start(2, go=False), *c.start(1, go=False, flips_from=5)]
        for trainer in trainers:
            trainer.go()
        codes = c.wait()
        assert sorted(codes.values()) == [0, 0, 3], str(c)
        (error,) = wrong.of("error")
        assert error["type"] == "DivergenceError", str(c)
        (rank,) = error["ranks"]
        assert rank == wrong.of("joined")[0]["rank"], str(c)
        assert f"rank {rank} (" in error["text"], error["text"]
        assert " computed other gradients of microbatch " in error["text"], error["text"]
        assert check_bits(c, folder, model) == 16


class BitsSoak:
    """Storms of faults, seed after seed, with the digests of one process beside them.

    Each seed trains twice: all workers of the first run are killed or leave at once, and the second run goes on from a
    checkpoint with another number of workers.

    Args:
        model: of `microbatch_problem`. If its state is spread, no part of it may be lost.
        seconds: length of both storms together.
        say: where lines for people go.
        balance: shares follow the speeds of the workers, which differ by their process ids.

    Attributes:
        counts: what has happened in all seeds.
        worlds: numbers of workers that have applied a step.
    """

    def __init__(self, model: str, seconds: float, say: Callable[[str], None], *, balance: bool = False) -> None:
        self.counts: Counter[str] = Counter()
        self.worlds: set[int] = set()
        self._model = model
        self._is_spread = "shard" in model
        self._seconds = seconds
        self._say = say
        self._balance = balance
        self._known: dict[int, str] = {}

    def say_so_far(self) -> None:
        """Says what has happened in all seeds."""
        told = ", ".join(f"{count} {what}" for what, count in self.counts.items())
        done = self.counts["restarts from a checkpoint at another W"]
        self._say(f"{self._model}, {done} seeds so far, {min(self.worlds)} to {max(self.worlds)} workers: {told}")

    def run(self, seed: int, folder: Path) -> None:
        """One seed.

        Raises:
            AssertionError: a step has other bits than in one process; the text has the seed and the faults.
        """
        choices = random.Random(seed)
        before, after = choices.sample(range(1, 5), 2)
        runs = {"checkpoint_dir": str(folder / "runs"), "checkpoint_every": 2}
        counts: Counter[str] = Counter()
        with self._stormy(folder / "before", seed, before, counts, **runs) as c:
            for trainer in c.trainers:
                trainer.signal(choices.choice([signal.SIGKILL, signal.SIGTERM]))
        with self._stormy(folder / "after", -seed, after, counts, **runs) as c:
            first = min(event["step"] for event in applied_steps(c))
            assert first > 1, f"seed {seed}: the second run did not go on from a checkpoint\n{c}"
            counts["restarts from a checkpoint at another W"] += 1
            for trainer in c.trainers:
                trainer.signal(signal.SIGTERM)
        self.counts += counts
        told = ", ".join(f"{count} {what}" for what, count in counts.items())
        self._say(f"{self._model}, seed {seed}: {before} and {after} workers at first; {told}; all with the same bits")

    @contextmanager
    def _stormy(self, folder: Path, seed: int, world: int, counts: Counter[str], **plan: Any) -> Iterator[Cluster]:
        """A cluster behind a storm; the block ends all its workers, whose steps are checked then."""
        folder.mkdir()
        # torch's first steps are silent for a second on a busy machine.
        patience = FAILURE_TIMEOUT if self._model.startswith("mlp") else 3 * FAILURE_TIMEOUT
        plan |= {"least": 1, "most": MOST + 2, "total": 1 << 30, "failure_timeout": patience, "pace": 0.04, "log": True}
        plan |= {"digest_every": 3}
        if self._balance:
            plan |= {"balance": True, "uneven": True, "microbatch_s": 0.008, "pace": 0.0}
        with in_microbatches(folder, self._model, **plan) as c:
            faults: list[str] = []
            storm = Storm(c, seed, faults.append, gaps=(0.1, 0.6), stall=60.0, mends=self._is_spread)
            try:
                c.start(world)
                c.wait_for_step(4)
                storm.blow(self._seconds / 2)
                lost = [line for t in c.trainers for line in t.stderr.splitlines() if "state is lost" in line]
                assert not (self._is_spread and lost), f"a part of the state was lost: {lost[0]}"
                yield c
                c.wait(60)
                steps = applied_steps(c)
                last = max(event["step"] for event in steps)
                if last not in self._known:
                    self._known = one_process_bits(folder, self._model, 2 * last)
                check_bits(c, folder, self._model, self._known)
            except BaseException as error:
                logs = "".join(f"=== log of {trainer.pid}\n{trainer.stderr}" for trainer in c.trainers)
                (folder / "trace.txt").write_text(f"{c}\n{logs}")
                self._say(f"FAILED with seed {abs(seed)}; everything that was told is in {folder}/trace.txt")
                told = "\n".join(faults)
                raise AssertionError(f"seed {abs(seed)}: {error}\nfaults:\n{told}") from error
        counts.update(storm.counts)
        counts["steps"] += len({event["step"] for event in steps})
        counts["steps undone and taken again"] += sum(c.redone().values())
        if self._balance:
            shared = (event for trainer in c.trainers for event in trainer.of("share") if event["shares"])
            counts["steps with unequal shares"] += len({event["step"] for event in shared})
        self.worlds |= {event["world"] for event in steps}
