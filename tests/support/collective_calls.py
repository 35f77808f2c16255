"""Calls of every collective by every schedule, with what NumPy makes of them: dtypes, ops, lengths, layouts, places."""

from collections.abc import Sequence
from functools import partial, reduce
from math import prod
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from paceline._collectives.choose import choose, only
from paceline._collectives.program import SEGMENT_BYTES
from paceline._collectives.schedules import SCHEDULES
from paceline._group import Group
from paceline._links.local import local_meshes
from paceline.config import Config
from support.parts import cut_frames

__all__ = [
    "BF16",
    "COMPLEX",
    "Call",
    "DTYPES",
    "INTEGERS",
    "OUTS",
    "PRIMES",
    "Place",
    "REALS",
    "REDUCING",
    "UFUNCS",
    "WAYS",
    "bits",
    "draw_call",
    "exact_values",
    "folded",
    "groups_by",
    "lay_out",
    "ops_of",
    "quick",
    "random_values",
]

BF16 = np.dtype(ml_dtypes.bfloat16)
INTEGERS = [np.dtype(name) for name in ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")]
REALS = [np.dtype(name) for name in ("f2", "f4", "f8")] + [BF16]
COMPLEX = [np.dtype(name) for name in ("c8", "c16")]
DTYPES = [np.dtype(bool), *INTEGERS, *REALS, *COMPLEX]
UFUNCS = {
    "sum": np.add,
    "mean": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}
PRIMES = [2, 3, 5, 7, 13, 31, 61]
REDUCING = [(kind, name) for kind in ("all_reduce", "reduce", "reduce_scatter") for name in SCHEDULES[kind]]
WAYS = [
    *((kind, name, "") for kind, name in REDUCING),
    *(("broadcast", name, told) for name in SCHEDULES["broadcast"] for told in ("", "unknown")),
    *(("scatter", "direct", told) for told in ("", "unknown", "list")),
    *(("all_gather", name, even) for name in SCHEDULES["all_gather"] for even in ("", "uneven")),
    *(("gather", "direct", even) for even in ("", "uneven")),
    *(("all_to_all", "pairwise", counts) for counts in ("", "sent", "sent and received", "received")),
]
"""Collective, schedule, and a variant of the call."""

quick = partial(settings, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def ops_of(dtype: Any) -> list[str]:
    ops = ["sum", "prod"]
    ops += ["min", "max"] if dtype.kind != "c" else []
    return ops + (["band", "bor", "bxor"] if dtype.kind in "biu" else ["mean"])


def groups_by(world: int, collective: str, schedule: str, segment_bytes: int = SEGMENT_BYTES) -> list[Group]:
    pick = partial(choose, rules=only(collective, schedule))
    groups = [Group(mesh, Config(), choose=pick) for mesh in local_meshes(world)]
    for group in groups:
        cut_frames(group, segment_bytes)
    return groups


def exact_values(rng: Any, shape: Any, dtype: Any) -> Any:
    """Values of which sums and products are exact in any order: for integers any at all, for they wrap around."""
    if dtype.kind in "iu":
        return rng.integers(0, 256, (*np.atleast_1d(shape), dtype.itemsize), np.uint8).view(dtype).reshape(shape)
    values = rng.integers(0, 3, shape)
    return np.asarray(values + 1j * rng.integers(0, 3, shape) if dtype.kind == "c" else values).astype(dtype)


def lay_out(x: Any, layout: str) -> Any:
    """The same values in another layout."""
    if layout == "strided":
        return np.repeat(x, 2, axis=0)[::2]
    if layout == "reversed":
        return x[::-1].copy()[::-1]
    if layout == "big-endian" and x.dtype != BF16:
        return x.astype(x.dtype.newbyteorder(">"))
    if layout == "fortran":
        return np.asfortranarray(x)
    return x


class Place:
    """Where a rank's argument lies, and where its result goes.

    Args:
        x: the argument.
        expected: what the result should be; None if there should be none.
        kind: one of `OUTS`.
    """

    def __init__(self, x: Any, expected: Any, kind: str) -> None:
        self.x, self.out, self.expected = x, None, expected
        dtype = self.dtype = x.dtype if x.dtype.isnative else x.dtype.newbyteorder("=")
        shape = expected.shape if expected is not None else (0,)
        same = x.shape == shape
        if kind == "in place" and same:
            self.out = x
        elif kind == "view of the argument" and same:
            self.out = x[...]
        elif kind == "overlapping":
            memory = np.zeros(x.size + prod(shape), dtype)
            self.x = memory[: x.size].reshape(x.shape)
            self.x[...] = x
            at = x.size // 2
            self.out = memory[at : at + prod(shape)].reshape(shape)
        elif kind == "scattered":
            self.out = np.zeros((*shape, 2), dtype)[..., 0]
        elif kind == "big-endian" and dtype != BF16:
            self.out = np.zeros(shape, dtype.newbyteorder(">"))
        elif kind != "none":
            self.out = np.zeros(shape, dtype)
        self._before = self.x.copy()
        # In a product of complex numbers the sign of a zero depends on the order; a zero added to it has none.
        self._nought = np.zeros((), dtype)

    def check(self, result: Any) -> None:
        """The result is right, and the argument what it was, but where the caller asked for it."""
        if self.expected is None:
            assert result is None
        else:
            assert result is self.out or self.out is None
            assert self.out is not None or (result.dtype == self.dtype and result.dtype.isnative)
            assert self.out is not None or not np.shares_memory(result, self.x)
            assert result.shape == self.expected.shape
            found, hoped = (bits(each.astype(self.dtype) + self._nought) for each in (result, self.expected))
            assert found == hoped
        if self.expected is None or self.out is None or not np.may_share_memory(self.out, self.x):
            assert bits(self.x) == bits(self._before), "the argument is never changed"


OUTS = ["none", "out", "in place", "view of the argument", "overlapping", "scattered", "big-endian"]


def bits(x: Any) -> bytes:
    return np.ascontiguousarray(x).tobytes()


def folded(op: str, terms: list[Any]) -> Any:
    """The terms of all ranks combined in rank order; means of exact sums are rounded once."""
    dtype = terms[0].dtype
    with np.errstate(all="ignore"):
        total = reduce(UFUNCS[op], terms)
        if op != "mean":
            return np.asarray(total, dtype)
        if dtype.itemsize == 2:
            return np.asarray(np.asarray(total, "f4") / np.float32(len(terms))).astype(dtype)
        real = np.asarray(total).reshape(-1).view(total.real.dtype)
        return (real / real.dtype.type(len(terms))).view(dtype).reshape(total.shape)


class Call(NamedTuple):
    """A collective of all ranks, and what NumPy says of it.

    Attributes:
        collective: its name.
        variant: of the call, as in `WAYS`.
        xs: the ranks' arguments; at least 1-d. Of a scatter each is a root's, all parts joined.
        op: for those that reduce.
        root: for those that have one.
        sent: rows from each rank to each, for an all_to_all with counts.
    """

    collective: str
    variant: str
    xs: list[Any]
    op: str = "sum"
    root: int = 0
    sent: list[list[int]] | None = None

    def counts(self, rank: int) -> list[int]:
        """Rows that a rank sends to each."""
        return self.sent[rank] if self.sent else [len(self.xs[rank]) // len(self.xs)] * len(self.xs)

    def expected(self) -> list[Any]:
        """The result at each rank; None where there is none."""
        xs, ranks = self.xs, range(len(self.xs))
        if self.collective == "all_reduce":
            return [folded(self.op, xs) for _ in ranks]
        if self.collective == "reduce":
            return [folded(self.op, xs) if rank == self.root else None for rank in ranks]
        if self.collective == "reduce_scatter":
            return np.split(folded(self.op, xs), len(xs))
        if self.collective == "broadcast":
            return [xs[self.root] for _ in ranks]
        if self.collective == "scatter":
            return np.split(xs[self.root], len(xs))
        if self.collective == "all_gather":
            return [np.concatenate(xs) for _ in ranks]
        if self.collective == "gather":
            return [np.concatenate(xs) if rank == self.root else None for rank in ranks]
        cut = [np.split(x, np.cumsum(self.counts(rank))[:-1]) for rank, x in enumerate(xs)]
        return [np.concatenate([cut[source][rank] for source in ranks]) for rank in ranks]

    def at(self, group: Group, x: Any, out: Any = None) -> Any:
        """What a rank does, and gets; `x` is its argument, perhaps in another layout."""
        rank, kwargs = group.rank, dict[str, Any](out=out)
        if self.collective in ("all_reduce", "reduce", "reduce_scatter"):
            kwargs["op"] = self.op
        if self.collective in ("reduce", "broadcast", "scatter", "gather"):
            kwargs["root"] = self.root
        if self.variant == "uneven":
            kwargs["uneven"] = True
        if self.variant.startswith("sent"):
            kwargs["send_counts"] = self.counts(rank)
        if self.variant.endswith("received"):
            kwargs["recv_counts"] = [self.counts(source)[rank] for source in range(group.size)]
        if self.variant == "unknown" and rank != self.root:
            x = None
        if self.variant == "list" and rank == self.root:
            x = list(x)
        return getattr(group, self.collective)(x, **kwargs)


def draw_call(data: Any, collective: str, variant: str) -> tuple[Call, list[Place]]:
    """A collective, and where each rank's arrays lie."""

    def pick(values: Sequence[Any]) -> Any:
        return data.draw(st.sampled_from(values))

    world, dtype = data.draw(st.integers(1, 8)), pick(DTYPES)
    layout = pick(["plain", "plain", "strided", "big-endian", "fortran", "reversed"])
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    tail = (3,) if layout == "fortran" else pick([(), (), (2,), (3, 0)])
    counts = st.lists(st.integers(0, 7), min_size=world, max_size=world)
    sent = None
    if variant == "uneven":
        rows = data.draw(counts)
    elif variant.startswith("sent"):
        sent = [data.draw(counts) for _ in range(world)]
        rows = [sum(each) for each in sent]
    elif collective in ("reduce_scatter", "all_to_all", "scatter"):
        rows = [world * pick([0, 1, 3, 7])] * world
    else:
        rows = [pick([0, 1, max(0, world - 1), world, *PRIMES])] * world
        if rows[0] == 1 and tail == () and pick([False, True]):
            tail = None
    xs = [exact_values(rng, (count, *(tail or ())), dtype) for count in rows]
    call = Call(collective, variant, xs, pick(ops_of(dtype)), data.draw(st.integers(0, world - 1)), sent)
    places = []
    for x, expected in zip(xs, call.expected(), strict=True):
        given, result = x, expected
        if collective == "scatter":
            given = x.reshape(world, len(x) // world, *x.shape[1:])
        elif tail is None:
            given = x.reshape(())
            result = expected.reshape(()) if expected is not None and "gather" not in collective else expected
        places.append(Place(lay_out(given, layout) if given.ndim else given, result, pick(OUTS)))
    return call, places


def random_values(rng: Any, n: int, dtype: Any) -> Any:
    """Floats of all sizes, infinities, zeros of both signs, and one NaN: the one that the CPU makes itself."""
    base = np.dtype("f4") if dtype in (BF16, np.dtype("c8")) else np.zeros(0, dtype).real.dtype
    count = n * (2 if dtype.kind == "c" else 1)
    values = (rng.standard_normal(count) * 10.0 ** rng.integers(-4, 5, count)).astype(base)
    with np.errstate(all="ignore"):
        nan = np.array([np.inf], base) - np.array([np.inf], base)
    special = np.concatenate([np.array([np.inf, -np.inf, 0.0, -0.0, 0.0, -0.0, 1.0], base), nan])
    odd = rng.random(count) < 0.4
    values[odd] = special[rng.integers(0, len(special), int(odd.sum()))]
    with np.errstate(all="ignore"):
        return values.view(dtype) if dtype.kind == "c" else values.astype(dtype)
