"""`torch.compile` around a wrapper, inside of it, and around a whole step: the numbers of one process without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from pytorch.torch_models import made
from pytorch.torch_ranks import finish
from torch import nn

from paceline._group import Group
from paceline.testing import run_ranks
from paceline.torch import DDP, FSDP

# Dynamo looks at such attributes, and hides the warning in a way that does not hold for threads.
pytestmark = [pytest.mark.needs(what="torch"), pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")]

in_threads = pytest.mark.skipif(
    torch.__version__.startswith("2.11."),
    reason="torch 2.11 crashes where two threads compile at once, as ranks do here",
)

X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(6, 4)


@pytest.fixture(autouse=True)
def anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if find_spec("tqdm") is not None:  # which torch uses if it is there, and which would leave a thread behind
        monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Layer(nn.Module):
    """A class of the user's own: dynamo takes frames of torch's modules only inside of others."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: Any) -> Any:
        return torch.tanh(self.linear(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(4, 8), Layer(8, 2)

    def forward(self, x: Any) -> Any:
        return self.second(self.first(x))


def net() -> Any:
    return made(lambda: Net().double())


def ddp(group: Group) -> Any:
    return DDP(net(), group)


def fsdp(group: Group) -> Any:
    return FSDP(net(), group, auto_wrap=Layer)


def loss_of(model: Any, x: Any) -> Any:
    return (model(x) ** 2).mean()


def backward(model: Any, x: Any) -> None:
    loss_of(model, x).backward()


def trained(model: Any, run: Callable[[Any, Any], None], rows: slice) -> dict[str, Any]:
    """The weights after three steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        run(model, X[rows])
        optimizer.step()
    return {path.removeprefix("_orig_mod."): values for path, values in model.state_dict().items()}


def check(train: Callable[[Group], dict[str, Any]]) -> None:
    expected = trained(net(), backward, slice(None))
    for found in run_ranks(2, train):
        torch.testing.assert_close(found, expected)


class Graphs:
    """A backend that counts the graphs in which a layer is computed, and compiles nothing."""

    def __init__(self) -> None:
        self.layers = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.layers += "linear" in graph.code
        return graph.forward


@pytest.mark.newest
@in_threads
@pytest.mark.parametrize("wrap", [ddp, fsdp])
@pytest.mark.parametrize("backend", ["counting", "aot_eager"])
def test_model_compile_compiles_the_wrapped_module(wrap: Any, backend: str) -> None:
    """The wrapper's own code is run as it is; what it wraps is compiled."""
    graphs = Graphs()

    def train(group: Group) -> dict[str, Any]:
        model = wrap(group)
        model.compile(backend=graphs if backend == "counting" else backend)  # in place, so that it has no other paths
        return trained(model, backward, slice(group.rank, None, 2))

    check(train)
    assert (graphs.layers > 0) == (backend == "counting")


@in_threads
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_ddp_wraps_a_compiled_module(backend: str) -> None:
    def train(group: Group) -> dict[str, Any]:
        model = DDP(torch.compile(net(), backend=backend, fullgraph=True), group)
        return trained(model, backward, slice(group.rank, None, 2))

    check(train)


@in_threads
def test_fsdp_wraps_compiled_units() -> None:
    def train(group: Group) -> dict[str, Any]:
        module = net()
        for layer in module.children():
            layer.compile(backend="aot_eager", fullgraph=True)
        return trained(FSDP(module, group, auto_wrap=Layer), backward, slice(group.rank, None, 2))

    check(train)


@in_threads
@pytest.mark.parametrize("wrap", [ddp, fsdp])
def test_a_compiled_training_step_matches_one_process(wrap: Any) -> None:
    """Forward, backward with its hooks and collectives, and a collective of the user's own."""

    def train(group: Group) -> dict[str, Any]:
        def run(model: Any, x: Any) -> None:
            loss = loss_of(model, x)
            loss.backward()
            assert group.all_reduce(loss.detach().numpy()).shape == ()
            model.clip_grad_norm(1e6)

        return trained(wrap(group), torch.compile(run, backend="eager"), slice(group.rank, None, 2))

    check(train)


@in_threads
def test_torch_compile_wraps_ddp() -> None:
    def train(group: Group) -> dict[str, Any]:
        return trained(torch.compile(ddp(group), backend="eager"), backward, slice(group.rank, None, 2))

    check(train)


@pytest.mark.newest
@pytest.mark.timeout(180)
def test_compiled_distributed_data_parallel_uses_the_backend() -> None:
    """What is compiled is the model; C++ calls the backend in the middle of it, to broadcast a buffer."""
    code = """
from torch import nn
from torch.nn.parallel import DistributedDataParallel

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 400), nn.Linear(400, 400)
        self.register_buffer("calls", torch.zeros(()))
    def forward(self, x):
        self.calls += 1
        return self.second(torch.tanh(self.first(x)))

def trained(model, x):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        (model(x) ** 2).mean().backward()
        optimizer.step()
    return list(model.parameters())

def counting(graph, inputs):
    layers.append("linear" in graph.code)
    return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

layers = []
torch.manual_seed(0)
net = Net().double()
x = torch.randn(6, 4, dtype=torch.float64)
expected = trained(net, x)
torch.manual_seed(0)
net = Net().double()
model = DistributedDataParallel(net, bucket_cap_mb=1)        # torch makes a graph for each bucket
found = trained(torch.compile(model, backend=counting), x[rank::2])
torch.testing.assert_close(found, expected)
assert len(layers) >= 2 and all(layers), layers
assert net.calls == 3
@torch.compile(backend=counting)
def sums(x):
    y = 2 * x
    dist.all_reduce(y)
    dist.barrier()                                           # where the graph ends
    work = dist.all_reduce(y, async_op=True)
    work.wait()
    return y + 1
assert sums(torch.ones(3)).tolist() == [9.0] * 3
"""
    finish(2, code, 120)
