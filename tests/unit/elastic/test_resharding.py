"""From W members to W': what is spread moves, and training is that of one process, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from unit.elastic.resharding import Trainee, fill_from, form, one_process, reshard, together

import paceline
from paceline import checkpoint
from paceline._elastic.train_state import TrainState
from paceline._group import Group
from paceline._links.local import local_meshes
from paceline.checkpoint.pieces import Shard, pieces_of
from paceline.checkpoint.tree import split_shards
from paceline.errors import PacelineError, SizeMismatch, UnsupportedOp
from paceline_protocol import WHOLE, Share
from support.parts import SOON, each

EXPECTED = one_process(8)
WORLDS = range(1, 6)
CASES = [
    *(("full", w, w2) for w, w2 in product(WORLDS, WORLDS)),
    *(("hybrid2", w, w2) for w, w2 in product((2, 4), (2, 4))),
    *((name, w, w2) for n, name in enumerate(("grad", "none", "hybrid1")) for w in WORLDS for w2 in WORLDS
      if (w + w2) % 3 == n),
]  # fmt: skip
"""Strategy, world, next world: which part goes where is the same arithmetic for all that have no nodes."""

made: list[Trainee] = []


@pytest.fixture(autouse=True)
def no_group_stays() -> Iterator[None]:
    yield
    while made:
        made.pop().group.close(0.2)


def trainees(name: str, world: int) -> list[Trainee]:
    """A view whose members have come to their shares, as `steps` has them do."""
    meshes = local_meshes(world)
    here = [Trainee(name, Group(mesh, SOON)) for mesh in meshes]
    made.extend(here)
    for trainee in here:
        trainee.group._core.confirm_same_state()
    return here


def candidate(name: str) -> Trainee:
    made.append(Trainee(name, seed=9))
    return made[-1]


def trained(name: str, world: int, steps: int) -> list[Trainee]:
    here = trainees(name, world)
    for number in range(steps):
        together(here, number)
    return here


def whole(here: list[Trainee]) -> dict[str, bytes]:
    """All arrays that are spread, put together from what members offer."""
    found: dict[str, Any] = {}
    for trainee in here:
        for name, leaf in split_shards(trainee.state._core.content())[1].items():
            if isinstance(leaf, Shard):
                array = found.setdefault(name, np.full(int(np.prod(leaf.shape)), np.nan, leaf.values.dtype))
                array[leaf.start : leaf.start + leaf.values.size] = leaf.values.reshape(-1)
    return {name: array.tobytes() for name, array in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "world", "next_world"), CASES)
@pytest.mark.sampled(3)
def test_training_goes_on_identically_after_resharding_to_any_world(name: str, world: int, next_world: int) -> None:
    before = trained(name, world, 2)
    bits = whole(before)
    # Some stay, in another order; some are new, built from other values.
    after = before[::-1][:next_world]
    after += [candidate(name) for _ in range(next_world - len(after))]
    reshard(before, after)
    assert whole(after) == bits
    form(after, 2)
    for number in (2, 3):
        together(after, number)
        for trainee in after:
            assert trainee.seen == EXPECTED[number]
            trainee.state._core.keep_updated_shares()
    back = [*before[:world], *after][:world]
    reshard(after, back)
    form(back, 3)
    together(back, 4)
    assert all(trainee.seen == EXPECTED[4] for trainee in back)
    assert all(trainee.model.module.mean.tolist() == [5, 5] for trainee in back), "small state comes along"


@pytest.mark.parametrize("name", ["full", "grad", "hybrid2"])
def test_every_member_holds_the_full_state_before_the_first_step(name: str) -> None:
    here = trainees(name, 4)
    assert {trainee.state._core.shares() for trainee in here} == {(WHOLE,)}
    assert len({trainee.state._core.fingerprint_of_origin() for trainee in here}) == 1
    alone = candidate(name)
    assert alone.state._core.shares() == (WHOLE,)
    assert alone.state._core.fingerprint_of_origin() != here[0].state._core.fingerprint_of_origin(), (
        "it has other values"
    )
    after = [here[3], alone]
    reshard(here, after)  # from one of those who are not cut yet
    form(after, 2)
    for number in range(2):
        together(after, number)
        assert all(trainee.seen == EXPECTED[number] for trainee in after)


@pytest.mark.parametrize("name", ["full", "hybrid2"])
def test_shards_of_one_initial_state_share_the_origin_fingerprint(name: str) -> None:
    def prepared(seed: int) -> set[bytes]:
        here = [Trainee(name, Group(mesh, SOON), seed) for mesh in local_meshes(2)]
        made.extend(here)
        outcomes = each([trainee.group for trainee in here], lambda group: here[group.rank].model.prepare())
        assert outcomes == [None, None]
        assert [trainee.state._core.shares() for trainee in here] == [(Share(0, 2),), (Share(1, 2),)]
        return {trainee.state._core.fingerprint_of_origin() for trainee in here}

    (one,), (same,), (other,) = prepared(0), prepared(0), prepared(1)
    assert one == same != other


def test_prepare_keeps_the_origin_fingerprint_of_an_unsharded_state() -> None:
    here = [Trainee("none", Group(mesh, SOON)) for mesh in local_meshes(2)]
    made.extend(here)
    before = here[0].state._core.fingerprint_of_origin()
    assert each([trainee.group for trainee in here], lambda group: here[group.rank].model.prepare()) == [None, None]
    assert {trainee.state._core.fingerprint_of_origin() for trainee in here} == {before}


def test_state_loaded_before_the_first_use_is_kept() -> None:
    (alone,) = trained("full", 1, 2)
    here = [Trainee("full", Group(mesh, SOON)) for mesh in local_meshes(3)]
    made.extend(here)
    for trainee in here:
        trainee.state.load_state_dict(alone.state.state_dict())
    together(here, 2)  # nobody vouches for them: rank 0 would give its own values to all
    assert all(trainee.seen == EXPECTED[2] for trainee in here)


def test_loading_an_optimizer_turns_the_full_state_into_a_share() -> None:
    (one, other) = trainees("full", 2)
    one.optimizer.load_state_dict(one.optimizer.state_dict())
    assert one.state._core.shares() == (Share(0, 2),), (
        "its moments may be anything now, and others have the rest of them"
    )
    assert other.state._core.shares() == (WHOLE,)


@pytest.mark.parametrize("name", ["full", "grad"])
def test_a_reshard_plan_changes_nothing_before_the_switch(name: str) -> None:
    here = trained(name, 3, 2)
    bits = whole(here)
    plan = here[0].state._core.resharding(Share(1, 2))
    assert plan.wanted
    with pytest.raises(LookupError):
        fill_from(plan, here[:2])  # the third has died
    for run in plan.wanted:
        plan.into(run)[...] = 7
    assert whole(here) == bits
    together(here, 2)
    assert all(trainee.seen == EXPECTED[2] for trainee in here)


@pytest.mark.parametrize("name", ["full", "grad", "hybrid2"])
def test_a_member_offers_its_old_share_until_keep_updated_shares(name: str) -> None:
    here = trained(name, 4, 2)
    bits = whole(here)
    old = [trainee.state._core.shares()[0] for trainee in here]
    plan = here[1].state._core.resharding(WHOLE)
    fill_from(plan, here)
    here[1].state._core.switch(plan)
    assert here[1].state._core.shares() == (WHOLE, old[1])
    newcomer = candidate(name)
    newcomer.state._core.switch(newcomer.state._core.resharding(Share(0, 2)))
    assert newcomer.state._core.shares() == (Share(0, 2), WHOLE)
    plan = newcomer.state._core.resharding(old[1], own=False)
    held = here[1].state._core.offered()
    assert all(held.select([run], 1 << 30) for run in plan.wanted)
    fill_from(plan, here[1:2])
    newcomer.state._core.switch(plan, held.tree())
    assert newcomer.state._core.shares() == (old[1],), "what it built itself is no share of this state"
    assert whole([here[0], newcomer, *here[2:]]) == bits
    here[1].state._core.keep_updated_shares()
    assert here[1].state._core.shares() == (WHOLE,)


def test_a_switch_with_a_mismatched_rest_changes_nothing() -> None:
    here = trained("full", 2, 2)
    newcomer = candidate("full")
    plan = newcomer.state._core.resharding(Share(0, 2), own=False)
    fill_from(plan, here)
    rest = here[0].state._core.offered().tree()
    before = newcomer.state._core.fingerprint_of_origin()
    with pytest.raises(SizeMismatch):
        newcomer.state._core.switch(plan, {**rest, "parts": {**rest["parts"], "more": {}}})
    assert newcomer.state._core.fingerprint_of_origin() == before
    assert newcomer.state._core.shares() == (WHOLE,)


@pytest.mark.parametrize("name", ["full", "grad", "hybrid2"])
def test_an_update_refused_by_the_gate_can_be_applied_afterwards(name: str) -> None:
    class Closed:
        def open(self, optimizer: object) -> None:
            raise PacelineError("the second word did not come")

        def changed(self) -> None:
            pass

        def spoil(self) -> None:
            raise AssertionError("nothing has begun")

    here = trained(name, 2, 2)
    one, other = here
    one.state._core.guard(Closed())
    with pytest.raises(PacelineError, match="second word"):
        together(here, 2)
    taken = one.state._core.take_gradients()
    one.optimizer.zero_grad()  # as loops do behind the step
    one.state._core.update(taken)
    one.state._core.unguard()
    together(here, 3)
    assert one.seen == other.seen == EXPECTED[3]


@pytest.mark.parametrize(
    ("name", "world"), [*product(("full", "grad", "none"), (1, 2, 4)), ("hybrid2", 2), ("hybrid2", 4)]
)
def test_a_checkpoint_of_any_world_loads_into_a_world_of_two(tmp_path: Path, name: str, world: int) -> None:
    here = trained(name, world, 2)
    leaves = [split_shards(trainee.state._core.content())[1] for trainee in here]
    written = [piece for rank, held in enumerate(leaves) for piece in pieces_of(held, rank, world)]
    arrays: dict[str, Any] = {}
    for piece in written:
        array = arrays.setdefault(piece.path, np.zeros(int(np.prod(piece.shape)), piece.values.dtype))
        array[piece.start : piece.start + piece.values.size] += piece.values  # each element is written once
    checkpoint.save(tmp_path, _joined(here[0], arrays), (1, 2))
    after = [candidate(name) for _ in range(2)]
    for rank, trainee in enumerate(after):
        plan = trainee.state._core.resharding(Share(rank, 2) if name != "none" else WHOLE, own=False)
        trainee.state._core.switch(plan, plan.load(tmp_path / "g00000001-s0000000002"))
    form(after, 2)
    together(after, 2)
    assert all(trainee.seen == EXPECTED[2] for trainee in after)


def _joined(trainee: Trainee, arrays: dict[str, Any]) -> Any:
    skeleton, leaves = split_shards(trainee.state._core.content())
    return checkpoint.tree.join(skeleton, {name: arrays[name].reshape(leaf.shape) for name, leaf in leaves.items()})


@pytest.mark.parametrize("name", ["full", "grad"])
def test_a_full_state_dict_loads_into_every_share(name: str) -> None:
    (alone,) = trained(name, 1, 2)
    saved = alone.state.state_dict()
    assert not any(isinstance(leaf, Shard) for leaf in split_shards(saved)[1].values())
    here = trainees(name, 3)
    for trainee in here:
        trainee.state.load_state_dict(saved)
    assert [trainee.state._core.shares()[0] for trainee in here] == [Share(rank, 3) for rank in range(3)]
    for trainee in here:
        trainee.state.load_state_dict(trainee.state.state_dict())  # shards go back to where they came from
    together(here, 2)
    assert all(trainee.seen == EXPECTED[2] for trainee in here)
    with pytest.raises(SizeMismatch, match="not those held here"):
        here[0].state.load_state_dict(here[1].state.state_dict())


def test_manifest_does_not_depend_on_the_share() -> None:
    here = [*trained("full", 3, 1), candidate("full")]
    assert len({trainee.state._core.manifest() for trainee in here}) == 1
    assert here[0].state._core.large() == [], "members have nothing alike that is large"


def test_a_state_that_cannot_be_resharded_is_refused() -> None:
    (one, _) = trainees("full", 2)
    one.state._core.check_round_trip()
    with pytest.raises(UnsupportedOp, match="optimizer belongs to a sharded model: give the FSDP wrapper"):
        TrainState(optimizer=one.optimizer)._core.check_round_trip()
    with pytest.raises(UnsupportedOp, match="model belongs to a sharded model"):
        TrainState(model=one.model.module)._core.check_round_trip()

    class Foreign:
        def step(self) -> None: ...
        def zero_grad(self) -> None: ...
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, saved: Any) -> None: ...

    with pytest.raises(UnsupportedOp, match=r"foreign cannot be sharded.*paceline\.optim"):
        TrainState(model=one.model, foreign=Foreign())._core.check_round_trip()
    second = paceline.optim.SGD(one.model, lr=0.1)
    with pytest.raises(UnsupportedOp, match=r"optimizer and second are several optimizers .*make one"):
        TrainState(model=one.model, optimizer=one.optimizer, second=second)._core.check_round_trip()
    TrainState(model=one.model, optimizer=one.optimizer, again=one.optimizer)._core.check_round_trip()
    hosts = paceline.FSDP(paceline.nn.Linear(2, 2, rng=np.random.default_rng(0)), one.group, "hybrid_shard")
    with pytest.raises(UnsupportedOp, match="needs intra_node_size="):
        TrainState(model=hosts)._core.check_round_trip()
    other = paceline.FSDP(paceline.nn.Linear(2, 2, rng=np.random.default_rng(0)), one.group, "hybrid_shard", 2)
    with pytest.raises(UnsupportedOp, match="nodes of different sizes"):
        TrainState(one=one.model, other=other)._core.check_round_trip()


def test_an_elastic_hybrid_shard_requires_intra_node_size() -> None:
    """Not whoever comes later."""
    (one,) = trainees("full", 1)
    alone = paceline.FSDP(paceline.nn.Linear(2, 2, rng=np.random.default_rng(0)), one.group, "hybrid_shard")
    TrainState(model=alone)._core.check_round_trip()
    one.group._core.make_elastic(4)
    with pytest.raises(UnsupportedOp, match=r"needs intra_node_size= in session\.steps"):
        TrainState(model=alone)._core.check_round_trip()
