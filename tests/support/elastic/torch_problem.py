"""The problem of `problem`, solved with torch: the same model, data and optimizer, so the same numbers."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Iterator
from typing import Any

import torch

import paceline.torch
from support.elastic.problem import BATCH, RATE, SAMPLES, build, data, decay

__all__ = ["TorchProblem"]

_PR_SET_PDEATHSIG = 1
"""<linux/prctl.h>"""

cross_entropy = torch.nn.functional.cross_entropy


class TorchProblem:
    """A torch model in DDP, its optimizer, and a scheduler that is to be stepped with it.

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
        self.optimizer = torch.optim.Adam(net.parameters(), lr=RATE)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, decay)
        x, t = data()
        self.data = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(t))
        self.loader: Any = None

    def load(self, workers: int) -> Any:
        """From now on samples come by way of a loader, which is returned."""
        settings = {"num_workers": workers, "worker_init_fn": _end_with_the_parent}
        self.loader = paceline.torch.ElasticDataLoader(self.data, **settings)
        return self.loader

    def stream(self, workers: int, shards: int) -> Any:
        """As `load`, but the loader is one of a stream, and a part of the training state in the place of a sampler."""
        settings = {"num_workers": workers, "worker_init_fn": _end_with_the_parent}
        stream = [_Stream(shard, shards) for shard in range(shards)] or _Stream()
        self.loader = paceline.torch.ElasticStreamLoader(stream, BATCH, **settings)
        return self.loader

    def batch(self, step: Any) -> tuple[Any, list[int]]:
        """Inputs and labels of a step, and the samples that they are."""
        if isinstance(self.loader, paceline.torch.ElasticStreamLoader):
            *batch, indices = self.loader.batch(step)
            return batch, indices.tolist()
        return self.loader.batch(step) if self.loader else self.data[step.indices], step.indices.tolist()

    def loss(self, x: Any, t: Any) -> Any:
        """The mean loss over some samples, as `data` has them."""
        return cross_entropy(self.model(x), t)

    def large(self) -> list[Any]:
        """Parameters, then the two moments of each: in the order of the NumPy problem."""
        parameters = list(self.model.parameters())
        state = self.optimizer.state
        moments = [state[p][name] for p in parameters for name in ("exp_avg", "exp_avg_sq")]
        return [tensor.detach().numpy() for tensor in [*parameters, *moments]]


class _Stream(torch.utils.data.IterableDataset[Any]):
    """The samples in the order that a sampler has them in, each with its number; or each `every`-th of them."""

    def __init__(self, first: int = 0, every: int = 1) -> None:
        self._x, self._t = data()
        self._mine = slice(first, None, every)
        self._sampler = paceline.ElasticSampler(SAMPLES, global_batch=SAMPLES)
        self._epoch = self._read = 0

    def set_epoch(self, epoch: int) -> None:
        """Which order."""
        self._epoch, self._read = epoch, 0

    def state_dict(self) -> dict[str, int]:
        """How many samples of the epoch were read."""
        return {"read": self._read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on there."""
        self._read = state["read"]

    def __iter__(self) -> Iterator[Any]:
        for index in self._sampler.batch(self._epoch)[self._mine][self._read :]:
            self._read += 1
            yield self._x[index], self._t[index], index


def _end_with_the_parent(_: int) -> None:
    """When a trainer is killed its workers end too: else they would hold its output open."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
