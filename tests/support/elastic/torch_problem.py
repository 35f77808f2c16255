"""The problem of `problem`, solved with torch: the same model, data and optimizer, so the same numbers."""

from __future__ import annotations

import ctypes
import signal
from typing import Any

import torch

import paceline.torch
from support.elastic.problem import build, data

__all__ = ["TorchProblem", "load"]

_PR_SET_PDEATHSIG = 1
"""<linux/prctl.h>"""

cross_entropy = torch.nn.functional.cross_entropy


class TorchProblem:
    """A torch model in DDP, and its optimizer.

    Args:
        seed: of `problem.build`, from whose values it begins.
        hidden: units of the hidden layer.
        group: the ranks.
        bucket_mb: of DDP.
    """

    def __init__(self, seed: int, hidden: int, group: Any, bucket_mb: float | None) -> None:
        torch.set_num_threads(1)
        layers = [module for module in build(seed, hidden).modules if hasattr(module, "weight")]
        linear = [torch.nn.Linear(*reversed(layer.weight.data.shape), dtype=torch.float64) for layer in layers]
        for torchs, layer in zip(linear, layers, strict=True):
            torchs.weight.data = torch.from_numpy(layer.weight.data.copy())
            torchs.bias.data = torch.from_numpy(layer.bias.data.copy())
        net = torch.nn.Sequential(linear[0], torch.nn.ReLU(), linear[1])
        self.model = paceline.torch.DDP(net, group, bucket_mb=bucket_mb)
        self.optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.ConstantLR(self.optimizer, factor=1.0)
        x, t = data()
        self.data = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(t))

    def loss(self, x: Any, t: Any) -> Any:
        """The mean loss over some samples, as `data` has them."""
        return cross_entropy(self.model(x), t)

    def large(self) -> list[Any]:
        """Parameters, then the two moments of each: in the order of the NumPy problem."""
        parameters = list(self.model.parameters())
        state = self.optimizer.state
        moments = [state[p][name] for p in parameters for name in ("exp_avg", "exp_avg_sq")]
        return [tensor.detach().numpy() for tensor in [*parameters, *moments]]


def load(data: Any, workers: int) -> Any:
    """A loader whose workers end when this process is killed: else they would hold its output open."""
    return paceline.torch.ElasticDataLoader(data, num_workers=workers, worker_init_fn=_end_with_the_parent)


def _end_with_the_parent(_: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
