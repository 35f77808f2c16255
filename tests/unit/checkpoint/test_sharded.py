"""What ranks save together, any world loads under any strategy, bit for bit; and a failure of one is everybody's."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline import DDP, FSDP, ShardingStrategy, checkpoint, load_sharded_state, nn, optim, sharded_state
from paceline._group import Group
from paceline._parallel._parameter import Parameter
from paceline.checkpoint import Shard, ShardedSaver, load_sharded, save_sharded
from paceline.checkpoint import sharded as module
from paceline.errors import CheckpointDamaged, CheckpointFailed, SizeMismatch, StepOrderError, UnsupportedOp
from paceline.testing import run_ranks

STRATEGIES = [strategy.name for strategy in ShardingStrategy]


class Model(nn.Sequential):
    """Two layers of odd sizes, in units of their own if wrapped, one weight under two paths, and a buffer."""

    def __init__(self, wrap: Any = lambda block: block, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        first = nn.Linear(5, 7, rng=rng)
        first.bias.requires_grad = False
        super().__init__(wrap(first), nn.ReLU(), nn.Linear(7, 3, rng=rng, dtype=np.float64))
        self.scale = Parameter(np.ones((), np.float32))
        self.seen = np.array([seed])

    def named_parameters(self) -> Any:
        yield from super().named_parameters()
        yield "scale", self.scale
        yield "tied", self.scale

    def named_buffers(self) -> Any:
        yield "seen", self.seen


def build(group: Group | None, name: str, seed: int = 0) -> tuple[Any, optim.Adam]:
    if group is None or name == "bare":
        model: Any = Model(seed=seed)
    elif name == "DDP":
        model = DDP(Model(seed=seed), group)
    else:
        size = {"intra_node_size": 2 if group.size % 2 == 0 else 1} if name == "HYBRID_SHARD" else {}
        options: dict[str, Any] = {"strategy": ShardingStrategy[name], **size}
        model = FSDP(Model(lambda block: FSDP(block, group, **options), seed), group, **options)
    return model, optim.Adam(model, 1e-2 * (seed + 1))


def train(model: Any, optimizer: optim.Adam, rank: int) -> None:
    for step in range(2):
        optimizer.zero_grad()
        model.backward(model.forward(np.full((2, 5), rank + step, np.float32)))
        optimizer.step()


def leaves_of(model: Any) -> Any:
    return sharded_state(model)["model"].items()


def same(a: dict[str, NDArray[Any]], b: dict[str, NDArray[Any]]) -> None:
    assert a.keys() == b.keys()
    for path in a:
        assert (a[path].dtype, a[path].shape, a[path].tobytes()) == (b[path].dtype, b[path].shape, b[path].tobytes())


def flat(tree: Any, path: str = "") -> dict[str, Any]:
    """The leaves of a sharded state by path."""
    if isinstance(tree, dict):
        return {k: v for key, inner in tree.items() if key != "note" for k, v in flat(inner, f"{path}/{key}").items()}
    return {path: tree if isinstance(tree, Shard) else np.asarray(tree)}


def holds(model: Any, optimizer: optim.Adam, state: Any) -> bool:
    """Whether this rank has, of parameters and moments, the very bits of a whole state."""
    mine, theirs = flat(sharded_state(model, optimizer)), flat(state)
    assert mine.keys() == theirs.keys()
    for path, leaf in mine.items():
        values, start = (leaf.values, leaf.start) if isinstance(leaf, Shard) else (leaf, 0)
        part = theirs[path].reshape(-1)[start : start + values.size]
        if (values.dtype, values.tobytes()) != (part.dtype, part.tobytes()):
            return False
    return True


def saved_by(directory: Path, world: int, name: str) -> Any:
    """Trains and saves; the state as one process reads it."""

    def rank(group: Group) -> bool:
        model, optimizer = build(group, name)
        train(model, optimizer, group.rank)
        save_sharded(directory, {**sharded_state(model, optimizer), "note": ("a", 1)}, (1, 2), group)
        found = checkpoint.load(directory)
        assert found is not None
        return holds(model, optimizer, found.state)

    assert run_ranks(world, rank) == [True] * world
    found = checkpoint.load(directory)
    assert found is not None
    assert found.state["note"] == ("a", 1)
    assert np.any(found.state["optimizer"]["state"]["2.weight"]["mean"])
    return found.state


@pytest.mark.slow
@pytest.mark.parametrize("name", [*STRATEGIES, "DDP"])
def test_a_checkpoint_of_four_ranks_loads_in_any_world_and_strategy(tmp_path: Path, name: str) -> None:
    state = saved_by(tmp_path, 4, name)
    for world in (1, 2, 3, 8):
        for other in (*STRATEGIES, "DDP", "bare"):

            def rank(group: Group, other: str = other) -> bool:
                model, optimizer = build(group, other, seed=1)
                found = load_sharded(tmp_path, sharded_state(model, optimizer), group)
                assert found is not None
                assert not holds(model, optimizer, state)
                load_sharded_state(found.state, model, optimizer)
                return holds(model, optimizer, state)

            assert run_ranks(world, rank) == [True] * world


def test_training_continues_alike_in_other_worlds_after_loading(tmp_path: Path) -> None:
    """A full turn: saved by four under FULL_SHARD, loaded by two under SHARD_GRAD_OP, and by one alone."""
    saved_by(tmp_path, 4, "FULL_SHARD")

    def rank(group: Group, name: str) -> Any:
        model, optimizer = build(group, name, seed=1)
        found = load_sharded(tmp_path, sharded_state(model, optimizer), group)
        assert found is not None
        load_sharded_state(found.state, model, optimizer)
        train(model, optimizer, 0)
        return model.state_dict() if isinstance(model, FSDP) else dict(leaves_of(model))

    two = run_ranks(2, lambda group: rank(group, "SHARD_GRAD_OP"))[0]
    one = run_ranks(1, lambda group: rank(group, "bare"))[0]
    for path in two:
        np.testing.assert_allclose(two[path], one[path], rtol=1e-6, atol=1e-7)


def test_a_checkpoint_of_one_process_is_loaded_by_ranks(tmp_path: Path) -> None:
    model, optimizer = build(None, "bare")
    train(model, optimizer, 0)
    checkpoint.save(tmp_path, {"model": dict(leaves_of(model)), "optimizer": optimizer.state_dict()}, (1, 1))

    def rank(group: Group) -> Any:
        fsdp, adam = build(group, "FULL_SHARD", seed=1)
        found = load_sharded(tmp_path, sharded_state(fsdp, adam), group)
        assert found is not None
        load_sharded_state(found.state, fsdp, adam)
        return fsdp.state_dict()

    same(run_ranks(3, rank)[2], dict(leaves_of(model)))


def test_replicated_arrays_are_written_once_in_equal_shares(tmp_path: Path) -> None:
    """8 MB that all ranks hold: a quarter each."""

    def rank(group: Group) -> None:
        save_sharded(tmp_path, {"w": np.arange(1 << 20), "b": np.ones(8)}, (1, 1), group)

    run_ranks(4, rank)
    files = sorted((tmp_path / "g00000001-s0000000001").glob("*.safetensors"))
    sizes = [file.stat().st_size for file in files]
    assert len(sizes) == 4
    assert max(sizes) - min(sizes) <= 4096
    assert sum(sizes) <= (1 << 23) + 64 + 4 * 4096


def test_each_host_saves_a_full_copy_under_hybrid_shard(tmp_path: Path) -> None:
    """Disks that are not shared: a node has a whole copy, and saves it in a group of its own."""

    def rank(group: Group) -> Any:
        model, optimizer = build(group, "HYBRID_SHARD")
        train(model, optimizer, group.rank)
        node = group.subgroup([0, 1] if group.rank < 2 else [2, 3])
        disk = tmp_path / f"host{group.rank // 2}"
        save_sharded(disk, sharded_state(model, optimizer, node), (1, 1), node)
        values = model.state_dict()
        with pytest.raises(CheckpointFailed, match="in no part"):  # shares that others outside would have to write
            save_sharded(disk, sharded_state(model, optimizer), (1, 2), node)
        return values

    values = run_ranks(4, rank)[0]
    for host in (0, 1):
        found = checkpoint.load(tmp_path / f"host{host}")
        assert found is not None
        same(found.state["model"], values)


def test_a_write_error_on_one_rank_fails_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = module.write_part

    def write(*args: Any) -> Any:
        if args[3] == 1:
            raise OSError(28, "No space left on device")
        return real(*args)

    def rank(group: Group) -> str:
        save_sharded(tmp_path, {"w": np.ones(9)}, (1, 1), group)
        monkeypatch.setattr(module, "write_part", write)
        group.barrier()
        with pytest.raises(CheckpointFailed) as told:
            save_sharded(tmp_path, {"w": np.zeros(9)}, (1, 2), group)
        return str(told.value)

    texts = run_ranks(3, rank)
    assert len(set(texts)) == 1
    assert "rank 1 on" in texts[0]
    assert "No space left" in texts[0]
    assert [path.name for path in tmp_path.iterdir()] == ["g00000001-s0000000001"]


def test_a_directory_that_cannot_be_made_fails_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def rank(group: Group) -> None:
        with pytest.raises(CheckpointFailed, match="rank 0 on"):
            save_sharded(tmp_path / "file", {}, (1, 2), group)

    run_ranks(2, rank)


def test_ranks_without_a_shared_disk_raise_checkpoint_failed(tmp_path: Path) -> None:
    def rank(group: Group) -> None:
        with pytest.raises(CheckpointFailed, match=r"rank 1 on .* does not see .*on a disk that all ranks share"):
            save_sharded(tmp_path / str(group.rank), {"w": np.ones(9)}, (1, 1), group)
        assert load_sharded(tmp_path / str(group.rank), {}, group) is None

    run_ranks(2, rank)
    assert list((tmp_path / "0").iterdir()) == []


def test_a_damaged_checkpoint_is_skipped_by_all_ranks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def rank(group: Group) -> Any:
        for step in (1, 2):
            save_sharded(tmp_path, {"w": Shard(np.full(4, step), 4 * group.rank, (8,))}, (1, step), group)
        group.barrier()
        if group.rank == 0:
            path = tmp_path / "g00000001-s0000000002" / "arrays-00001-of-00002.safetensors"
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
        group.barrier()
        wanted = {"w": Shard(np.empty(4), 4 * group.rank, (8,))}  # rank 0 reads nothing of the damaged file
        found = load_sharded(tmp_path, wanted, group)
        assert found is not None
        with pytest.raises(CheckpointDamaged, match="00001-of-00002"):
            load_sharded(tmp_path, wanted, group, (1, 2))
        with pytest.raises(SizeMismatch, match="is missing"):
            load_sharded(tmp_path, {"v": wanted["w"]}, group)
        return found.tag, found.state["w"].values.tolist()

    with caplog.at_level(logging.ERROR, "paceline.checkpoint"):
        assert run_ranks(2, rank) == [((1, 1), [1] * 4)] * 2
    assert "g00000001-s0000000002 is left out" in caplog.text


def test_sharded_saver_writes_in_the_background(tmp_path: Path) -> None:
    def rank(group: Group) -> None:
        saver = ShardedSaver(tmp_path, group, keep=2)
        w = np.zeros(1 << 16)
        with pytest.raises(StepOrderError, match="no checkpoint"):
            saver.finish()
        for step in range(1, 4):
            saver.begin({"w": w, "step": step}, (1, step))
            saver.wait_until_copied()
            w += 1
            with pytest.raises(StepOrderError, match="finish"):
                saver.begin({}, (9, 9))
            assert saver.finish().name == f"g00000001-s000000000{step}"
            assert not saver.is_writing
        saver.begin({"w": w}, (1, 3))  # is there already
        saver.finish()
        with pytest.raises(UnsupportedOp):
            saver.begin({"w": object()}, (1, 4))
        with pytest.raises(ValueError, match="tag"):
            saver.begin({}, (-1, 4))

    run_ranks(2, rank)
    assert checkpoint.tags(tmp_path) == [(1, 2), (1, 3)]
    found = checkpoint.load(tmp_path)
    assert found is not None
    assert (found.state["w"] == 2).all()


def test_state_of_another_model_raises_size_mismatch(tmp_path: Path) -> None:
    model, optimizer = build(None, "bare")
    with pytest.raises(SizeMismatch, match="the model does not have"):
        sharded_state(nn.Linear(2, 2, rng=np.random.default_rng()), optimizer)
    state = {"model": {"scale": np.ones(3)}}
    with pytest.raises(SizeMismatch, match=r"in only one of them.*'scale' has shape \[3\], not \[\]"):
        load_sharded_state(state, model)
