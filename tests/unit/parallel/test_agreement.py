"""First use: models that differ are told apart by name, and rank 0's values are everywhere before training."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from unit.parallel.helpers import Array, Branches, mlp, scale, weights

from paceline._group import Group
from paceline._links.fault import Suspicion
from paceline._links.local import local_meshes
from paceline._links.nowhere import NoMesh
from paceline._parallel import DDP, FSDP, ShardingStrategy
from paceline._parallel._agreement import ModelManifest, NewcomerDiffers, agree
from paceline.errors import (
    DivergenceError,
    PacelineError,
    SettingsMismatch,
    SizeMismatch,
    StepOrderError,
    UnsupportedOp,
)
from paceline.testing import run_ranks
from pacelinepb.v1.errors_pb2 import ErrorReason
from support.parts import SOON, each


class Buffered(Branches):
    def __init__(self, **buffers: Any) -> None:
        super().__init__("a", a=scale(1.0))
        self.buffers = buffers

    def named_buffers(self) -> Iterator[tuple[str, Any]]:
        yield from self.buffers.items()


def test_parameters_take_the_values_of_rank_0_in_place() -> None:
    def rank(g: Group) -> Any:
        module = mlp(seed=g.rank)
        arrays = [id(p.data) for _, p in module.named_parameters()]
        DDP(module, g)(np.zeros((1, 12)))
        assert arrays == [id(p.data) for _, p in module.named_parameters()]
        return weights(module)

    expected = weights(mlp(seed=0))
    for found in run_ranks(3, rank):
        np.testing.assert_equal(found, expected)


def test_buffers_of_any_dtype_and_layout_are_broadcast() -> None:
    def rank(g: Group) -> list[Array]:
        buffers = {
            "flags": np.array([g.rank == 0, True]),
            "strided": np.full((4, 6), g.rank + 0.5)[::2, ::3],
            "fortran": np.asfortranarray(np.arange(6).reshape(2, 3) * (g.rank + 1)),
            "scalar": np.array(g.rank, np.int64),
            "empty": np.zeros((0, 2)),
            "half": np.full(3, g.rank + 1, ml_dtypes.bfloat16),
        }
        ddp = DDP(Buffered(**buffers), g)
        ddp(np.ones((1, 1)))
        assert [name for name, _ in ddp.named_buffers()] == list(buffers)
        return list(buffers.values())

    first, second = run_ranks(2, rank)
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(second[2], np.arange(6).reshape(2, 3))


def test_equal_values_are_not_broadcast() -> None:
    def rank(g: Group) -> None:
        def no_broadcast(*args: Any, **settings: Any) -> Any:
            raise AssertionError("broadcast")

        g.broadcast = no_broadcast  # type: ignore[method-assign]
        DDP(mlp(), g)(np.zeros((1, 12)))

    run_ranks(2, rank)


@pytest.mark.parametrize(
    ("odd", "kind", "text"),
    [
        (lambda: Branches("a", a=scale(1.0, 2.0)), SizeMismatch, r"'a' float64 \[2\] where rank 0 has trained 'a'"),
        (lambda: Branches("a", a=scale(1, dtype="f4")), DivergenceError, r"'a' float32 \[1\] where rank 0 has"),
        (lambda: Branches("z", z=scale(1.0)), DivergenceError, "trained 'z' .* where rank 0 has trained 'a'"),
        (lambda: Branches("a", a=scale(1, requires_grad=False)), DivergenceError, "has frozen 'a' .* where"),
        (
            lambda: Branches("a", a=scale(1.0), b=scale(1.0)),
            DivergenceError,
            r"rank 2 has trained 'b'.* rank 0 does not have",
        ),
        (
            lambda: Buffered(mean=np.zeros(3)),
            DivergenceError,
            r"has buffer 'mean' float64 \[3\], which rank 0 does not have",
        ),
    ],
)
def test_models_that_differ_raise_the_same_error_on_all_ranks(
    odd: Callable[[], Branches], kind: type[PacelineError], text: str
) -> None:
    def rank(g: Group) -> str:
        with pytest.raises(kind, match=text) as caught:
            DDP(odd() if g.rank == 2 else Branches("a", a=scale(1.0)), g)(np.ones((1, 1)))
        assert caught.value.ranks == (2,)
        return str(caught.value)

    assert len(set(run_ranks(3, rank))) == 1  # all tell the same story


def test_all_ranks_learn_of_a_mismatch_before_the_generation_ends() -> None:
    """Rank 2 is late for the last message, and rank 0 ends the generation as soon as it has raised."""
    rank_0_is_through = threading.Event()

    def rank(g: Group) -> None:
        reduce, broadcast = g.all_reduce, g.broadcast
        reductions, messages = [0], [0]

        def all_reduce(*args: Any, **settings: Any) -> Any:
            reductions[0] += 1
            if g.rank == 0 and reductions[0] == 2:
                rank_0_is_through.set()
            return reduce(*args, **settings)

        def late(*args: Any, **settings: Any) -> Any:
            messages[0] += 1
            if g.rank == 2 and messages[0] == 2:
                assert rank_0_is_through.wait(10)
            return broadcast(*args, **settings)

        g.all_reduce, g.broadcast = all_reduce, late  # type: ignore[method-assign]
        with pytest.raises(SizeMismatch, match="differs"):
            DDP(Branches("a", a=scale(*[1.0] * (1 + min(g.rank, 1)))), g)(np.ones((1, 1)))
        if g.rank == 0:
            g._core.mesh.fault.suspect(Suspicion(ErrorReason.ERROR_REASON_PEER_RAISED, 1, 0, "rank 1 is odd"))
            rank_0_is_through.set()

    run_ranks(3, rank)


def manifest_of(*values: float) -> ModelManifest:
    return ModelManifest.of({"a": scale(*values)}, {}, bucket_mb=25)


@pytest.mark.parametrize(
    ("new", "odd", "blamed", "hear"),
    [
        ((0, 3), (0,), (0,), (0,)),
        ((0, 3), (0, 3), (0, 3), (0, 3)),
        ((3,), (0, 3), (1, 2), (0, 1, 2, 3)),  # the first who was there is what the others are compared with
        ((), (3,), (3,), (0, 1, 2, 3)),
        ((0, 1, 2, 3), (3,), (3,), (0, 1, 2, 3)),  # nobody was there
    ],
)
@pytest.mark.parametrize("before", [0, 5])  # it has come in, or was away when the others agreed last
def test_newcomers_are_blamed_for_a_model_that_differs(before: int, new: Any, odd: Any, blamed: Any, hear: Any) -> None:
    """It is their error alone: `hear` are the ranks for which it is a SizeMismatch."""

    def rank(g: Group) -> None:
        kind, mine = SizeMismatch if g.rank in hear else NewcomerDiffers, (1.0, 2.0) if g.rank in odd else (1.0,)
        with pytest.raises(kind, match=f"the model of rank {blamed[0]}") as caught:
            agree(g, manifest_of(*mine), [], may_change=True, agreed_in=before if g.rank in new else 7)
        assert caught.value.ranks == blamed

    run_ranks(4, rank)


def test_a_newcomer_in_a_subgroup_is_blamed_by_its_rank_in_the_view() -> None:
    def rank(g: Group) -> None:
        if g.rank >= 2:
            kind, agreed_in = (SizeMismatch, 0) if g.rank == 3 else (NewcomerDiffers, 1)
            with pytest.raises(kind, match="the model of rank 1") as caught:
                agree(g.subgroup([2, 3]), manifest_of(*[1.0] * g.rank), [], may_change=True, agreed_in=agreed_in)
            assert caught.value.ranks == (3,), "in the view"

    run_ranks(4, rank)


@pytest.mark.parametrize("wrap", [DDP, lambda model, g: FSDP(model, g, ShardingStrategy.NO_SHARD)])
def test_a_member_is_a_newcomer_to_a_wrapper_until_its_first_use(wrap: Any) -> None:
    """However many steps and views the two have trained with another wrapper meanwhile."""
    old, new = Group(local_meshes(1)[0], SOON), Group(NoMesh("waits"), SOON)
    models = {g: (Branches("a", a=scale(1.0)), Branches("a", a=scale(*[1.0] * n))) for g, n in ((old, 1), (new, 2))}
    wrappers = {g: [wrap(model, g) for model in both] for g, both in models.items()}
    for wrapper in wrappers[old]:
        wrapper.prepare()
    for generation in (2, 3):
        for group, mesh in zip((new, old), local_meshes(2, generation=generation), strict=True):
            group._core.move(mesh)
            group._core.confirm_same_state()
        assert each([new, old], lambda g: wrappers[g][0].prepare()) == [None, None]
    ends = each([new, old], lambda g: wrappers[g][1].prepare())
    assert [type(error) for error in ends] == [SizeMismatch, NewcomerDiffers]
    assert ends[1].newcomer == old.members[0]
    for group in (old, new):
        group.close(0.2)


def test_parameters_tied_on_one_rank_only_raise_divergence_error() -> None:
    def rank(g: Group) -> None:
        a, b = scale(1.0), scale(1.0)
        with pytest.raises(DivergenceError, match=r"rank 0 has trained 'b' float64 \[1\], which rank 1 does not have"):
            DDP(Branches("a", a=a, b=a if g.rank else b), g)(np.ones((1, 1)))

    run_ranks(2, rank)


def test_several_ranks_that_differ_are_all_named() -> None:
    def rank(g: Group) -> None:
        with pytest.raises(SizeMismatch, match=r"rank 1 \(ranks that differ: \[1, 3\]\)") as caught:
            DDP(Branches("a", a=scale(*[1.0] * (1 + g.rank % 2))), g)(np.ones((1, 1)))
        assert caught.value.ranks == (1, 3)

    run_ranks(4, rank)


def test_different_bucket_sizes_raise_settings_mismatch() -> None:
    def rank(g: Group) -> None:
        with pytest.raises(SettingsMismatch, match="bucket_mb is 2 on rank 1 and 1 on rank 0"):
            DDP(mlp(), g, bucket_mb=1 + g.rank)(np.zeros((1, 12)))

    run_ranks(2, rank)


def test_a_corrupted_broadcast_raises_divergence_error() -> None:
    def rank(g: Group) -> None:
        if g.rank == 1:
            whole = g.broadcast

            def torn(x: Any, *, root: int = 0, out: Any = None) -> Any:
                whole(x, root=root, out=out)
                out[0] ^= 1
                return out

            g.broadcast = torn  # type: ignore[assignment,method-assign]
        with pytest.raises(DivergenceError, match=r"ranks \[1\] do not hold the values") as caught:
            DDP(mlp(seed=g.rank), g)(np.zeros((1, 12)))
        assert caught.value.ranks == (1,)

    run_ranks(3, rank)


def test_gradients_from_other_initial_values_are_refused_on_every_rank() -> None:
    def rank(g: Group) -> None:
        module = Branches("a", a=scale(1.0 + g.rank))
        module.forward(np.ones((1, 1)))
        module.backward(np.ones((1, 1)))
        ddp = DDP(module, g)
        with pytest.raises(StepOrderError, match=r"ranks \[1\] computed gradients from initial values"):
            ddp.sync_gradients()
        module.scales["a"].grad = None
        ddp.prepare()
        ddp.backward(np.ones((1, 1)))
        assert module.scales["a"].data == module.scales["a"].grad == 1

    run_ranks(2, rank)


def test_buffers_must_be_arrays_of_plain_data() -> None:
    def rank(g: Group) -> None:
        with pytest.raises(UnsupportedOp, match="'count' must be an array"):
            DDP(Buffered(count=3), g)(np.ones((1, 1)))
        with pytest.raises(UnsupportedOp, match="'names' holds Python objects"):
            DDP(Buffered(names=np.array(["a"], object)), g)(np.ones((1, 1)))

    run_ranks(1, rank)


def test_manifest_survives_encode_and_decode() -> None:
    manifest = ModelManifest.of(
        {"a": scale(1.0), "b": scale(1, requires_grad=False)}, {"m": np.zeros((2, 3), ">f4")}, bucket_mb=25
    )
    assert ModelManifest.decode(manifest.encode()) == manifest
    assert [str(e) for e in manifest.entries] == [
        "trained 'a' float64 [1]",
        "frozen 'b' float64 [1]",
        "buffer 'm' >f4 [2, 3]",
    ]


def test_a_model_without_arrays_agrees() -> None:
    run_ranks(2, lambda g: agree(g, ModelManifest.of({}, {}, bucket_mb=25), [], may_change=True))
