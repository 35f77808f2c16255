"""The ranks of a replica agree in rounds: whatever each of them does, none waits for a mate that has left.

Each test plays all orders in which mates may act. A mate is a generator that yields while it waits for a round.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Sequence

import pytest

from paceline._elastic.rounds import Point, Rounds
from paceline.errors import StepOrderError
from paceline_protocol import StepFlag


class Table:
    """Lays the n-th words of all mates together, as an all_reduce with MAX does."""

    def __init__(self, size: int) -> None:
        self.words: list[list[list[int]]] = [[] for _ in range(size)]

    def post(self, position: int, word: list[int]) -> int:
        self.words[position].append(word)
        return len(self.words[position]) - 1

    def found(self, number: int) -> list[int] | None:
        if any(len(words) <= number for words in self.words):
            return None
        return [max(column) for column in zip(*(words[number] for words in self.words), strict=True)]


class Mate:
    """One rank: it goes through its generations, each with a way out; `past` has what it did in each."""

    def __init__(self, table: Table, position: int, ways: Sequence[tuple[int, str]]) -> None:
        self.rounds = Rounds(position, len(table.words))
        self.table, self.position, self.ways = table, position, ways
        self.pending: list[int] = []
        self.mates: Sequence[Mate] = ()
        self.met: set[int] = set()
        self.past: list[tuple[int, int, bool]] = []
        self.at = 0

    def run(self) -> Iterator[None]:
        for generation, way in self.ways:
            self.tell(self.rounds.leave())
            self.met.add(generation)
            yield  # the view comes one by one, after all have met
            while any(generation not in mate.met for mate in self.mates if generation in dict(mate.ways)):
                yield
            self.rounds.enter(generation)
            self.at = generation
            for number, says in enumerate(way):
                if says == "x":
                    self.tell(self.rounds.leave())
                    self.tell(self.rounds.cast_out())
                elif says == "s":
                    self.tell(self.rounds.leave())
                else:
                    passed = yield from self.go()
                    self.past.append((generation, number, passed))
                    if not passed:
                        self.tell(self.rounds.leave())
                        break
                    continue
                break
            else:
                self.tell(self.rounds.leave())

    def tell(self, word: list[int] | None) -> None:
        if word is not None:
            self.pending.append(self.table.post(self.position, word))

    def go(self) -> Generator[None, None, bool]:
        while self.pending:
            while (found := self.table.found(self.pending[0])) is None:
                yield
            self.rounds.hear(found)
            self.pending.pop(0)
        while self.rounds.is_open:
            number = self.table.post(self.position, self.rounds.go(Point.BEGIN, StepFlag(0)))
            while (found := self.table.found(number)) is None:
                yield
            if self.rounds.hear(found) is not None:
                return True
        return False


WAYS = ("", "s", "g", "gs", "gg", "ggs", "ggg")
"""The ways of a rank through a generation: "g" is a round in which it goes on, and "s" a stop."""


def play(ways: Sequence[Sequence[tuple[int, str]]], turns: Iterator[int]) -> list[Mate]:
    """Plays the mates until all are through. A generation begins only when all that are in it have left the one before.

    Fails if all wait.
    """
    table = Table(len(ways))
    mates = [Mate(table, position, way) for position, way in enumerate(ways)]
    for mate in mates:
        mate.mates = mates
    live = {position: mate.run() for position, mate in enumerate(mates)}

    def shown() -> object:
        told = [
            (len(words), mate.at, len(mate.met), len(mate.pending))
            for words, mate in zip(table.words, mates, strict=True)
        ]
        return told, len(live)

    idle = 0
    while live:
        position = sorted(live)[next(turns) % len(live)]
        before = (
            [len(words) for words in table.words],
            [mate.at for mate in mates],
            len(live),
            mates[position].pending[:],
        )
        try:
            next(live[position])
        except StopIteration:
            del live[position]
        idle = 0 if before != shown() else idle + 1
        assert idle < 20 * len(ways), f"all wait: {ways}, {[mate.past for mate in mates]}"
    return mates


def orders(size: int, length: int) -> Iterator[Iterator[int]]:
    for order in itertools.product(range(size), repeat=length):
        yield itertools.chain(order, itertools.cycle(range(size)))


def check_alike(mates: Sequence[Mate]) -> None:
    """Each round of a generation passes at all mates that come to it, or at none."""
    told: dict[tuple[int, int], bool] = {}
    for mate in mates:
        for generation, number, passed in mate.past:
            assert told.setdefault((generation, number), passed) == passed, [mate.past for mate in mates]


@pytest.mark.parametrize("first", WAYS)
@pytest.mark.parametrize("second", WAYS)
def test_two_mates_do_the_same_in_each_round_whatever_one_of_them_does(first: str, second: str) -> None:
    for later in ("g", "s"):
        for turns in orders(2, 7):
            check_alike(play([[(1, first), (2, "gg")], [(1, second), (2, later)]], turns))


@pytest.mark.parametrize("first", ["", "s", "g", "gs"])
def test_three_mates_do_the_same_in_each_round(first: str) -> None:
    for second, third in itertools.product(["", "s", "g"], repeat=2):
        for turns in orders(3, 5):
            check_alike(play([[(1, way), (2, "gg")] for way in (first, second, third)], turns))


@pytest.mark.parametrize("unseen", ["g", "gg", "s"])
def test_a_mate_that_never_heard_of_a_generation_frees_the_others_when_its_session_ends(unseen: str) -> None:
    for turns in orders(2, 8):
        check_alike(play([[(1, "s"), (2, unseen), (3, "s"), (4, "gg")], [(1, "x"), (3, "s"), (4, "gg")]], turns))


def test_flags_of_all_mates_are_joined() -> None:
    one, two = Rounds(0, 2), Rounds(1, 2)
    words = []
    for rounds, flags in ((one, StepFlag.JOIN), (two, StepFlag.STOP)):
        rounds.enter(1)
        words.append(rounds.go(Point.UPDATE, flags))
    found = [max(pair) for pair in zip(*words, strict=True)]
    assert one.hear(found) == two.hear(found) == StepFlag.JOIN | StepFlag.STOP


def test_a_generation_that_a_mate_has_left_is_over_for_all_even_if_they_enter_it_later() -> None:
    one, two = Rounds(0, 2), Rounds(1, 2)
    one.enter(1)
    two.enter(1)
    stop, go = one.leave(), two.go(Point.BEGIN, StepFlag(0))
    assert stop is not None
    assert two.hear([max(pair) for pair in zip(stop, go, strict=True)]) is None
    assert not two.is_open
    assert two.leave() is None, "one stop is enough"


def joined(*words: list[int]) -> list[int]:
    """Lays words together, as an all_reduce with MAX does."""
    return [max(column) for column in zip(*words, strict=True)]


def test_after_both_mates_were_cast_out_they_go_on_in_the_next_generation() -> None:
    mates = [Rounds(position, 2) for position in range(2)]
    for rounds in mates:
        rounds.enter(5)
    for say in (Rounds.leave, Rounds.cast_out):
        words = [say(rounds) for rounds in mates]
        for rounds in mates:
            rounds.hear(joined(*(word for word in words if word is not None)))
    for rounds in mates:
        rounds.enter(7)
    found = joined(*(rounds.go(Point.BEGIN, StepFlag(0)) for rounds in mates))
    assert [rounds.hear(found) for rounds in mates] == [StepFlag(0)] * 2


def test_mates_at_different_points_of_the_script_all_raise() -> None:
    mates = [Rounds(position, 2) for position in range(2)]
    for rounds in mates:
        rounds.enter(1)
    points = (Point.UPDATE, Point.NO_UPDATE)
    found = joined(*(rounds.go(point, StepFlag(0)) for rounds, point in zip(mates, points, strict=True)))
    for rounds in mates:
        with pytest.raises(StepOrderError, match="rank 0 makes its update; rank 1 ends the step's block without an up"):
            rounds.hear(found)
