"""A replica's checkpoint: torch.distributed.checkpoint alone reads it, and replicas of other layouts go on from it."""

from __future__ import annotations

from pathlib import Path

import pytest
from pytorch.replica_ranks import run_replicas

pytestmark = pytest.mark.needs(what="torch")

_SAVE = """
import json
from pathlib import Path
import numpy as np
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
import paceline
from paceline._elastic.mates import Mates
from paceline._elastic.replica_checkpoint import MateLine, ReplicaContent, write
from paceline.errors import CheckpointDamaged, CheckpointFailed, SizeMismatch, UnsupportedOp

line = MateLine(Mates(inner.get_group()))

class Run:
    def __init__(self, model, position=position):
        self.model, self.position = model, position
        head = {"params": model.head.parameters(), "betas": (0.5, 0.75)}
        self.optimizer = torch.optim.AdamW([{"params": model.blocks.parameters(), "lr": 0.25}, head])
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.own = {"position": position, "seen": torch.full((2,), float(position))}
        sampler = paceline.ElasticSampler(60, 4)
        self.state = paceline.TrainState(
            model=model, optimizer=self.optimizer, sampler=sampler, schedule=self.schedule, own=self.own
        )

    def train(self, x, steps=2):
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss_of(self.model, x).backward()
            self.optimizer.step()
            self.schedule.step()
            self.state._core.advance(1)

    def save(self, folder):
        content = ReplicaContent(self.state._core, self.position)
        if line.position == 0:
            folder.mkdir()
        line.gather(None)
        return write(folder, content.copied(), content.buffers, line)

    def load(self, folder):
        ReplicaContent(self.state._core, self.position).load(folder, os.listdir(folder))

    def values(self):
        found = {f"model {path}": whole(value) for path, value in self.model.state_dict().items()}
        paths = {parameter: path for path, parameter in self.model.named_parameters()}
        for parameter, state in self.optimizer.state.items():
            found |= {f"{paths[parameter]} {key}": whole(value) for key, value in state.items()}
        settings = [
            {key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups
        ]
        sampler = self.state.sampler.state_dict()
        return found, [settings, self.schedule.state_dict(), sampler, self.state.step]

def check_equal(run, expected):
    found, others = run.values()
    assert found.keys() == expected[0].keys(), found.keys() ^ expected[0].keys()
    for name, value in found.items():
        assert torch.equal(value, expected[0][name]), name
    assert str(others) == str(expected[1]), (others, expected[1])

def tensor_parallel():
    model = built()
    for block in model.blocks:
        parallelize_module(block, inner, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model

mine = X[position * 4 :][:4]  # alike in both replicas
saved = Run(sharded(built()))
saved.train(mine)
"""


def run(tmp_path: Path, code: str) -> None:
    run_replicas(f"{_SAVE}folder = Path({str(tmp_path / 'saved')!r})\n{code}")


def test_replicas_of_any_layout_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    """The values that each rank has of its own come back at the same position."""
    run(
        tmp_path,
        """
if replica == 0:
    saved.save(folder)
dist.barrier()
expected = saved.values()
four = init_device_mesh("cpu", (4,), mesh_dim_names=("inner",))
runs = {
    "alike": Run(sharded(built(seed=3))),
    "four ranks": Run(sharded(built(seed=3), mesh=four), rank),
    "tensor parallel": Run(tensor_parallel()),
    "one rank": Run(built(seed=3), 0),
}
for name, other in runs.items():
    other.load(folder)
    assert other.state.is_whole
    check_equal(other, expected)
    wanted = other.position if other.position < 2 else 0
    assert other.own["position"] == wanted, name
    assert other.own["seen"].tolist() == [wanted, wanted]
saved.train(mine)
runs["alike"].train(mine)
check_equal(runs["alike"], saved.values())
""",
    )


def test_torch_alone_reads_a_checkpoint(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
if replica == 0:
    saved.save(folder)
dist.barrier()
model = built(seed=3)
optimizer = torch.optim.AdamW([{"params": model.blocks.parameters()}, {"params": model.head.parameters()}])
torch.optim.lr_scheduler.StepLR(optimizer, 1)
options = StateDictOptions(flatten_optimizer_state_dict=True)
tree = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
dcp.load(tree, checkpoint_id=folder)
ours = ReplicaContent(saved.state._core, position).copied()["optimizer"]
assert tree["optimizer"].keys() == ours.keys(), tree["optimizer"].keys() ^ ours.keys()
for name, value in tree["optimizer"].items():
    mine_of = ours[name]
    assert torch.equal(value, whole(mine_of)) if torch.is_tensor(value) else value == mine_of, name
for name, value in saved.model.state_dict().items():
    assert torch.equal(tree["model"][name], whole(value)), name
""",
    )


def test_names_are_those_of_the_model_within_wrappers(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
plain, wrapped = built(), built()
wrapped.blocks[0] = checkpoint_wrapper(wrapped.blocks[0])
wrapped.blocks[1] = torch.compile(wrapped.blocks[1], backend="eager")
wrapped = torch.nn.parallel.DistributedDataParallel(wrapped, process_group=inner.get_group())

def rename(module, state, prefix, metadata):
    state["fused"] = state.pop("head.weight")

hooked = built()
hooked.register_state_dict_post_hook(rename)  # torch finds no parameter of that name
names = []
for model in (plain, wrapped, hooked):
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model, ours).backward()
    optimizer.step()
    tree = ReplicaContent(paceline.TrainState(model=model, optimizer=optimizer)._core, position).copied()
    names.append({key for name in ("model", "optimizer") for key in tree[name]})
assert names[0] == names[1] == names[2], [names[0] ^ each for each in names]
""",
    )


def test_mates_with_different_values_under_one_name_write_no_checkpoint(tmp_path: Path) -> None:
    """As the stages of a pipeline that both begin to count at 0. Buffers may differ: each rank sees its own samples."""
    run(
        tmp_path,
        """
folder = folder.with_name(f"saved-{replica}")
stage = Run(built(seed=position))
try:
    stage.save(folder)
except CheckpointFailed as error:
    assert "hold different values of model.blocks.0.down.bias" in str(error), error
    assert "names that they have in the entire model" in str(error)
else:
    raise AssertionError("both wrote")
assert not list(folder.iterdir())

class Counts(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))

counting = Run(built(make=Counts))
counting.model.seen += position
files = counting.save(folder.with_name(f"counts-{replica}"))
assert {file.name for file in files} == {".metadata", "paceline.json", "__0_0.distcp", "__1_0.distcp"}, files

alone = init_device_mesh("cpu", (world, 1), mesh_dim_names=("all", "one"))["one"]
stage = Run(sharded(built(seed=position), mesh=alone))
try:
    stage.save(folder.with_name(f"shards-{replica}"))
except CheckpointFailed as error:
    assert "hold different values of model.blocks.0.down.bias" in str(error), error
else:
    raise AssertionError("one stage would come back with the other's weights")
Run(sharded(built(), mesh=alone)).save(folder.with_name(f"copies-{replica}"))  # as what TP leaves whole
""",
    )


def test_a_damaged_checkpoint_is_refused_and_nothing_in_it_is_run(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
if replica == 0:
    saved.save(folder)
dist.barrier()
if rank == 0:
    import pickle
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(folder / "evil"),)
    table, data = folder / "paceline.json", folder / "__0_0.distcp"
    whole_table, whole_data = table.read_bytes(), data.read_bytes()
    def changed(change):
        stored = json.loads(whole_table)
        change(stored)
        return json.dumps(stored).encode()
    def at_the_start(stored):
        for place in stored["places"]:
            if place[0] in stored["values"]:
                place[4:] = [0, 1000]
    trials = {
        "cut": (whole_table[:100], whole_data),
        "elsewhere": (changed(lambda t: t["places"][0].__setitem__(3, "../elsewhere")), whole_data),
        "no dtype": (changed(lambda t: t["tensors"]["model.head.bias"].__setitem__(0, "save")), whole_data),
        "no table": (b"[1]", whole_data),
        "short": (whole_table, whole_data[: len(whole_data) // 2]),
        "evil": (changed(at_the_start), pickle.dumps(Evil()) + whole_data),
    }
    for name, (a, b) in trials.items():
        table.write_bytes(a)
        data.write_bytes(b)
        other = Run(built(), 0)
        try:
            other.load(folder)
        except CheckpointDamaged as error:
            assert str(folder) in str(error), error
        else:
            raise AssertionError(f"{name}: was loaded")
    assert not (folder / "evil").exists()
    table.write_bytes(whole_table)
    data.write_bytes(whole_data)
    (folder / ".metadata").write_bytes(pickle.dumps(Evil()))
    other.load(folder)
    assert not (folder / "evil").exists()
""",
    )


def test_a_checkpoint_of_another_model_is_refused_with_the_difference(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
if replica == 0:
    saved.save(folder)
dist.barrier()
other = Run(built(make=lambda: Net(last=3)))
before = {name: value.clone() for name, value in other.model.state_dict().items()}
try:
    other.load(folder)
except SizeMismatch as error:
    assert "model.head.weight has shape [1, 6], not [3, 6]" in str(error), error
else:
    raise AssertionError("it was loaded")
assert all(torch.equal(value, before[name]) for name, value in other.model.state_dict().items())
loose = torch.nn.Parameter(torch.ones(2))
state = paceline.TrainState(model=built(), optimizer=torch.optim.SGD([loose]))
try:
    ReplicaContent(state._core, position)
except UnsupportedOp as error:
    assert "1 parameters of optimizer are in no model of the training state" in str(error), error
else:
    raise AssertionError("it has a name")
""",
    )


def test_frozen_parameters_numpy_numbers_and_unsharded_weights_come_back(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
saved.model.head.bias.requires_grad = False
saved.optimizer.param_groups[0]["lr"] = np.float64(0.125)
with torch.no_grad():
    saved.model(mine)  # leaves the root's weights whole
if replica == 0:
    saved.save(folder)
dist.barrier()
saved.optimizer.param_groups[0]["lr"] = 0.125
other = Run(sharded(built(seed=3)))
other.load(folder)
check_equal(other, saved.values())
assert [p for p, each in other.model.named_parameters() if not each.requires_grad] == ["head.bias"]
renamed = paceline.TrainState(model=other.model, opt=other.optimizer, sampler=paceline.ElasticSampler(60, 4))
try:
    ReplicaContent(renamed._core, position).load(folder, os.listdir(folder))
except SizeMismatch as error:
    assert "the checkpoint has no opt.param_groups.blocks.0.norm.weight" in str(error), error
else:
    raise AssertionError("an optimizer without its state")
other.optimizer.param_groups[1]["betas"] = slice(2)
try:
    ReplicaContent(other.state._core, position).check()
except UnsupportedOp as error:
    assert "betas of optimizer is a slice" in str(error), error
else:
    raise AssertionError("it could not be read again")
""",
    )


def test_buffers_of_wrapped_models_may_differ_between_ranks(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
class Counts(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))
model = torch.nn.parallel.DistributedDataParallel(
    built(make=Counts), process_group=inner.get_group(), broadcast_buffers=False
)
counting = Run(model.module)
counting.state = paceline.TrainState(model=torch.compile(model, backend="eager"))
model.module.seen += position
counting.save(folder.with_name(f"counts-{replica}"))
""",
    )


def test_the_last_checkpoint_waits_for_one_that_is_being_written(tmp_path: Path) -> None:
    """Nobody has said whether the first one is committed; and another thread writes it to the same mates."""
    run(
        tmp_path,
        """
from paceline._base.activity import MemberCounters
from paceline._elastic.replica_saver import ReplicaSaver
from paceline.checkpoint.folder import read_manifest
from paceline_protocol import Tag

saver = ReplicaSaver(folder, 1, MemberCounters(), line._mates)
for held in (Tag(1, 3), Tag(1, 4)):
    saver.begin(held, saved.state._core, group)
    saver.start(held, saved.state._core, group, writing=False)
    saver.keep_last(held, saved.state._core, group)
    if replica == 0:
        assert read_manifest(folder / str(held)).tag == held
    dist.barrier()
saver.start(Tag(1, 5), saved.state._core, group, writing=False)
saver.drop_others(Tag(2, 5))
saver.commit(5)
saver.wait()
dist.barrier()
assert paceline.checkpoint.tags(folder) == [Tag(1, 3), Tag(1, 4)]
assert len(list(folder.iterdir())) == 2
other = Run(sharded(built(seed=3)))
again = ReplicaSaver(folder, 1, MemberCounters(), line._mates)
again.load(other.state._core)
assert again.tag == Tag(1, 4)
check_equal(other, saved.values())
""",
    )


def test_a_rank_that_cannot_copy_its_state_leaves_no_mate_waiting(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
from paceline._base.activity import MemberCounters
from paceline._elastic.replica_saver import ReplicaSaver
from paceline_protocol import Tag

saver = ReplicaSaver(folder, 1, MemberCounters(), line._mates)
if position == 1:
    saved.own["seen"] = iter(())
try:
    saver.keep(Tag(1, 3), saved.state._core, group)
except CheckpointFailed as error:
    text = "rank 1: " if replica == 0 else "could not write the checkpoint"
    assert text in str(error), error
else:
    raise AssertionError("it was written")
assert not list(folder.glob("g*"))
""",
    )
