"""Many schedules of one job, each with its own faults: no invariant breaks, and every job finishes.

A seed that fails prints its events; `simulation.runner.replay(seed, shape)` runs it again, with what the code logs.
"""

from dataclasses import replace

import pytest
from simulation.runner import run
from simulation.world import Shape

SMALL = Shape()
PAIRS = Shape(members=(1, 3), steps=(3, 8), faults=(3, 9))
SPREAD = Shape(members=(2, 4), faults=(2, 7), node_size=0)
COPIES = Shape(members=(3, 5), faults=(2, 7), node_size=0, redundancy=2)
NODES = Shape(members=(3, 6), faults=(2, 7), node_size=2)
HOSTS = Shape(members=(4, 7), faults=(2, 7), node_size=2, hosts=3)
SEEN = Shape(members=(3, 5), faults=(2, 7), hosts=2, containers=2)
AWAY = Shape(members=(2, 4), away=True, step_timeout=600.0)
FORGETFUL = Shape(faults=(2, 6), loses_disk=True)
LOST = replace(FORGETFUL, faults=(4, 9), directory="local", disks=True)
FIXED = Shape(members=(2, 4), fixed=True)
STUCK = Shape(members=(2, 4), stuck=True)
STUCK_MOST = Shape(members=(4, 5), faults=(7, 12), stuck=True, slow=True)
DISKS = Shape(members=(2, 4), faults=(2, 6), directory="shared", disks=True)
LATE = Shape(members=(2, 4), faults=(4, 9), fixed=True, late=True, step_timeout=600.0)
BUSY = Shape(members=(2, 5), busy=True, step_timeout=600.0)
SLOW = Shape(members=(3, 5), steps=(2, 3), faults=(4, 9), slow=True, fixed=True)
TWICE = Shape(members=(2, 4), faults=(2, 7), twice=True)
MICROBATCHES = Shape(members=(2, 4), faults=(2, 7), microbatches=True)
BALANCED = replace(MICROBATCHES, balanced=True, steps=(14, 20))
RECLAIMED = Shape(members=(5, 7), steps=(2, 3), faults=(1, 3), slow=True)
REPLICAS = Shape(members=(2, 3), faults=(2, 7), replica_size=2)

SHAPES = {
    "small": (SMALL, 500),
    "pairs": (PAIRS, 200),
    "spread": (SPREAD, 150),
    "nodes": (NODES, 150),
    "hosts": (HOSTS, 60),
    "hosts-of-3": (replace(HOSTS, node_size=3), 60),
    "away": (AWAY, 100),
    "away-spread": (replace(AWAY, node_size=0), 60),
    "away-nodes": (replace(AWAY, node_size=2), 60),
    "forgetful": (FORGETFUL, 150),
    "forgetful-spread": (replace(FORGETFUL, node_size=0), 60),
    "forgetful-nodes": (replace(FORGETFUL, node_size=2), 60),
    "forgetful-disks": (replace(FORGETFUL, directory="local"), 60),
    "fixed": (FIXED, 150),
    "claimed": (replace(FIXED, claimed=True), 100),
    "stuck": (STUCK, 150),
    "stuck-fixed": (replace(STUCK, fixed=True), 80),
    "stuck-most": (STUCK_MOST, 80),
    "disks": (DISKS, 150),
    "local-disks": (replace(DISKS, directory="local"), 150),
    "disks-spread": (replace(DISKS, node_size=0), 80),
    "slow": (SLOW, 100),
    "drains": (replace(SPREAD, drains=True), 60),
    "lost": (LOST, 100),
    "late": (LATE, 80),
    "reclaimed": (RECLAIMED, 50),
    "twice": (TWICE, 150),
    "twice-disks": (replace(TWICE, directory="shared", disks=True), 80),
    "stuck-spread": (replace(STUCK, node_size=0), 60),
    "stuck-nodes": (replace(STUCK, node_size=2), 60),
    "busy": (BUSY, 80),
    "busy-fixed": (replace(BUSY, fixed=True), 80),
    "busy-spread": (replace(BUSY, node_size=0), 60),
    "seen": (SEEN, 100),
    "seen-spread": (replace(SEEN, node_size=0), 60),
    "microbatches": (MICROBATCHES, 100),
    "microbatches-twice": (replace(MICROBATCHES, twice=True), 50),
    "microbatches-slow": (replace(MICROBATCHES, slow=True, steps=(2, 3), faults=(3, 7)), 50),
    "microbatches-forgetful": (replace(MICROBATCHES, loses_disk=True), 40),
    "microbatches-away": (replace(AWAY, microbatches=True), 40),
    "microbatches-reclaimed": (replace(RECLAIMED, members=(3, 5), microbatches=True), 40),
    "zombies": (replace(SEEN, zombies=True), 100),
    "zombies-spread": (replace(SEEN, node_size=0, zombies=True), 60),
    "replicas": (REPLICAS, 400),
    "replicas-three": (replace(REPLICAS, replica_size=3), 160),
    "replicas-drains": (replace(REPLICAS, drains=True), 160),
    "replicas-slow": (replace(REPLICAS, steps=(2, 3), slow=True), 100),
    "replicas-away": (replace(AWAY, members=(2, 3), replica_size=2), 100),
    "replicas-fixed": (replace(REPLICAS, fixed=True), 100),
    "copies": (COPIES, 200),
    "copies-mixed": (replace(COPIES, mixed=True), 60),
    "copies-three": (replace(COPIES, redundancy=3), 80),
    "copies-away": (replace(AWAY, members=(3, 4), node_size=0, redundancy=2), 60),
    "copies-drains": (replace(COPIES, drains=True), 80),
    "copies-disks": (replace(DISKS, node_size=0, redundancy=2), 60),
    "copies-seen": (replace(SEEN, node_size=0, redundancy=2), 60),
    "copies-zombies": (replace(SEEN, node_size=0, redundancy=2, zombies=True), 60),
    "balanced": (BALANCED, 100),
    "balanced-twice": (replace(BALANCED, twice=True), 50),
    "launched": (replace(SMALL, launched=True), 100),
    "launched-replicas": (replace(REPLICAS, launched=True), 60),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_job_with_faults_finishes(name: str) -> None:
    shape, count = SHAPES[name]
    first = 100_000 * list(SHAPES).index(name)
    for seed in range(first, first + count // 16):
        run(seed, shape)


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        # The coordinator is killed over a verdict, and a member hangs.
        ("stuck-most", 20_000_070),
        # A member trained on alone while it was cut off, and comes back while others wait to begin.
        ("away", 50_000_092),
        # It is told to leave before it can say what it holds.
        ("away", 70_000_142),
        # Ranks are claimed, and a member that came back and is to leave keeps its rank from others.
        ("claimed", 73_000_156),
        # The coordinator's disk is an older copy, which takes a spare for a member.
        ("forgetful-nodes", 20_000_011),
        # A member that has been in a generation comes back twice.
        ("forgetful-nodes", 70_001_135),
        # A coordinator with an older copy hears from a newcomer before it does from the members.
        ("forgetful-spread", 70_000_592),
        # A rank of a replica is evicted right after its first view, which another rank has not got.
        ("launched-replicas", 136),
        # A rank of a replica ends before the coordinator knows it, while the others join, and no launcher sees it.
        ("replicas-three", 72),
        # A rank is interrupted in the update of the last step, which its mate has applied and closed.
        ("replicas-slow", 20_000_045),
        # The coordinator gives up a replica whose ranks hold two different states.
        ("replicas", 20_000_513),
    ],
)
def test_a_schedule_that_once_failed_finishes(name: str, seed: int) -> None:
    run(seed, SHAPES[name][0])


def test_a_job_without_faults_needs_no_restart_and_few_generations() -> None:
    for seed in range(50):
        outcome = run(seed, Shape(faults=(0, 0)))
        assert outcome.generations <= 2 + 3  # one to compare, one to train, and one for whoever came late
        assert outcome.restarts == 0


def test_a_seed_repeats_exactly() -> None:
    assert run(4711) == run(4711)
    assert run(4712, MICROBATCHES) == run(4712, MICROBATCHES)


def test_schedules_with_microbatches_repair_steps() -> None:
    assert sum(run(seed, MICROBATCHES).repairs for seed in range(10)) > 2


def test_balanced_schedules_have_steps_with_unequal_shares() -> None:
    assert sum(run(seed, BALANCED).unequal for seed in range(10)) > 20


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SHAPES)
def test_many_more_schedules(name: str) -> None:
    shape, count = SHAPES[name]
    for seed in range(10_000_000, 10_000_000 + count // 4):
        run(seed, shape)


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SHAPES)
def test_many_more_schedules_exhaustively(name: str) -> None:
    shape, count = SHAPES[name]
    for seed in range(20_000_000, 20_000_000 + 3 * count):
        run(seed, shape)
