"""Collectives of the backend that PyTorch's own suite has no CPU test for, and layouts and dtypes of tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
from pytorch.torch_ranks import finish

pytestmark = [pytest.mark.needs(what="torch"), pytest.mark.newest, pytest.mark.timeout(180)]


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.exhaustive), 3])
def test_single_tensor_and_coalesced_collectives(world: int) -> None:
    code = """
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions
x = torch.arange(6.) + 100 * rank
out = torch.empty(6 * world)
dist.all_gather_into_tensor(out, x)
assert torch.equal(out, torch.cat([torch.arange(6.) + 100 * r for r in range(world)]))
work = dist.all_gather_into_tensor(out.zero_(), x, async_op=True)
work.wait()
assert out[-1] == 5 + 100 * (world - 1) and work.is_completed() and work.is_success() and work.exception() is None

y = torch.arange(4. * world).reshape(world, 4) * (rank + 1)
part = torch.empty(4)
for op, scale in ((dist.ReduceOp.SUM, sum(range(1, world + 1))), (dist.ReduceOp.AVG, (world + 1) / 2)):
    dist.reduce_scatter_tensor(part, y, op=op)
    torch.testing.assert_close(part, scale * torch.arange(4. * rank, 4 * rank + 4))
parts = [torch.full((r + 1,), float(rank)) for r in range(world)]        # of different sizes
mine = torch.empty(rank + 1)
dist.reduce_scatter(mine, parts)
assert torch.equal(mine, torch.full((rank + 1,), float(sum(range(world)))))

with dist._coalescing_manager(async_ops=True) as works:
    outs = [torch.empty(3 * world), torch.empty(2 * world)]
    for out, n in zip(outs, (3, 2)):
        dist.all_gather_into_tensor(out, torch.full((n,), float(rank)))
works.wait()
for out, n in zip(outs, (3, 2)):
    assert torch.equal(out, torch.arange(float(world)).repeat_interleave(n))

group = dist.group.WORLD
ins = [torch.full((2,), float(rank)), torch.full((3,), -float(rank))]
outs = [torch.empty(2 * world), torch.empty(3 * world)]
group.all_gather_single_coalesced(outs, ins, AllgatherOptions()).wait()
assert outs[1].tolist() == [-float(r) for r in range(world) for _ in range(3)]
ins, outs = [torch.ones(world * 2), torch.ones(world)], [torch.empty(2), torch.empty(1)]
group.reduce_scatter_single_coalesced(outs, ins, ReduceScatterOptions()).wait()
assert [out.tolist() for out in outs] == [[float(world)] * 2, [float(world)]]

uneven = [torch.empty(r + 1) for r in range(world)]
dist.all_gather(uneven, torch.full((rank + 1,), float(rank)))
assert all(torch.equal(t, torch.full((r + 1,), float(r))) for r, t in enumerate(uneven))
"""
    finish(world, code)


def test_all_to_all_with_parts_of_different_sizes() -> None:
    """Which Gloo cannot do with lists of tensors."""
    code = """
send = [torch.full((r + 1, 2), float(rank)) for r in range(world)]
got = [torch.empty(rank + 1, 2) for _ in range(world)]
dist.all_to_all(got, send)
assert all(torch.equal(t, torch.full((rank + 1, 2), float(r))) for r, t in enumerate(got))
x = torch.arange(float(world * (world + 1) // 2)) + 100 * rank
splits = list(range(1, world + 1))
out = torch.empty((rank + 1) * world)
dist.all_to_all_single(out, x, [rank + 1] * world, splits)
start = sum(splits[:rank])
assert out.tolist() == [100. * r + start + i for r in range(world) for i in range(rank + 1)]
same = torch.empty(world)
dist.all_to_all_single(same, torch.full((world,), float(rank)))
assert same.tolist() == list(map(float, range(world)))
"""
    finish(3, code)


def test_collectives_of_all_dtypes_and_layouts() -> None:
    code = """
for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
              torch.float32, torch.float64, torch.complex64):
    t = torch.full((5,), rank + 1).to(dtype)
    dist.all_reduce(t)
    assert torch.equal(t, torch.full((5,), 3).to(dtype)), dtype
flags = torch.tensor([rank == 0, False])
dist.all_reduce(flags, op=dist.ReduceOp.MAX)
assert flags.tolist() == [True, False]
eighth = torch.full((3,), float(rank)).to(torch.float8_e4m3fn)      # NumPy has no such type: it travels as bytes
outs = [torch.empty_like(eighth) for _ in range(2)]
dist.all_gather(outs, eighth)
assert [t.float()[0].item() for t in outs] == [0., 1.]
try:
    dist.all_reduce(eighth)
    raise AssertionError("bytes were added up")
except paceline.UnsupportedOp as error:
    assert "convert them first" in str(error)
wide = torch.zeros(4, 6)
wide.t()[1:5:2] = rank + 1.                                          # not contiguous
before = wide.clone()
dist.all_reduce(wide.t())
assert torch.equal(wide, (before != 0) * 3.)
last = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last) * (rank + 1)
dist.all_reduce(last)
assert torch.equal(last, torch.full((2, 3, 4, 5), 3.)) and last.is_contiguous(memory_format=torch.channels_last)
point, nothing = torch.tensor(float(rank)), torch.empty(0, 3)
dist.all_reduce(point); dist.all_reduce(nothing)
assert point == 1
parameter = torch.nn.Parameter(torch.full((3,), float(rank)))
dist.broadcast(parameter, 1)
assert parameter.tolist() == [1., 1., 1.] and parameter.requires_grad
sparse = torch.sparse_coo_tensor([[rank, 2]], torch.ones(2, 3), (4, 3))
dist.all_reduce(sparse)
assert sparse.to_dense()[:, 0].tolist() == [1., 1., 2., 0.]
"""
    finish(2, code)


def test_integer_averages_are_truncated() -> None:
    code = """
x = torch.tensor([7, -7, 2**40 + 3]) * (rank + 1)                    # sums 21, -21 and 3 * 2**40 + 9
mean = [10, -10, (3 * 2**40 + 9) // 2]
for y in (x.clone(), torch.stack([x, x]).t()):                       # in place, and by way of a copy
    dist.all_reduce(y, op=dist.ReduceOp.AVG)
    assert y.flatten().unique(sorted=True).tolist() == sorted(mean), y
y = x.clone()
dist.reduce(y, 0, op=dist.ReduceOp.AVG)
assert y.tolist() == (mean if rank == 0 else x.tolist())
part = torch.empty(3, dtype=torch.int64)
dist.reduce_scatter_tensor(part, torch.cat([x, x]), op=dist.ReduceOp.AVG)
assert part.tolist() == mean
for y in (x.clone(), torch.stack([x, x]).t()):
    work = dist.all_reduce(y, op=dist.ReduceOp.AVG, async_op=True)
    work.wait(); work.wait()
    assert work.get_future().value()[0] is y or torch.equal(work.get_future().value()[0], y)
    assert y.flatten().unique(sorted=True).tolist() == sorted(mean), y
small = torch.tensor([200, 100], dtype=torch.uint8)                  # the sum of 400 wraps to 144, as that of SUM does
dist.all_reduce(small, op=dist.ReduceOp.AVG)
assert small.tolist() == [72, 100]
"""
    finish(2, code)


def test_collectives_leave_tensor_storages_resizable() -> None:
    """FSDP1 and PowerSGD change the size of storages, which `Tensor.numpy` would fix for good."""
    code = """
for dtype in (torch.float32, torch.bfloat16, torch.int64):
    x, out = torch.ones(4, dtype=dtype), torch.empty(4 * world, dtype=dtype)
    dist.all_reduce(x)
    dist.broadcast(x, 0)
    dist.all_gather_into_tensor(out, x)
    assert out.tolist() == [float(world)] * 4 * world
    for tensor in (x, out):
        size = tensor.untyped_storage().size()
        tensor.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(size)
"""
    finish(2, code)


def test_functional_collectives() -> None:
    code = """
import torch.distributed._functional_collectives as funcol
group = list(range(world))
assert funcol.all_reduce(torch.ones(3), "sum", group).tolist() == [2., 2., 2.]
assert funcol.all_reduce(torch.ones(3) * rank, "avg", group).tolist() == [.5, .5, .5]
assert funcol.all_gather_tensor(torch.full((2,), float(rank)), 0, group).tolist() == [0., 0., 1., 1.]
assert funcol.reduce_scatter_tensor(torch.arange(4.), "sum", 0, group).tolist() == [4. * rank, 4. * rank + 2]
assert funcol.broadcast(torch.full((2,), float(rank)), 1, group).tolist() == [1., 1.]
got = funcol.all_to_all_single(torch.arange(3.) + 10 * rank, [rank + 1] * 2, [1, 2], group)
assert got.tolist() == ([0., 10.] if rank == 0 else [1., 2., 11., 12.])
summed = funcol.all_reduce_coalesced([torch.ones(2), torch.ones(1)], "sum", group)
assert [t.tolist() for t in summed] == [[2., 2.], [2.]]
"""
    finish(2, code)


def test_state_dict_broadcast_and_async_save_of_fully_shard(tmp_path: Path) -> None:
    """State dicts that rank 0 alone has, and checkpoints that are written beside training."""
    code = f"""
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
model = torch.nn.Linear(3, 5)
fully_shard(model)
given = {{"weight": torch.arange(15.).view(5, 3), "bias": torch.arange(5.)}} if rank == 0 else {{}}
set_model_state_dict(model, given, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
weight = model.weight.full_tensor()
assert torch.equal(weight, torch.arange(15.).view(5, 3))
dcp.async_save(model.state_dict(), checkpoint_id="{tmp_path}/saved").result()
torch.nn.init.zeros_(model.weight)
loaded = model.state_dict()
dcp.load(loaded, checkpoint_id="{tmp_path}/saved")
assert torch.equal(model.weight.full_tensor(), weight)
"""
    finish(2, code)


def test_send_and_receive_in_any_order() -> None:
    """More than fits on the way, posted in whichever order, on both sides at once; from any; to oneself."""
    code = """
big = torch.full((30_000_000,), float(rank))
got = torch.empty_like(big)
other = 1 - rank
receive = dist.irecv(got, other, tag=7)
dist.send(big, other, tag=7)                                 # 120 MB each way, nobody waits for the receive yet
receive.wait()
assert got[-1] == other
sends = [dist.isend(torch.tensor([float(i)]), other, tag=i) for i in range(100)]
dist.barrier()                                               # nobody has asked for them
for i in reversed(range(100)):
    one = torch.empty(1)
    assert dist.recv(one, other, tag=i) == other and one.item() == i
for work in sends:
    work.wait()
first, second = torch.empty(1), torch.empty(1)
works = [dist.irecv(first, other), dist.irecv(second, other)]
dist.send(torch.tensor([1.]), other); dist.send(torch.tensor([2.]), other)
works[1].wait(); works[0].wait()
assert (first.item(), second.item()) == (1., 2.)
dist.barrier()
if rank == 0:
    dist.send(torch.ones(1), 1)
else:
    assert dist.recv(torch.empty(1)) == 0                    # from any
ops = [dist.P2POp(dist.isend, big, other), dist.P2POp(dist.irecv, got.zero_(), other)]
for work in dist.batch_isend_irecv(ops):
    work.wait()
assert got[0] == other
"""
    finish(2, code, timeout=120)


def test_collectives_of_subgroups_and_from_several_threads() -> None:
    """Groups of some ranks, by themselves and at once; and collectives of one group from several threads in turn."""
    code = """
pairs = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([0, 2])]
for ranks, pair in zip(([0, 1], [1, 2], [0, 2]), pairs):
    if rank in ranks:
        t = torch.ones(1)
        dist.all_reduce(t, group=pair)
        assert t.item() == 2 and dist.get_group_rank(pair, rank) == ranks.index(rank)
again = dist.new_group([0, 1])
if rank < 2:
    works = [dist.all_reduce(torch.ones(1000), group=group, async_op=True) for group in (pairs[0], again) * 20]
    for work in works:
        work.wait()
found = []
def in_thread():
    t = torch.ones(1)
    dist.all_reduce(t)
    found.append(t.item())
for _ in range(3):
    thread = threading.Thread(target=in_thread)
    thread.start(); thread.join()
    in_thread()
assert found == [3.] * 6
dist.destroy_process_group(again)
"""
    finish(3, code)
