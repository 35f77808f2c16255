"""Any order of operations, legal or not, against one process that is asked for the same (hypothesis)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.parallel.helpers import Array, Branches, gradient, scale, weights
from unit.parallel.sharding.models import (
    HASTY,
    cases,
    chosen,
    close,
    data,
    holding,
    inside,
    joined,
    layers,
    net,
    same_bits,
    squared,
    strategies,
    wrap,
)

from paceline._group import Group
from paceline.errors import StepOrderError, UnsupportedOp
from paceline.optim import SGD
from paceline.testing import run_ranks
from support.turns import by_turns

WORDS = """forward backward micro_batch step zero_grad prefetch update_shards load load_shards read_whole write_whole
broadcast clip sync forward_fails backward_fails"""
OPERATIONS = WORDS.split()
often = ["forward", "backward", "step", "prefetch", "micro_batch"]
operation = st.tuples(st.sampled_from(OPERATIONS + often * 2), st.integers(0, 2))
programs = st.lists(operation, max_size=14)
LOADED = weights(net(7))


class Failure(Exception):
    """What a module raises."""


def batch(number: int, world: int) -> tuple[Array, Array, list[Array]]:
    """Inputs, targets, and which rows each rank takes: uneven."""
    x, t = data(30)
    rows = np.split(np.arange(4 * world + number), [3 * rank + number for rank in range(1, world)])
    return x[number:], t[number:], rows


class Oracle:
    """One process. What an operation should give: "skip" (not asked of anybody), "ok", or the error."""

    def __init__(self, world: int, name: str) -> None:
        self.world, self.name = world, name
        self.module = net()
        self.optimizer = SGD(self.module, lr=0.1, momentum=0.9)
        self.parameters = dict(self.module.named_parameters())
        self.sums: dict[str, Array] = {}
        self.weight = 0.0
        self.dy: Array | None = None
        self.prefetched = self.ran = False
        self.stale = False
        """Under SHARD_GRAD_OP a step came after forward: what the others have is whole, and old, until the next one."""
        self.norm = 0.0

    def expected(self, kind: str, number: int) -> Any:
        """Does it; the outcome, and what all ranks should hold then. Gradients count where no round is open."""
        outcome = getattr(self, kind)(number)
        gradients = {path: None if p.grad is None else p.grad.copy() for path, p in self.parameters.items()}
        return outcome, weights(self.module), None if self.weight else gradients, self.prefetched, self.norm

    def _passes(self) -> None:
        self.prefetched = self.stale = False

    def forward(self, number: int) -> Any:
        self.ran = True
        self._passes()
        x, t, rows = batch(number, self.world)
        count = sum(map(len, rows))
        self.dy = squared(self.module.forward(x[:count]), t[:count])[1]
        return "ok"

    def forward_fails(self, number: int) -> Any:
        self.ran, self.dy = True, None
        self._passes()
        return Failure

    def backward(self, number: int) -> Any:
        if self.dy is None or self.stale:
            return "skip"
        self.micro_batch(number)
        return self.sync(number)

    def micro_batch(self, number: int) -> Any:
        if self.dy is None or self.stale:
            return "skip"
        self._passes()
        before = {path: p.grad for path, p in self.parameters.items()}
        self._clear()
        self.module.backward(self.dy)
        for path, p in self.parameters.items():
            self.sums[path] = self.sums.get(path, 0) + gradient(p) * len(self.dy)
            p._hold(before[path])
        self.weight += len(self.dy)
        return "ok"

    def sync(self, number: int) -> Any:
        if not self.ran:
            return StepOrderError
        if self.weight:
            self._passes()
            for path, p in self.parameters.items():
                p._hold(self.sums[path] / self.weight + (0 if p.grad is None else p.grad))
        self._end_round()
        return "ok"

    def backward_fails(self, number: int) -> Any:
        if self.dy is None or self.stale:
            return "skip"
        self._passes()
        self._clear()
        self._end_round()
        return Failure

    def step(self, number: int) -> Any:
        if self.weight:
            return "skip"  # gradients are this rank's alone
        used = any(p.grad is not None for p in self.parameters.values())
        self.stale = self.stale or (used and self.name == "grad")
        self.optimizer.step()
        return "ok"

    def zero_grad(self, number: int) -> Any:
        self._clear()
        self._end_round()
        return "ok"

    def prefetch(self, number: int) -> Any:
        if self.name in ("grad", "none"):
            return UnsupportedOp
        if self.prefetched:
            return StepOrderError
        self.prefetched = True
        return "ok"

    def update_shards(self, number: int) -> Any:
        self._passes()
        for p in self.parameters.values():
            p.data = p.data * 1.25
        return self.zero_grad(number)

    def load(self, number: int) -> Any:
        self._passes()
        for path, p in self.parameters.items():
            p.data = LOADED[path]
        return "ok"

    def load_shards(self, number: int) -> Any:
        self._passes()
        return "ok"

    read_whole = load_shards

    def write_whole(self, number: int) -> Any:
        self._passes()
        for p in self.parameters.values():
            p.data = p.data * 0.75
        return "ok"

    def broadcast(self, number: int) -> Any:
        self.stale = False
        return "ok"

    def clip(self, number: int) -> Any:
        if self.weight:
            return "skip"
        values = [p.grad.ravel() for p in self.parameters.values() if p.grad is not None]
        self.norm = float(np.linalg.norm(np.concatenate([np.zeros(0), *values])))
        for p in self.parameters.values():
            if p.grad is not None and self.norm > 0.125:
                p._hold(p.grad * (0.125 / self.norm))
        return "ok"

    def _clear(self) -> None:
        for p in self.parameters.values():
            p._hold(None)

    def _end_round(self) -> None:
        self.sums, self.weight = {}, 0.0


class Rank:
    """One of the ranks."""

    def __init__(self, group: Group, name: str, units: str) -> None:
        self.group, self.name = group, name
        self.parts = layers(group.rank)
        self.fsdp = wrap(self.parts, group, units, **chosen(name))
        self.optimizer = SGD(self.fsdp, lr=0.1, momentum=0.9)
        self.fsdp.prepare()
        self.dy: Any = None
        self.norm = 0.0

    def do(self, kind: str, number: int) -> Any:
        """The outcome, and what is held then."""
        try:
            getattr(self, kind)(number)
            outcome: Any = "ok"
        except (Failure, StepOrderError, UnsupportedOp) as error:
            outcome = type(error)
        if self.name != "grad":
            assert holding(self.fsdp) == [], f"after {kind}"
        pending = self.fsdp.has_pending_prefetch()
        return outcome, self.fsdp.state_dict(), self.fsdp.padded_gradients(), pending, self.norm

    def forward(self, number: int) -> None:
        x, t, rows = batch(number, self.group.size)
        mine = rows[self.group.rank]
        self.dy = squared(self.fsdp(x[mine]), t[mine])[1]

    def forward_fails(self, number: int) -> None:
        self._failing(number, "forward", self.forward)

    def backward(self, number: int) -> None:
        self.fsdp.backward(self.dy)

    def backward_fails(self, number: int) -> None:
        self._failing(number, "backward", self.backward)

    def _failing(self, number: int, when: str, run: Any) -> None:
        def act(now: str) -> None:
            if now == when:
                raise Failure

        def has_gradients() -> bool:
            return any(p.grad is not None or p._home is not None for p in inside(self.fsdp).values())

        keeps = when == "forward" and has_gradients()  # of an accumulation
        self.parts[number].act = act
        try:
            run(number)
        finally:
            self.parts[number].act = lambda when: None
            assert has_gradients() == keeps

    def micro_batch(self, number: int) -> None:
        with self.fsdp.no_sync():
            self.fsdp.backward(self.dy)

    def step(self, number: int) -> None:
        self.optimizer.step()

    def zero_grad(self, number: int) -> None:
        self.optimizer.zero_grad()

    def prefetch(self, number: int) -> None:
        self.fsdp.prefetch_forward_params()

    def update_shards(self, number: int) -> None:
        pieces = [p.data.ravel() for _, p in self.fsdp.named_parameters()]
        self.fsdp.update_shards(np.concatenate(pieces) * 1.25)

    def load(self, number: int) -> None:
        self.fsdp.load_state_dict(LOADED)

    def load_shards(self, number: int) -> None:
        self.fsdp.load_sharded_state_dict(self.fsdp.sharded_state_dict())

    def read_whole(self, number: int) -> None:
        before = self.fsdp.state_dict()
        with self.fsdp.unshard():
            same_bits([before, {path: p.data for path, p in inside(self.fsdp).items()}])

    def write_whole(self, number: int) -> None:
        with self.fsdp.unshard():
            for p in inside(self.fsdp).values():
                p.data = p.data * 0.75

    def broadcast(self, number: int) -> None:
        self.fsdp.broadcast_updated_params()

    def clip(self, number: int) -> None:
        self.norm = self.fsdp.clip_grad_norm(0.125)

    def sync(self, number: int) -> None:
        self.fsdp.sync_gradients()


def check(world: int, name: str, units: str, program: list[tuple[str, int]]) -> None:
    oracle = Oracle(world, name)
    expected = [oracle.expected(*one) for one in program]
    asked = [(one, want) for one, want in zip(program, expected, strict=True) if want[0] != "skip"]

    def rank(g: Group) -> list[Any]:
        me = Rank(g, name, units)
        return [me.do(*one) for one, _ in asked]

    ranks = run_ranks(world, rank, config=HASTY, timeout=20)
    for number, (one, (outcome, state, gradients, prefetched, norm)) in enumerate(asked):
        found = [results[number] for results in ranks]
        where = f"operation {number}, {one}"
        assert [f[0] for f in found] == [outcome] * world, where
        same_bits([f[1] for f in found])
        close(found[0][1], state, 1e-9)
        if gradients is not None:
            close(joined([f[2] for f in found], name), gradients, 1e-9)
        assert [f[3] for f in found] == [prefetched] * world, where
        assert found[0][4] == pytest.approx(norm, rel=1e-9, abs=1e-12), where
        assert len({f[4] for f in found}) == 1, where


ORDERS = {
    "prefetches between steps": "forward backward step prefetch forward backward step prefetch prefetch forward",
    "an update after a prefetch": "forward backward prefetch step forward forward backward step",
    "an update between prefetch and backward": "forward backward forward prefetch step backward step forward",
    "an update after an evaluation": "forward backward forward step forward backward step",
    "an update with the gradients of the last": "forward backward step forward step forward",
    "gradients that add up": "forward backward forward:1 backward forward:2 micro_batch sync step",
    "zero_grad in an accumulation": "forward micro_batch forward:1 micro_batch zero_grad forward:2 backward step",
    "zero_grad in an accumulation that sync ends": "forward micro_batch zero_grad forward:1 micro_batch sync step",
    "nothing after zero_grad": "forward micro_batch zero_grad forward sync step",
    "sync after an evaluation": "forward backward forward:1 sync clip step",
    "update_shards in an accumulation": "forward micro_batch update_shards forward:1 backward step",
    "state in and out": "forward micro_batch load sync prefetch write_whole prefetch read_whole forward backward step",
    "failures after prefetches": """prefetch forward_fails:0 prefetch forward_fails:2 prefetch forward backward_fails:0
        backward clip step""",
    "failures in an accumulation": "forward micro_batch forward:1 backward_fails:1 backward backward step forward",
    **{
        f"failures of unit {k}": f"""forward backward step zero_grad forward_fails:{k} forward backward step
            zero_grad forward backward_fails:{k} forward backward step"""
        for k in range(3)
    },
}
"""Orders that once went wrong; "kind:k" is for unit k, or batch k."""


@pytest.mark.parametrize(
    ("world", "name", "units"),
    by_turns(
        [(1, "full"), *((2, name) for name in strategies(2)), (3, "full"), (3, "grad"), (4, "hybrid2")],
        [("each",), ("some",)],
    ),
)
@pytest.mark.parametrize("order", ORDERS)
def test_known_orders_of_calls_train_as_one_process(order: str, world: int, name: str, units: str) -> None:
    words = [word.partition(":") for word in ORDERS[order].split()]
    check(world, name, units, [(kind, int(number or 0)) for kind, _, number in words])


@pytest.mark.slow
@pytest.mark.parametrize(("world", "name"), cases(2, 3))
@pytest.mark.parametrize("units", ["each", "some"])
@settings(max_examples=10, deadline=None, derandomize=True)
@given(programs)
@pytest.mark.sampled(3)
def test_random_orders_of_calls_train_as_one_process(
    world: int, name: str, units: str, program: list[tuple[str, int]]
) -> None:
    check(world, name, units, program)


@pytest.mark.parametrize("more", [0, 1])
def test_a_step_after_an_error_with_nodes_out_of_step_is_right(more: int) -> None:
    """Which of a node's gradients have gone on to the other node when the error comes must not matter afterwards."""

    def rank(g: Group) -> Any:
        node = g.subgroup([0, 1] if g.rank < 2 else [2, 3])
        unused = [scale(*[0.0] * (3 + n * more)) for n in range(4)]
        blocks = [Branches("a", a=scale(2), b=b) for b in unused]
        fsdp = wrap(blocks, g, "each", **chosen("hybrid2"))
        found, one = [], np.ones((1, 1))

        def fail(_: str) -> None:
            raise ZeroDivisionError

        def linger(name: str) -> None:
            for _ in range(3 if g.rank < 2 else 0):
                node.barrier()  # this node's gradients arrive meanwhile

        for _ in range(10):
            blocks[1].before_backward_of, blocks[0].before_backward_of = linger, fail
            fsdp(one)
            with pytest.raises(ZeroDivisionError):
                fsdp.backward(one * 1000)
            blocks[1].before_backward_of = blocks[0].before_backward_of = lambda _: None
            fsdp(one)
            fsdp.backward(one)
            found.append(fsdp.clip_grad_norm(math.inf))
            SGD(fsdp, lr=0.1).zero_grad()
        return found

    assert run_ranks(4, rank, config=HASTY) == [[16.0] * 10] * 4  # of four gradients, 2 * 2 * 2 each
