"""Copies of other ranks' shards: after each step they have the bits of the shards that they are copies of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from unit.elastic.resharding import Trainee, all_do, check_copies, form, one_process, reshard, take_copies, together
from unit.parallel.sharding.models import chosen

import paceline
from paceline._group import Group
from paceline._links.base import Peer
from paceline._links.local import local_meshes
from paceline._parallel.sharding._copies import _are_close
from paceline._parallel.sharding._placement import CopyPartners, copy_partners
from paceline.errors import CollectiveMismatch, StepOrderError, UnsupportedOp
from paceline_protocol import Share
from support.parts import SOON, each

EXPECTED = one_process(8)

made: list[Trainee] = []


@pytest.fixture(autouse=True)
def no_group_stays() -> Iterator[None]:
    yield
    while made:
        made.pop().group.close(0.2)


class Copying(Trainee):
    """One process that keeps copies, as `session.steps` has it do."""

    redundancy = 2

    def _wrap(self, name: str, block: Any) -> Any:
        return paceline.FSDP(block, self.group, **chosen(name), redundancy=self.redundancy)

    def step(self, number: int, rank: int = 0, world: int = 1) -> None:
        if not self.state._core.copies:
            super().step(number, rank, world)
            return
        update, self.optimizer.step = self.optimizer.step, self._exchange  # type: ignore[method-assign]
        try:
            super().step(number, rank, world)
        finally:
            vars(self.optimizer).pop("step")
        self.state._core.update_copies()
        update()

    def _exchange(self) -> None:
        self.state._core.send_gradients(self.group)


def trainees(name: str, world: int, redundancy: int = 2) -> list[Copying]:
    """Members of a view in which each has its share and its copies."""
    here = []
    for mesh in local_meshes(world):
        kind = type("Copying", (Copying,), {"redundancy": redundancy})
        here.append(kind(name, Group(mesh, SOON)))
    made.extend(here)
    for trainee in here:
        trainee.group._core.confirm_same_state()
    together(here, 0)  # without copies, because the initial values are agreed on here
    take_copies(here, redundancy)
    return here


@pytest.mark.parametrize(("world", "redundancy"), [(2, 2), (3, 2), (4, 2), (5, 2), (3, 3), (5, 3), (2, 3)])
@pytest.mark.parametrize("name", ["full", "grad"])
def test_copies_have_the_bits_of_the_shards_after_each_step(name: str, world: int, redundancy: int) -> None:
    here = trainees(name, world, redundancy)
    for number in range(1, 4):
        together(here, number)
        assert check_copies(here) == world * (min(redundancy, world) - 1)
        assert all(trainee.seen == EXPECTED[number] for trainee in here)


@pytest.mark.parametrize(("world", "redundancy"), [(4, 2), (5, 3)])
@pytest.mark.parametrize("name", ["full", "grad"])
def test_a_rank_holds_as_many_shards_as_redundancy_says(name: str, world: int, redundancy: int) -> None:
    """Padding counts, which is less than W elements of each array."""
    here = trainees(name, world, redundancy)
    for trainee in here:
        spread = trainee.state._core._spread
        held = [spread.named(spread.holding()), *map(spread.named, spread.copies.holdings().values())]
        elements = sum(shard.values.size for arrays in held for shard in arrays.values())
        whole = sum(int(np.prod(shard.shape)) for shard in held[0].values())
        assert elements <= whole * redundancy / world + redundancy * len(held[0])


@pytest.mark.parametrize("lost", range(4))
@pytest.mark.parametrize("name", ["full", "grad"])
def test_after_a_loss_the_others_go_on_with_the_state_of_one_process(name: str, lost: int) -> None:
    here = trainees(name, 4)
    for number in (1, 2):
        together(here, number)
    rest = [trainee for rank, trainee in enumerate(here) if rank != lost]
    reshard(rest, rest)
    form(rest, 2)
    take_copies(rest)
    for number in (3, 4):
        together(rest, number)
        assert check_copies(rest) == 3
        assert all(trainee.seen == EXPECTED[number] for trainee in rest)


def test_a_copy_that_is_kept_from_the_view_before_is_not_taken_again() -> None:
    here = trainees("full", 4)
    together(here, 1)
    (share,) = here[0].state._core.copies
    (partners,) = copy_partners(0, here[0].group.members, 2)
    here[0].state._core.retire_copies()
    assert here[0].state._core.copies == ()
    assert here[0].state._core.shares() == (Share(0, 4), share)
    memory = here[0].state._core._spread.copies._all[tuple(share)]
    plan = here[0].state._core.copying(share, partners)
    assert not plan.wanted
    plan.switch()
    assert here[0].state._core._spread.copies._all[tuple(share)] is memory
    together(here, 2)
    assert check_copies(here) == 4


def test_a_share_that_is_copied_can_become_the_live_one() -> None:
    here = trainees("full", 2)
    together(here, 1)
    after = here[::-1]
    for rank, trainee in enumerate(after):
        plan = trainee.state._core.resharding(Share(rank, 2))
        assert not plan.wanted
        trainee.state._core.switch(plan)
    form(after, 2)
    take_copies(after)
    together(after, 2)
    assert check_copies(after) == 2
    assert all(trainee.seen == EXPECTED[2] for trainee in after)


def test_a_setting_that_changes_between_steps_holds_for_copies_too() -> None:
    here = trainees("full", 3)
    for trainee in here:
        trainee.optimizer.lr = 0.5
    together(here, 1)
    assert check_copies(here) == 3


def test_a_parameter_without_a_gradient_does_not_change_in_copies() -> None:
    here = trainees("full", 3)

    def without_one(trainee: Copying) -> None:
        exchange = trainee._exchange

        def leave_out() -> None:
            for path, piece in trainee.model.named_parameters():
                if path.endswith("a"):
                    piece.grad = None
            exchange()

        trainee._exchange = leave_out  # type: ignore[method-assign]

    for trainee in here:
        without_one(trainee)
    together(here, 1)
    assert check_copies(here) == 3


def test_a_gradient_that_one_rank_alone_has_raises_a_mismatch() -> None:
    here = trainees("full", 2)
    next(piece for _, piece in here[1].model.named_parameters()).grad = None
    with pytest.raises(CollectiveMismatch, match="copies-"):
        all_do(here, lambda trainee: trainee.state._core.send_gradients(trainee.group))


def load(trainee: Copying) -> None:
    saved = trainee.model.state_dict()
    trainee.model.load_state_dict({path: values + 1 for path, values in saved.items()})


def write(trainee: Copying) -> None:
    with trainee.model.unshard() as whole:
        for parameter in whole.values():
            parameter.data[...] += 1


def write_pieces(trainee: Copying) -> None:
    for _, piece in trainee.model.named_parameters():
        piece.data[...] += 1


def write_moments(trainee: Copying) -> None:
    for array in trainee.optimizer.live_arrays().values():
        array[...] += 1


@pytest.mark.parametrize("name", ["full", "grad"])
@pytest.mark.parametrize(("change", "after"), [(load, 0), (write, 0), (write_pieces, 0), (write_moments, 1)])
def test_a_change_by_something_other_than_the_optimizer_is_refused_on_all_ranks(
    change: Callable[[Copying], None], after: int, name: str
) -> None:
    """Moments show in the values, one step later."""
    here = trainees(name, 3)
    all_do(here, change)
    for number in range(after):
        together(here, 1 + number)
    outcomes = each([trainee.group for trainee in here], lambda group: here[group.rank].step(5, group.rank, 3))
    for outcome in outcomes:
        assert isinstance(outcome, StepOrderError), outcome
        assert "differs from the shard" in str(outcome)


def test_all_elements_are_compared_in_turn() -> None:
    here = trainees("full", 2)
    copies = here[0].state._core._spread.copies
    flat = next(flat for part in copies._models[0].parts() for flat in part.unit.flats)
    for size, expected in ((5, [(0, 5)] * 3), (600, [(0, 256), (256, 512), (512, 600), (0, 256)])):
        flat.layout.shard_size = size
        found = []
        for number in range(len(expected)):
            copies._compared = number
            starts = {flat.dtype: 1000}
            window, place = copies._window(flat, starts)
            assert (place.start, place.stop - place.start) == (1000, window.stop - window.start)
            found.append((window.start, window.stop))
        assert found == expected


def test_a_copy_that_was_rounded_differently_is_accepted() -> None:
    here = trainees("full", 2)
    for room in here[0].state._core._spread.copies._all.values():
        for shard in room.memory.target.values.values():
            shard.values[...] *= 1 + 1e-6
    together(here, 1)


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_compared_with_the_others(odd: float) -> None:
    owners = np.array([1.0, odd, 3.0])
    assert _are_close(owners * (1 + 1e-6), owners)
    assert not _are_close(owners * 1.5, owners)
    assert not _are_close(np.array([1.0, 2.0, 3.0]), owners)


@pytest.mark.parametrize("name", ["full", "grad"])
def test_unshard_and_state_dict_between_steps_leave_copies_valid(name: str) -> None:
    here = trainees(name, 2)

    def read(trainee: Copying) -> None:
        with trainee.model.unshard():
            pass
        trainee.model.state_dict()

    all_do(here, read)
    together(here, 1)
    assert check_copies(here) == 2


def test_memory_for_gradients_is_freed_where_no_copy_is_left() -> None:
    here = trainees("full", 2)
    together(here, 1)
    copies = here[0].state._core._spread.copies
    assert copies._outgoing
    here[0].state._core.retire_copies()
    here[0].state._core.keep_updated_shares()
    assert not copies._outgoing


# Where copies are ----------------------------------------------------------------------------------------------------


def members(hosts: str) -> list[Peer]:
    """One for each letter, which names its host."""
    return [Peer(rank, f"id{rank}", host) for rank, host in enumerate(hosts)]


@pytest.mark.parametrize("redundancy", [1, 2, 3, 4])
@pytest.mark.parametrize("world", range(1, 9))
def test_each_rank_has_as_many_copies_of_different_ranks(world: int, redundancy: int) -> None:
    for hosts in ("A" * world, "ABCDEFGH"[:world], "AABBCCDD"[:world], "ABABABAB"[:world]):
        ways = [copy_partners(rank, members(hosts), redundancy) for rank in range(world)]
        assert {len(of) for of in ways} == {min(redundancy, world) - 1}
        for rank, of in enumerate(ways):
            assert len({rank, *(way.source for way in of)}) == len(of) + 1
            assert len({rank, *(way.to for way in of)}) == len(of) + 1
            for n, way in enumerate(of):
                assert ways[way.to][n].source == rank


@pytest.mark.parametrize("hosts", ["AABB", "ABAB", "AAABBB", "ABBA", "AABBC", "AABBCC", "ABC", "ABCAB"])
def test_no_two_holders_of_a_shard_are_on_one_host(hosts: str) -> None:
    assert Counter(hosts).most_common(1)[0][1] <= len(hosts) // 2
    for rank in range(len(hosts)):
        (way,) = copy_partners(rank, members(hosts), 2)
        assert hosts[way.to] != hosts[rank]


@pytest.mark.parametrize("node", ["boot{machine}/1/0", "boot{machine}/{rank}/0"])
def test_copies_are_on_another_machine_where_hosts_have_one_name_or_all_have_their_own(node: str) -> None:
    """The second are containers, which share no memory."""
    for name in ("host", "pod{rank}"):
        members = [
            Peer(rank, f"id{rank}", name.format(rank=rank), node=node.format(machine=rank % 2, rank=rank))
            for rank in range(4)
        ]
        for rank in range(4):
            (partners,) = copy_partners(rank, members, 2)
            assert partners.to % 2 != rank % 2


def test_copies_on_another_machine_need_no_node() -> None:
    assert copy_partners(0, members("AABB"), 2) == [CopyPartners(2, 2)]


# Which redundancy ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "most", "expected"),
    [("full", 3, 2), ("grad", 8, 2), ("full", 2, 1), ("full", None, 1), ("none", 3, 1), ("hybrid1", 3, 1)],
)
def test_the_default_is_two_in_an_elastic_job_of_three(strategy: str, most: int | None, expected: int) -> None:
    group = Group(local_meshes(1)[0], SOON)
    if most is not None:
        group._core.make_elastic(most)
    model = paceline.FSDP(paceline.nn.Linear(2, 2, rng=np.random.default_rng(0)), group, **chosen(strategy))
    assert model._sharded.redundancy == expected
    assert paceline.TrainState(model=model)._core.redundancy == expected
    group.close(0.2)


@pytest.mark.parametrize(
    ("strategy", "redundancy", "text"),
    [
        ("full", 0, "redundancy must be 1 to 8, not 0"),
        ("full", 9, "redundancy must be 1 to 8, not 9"),
        ("none", 2, "redundancy=2 is for FULL_SHARD and SHARD_GRAD_OP"),
        ("hybrid1", 2, "redundancy=2 is for FULL_SHARD and SHARD_GRAD_OP"),
    ],
)
def test_a_redundancy_that_a_strategy_cannot_have_is_refused(strategy: str, redundancy: int, text: str) -> None:
    group = Group(local_meshes(1)[0], SOON)
    with pytest.raises(ValueError, match=text):
        paceline.FSDP(
            paceline.nn.Linear(2, 2, rng=np.random.default_rng(0)), group, **chosen(strategy), redundancy=redundancy
        )
    group.close(0.2)


def test_a_part_that_is_sharded_gives_its_model_redundancy() -> None:
    group = Group(local_meshes(1)[0], SOON)
    group._core.make_elastic(3)
    part = paceline.FSDP(paceline.nn.Linear(2, 2, rng=np.random.default_rng(0)), group)
    model = paceline.FSDP(paceline.nn.Sequential(part), group, paceline.ShardingStrategy.NO_SHARD)
    assert model._sharded.redundancy == 2
    group.close(0.2)


def test_models_with_different_redundancy_in_one_state_are_refused() -> None:
    group = Group(local_meshes(1)[0], SOON)
    models = {
        f"model{n}": paceline.FSDP(paceline.nn.Linear(2, 2, rng=np.random.default_rng(0)), group, redundancy=n)
        for n in (1, 2)
    }
    with pytest.raises(UnsupportedOp, match=r"different redundancy: \[1, 2\]"):
        _ = paceline.TrainState(**models)._core.redundancy
    group.close(0.2)
