"""How large buckets are if nobody says: by where the ranks are, and anew when hosts come or go."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from unit.parallel.helpers import Array, Branches, RecordingGroup, scale

from paceline._links.base import Peer
from paceline._parallel import DDP, Parameter

X = np.ones((1, 3))


@pytest.mark.parametrize(
    ("nodes", "settings", "buckets"),
    [
        ("aa", {}, [5, 10]),
        ("ab", {}, [5, 5, 5]),
        ("aa", {"bucket_mb": 25}, [5, 5, 5]),
        ("aa", {"compression": "int8"}, [5, 5, 5]),
        ("aa", {"compression": "powersgd"}, [5, 5, 5]),
        (["", ""], {}, [5, 5, 5]),
        ("", {}, [5, 5, 5]),
    ],
)
def test_default_buckets_are_larger_where_all_ranks_share_a_host(
    nodes: str | list[str], settings: dict[str, Any], buckets: list[int]
) -> None:
    """Parameters of 5 million elements, whose memory nobody touches."""

    class Untouched(RecordingGroup):
        def empty(self, shape: Any, dtype: Any) -> Array:
            return np.empty(shape, dtype)

    group = Untouched(members=_peers(nodes), has_same_state=True)
    module = Branches("abc", **{name: Parameter(np.empty(5_000_000, np.float32)) for name in "abc"})
    ddp = DDP(module, group, **settings)
    ddp.prepare()
    assert ddp._model.reducer is not None
    assert [bucket.flat.size // 1_000_000 for bucket in ddp._model.reducer.buckets] == buckets


def test_buckets_are_rebuilt_when_hosts_join_or_leave() -> None:
    """Gradients that are there go home with them."""
    group = RecordingGroup(members=_peers("aa"))
    ddp = DDP(Branches("ab", a=scale(2.0), b=scale(3.0)), group)
    reducers = []
    for generation, nodes in enumerate(["aa", "aa", "ab", "aa"], start=1):
        group.generation, group.members = generation, _peers(nodes)
        ddp.prepare()
        assert ddp._model.reducer is not None
        (bucket,) = ddp._model.reducer.buckets
        reducers.append(ddp._model.reducer)
        gradients = [p.grad for _, p in ddp.named_parameters() if p.grad is not None]
        assert [float(each[0]) for each in gradients] == ([] if generation == 1 else [9.0, 6.0])
        assert all(np.shares_memory(each, bucket.flat) for each in gradients)
        for _, parameter in ddp.named_parameters():
            parameter.grad = None
        ddp(X)
        ddp.backward(X)
    assert reducers[0] is reducers[1]
    assert len(set(map(id, reducers[1:]))) == 3


def test_bucket_dtypes_and_sizes_do_not_depend_on_hosts() -> None:
    """With microbatches, the total weight has the same bits however hosts lie, also for models of two dtypes."""
    found = []
    for nodes in ("aa", "ab"):
        sizes = {"a": (30 << 20, "f4"), "b": (1 << 10, "f8"), "c": (1 << 19, "f4")}
        parameters = {
            name: Parameter(np.empty(size // np.dtype(of).itemsize, of)) for name, (size, of) in sizes.items()
        }
        ddp = DDP(Branches("", **parameters), RecordingGroup(members=_peers(nodes), has_same_state=True))
        ddp.prepare()
        assert ddp._model.reducer is not None
        found.append([(bucket.dtype.name, bucket.nbytes) for bucket in ddp._model.reducer.buckets])
    assert found[0] == found[1]
    assert len({dtype for dtype, _ in found[0]}) == 2


def _peers(nodes: str | list[str]) -> tuple[Peer, ...]:
    return tuple(Peer(rank, f"member-{rank}", "host", node=node) for rank, node in enumerate(nodes))


def test_bucket_size_of_zero_raises_value_error() -> None:
    with pytest.raises(ValueError, match="bucket_mb"):
        DDP(Branches(""), RecordingGroup(), bucket_mb=0)
