"""What PyTorch's users train with, on the backend: real DDP, `fully_shard`, DTensor, checkpoints, ZeRO, pipelines."""

from __future__ import annotations

from pathlib import Path

import pytest
from pytorch.torch_ranks import finish

from support.python_process import fresh

pytestmark = [pytest.mark.needs(what="torch"), pytest.mark.timeout(240)]

MODEL = """
import copy
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.distributed.device_mesh import init_device_mesh
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)).double()
plain = copy.deepcopy(net)
x, t = torch.randn(12, 16, dtype=torch.float64), torch.randn(12, 8, dtype=torch.float64)
mine = slice(rank * 12 // world, (rank + 1) * 12 // world)

def train(model, optimizer, x, t, steps=5):
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), t).backward()
        optimizer.step()

def reference(steps=5, make=lambda ps: torch.optim.AdamW(ps, lr=1e-2)):
    train(plain, make(plain.parameters()), x, t, steps)
    return [p.detach() for p in plain.parameters()]

def same(found, expected):
    for a, b in zip(found, expected, strict=True):
        a = a.full_tensor() if hasattr(a, "full_tensor") else a.detach()
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
"""


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param("", marks=pytest.mark.newest),
        "static_graph=True",
        "gradient_as_bucket_view=True, find_unused_parameters=True",
    ],
)
def test_torch_ddp_equals_one_process(settings: str) -> None:
    code = f"""
model = DistributedDataParallel(net, bucket_cap_mb=0.005, {settings})
train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), x[mine], t[mine])
same(net.parameters(), reference())
"""
    finish(2, MODEL + code, 120)


@pytest.mark.parametrize("hook", ["fp16", "powersgd", "batched_powersgd", "allreduce"])
def test_communication_hooks(hook: str) -> None:
    code = f"""
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
net, plain = net.float(), plain.float()
x, t = x.float(), t.float()
model = DistributedDataParallel(net)
theirs = powerSGD_hook._orthogonalize                # refuses the two axes that the batched hook gives it, on Gloo too
powerSGD_hook._orthogonalize = lambda matrices, epsilon=0: theirs(matrices.view(-1, *matrices.shape[-2:]), epsilon)
if "powersgd" in {hook!r}:
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    hooks = dict(powersgd=powerSGD_hook.powerSGD_hook, batched_powersgd=powerSGD_hook.batched_powerSGD_hook)
    model.register_comm_hook(state, hooks[{hook!r}])
else:
    hooks = dict(fp16=default_hooks.fp16_compress_hook, allreduce=default_hooks.allreduce_hook)
    model.register_comm_hook(None, hooks[{hook!r}])
before = nn.functional.mse_loss(net(x), t)
train(model, torch.optim.SGD(model.parameters(), lr=0.1), x[mine], t[mine], 10)
assert nn.functional.mse_loss(net(x), t) < before
gathered = [torch.empty_like(net[0].weight) for _ in range(world)]
dist.all_gather(gathered, net[0].weight.detach())
assert torch.equal(gathered[0], gathered[1])
"""
    finish(2, MODEL + code, 120)


@pytest.mark.newest
def test_fsdp1_equals_one_process() -> None:
    code = """
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
model = FullyShardedDataParallel(net, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), device_id=torch.device("cpu"))
train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), x[mine], t[mine])
with FullyShardedDataParallel.summon_full_params(model):
    same(model.parameters(), reference())
"""
    finish(2, MODEL + code, 120)


@pytest.mark.newest
def test_uneven_inputs_equal_one_process() -> None:
    """Rank 0 has inputs for 3 steps, rank 1 for 7; at the end both have the model of the rank that was at it last."""
    code = """
from torch.distributed.algorithms.join import Join
model = DistributedDataParallel(net)
optimizer, alone = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(plain.parameters(), lr=0.1)
for by_all in (True, False):  # divided by the number of all ranks, or of those that still have inputs
    with Join([model], divide_by_initial_world_size=by_all):
        train(model, optimizer, x[mine], t[mine], 3 + 4 * rank)
    for step in range(7):
        alone.zero_grad()
        with_inputs = [half for half in range(2) if step < 3 + 4 * half]
        for half in with_inputs:
            loss = nn.functional.mse_loss(plain(x[6 * half:6 * half + 6]), t[6 * half:6 * half + 6])
            (loss / (2 if by_all else len(with_inputs))).backward()
        alone.step()
    same(net.parameters(), [p.detach() for p in plain.parameters()])
"""
    finish(2, MODEL + code, 120)


@pytest.mark.parametrize(
    ("world", "shape"), [pytest.param(2, (2,), marks=[pytest.mark.newest, pytest.mark.exhaustive]), (4, (2, 2))]
)
def test_fully_shard_equals_a_replicated_adamw(world: int, shape: tuple[int, ...], tmp_path: Path) -> None:
    """FSDP2, and HSDP where the mesh has two axes; saved, and loaded into another model and a plain one."""
    code = f"""
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
mesh = init_device_mesh("cpu", {shape}, mesh_dim_names={("replicate", "shard")[-len(shape) :]!r})
for layer in net:
    if isinstance(layer, nn.Linear):
        fully_shard(layer, mesh=mesh)
fully_shard(net, mesh=mesh)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
train(net, optimizer, x[mine], t[mine])
expected = reference()
same(net.parameters(), expected)
norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
torch.testing.assert_close(norm.full_tensor() if hasattr(norm, "full_tensor") else norm,
                           torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0))
model_state, optimizer_state = get_state_dict(net, optimizer)
dcp.save(dict(model=model_state, optimizer=optimizer_state), checkpoint_id={str(tmp_path)!r})
with torch.no_grad():
    for p in net.parameters():
        p.zero_()
dcp.load(dict(model=model_state, optimizer=optimizer_state), checkpoint_id={str(tmp_path)!r})
set_state_dict(net, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
same(net.parameters(), expected)
train(net, optimizer, x[mine], t[mine], 1)
"""
    finish(world, MODEL + code, 180)


def test_mixed_precision_and_tensor_parallel() -> None:
    code = """
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
from torch.distributed.tensor import distribute_tensor, Shard, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
mesh = init_device_mesh("cpu", (2,))
half = copy.deepcopy(net).float()
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
fully_shard(half, mesh=mesh, mp_policy=policy)
train(half, torch.optim.AdamW(half.parameters(), lr=1e-2), x[mine].float(), t[mine].float(), 5)
last = ColwiseParallel(output_layouts=Replicate())
parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": last})
train(net, torch.optim.AdamW(net.parameters(), lr=1e-2), x, t)
expected = reference()
same(net.parameters(), expected)
for a, b in zip(half.parameters(), expected, strict=True):
    assert (a.full_tensor() - b).abs().max() < 0.05
whole = torch.arange(10.)
d = distribute_tensor(whole, mesh, [Shard(0)])
assert d.to_local().tolist() == whole[5 * rank:5 * rank + 5].tolist() and torch.equal(d.full_tensor(), whole)
assert torch.equal((d + d).redistribute(mesh, [Replicate()]).to_local(), 2 * whole)
"""
    finish(2, MODEL + code, 180)


def test_zero_redundancy_optimizer_and_pipelines() -> None:
    code = """
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
model = DistributedDataParallel(copy.deepcopy(net))
train(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2), x[mine], t[mine])
same(model.parameters(), reference())
stage = PipelineStage(net[:2] if rank == 0 else net[2:], rank, world, torch.device("cpu"))
schedule = ScheduleGPipe(stage, 3, loss_fn=nn.functional.mse_loss)
losses = []
schedule.step(x) if rank == 0 else schedule.step(target=t, losses=losses)
if rank:
    whole = copy.deepcopy(net)
    expected = nn.functional.mse_loss(whole(x), t)
    torch.testing.assert_close(torch.stack(losses).mean(), expected)
"""
    finish(2, MODEL + code, 180)


def test_the_profiler_shows_operations() -> None:
    code = """
with torch.profiler.profile() as seen:
    dist.all_reduce(torch.ones(3))
    dist.all_gather_into_tensor(torch.empty(6), torch.ones(3), async_op=True).wait()
names = {event.name for event in seen.events()}
assert {"paceline:all_reduce", "paceline:all_gather"} <= names, names
assert dist.get_debug_level() == dist.DebugLevel.DETAIL
"""
    with fresh():  # torch reads that variable when it is loaded
        finish(2, MODEL + code, 120, TORCH_DISTRIBUTED_DEBUG="DETAIL")
