"""Training states that are spread, whose bits are those of one process: and how they take each other's runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from unit.parallel.sharding.models import chosen

import paceline
from paceline._elastic.reshard_plan import ReshardPlan, assign
from paceline._elastic.train_state import TrainState
from paceline._group import Group
from paceline._links.local import local_meshes
from paceline._links.nowhere import NoMesh
from paceline._parallel._parameter import Parameter
from paceline._parallel.sharding._placement import copy_partners
from paceline_protocol import Share, share_of
from support.parts import SOON, each

__all__ = [
    "BATCH",
    "Trainee",
    "all_do",
    "check_copies",
    "fill_from",
    "form",
    "one_process",
    "reshard",
    "take_copies",
    "together",
]

BATCH = 8


class Block:
    """Gradients are whole numbers, whatever the values: sums of them are exact in every order, in every world.

    Two dtypes, a parameter under two paths, a frozen one, one without elements, and some smaller than a world.
    """

    def __init__(self, rng: np.random.Generator, inner: Sequence[Any] = (), frozen: bool = True) -> None:
        self.own = {
            "a": Parameter(rng.standard_normal((3, 5))),
            "empty": Parameter(np.zeros((0, 3))),
            "b": Parameter(rng.standard_normal(2)),
            "half": Parameter(rng.standard_normal(7).astype(np.float32)),
            "one": Parameter(rng.standard_normal(1).astype(np.float32)),
            "frozen": Parameter(rng.standard_normal(4), requires_grad=not frozen),
        }
        self.inner = inner
        self.seen: list[bytes] = []
        self.mean = np.zeros(2)

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        yield from self.own.items()
        yield "tied", self.own["a"]
        for n, block in enumerate(self.inner):
            for path, parameter in block.named_parameters():
                yield f"{n}.{path}", parameter

    def named_buffers(self) -> Iterator[tuple[str, Any]]:
        yield "mean", self.mean

    def forward(self, x: Any) -> Any:
        self.seen = [p.data.tobytes() for p in self.own.values()]
        self.mean += 1
        for block in self.inner:
            x = block.forward(x)
        self.x = x
        return x

    def backward(self, dy: Any) -> Any:
        for block in reversed(self.inner):
            dy = block.backward(dy)
        total = float((dy * self.x).sum())
        for n, p in enumerate(self.own.values()):
            p.accumulate((total * (np.arange(np.prod(p.shape)) % 5 + n)).reshape(p.shape).astype(p.dtype))
        return dy


class Trainee:
    """One process, as it were.

    Args:
        name: of the strategy; "" for one process without a wrapper.
        group: its group; None for one that is in no view yet.
        seed: of the initial values.
    """

    def __init__(self, name: str, group: Group | None = None, seed: int = 0) -> None:
        self.group = Group(NoMesh("waits"), SOON) if group is None else group
        rng = np.random.default_rng(seed)
        self.blocks: list[Any] = [Block(rng), Block(rng)]
        self.blocks.append(Block(rng, [self._wrap(name, block) for block in self.blocks]))
        self.model = self._wrap(name, self.blocks[-1])
        self.optimizer = paceline.optim.Adam(self.model, lr=0.125, weight_decay=0.25)
        self.state = TrainState(model=self.model, optimizer=self.optimizer, notes={"n": np.zeros(3)})

    def _wrap(self, name: str, block: Any) -> Any:
        return paceline.FSDP(block, self.group, **chosen(name)) if name else block

    def step(self, number: int, rank: int = 0, world: int = 1) -> None:
        low, high = BATCH * rank // world, BATCH * (rank + 1) // world
        x = np.arange(BATCH, dtype=np.float64).reshape(BATCH, 1)[low:high] + number
        self.optimizer.zero_grad()
        self.model.forward(x)
        dy = np.ones((high - low, 1)) / (
            high - low
        )  # times the number of samples: 1 again, exactly, for up to 6 of them
        self.model.backward(dy)
        self.optimizer.step()

    @property
    def seen(self) -> list[bytes]:
        """What the modules found in their parameters in the last forward pass."""
        return [value for block in self.blocks for value in block.seen]


def one_process(steps: int) -> list[list[bytes]]:
    """What the modules of one process find in each step."""
    alone = Trainee("")
    found = []
    for number in range(steps):
        alone.step(number)
        found.append(alone.seen)
    return found


def form(trainees: Sequence[Any], generation: int, *, vouched: bool = True) -> None:
    """A view of these, in this order of ranks; `vouched` if they are known to have the same state."""
    for trainee, mesh in zip(trainees, local_meshes(len(trainees), generation=generation), strict=True):
        trainee.group._core.move(mesh)
        if vouched:
            trainee.group._core.confirm_same_state()


def all_do(trainees: Sequence[Any], do: Callable[[Any], Any]) -> None:
    """Each does it, all at the same time."""
    by_group = {id(trainee.group): trainee for trainee in trainees}
    for outcome in each([trainee.group for trainee in trainees], lambda group: do(by_group[id(group)])):
        if isinstance(outcome, BaseException):
            raise outcome


def together(trainees: Sequence[Any], number: int) -> None:
    """One step of all."""
    all_do(trainees, lambda trainee: trainee.step(number, trainee.group.rank, trainee.group.size))


def fill_from(plan: ReshardPlan, holders: Sequence[Trainee]) -> None:
    """What `take_shards` does, without a network."""
    held = {n: holder.state._core.shares() for n, holder in enumerate(holders)}
    for n, runs in assign(plan.wanted, held, plan.cut).items():
        for run, values in zip(runs, holders[n].state._core.offered().select(runs, 1 << 30), strict=True):
            plan.into(run)[...] = values
    plan.wanted = []


def reshard(before: Sequence[Trainee], after: Sequence[Trainee]) -> None:
    """All of a view that comes take the shares of their seats from those of the view that was."""
    whole = before[0].state._core.offered()
    for rank, trainee in enumerate(after):
        own = trainee in before
        share = share_of(rank, len(after), trainee.state._core.node_size)
        if own and trainee.state._core.shares()[0] == share and share != Share(0, 1):
            continue
        plan = trainee.state._core.resharding(share, own=own)
        fill_from(plan, before)
        trainee.state._core.switch(plan, None if own else whole.tree())


def take_copies(here: Sequence[Any], redundancy: int = 2) -> None:
    """Each takes the copies that it is to have in its view."""
    for rank, trainee in enumerate(here):
        trainee.state._core.retire_copies()
        for partners in copy_partners(rank, trainee.group.members, redundancy):
            plan = trainee.state._core.copying(Share(partners.source, len(here)), partners)
            fill_from(plan, here)
            plan.switch()
        trainee.state._core.keep_updated_shares()


def _bits(arrays: dict[str, Any]) -> dict[str, tuple[int, bytes]]:
    return {name: (shard.start, shard.values.tobytes()) for name, shard in arrays.items()}


def check_copies(here: Sequence[Any]) -> int:
    """Compares each copy with the shard of its owner; returns how many there are."""
    spread = [trainee.state._core._spread for trainee in here]
    live = {spread.share: _bits(spread.named(spread.holding())) for spread in spread}
    copies = [(share, _bits(one.named(held))) for one in spread for share, held in one.copies.holdings().items()]
    for share, found in copies:
        assert found == live[Share(*share)], share
    return len(copies)
