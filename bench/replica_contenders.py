"""One rank of a job that `replicas.py` measures: python replica_contenders.py FOLDER paceline|torchft LAYERS WIDTH.

All contenders train one toy transformer with AdamW, divided by FSDP2 among the ranks of a replica. Each process writes
what happens to a file of its own, with the time of the machine's one monotonic clock: so a killed one has told
everything. The file is named after the process, its rank, and its replica's port, which is another one when a replica
has started again.

torchft's ranks are written as its example and torchtitan's trainer are: gradients by the hook of FSDP2, a quorum that
is asked for while the step begins, samples by its sampler, whose position is kept after each step, and state by HTTP.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

SAMPLES = 1 << 17
TOKENS, WORDS = 8, 256
GLOBAL_BATCH = 12


class Model(torch.nn.Module):
    """A transformer that says the next of 256 words."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(WORDS, width)
        self.layers = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(layers)
        )
        self.head = torch.nn.Linear(width, WORDS)

    def forward(self, x: Any) -> Any:
        """Returns a vector of scores for each word."""
        y = self.words(x)
        for layer in self.layers:
            y = layer(y)
        return self.head(y)


def sharded(layers: int, width: int, mesh: Any) -> Model:
    """Returns the model divided by FSDP2, a unit for each layer."""
    model = Model(layers, width)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def loss_of(model: Model, samples: list[int]) -> Any:
    """Returns the summed loss of some samples, whose words follow from their numbers; 0 for none, with gradients."""
    x = (torch.tensor(samples).reshape(-1, 1) * 7919 + torch.arange(TOKENS + 1) * 104729) % WORDS
    if not samples:  # mates are in FSDP2's collectives
        x = torch.zeros(1, TOKENS + 1, dtype=torch.int64)
    y = model(x[:, :-1]).flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(y, x[:, 1:].flatten(), reduction="sum") / TOKENS
    return loss if samples else loss * 0.0


def teller(folder: Path) -> Callable[..., None]:
    """Returns the function that writes an event of this process."""
    name = f"{os.environ['MASTER_PORT']}-{os.environ['RANK']}-{os.getpid()}.jsonl"
    file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def tell(event: str, **facts: Any) -> None:
        os.write(
            file,
            json.dumps({"event": event, "at": time.monotonic(), **facts}).encode() + b"\n",
        )

    return tell


def paceline_rank(model: Model, optimizer: Any, tell: Callable[..., None]) -> None:
    """Trains until it is told to leave."""
    from paceline import ElasticSampler, TrainState, join
    from paceline.torch import replicate

    rank, ranks = dist.get_rank(), dist.get_world_size()
    tell("ready")
    with join(replica=dist.group.WORLD) as session:
        replicate(model, session)
        state = TrainState(model=model, optimizer=optimizer, sampler=ElasticSampler(SAMPLES, GLOBAL_BATCH))
        for step in session.steps(state, total=1 << 40):
            with step:
                mine = step.indices[rank::ranks].tolist()
                view = session.generation
                tell("begin", step=step.number, view=view, samples=mine)
                optimizer.zero_grad()
                (loss_of(model, mine) * ranks / len(step.indices)).backward()
                optimizer.step()
            if step.applied:
                tell("commit", step=step.number, view=view, replicas=session.replicas)


def torchft_rank(folder: Path, model: Model, optimizer: Any, tell: Callable[..., None]) -> None:
    """Trains until it is killed."""
    from torchft import DistributedSampler, Manager, Optimizer, ProcessGroupGloo
    from torchft.process_group import ManagedProcessGroup

    rank, ranks = dist.get_rank(), dist.get_world_size()
    replica, replicas = (int(os.environ[name]) for name in ("REPLICA_GROUP_ID", "NUM_REPLICA_GROUPS"))
    # Listed now: in a forward pass, during which others ask for them, FSDP2 shows whole parameters in their place.
    tensors = [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())]

    def state() -> dict[str, Any]:
        return {str(n): t.to_local() if hasattr(t, "to_local") else t for n, t in enumerate(tensors)}

    def load(given: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, tensor in state().items():
                tensor.copy_(given[name])

    keep = folder / f"position-{replica}-{rank}"
    sampler = DistributedSampler(
        range(SAMPLES), replica_rank=replica, num_replica_groups=replicas, group_rank=rank, num_replicas=ranks, seed=0
    )
    order = list(sampler)
    position = int(keep.read_text()) if keep.exists() else 0
    share = GLOBAL_BATCH // replicas // ranks

    tell("ready")
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        min_replica_size=2,
        load_state_dict=load,
        state_dict=state,
        replica_id=f"replica_{replica}",
        timeout=timedelta(seconds=30),
        heartbeat_interval=timedelta(milliseconds=100),
    )
    across = ManagedProcessGroup(manager)
    across.register("dp_replicate")
    for module in model.modules():
        if hasattr(module, "set_all_reduce_hook"):
            module.set_all_reduce_hook(lambda gradient: dist.all_reduce(gradient, op=dist.ReduceOp.AVG, group=across))
    managed = Optimizer(manager, optimizer)

    while True:
        mine = order[position : position + share]
        before = manager.current_step()
        managed.zero_grad()
        tell("begin", step=before + 1, view=manager._quorum_id, samples=mine)
        (loss_of(model, mine) / share).backward()
        takes_part = manager.is_participating()  # a rank that heals adds zeros
        managed.step()
        now, view = manager.current_step(), manager._quorum_id
        tell("end", step=now if now > before else before + 1, view=view, takes_part=takes_part)
        if now > before:
            tell("commit", step=now, view=view, replicas=manager.num_participants())
        position += share
        (new := keep.with_suffix(".new")).write_text(str(position))
        new.replace(keep)  # a rank that is killed meanwhile leaves the old one


def main(folder: Path, contender: str, layers: int, width: int) -> None:
    """Runs one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    model = sharded(layers, width, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for p in model.parameters():  # makes the optimizer's state, as torchtitan does, and loads what torch needs for it
        p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad()
    tell = teller(folder)
    if contender == "paceline":
        paceline_rank(model, optimizer, tell)
    else:
        torchft_rank(folder, model, optimizer, tell)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
