"""A long job in a storm of faults, and what must be true of it afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from support.elastic.afterwards import check_commits, check_exits, check_weights, undone_generations
from support.elastic.cluster import Cluster, cluster
from support.elastic.rounds import PATIENCE, Rounds
from support.elastic.storm import FAILURE_TIMEOUT, MOST, Storm
from support.failover import place
from support.netns import Host

__all__ = ["soak", "soak_failover"]

_MODEL_SEED = 5
_PACE = 0.04


def soak(seconds: float, seed: int, folder: Path, say: Callable[[str], None], wrapper: str = "ddp") -> None:
    """Trains for so long while workers and the coordinator fail, and checks everything.

    Args:
        seconds: how long.
        seed: of the faults.
        folder: for the state file; on a failure everything that was told is in trace.txt there.
        say: where lines for people go.
        wrapper: of the model. Where one has what nobody else has, nobody is killed, only all the rest is done.

    Raises:
        AssertionError: something was not as promised; the text has the seed and the faults.
    """
    with cluster(
        folder, least=1, most=MOST + 2, total=1 << 30, failure_timeout=FAILURE_TIMEOUT, pace=_PACE,
        model_seed=_MODEL_SEED, wrapper=wrapper, log=True,
    ) as c:  # fmt: skip
        storm = Storm(c, seed, say, kills=wrapper == "ddp")
        _endure(c, storm, lambda: storm.blow(seconds), seed, say)


def soak_failover(rounds: int, seed: int, folder: Path, say: Callable[[str], None]) -> None:
    """Trains for so many rounds, each with a fault of two coordinators, of their etcd or of the network between all.

    Args:
        rounds: how many.
        seed: see `soak`.
        folder: see `soak`.
        say: see `soak`.

    Raises:
        AssertionError: see `soak`.
    """
    with place(folder, 3) as made, cluster(
        folder, least=1, most=MOST, total=1 << 30, failure_timeout=PATIENCE, pace=_PACE, model_seed=_MODEL_SEED,
        log=True, witness=False, coordinators=made.pair.addresses,
    ) as c:  # fmt: skip
        storm = Rounds(c, seed, say, made)
        _endure(c, storm, lambda: storm.play(rounds), seed, say, made.there)


def _endure(
    c: Cluster, storm: Storm, blow: Callable[[], None], seed: int, say: Callable[[str], None], host: Host | None = None
) -> None:
    """Starts trainers on a host, lets a storm blow upon them, and checks what they have told."""
    start = time.monotonic()
    try:
        c.start(4, host=host)
        c.wait_for_step(5)
        blow()
        storm.calm()
        c.wait(30)
        check_exits(c)
        last = check_weights(c, _MODEL_SEED)
        check_commits(c)
        c.check_samples(last)
        c.check_losses(last, seed=_MODEL_SEED, rtol=1e-7)
        undone = undone_generations(c)
        assert len(undone) <= storm.harm, f"{len(undone)} steps were redone, but {storm.harm} faults: {undone}"
    except BaseException as error:
        logs = "".join(f"=== log of {trainer.pid}\n{trainer.stderr}" for trainer in c.trainers)
        (c.folder / "trace.txt").write_text(f"{c}\n{logs}")
        faults = "\n".join(storm.done)
        say(f"FAILED with seed {seed}; everything that was told is in {c.folder}/trace.txt")
        raise AssertionError(f"seed {seed}: {error}\nfaults:\n{faults}") from error
    say(
        f"seed {seed}: {len(storm.done)} faults in {time.monotonic() - start:.0f} s, {last} steps in "
        f"{max(c.line().values())} generations, {len(undone)} redone; the longest pause was {storm.longest:.1f} s"
    )
