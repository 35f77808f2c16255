"""Two replicas of k ranks each, in real processes: torch's own groups inside, a lane of Paceline's between them."""

from __future__ import annotations

from pathlib import Path

from pytorch.torch_ranks import finish

__all__ = ["run_replicas"]

_PRELUDE = """
import copy
import paceline.torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

k = world // 2
replica, position = divmod(rank, k)
lanes = [dist.new_group([p, p + k], backend="paceline") for p in range(k)]
group = lanes[position].paceline_group
meshes = init_device_mesh("cpu", (2, k), mesh_dim_names=("replica", "inner"))
inner, across = meshes["inner"], meshes["replica"].get_group()

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(10, 6)
    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))

class Net(nn.Module):
    def __init__(self, last=1):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(6, last)  # 1 row: one rank's shard of it is empty
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def built(seed=0, dtype=torch.float64, make=Net):
    torch.manual_seed(seed)
    return make().to(dtype)

def loss_of(model, x):
    return model(x).square().mean()

torch.manual_seed(7)
X = torch.randn(16, 4, 6, dtype=torch.float64)
mine = X[rank * 16 // world:][: 16 // world]  # where ranks share the replica's samples
ours = X[replica * 8:][: 8]  # where all ranks compute on all of them

def local(t):
    return t.to_local() if isinstance(t, DTensor) else t

def whole(t):
    return t.full_tensor() if isinstance(t, DTensor) else t

def sharded(model, mesh=inner, **settings):
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)

def check_same_bits(model):
    for path, p in model.named_parameters():
        if p.grad is not None and local(p).numel():
            here = local(p.grad).contiguous().view(torch.uint8)
            both = [torch.empty_like(here) for _ in range(2)]
            dist.all_gather(both, here, group=across)
            assert torch.equal(*both), f"replicas differ in {path}"

def check(model, reference, **tolerance):
    check_same_bits(model)
    for (path, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        if q.grad is None:
            assert p.grad is None, path
            continue
        assert type(p.grad) is type(p.data), (path, type(p.grad))
        torch.testing.assert_close(whole(p.grad).to(q.grad.dtype), q.grad, msg=lambda m: f"{path}: {m}", **tolerance)
"""


_ON_A_DEVICE = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
from pytorch.fake_device import install
install(setattr)
"""


def run_replicas(
    code: str, size: int = 2, timeout: float = 60.0, *, device: bool = False, engine: str = "links"
) -> None:
    """Runs code on all ranks of two replicas; all must come to its end.

    Args:
        code: what each rank runs, behind the names above.
        size: k.
        timeout: seconds.
        device: whether tensors are taken for those of a device.
        engine: carries the gradients.
    """
    code = _PRELUDE + (_ON_A_DEVICE if device else "") + code
    finish(2 * size, code, timeout, BACKEND="gloo", PACELINE_ENGINE=engine)
