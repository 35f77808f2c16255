"""A failure at any frame of any collective by any schedule: one error for all, nothing hangs, and the links go on.

Each case breaks one frame at one rank. Then every rank must raise the same, arrays are the callers' again, and in the
next generation the same collective is right, over the same links.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from time import monotonic
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest

from paceline._collectives.choose import choose, only
from paceline._collectives.schedules import SCHEDULES
from paceline._group import Group
from paceline._links.base import LEND_BYTES, LinkEnded
from paceline._links.frame import Frame
from paceline._links.local import local_meshes
from paceline.config import Config
from paceline.errors import CollectiveMismatch, OperationTimeout, PacelineError, PeerBrokeProtocol, PeerLost, PeerRaised
from paceline.testing import next_generation
from support.parts import at_once, cut_frames

WORLD = 4
AT = (0, 2)
"""Ranks that fail: the root and hub of rooted schedules, and one that is neither first nor last."""
SEGMENTS = 3
"""Frames that a chunk is cut into."""
SMALL, LENT = 32, LEND_BYTES
"""Bytes of a frame, where the array is cut into W chunks: copied, and lent."""
HANG = 8.0
"""Seconds after which a case counts as a hang."""
LATE = 1.0
"""Seconds that are waited for a lost frame, at least: a busy machine gets thirty times what it needs without one."""
SOON = Config(failure_timeout=0.6)

WAYS = [
    *((kind, name, "") for kind in ("all_reduce", "reduce", "reduce_scatter", "barrier") for name in SCHEDULES[kind]),
    *(("broadcast", name, told) for name in SCHEDULES["broadcast"] for told in ("", "unknown")),
    *(("scatter", "direct", told) for told in ("", "unknown")),
    *(("all_gather", name, even) for name in SCHEDULES["all_gather"] for even in ("", "uneven")),
    *(("gather", "direct", even) for even in ("", "uneven")),
    *(("all_to_all", "pairwise", counts) for counts in ("", "counts")),
]
"""Collective, schedule, and a variant of the call."""

QUICK = [("all_reduce", "recursive_doubling"), ("all_reduce", "ring"), ("all_gather", "bruck"), ("broadcast", "tree")]
"""One of each shape: frames to one neighbour, to a partner, in growing runs, and up and down a tree."""


class Attempt(NamedTuple):
    """What became of a collective at one rank.

    Attributes:
        x: its argument.
        out: where the result was to go; None if the collective was to make one.
        result: what it returned; None for nothing.
        error: what it raised.
    """

    x: Any
    out: Any
    result: Any
    error: BaseException | None


class Case(NamedTuple):
    """One collective; whole numbers, so that its result is exact."""

    collective: str
    schedule: str
    variant: str

    def n(self, nbytes: int) -> int:
        """Elements of each rank's array, so that a chunk of W has `SEGMENTS` frames of `nbytes`."""
        return WORLD * SEGMENTS * nbytes // 8

    def segment(self, nbytes: int) -> int:
        """Bytes of a frame, so that the schedule's chunks have `SEGMENTS` of them."""
        chunks = SCHEDULES[self.collective][self.schedule].chunks(WORLD)
        whole = self.collective in ("all_gather", "gather", "reduce") or chunks == 1
        return nbytes * (WORLD if whole else 1)

    def argument(self, rank: int, nbytes: int) -> Any:
        n = self.n(nbytes)
        if self.collective == "scatter":
            return (np.arange(n, dtype="f8") + rank).reshape(WORLD, -1)
        if self.variant == "uneven":
            n -= rank
        return np.arange(n, dtype="f8") * (rank + 1)

    @lru_cache(maxsize=64)  # noqa: B019  a case is a tuple of three words
    def expected(self, rank: int, nbytes: int) -> Any:
        xs = [self.argument(r, nbytes) for r in range(WORLD)]
        if self.collective in ("all_reduce", "reduce", "reduce_scatter"):
            total = np.sum(xs, axis=0)
            parts = {"all_reduce": total, "reduce": total if rank == 0 else None}
            return parts[self.collective] if self.collective in parts else np.split(total, WORLD)[rank]
        if self.collective in ("broadcast", "scatter"):
            return xs[0] if self.collective == "broadcast" else xs[0][rank]
        if self.collective in ("all_gather", "gather"):
            return np.concatenate(xs) if self.collective == "all_gather" or rank == 0 else None
        if self.collective == "all_to_all":
            return np.concatenate([np.split(x, self.cuts(len(x)))[rank] for x in xs])
        return None

    def cuts(self, n: int) -> list[int]:
        third = 3 if self.variant == "counts" else 0
        return [n // 4 - third, n // 2, n // 4 * 3 + third]

    def attempt(self, nbytes: int, timeout: float, group: Group) -> Attempt:
        """Calls it; the arrays are the caller's when this returns."""
        cut_frames(group, self.segment(nbytes))
        x, kwargs = self.argument(group.rank, nbytes), dict[str, Any](timeout=timeout)
        args: list[Any] = [x]
        expected = self.expected(group.rank, nbytes)
        out = None if expected is None or self.variant == "unknown" else np.zeros_like(expected)
        if self.collective == "barrier":
            args = []
        else:
            kwargs["out"] = out
        if self.variant == "unknown" and group.rank != 0:
            args = [None]
        if self.variant == "uneven":
            kwargs["uneven"] = True
        if self.variant == "counts":
            kwargs["send_counts"] = np.diff([0, *self.cuts(len(x)), len(x)]).tolist()
        try:
            result = getattr(group, self.collective)(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001  the test looks at it
            return Attempt(x, out, None, error)
        return Attempt(x, out, result, None)


class AtFrame:
    """Something happens at the k-th frame that a rank sends or receives in its first operation."""

    def __init__(self, k: int, act: Callable[[], None]) -> None:
        self.k = k
        self.act = act
        self.ways: list[str] = []

    def __call__(self, way: str, peer: int, frame: Frame) -> Frame | None:
        if frame.operation > 1:
            return frame
        self.ways.append(way)
        if len(self.ways) == self.k:
            self.act()
            return None
        return frame


def end_link() -> None:
    raise LinkEnded("the test cut it")


def raise_in_rank() -> None:
    raise MemoryError("no room")


def lose() -> None:
    """The frame is gone, and nobody is told."""


class Worlds:
    """Worlds of groups whose ranks all run at the same time, and never for longer than `HANG`."""

    def __init__(self, case: Case, nbytes: int, count: int) -> None:
        self.case, self.nbytes = case, nbytes
        pick = partial(choose, rules=only(case.collective, case.schedule))
        self.worlds = [[Group(mesh, SOON, choose=pick) for mesh in local_meshes(WORLD)] for _ in range(count)]

    def each(self, do: Callable[[Group], Any]) -> list[list[Any]]:
        """What each rank of each world does."""
        every = [partial(do, group) for groups in self.worlds for group in groups]
        ended = at_once(every, HANG)
        for end in ended:
            if isinstance(end, BaseException):
                raise end
        return [ended[first : first + WORLD] for first in range(0, len(ended), WORLD)]

    def attempts(self, timeout: float = HANG) -> list[list[Attempt]]:
        return self.each(partial(self.case.attempt, self.nbytes, timeout))

    def check_clean(self) -> None:
        """The collective is right, at all ranks of all worlds."""
        for attempts in self.attempts():
            for rank, attempt in enumerate(attempts):
                assert attempt.error is None
                check_result(attempt, self.case, self.nbytes, rank)

    def break_once(self, tampers: Sequence[tuple[int, AtFrame]], act: Callable[[], None]) -> None:
        """Breaks the collective in each world in its own way, and sees that all is well in the next generation.

        Args:
            tampers: the rank that fails, and how, for each world.
            act: what happens at the frame.
        """
        case, nbytes = self.case, self.nbytes
        started = monotonic()
        self.check_clean()
        late = min(HANG / 2, max(LATE, 30 * (monotonic() - started)))
        for groups, (at, tamper) in zip(self.worlds, tampers, strict=True):
            next_generation(groups, {at: tamper})

        def fail(group: Group) -> tuple[Attempt, Any, Any, BaseException]:
            attempt = case.attempt(nbytes, late if act is lose else HANG, group)
            before = attempt.x.copy()
            attempt.x[...] = -1.0  # the caller's own again
            out = attempt.out if attempt.error is not None else None
            if out is not None:
                out[...] = -2.0
            with pytest.raises(PacelineError) as caught:  # at the barrier, where there was no error before
                group.barrier(HANG)
            return attempt, before, out, caught.value

        for (at, tamper), found in zip(tampers, self.each(fail), strict=True):
            label = (case, at, act.__name__, tamper.k)
            assert len(tamper.ways) >= tamper.k, label
            news = found[at][3]
            check_kind(news, act, at, label)
            for rank, (attempt, before, out, error) in enumerate(found):
                assert (type(error), str(error), error.ranks) == (type(news), str(news), news.ranks), label
                assert (before == case.argument(rank, nbytes)).all(), "the argument is never changed"
                assert (attempt.x == -1.0).all(), "nobody writes to it afterwards"
                assert out is None or (out == -2.0).all(), "nor to out"
                if attempt.error is None:
                    check_result(attempt, case, nbytes, rank)
                elif rank == at and act is raise_in_rank:
                    assert type(attempt.error) is MemoryError, label
                else:
                    assert (type(attempt.error), str(attempt.error)) == (type(news), str(news)), label
            if act is not lose:
                assert found[at][0].error is not None, label
        for groups in self.worlds:
            next_generation(groups)
        self.check_clean()

    def close(self) -> None:
        for groups in self.worlds:
            for group in groups:
                group.close(0.2)


def check_result(attempt: Attempt, case: Case, nbytes: int, rank: int) -> None:
    expected = case.expected(rank, nbytes)
    if expected is None:
        assert attempt.result is None
    else:
        assert attempt.out is None or attempt.result is attempt.out
        assert np.array_equal(attempt.result, expected)


def check_kind(error: PacelineError, act: Callable[[], None], at: int, label: Any) -> None:
    """The news of a failure are of the right type, and name somebody."""
    if act is raise_in_rank:
        assert type(error) is PeerRaised, label
        assert error.ranks == (at,), label
        assert f"rank {at} (local) raised MemoryError: no room" in str(error), label
    elif act is end_link:
        assert type(error) is PeerLost, label
        assert error.ranks, label
        assert at not in error.ranks, label
        assert f"as seen by rank {at} (local): the test cut it" in str(error), label
    else:  # it never comes, or the next one comes in its place, or one of the barrier that follows
        assert type(error) in (OperationTimeout, PeerBrokeProtocol, CollectiveMismatch), label
        assert error.ranks, label
    assert f"operation {error.operation}" in str(error), label


@contextmanager
def worlds_of(way: tuple[str, str, str], nbytes: int, count: int = 1) -> Iterator[Worlds]:
    case = Case(*way)
    worlds = Worlds(case, nbytes, count)
    try:
        worlds.check_clean()
        yield worlds
    finally:
        worlds.close()


def frames(worlds: Worlds, at: int) -> list[str]:
    """The ways of the frames that a rank moves in a clean run, in order."""
    counter = AtFrame(0, lose)
    (groups,) = worlds.worlds
    next_generation(groups, {at: counter})
    worlds.check_clean()
    return counter.ways


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, marks=[] if way[:2] in QUICK[1:3] else pytest.mark.exhaustive if n % 2 else pytest.mark.slow)
        for n, way in enumerate(WAYS)
    ],
    ids="-".join,
)
def test_a_link_end_or_an_exception_at_any_frame_fails_all_ranks_alike(way: tuple[str, str, str]) -> None:
    with worlds_of(way, SMALL) as worlds:
        for at in AT:
            ways = frames(worlds, at)
            assert len(ways) >= (SEGMENTS if way[0] != "barrier" else 2)
            for k in range(1, len(ways) + 1):
                for act in (end_link, raise_in_rank):
                    worlds.break_once([(at, AtFrame(k, act))], act)


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, marks=pytest.mark.slow if way[:2] in QUICK else pytest.mark.exhaustive)
        for way in WAYS
        if way[0] != "barrier"
    ],
    ids="-".join,
)
def test_a_link_end_or_an_exception_with_lent_arrays_fails_all_alike(way: tuple[str, str, str]) -> None:
    with worlds_of(way, LENT) as worlds:
        for at in AT:
            for k in some(len(frames(worlds, at))):
                for act in (end_link, raise_in_rank):
                    worlds.break_once([(at, AtFrame(k, act))], act)


@pytest.mark.slow  # each costs its timeout
@pytest.mark.parametrize(
    ("way", "nbytes"),
    [
        *(
            pytest.param(way, SMALL, id=f"{'-'.join(way)}-{SMALL}", marks=[] if n % 2 else [pytest.mark.exhaustive])
            for n, way in enumerate(WAYS)
        ),
        *(pytest.param(way, LENT, id=f"{'-'.join(way)}-{LENT}") for way in WAYS if way[:2] in QUICK),
    ],
)
@pytest.mark.sampled(3)
def test_a_lost_frame_fails_all_ranks_alike(way: tuple[str, str, str], nbytes: int) -> None:
    """Every one of them takes `LATE` seconds, so worlds lose theirs at the same time."""
    with worlds_of(way, SMALL) as worlds:
        places = [(at, k) for at in AT for k in some(len(frames(worlds, at)))]
    with worlds_of(way, nbytes, len(places)) as many:
        many.break_once([(at, AtFrame(k, lose)) for at, k in places], lose)


def some(count: int) -> list[int]:
    """The first frames, the last ones, and some between them."""
    ks = {1, 2, 3, count // 3, count // 2, 2 * count // 3, count - 2, count - 1, count}
    return sorted(k for k in ks if 1 <= k <= count)


def test_the_harness_detects_a_hang() -> None:
    """The judge judges: a rank that never comes back fails the case, and soon."""
    with worlds_of(("barrier", "ring", ""), SMALL) as worlds, mock.patch(f"{__name__}.HANG", 0.1):
        stuck = threading.Event()
        with pytest.raises(AssertionError, match="some hang"):  # on a busy machine those who have yet to begin, too
            worlds.each(lambda group: group.rank == 1 and stuck.wait(20))
        stuck.set()
