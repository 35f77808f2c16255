"""Compares torch's DDP and `fully_shard` on the backends "paceline" and "gloo", in the same script and processes.

All variants and the bare model take turns, a step each, so that other load on the machine affects all alike. Two more
variants show what the backend can reach at best: DDP that communicates nothing, and DDP that sums as many bytes in
memory of the group, where nothing is copied in or out.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import pytest
from pytorch.torch_ranks import torch_ranks

from figures import QUIET, at_least
from support.peers import need_peers

pytestmark = [pytest.mark.needs(what="peers"), pytest.mark.timeout(900)]

ROUNDS = 15

MOST_OVER_NO_COMMUNICATION = 0.12
"""The required limit; 0.18 to 0.33 was measured (Gloo 0.23 to 0.51, sums alone 0.17 to 0.26). The test asserts it with
QUIET=1; otherwise it also accepts figures not much above Gloo's."""

CODE = """
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
kind, rounds = {kind!r}, {rounds}
gloo = dist.new_group(backend="gloo")
x = torch.randn({batch}, 1024)

def model():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(12)])

def sharded(group):
    net, mesh = model(), DeviceMesh.from_group(group, "cpu")
    for layer in net:
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)

def nothing(arrays, bucket):
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done

def sums_alone(arrays, bucket):
    buffer, group = bucket.buffer(), dist.group.WORLD.paceline_group
    key = bucket.index(), buffer.numel()
    if key not in arrays:
        arrays[key] = torch.from_numpy(group.empty(buffer.numel(), "float32")).zero_()
    work = dist.all_reduce(arrays[key], async_op=True)
    return work.get_future().then(lambda _: buffer)

if kind == "ddp":
    ways = dict(alone=model(), gloo=DistributedDataParallel(model(), process_group=gloo),
                **{{way: DistributedDataParallel(model()) for way in ("paceline", "nothing", "sums_alone")}})
    for hook in (nothing, sums_alone):
        ways[hook.__name__].register_comm_hook({{}}, hook)
else:
    ways = dict(gloo=sharded(gloo), paceline=sharded(dist.group.WORLD))
optimizers = {{way: torch.optim.SGD(net.parameters(), lr=1e-4) for way, net in ways.items()}}
times = {{way: [] for way in ways}}
for _ in range(rounds + 3):
    for way, net in ways.items():
        dist.barrier()
        start = time.perf_counter()
        optimizers[way].zero_grad()
        net(x).square().mean().backward()
        optimizers[way].step()
        times[way].append(time.perf_counter() - start)
emit("times", **{{way: found[3:] for way, found in times.items()}})
dist.destroy_process_group()
"""


def steps(world: int, kind: str, batch: int) -> dict[str, list[float]]:
    """Returns the seconds of each step at rank 0, by variant."""
    need_peers()
    with torch_ranks(world, CODE.format(kind=kind, rounds=ROUNDS, batch=batch), PACELINE_FLIGHT_DIR="off") as started:
        told = [worker.expect("times", 600) for worker in started]
    return {way: found for way, found in told[0].items() if isinstance(found, list)}


def over(times: dict[str, list[float]], way: str, base: str) -> float:
    """Returns the median fraction by which a step takes longer than the base's step in the same round."""
    return statistics.median(a / b for a, b in zip(times[way], times[base], strict=True)) - 1


def told(what: str, times: dict[str, list[float]], ways: Sequence[str]) -> None:
    print(f"\n{what}: " + ", ".join(f"{way} {statistics.median(times[way]) * 1e3:.1f} ms" for way in ways), end="")


@pytest.mark.parametrize("world", [2, 4])
def test_communication_over_paceline_adds_little_to_a_torch_ddp_step(world: int) -> None:
    """12.6 M parameters, at most one core per rank."""
    times = steps(world, "ddp", 128)
    told(f"torch's DDP, W={world}", times, ("alone", "paceline", "gloo"))
    mine, gloos = over(times, "paceline", "alone"), over(times, "gloo", "alone")
    floors = ", ".join(f"{way} {over(times, way, 'alone'):+.0%}" for way in ("nothing", "sums_alone"))
    print(f"; against no communication: paceline {mine:+.0%}, gloo {gloos:+.0%}; {floors}")
    assert mine <= (MOST_OVER_NO_COMMUNICATION if QUIET else max(MOST_OVER_NO_COMMUNICATION, 1.25 * gloos))


@pytest.mark.parametrize("world", [2, 4])
def test_fully_shard_over_paceline_beats_gloo(world: int) -> None:
    times = steps(world, "fully_shard", 64)
    told(f"fully_shard, W={world}", times, ("paceline", "gloo"))
    rate = statistics.median(theirs / mine for theirs, mine in zip(times["gloo"], times["paceline"], strict=True))
    print(f"; {rate:.2f} times gloo's step rate")
    assert rate >= at_least(1.5)
