"""Carries programs out on symbols instead of numbers: what a schedule computes, shown for every world."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from paceline._collectives.program import AHEAD, Area, Do, Move, Program

__all__ = ["Lent", "Rank", "add", "advance", "leaves", "run"]


class Lent(NamedTuple):
    """Elements that a receiver reads where they lie, and when it needs them."""

    memory: list[Any]
    lo: int
    n: int

    def read(self) -> list[Any]:
        return self.memory[self.lo : self.lo + self.n]


class Rank:
    """One rank: its program, and its memory as lists of expressions."""

    def __init__(self, program: Program, base: list[Any], out: list[Any]) -> None:
        self.program = program
        self.todo = deque(program.moves)
        self.memory = {Area.BASE: base, Area.OUT: out, Area.SCRATCH: ["scratch"] * program.scratch}
        self.held: dict[int, Any] = {}

    def read(self, area: Area, lo: int, n: int) -> list[Any]:
        values = self.memory[area][lo : lo + n]
        assert len(values) == n, "a move reads beyond an area"
        return values


def add(a: Any, b: Any) -> Any:
    """a + b, which is the same as b + a."""
    return ("+", *sorted((a, b), key=repr))


def leaves(expression: Any) -> list[Any]:
    """What went into an expression."""
    if isinstance(expression, tuple) and expression and expression[0] in ("+", "/"):
        return sorted(leaf for part in expression[1:] for leaf in leaves(part))
    return [expression]


def run(
    ranks: list[Rank],
    *,
    capacity: int = AHEAD,
    lend: bool = False,
    pick: Callable[[int], int] = lambda turn: turn,
) -> None:
    """Runs all ranks to their end, one thread each in effect, over links that hold `capacity` frames.

    Args:
        ranks: all ranks.
        capacity: frames that a link holds.
        lend: receivers read what was sent where it lies, at the last moment.
        pick: in turn t, rank `pick(t)` modulo W makes a move, then each of the others.
    """
    wires = advance(ranks, capacity=capacity, lend=lend, pick=pick)
    assert not any(rank.todo for rank in ranks), "the program comes to a stop"
    assert not any(wires.values()), "something was sent that nobody receives"
    for rank in ranks:
        for base_lo, out_lo, n in rank.program.keep:
            rank.memory[Area.OUT][out_lo : out_lo + n] = rank.read(Area.BASE, base_lo, n)


def advance(
    ranks: list[Rank],
    *,
    capacity: int = AHEAD,
    lend: bool = False,
    pick: Callable[[int], int] = lambda turn: turn,
) -> dict[tuple[int, int], deque[tuple[int, Any]]]:
    """Runs all ranks until none can make a move; what is on the way then, by (sender, receiver)."""
    wires: dict[tuple[int, int], deque[tuple[int, Any]]] = defaultdict(deque)
    turn, moved = 0, True
    while moved:
        order = [pick(turn) % len(ranks), *range(len(ranks))]
        moved = any([_step(at, ranks[at], wires, capacity, lend) for at in order])
        turn += 1
    return wires


def _step(me: int, rank: Rank, wires: Any, capacity: int, lend: bool) -> bool:
    """Makes a rank's next move, if it can."""
    if not rank.todo:
        return False
    move = rank.todo[0]
    if move.do is Do.SEND:
        wire = wires[me, move.peer]
        if len(wire) >= capacity:
            return False
        own = Lent(rank.memory[move.own], move.own_lo, move.n)
        assert len(own.read()) == move.n, "a move reads beyond an area"
        wire.append((move.part, own if lend and rank.program.lend and move.own is not Area.SCRATCH else own.read()))
    else:
        wire = wires[move.peer, me]
        if not wire:
            return False
        part, payload = wire.popleft()
        assert part == move.part
        rank.held[move.peer] = payload
        if move.do is not Do.HOLD:
            _take(me, rank, move)
    rank.todo.popleft()
    return True


def _take(me: int, rank: Rank, move: Move) -> None:
    received = {peer: _values(payload) for peer, payload in rank.held.items()}
    rank.held.clear()
    assert all(len(values) == move.n for values in received.values())
    own = rank.read(move.own, move.own_lo, move.n) if move.do is not Do.STORE else []
    if move.do is Do.FOLD:
        received[me] = own
        result = _fold(received[peer] for peer in sorted(received))
    elif move.do is Do.STORE:
        (result,) = received.values()
    else:
        (values,) = received.values()
        result = [add(a, b) for a, b in zip(values, own, strict=True)]
    if move.do in (Do.FOLD, Do.FINALIZE):
        result = [("/", value) for value in result]
    target = rank.memory[move.to]
    assert move.to is not Area.BASE or target is rank.memory[Area.OUT], "the argument is never written to"
    assert move.to_lo + move.n <= len(target)
    target[move.to_lo : move.to_lo + move.n] = result


def _values(payload: Any) -> list[Any]:
    return payload.read() if isinstance(payload, Lent) else list(payload)


def _fold(columns: Iterable[list[Any]]) -> list[Any]:
    first, *rest = columns
    for values in rest:
        first = [add(a, b) for a, b in zip(first, values, strict=True)]
    return first
