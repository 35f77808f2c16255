"""Models that are trained in microbatches. Their buffers, dropout and schedulers could differ between worlds."""

from __future__ import annotations

from typing import Any

import numpy as np

import paceline
from paceline.nn import Linear, ReLU, Sequential, softmax_cross_entropy

__all__ = ["MODELS", "problem_of"]

MODELS = ("mlp", "torch-mlp", "cnn", "characters", "diloco")
"""The first is of NumPy, the others of torch. Each may be followed by a strategy of FSDP: "mlp/full_shard"."""

_BATCH, _SEED = 29, 4
"""No multiple of the microbatches, so their shapes differ; with 8 microbatches three have one sample less."""


def problem_of(model: str) -> Any:
    """The problem of that name."""
    name, *options = model.split("/")
    problem: Any = {
        "mlp": Mlp,
        "torch-mlp": TorchMlp,
        "cnn": Cnn,
        "characters": Characters,
        "diloco": Rounds,
        "two": Two,
        "wraps-anew": WrapsAnew,
    }[name]()
    for option in options:
        if option == "fake_device":
            from pytorch.fake_device import install

            install(setattr)
        else:
            problem.strategy = paceline.ShardingStrategy(option)
    return problem


def _sharding(strategy: paceline.ShardingStrategy) -> tuple[paceline.ShardingStrategy, int | None]:
    """Returns the strategy, and the number of ranks in a node."""
    return strategy, 2 if strategy is paceline.ShardingStrategy.HYBRID_SHARD else None


class Mlp:
    """A NumPy model with dropout and clipping; the state may have the module without its wrapper."""

    bare = False
    strategy: paceline.ShardingStrategy | None = None

    def __init__(self) -> None:
        rng = np.random.default_rng(_SEED)
        self.flips = False
        self.x = rng.standard_normal((200, 12)).astype("f4")
        self.t = rng.integers(0, 5, 200)

    def build(self, group: Any, **settings: Any) -> Any:
        """The training state."""
        rng = np.random.default_rng(_SEED)
        layers = [Linear(12, 33, rng=rng), ReLU(), Linear(33, 17, rng=rng), ReLU(), Linear(17, 5, rng=rng)]
        self.model: Any
        if self.strategy is None:
            self.model = paceline.DDP(Sequential(*layers), group, bucket_mb=1e-3)
        else:
            how = _sharding(self.strategy)
            layers[2] = paceline.FSDP(layers[2], group, *how)
            self.model = paceline.FSDP(Sequential(*layers), group, *how)
        self.optimizer = paceline.optim.Adam(self.model, lr=0.01)
        sampler = paceline.ElasticSampler(200, global_batch=_BATCH, **settings)
        model = self.model.module if self.bare else self.model
        return paceline.TrainState(model=model, optimizer=self.optimizer, sampler=sampler)

    def compute(self, micro: Any) -> None:
        """Forward and backward."""
        x = self.x[micro.indices]
        kept = micro.rng.random(x.shape) > 0.1
        _, dy = softmax_cross_entropy(self.model(x * kept), self.t[micro.indices])
        if self.flips:
            dy.view(np.uint32)[0, 0] ^= 1 << 12
        self.model.backward(dy)

    def update(self) -> None:
        """The optimizer's step."""
        self.model.clip_grad_norm(0.5)
        self.optimizer.step()


class WrapsAnew(Mlp):
    """The state has the bare module, which the script wraps anew in each generation."""

    bare = True

    def build(self, group: Any, **settings: Any) -> Any:
        """The training state."""
        self._group, self._generation = group, group.generation
        return super().build(group, **settings)

    def compute(self, micro: Any) -> None:
        """Forward and backward."""
        if self._group.generation != self._generation:
            self._generation = self._group.generation
            self.model = paceline.DDP(self.model.module, self._group, bucket_mb=1e-3)
        super().compute(micro)


class Two(Mlp):
    """Two wrappers, of which the second is in every second step only."""

    def build(self, group: Any, **settings: Any) -> Any:
        """The training state."""
        rng = np.random.default_rng(_SEED)
        self._wrappers = [paceline.DDP(Linear(12, 5, rng=rng), group) for _ in range(2)]
        self._optimizers = [paceline.optim.Adam(wrapper, lr=0.01) for wrapper in self._wrappers]
        self.optimizer = self
        things = {
            f"{kind}{n}": thing
            for n in range(2)
            for kind, thing in (("w", self._wrappers[n]), ("o", self._optimizers[n]))
        }
        sampler = paceline.ElasticSampler(200, global_batch=_BATCH, **settings)
        return paceline.TrainState(sampler=sampler, **things)

    def zero_grad(self) -> None:
        """Of both."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()

    def compute(self, micro: Any) -> None:
        """Forward and backward."""
        self._used = 2 - micro.step.number % 2
        for wrapper in self._wrappers[: self._used]:
            _, dy = softmax_cross_entropy(wrapper(self.x[micro.indices]), self.t[micro.indices])
            wrapper.backward(dy)

    def update(self) -> None:
        """The optimizers' steps."""
        for optimizer in self._optimizers[: self._used]:
            optimizer.step()


class _Torch:
    """A torch model with AdamW, clipping and a scheduler."""

    clips_with_torch = False
    strategy: paceline.ShardingStrategy | None = None

    def net(self) -> Any:
        """The model."""
        raise NotImplementedError

    def data(self) -> tuple[Any, Any]:
        """Inputs and labels."""
        raise NotImplementedError

    def __init__(self) -> None:
        import torch

        import paceline.torch  # noqa: F401  before the processes begin together

        self.torch = torch
        self.flips = False
        self.x, self.t = self.data()

    def build(self, group: Any, **settings: Any) -> Any:
        """The training state."""
        torch = self.torch
        torch.manual_seed(_SEED)
        if self.strategy is None:
            self.model = paceline.torch.DDP(self.net(), group, bucket_mb=0.02)
        else:
            units = (torch.nn.Conv2d, torch.nn.TransformerEncoderLayer)
            self.model = paceline.torch.FSDP(self.net(), group, *_sharding(self.strategy), auto_wrap=units)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 200)
        sampler = paceline.ElasticSampler(len(self.x), global_batch=_BATCH, **settings)
        return paceline.TrainState(model=self.model, optimizer=self.optimizer, schedule=self.schedule, sampler=sampler)

    def compute(self, micro: Any) -> None:
        """Forward and backward."""
        y = self.model(self.x[micro.indices])
        if self.flips:
            y.register_hook(self._flip)
        self.torch.nn.functional.cross_entropy(y.flatten(0, -2), self.t[micro.indices].flatten()).backward()

    def _flip(self, gradient: Any) -> Any:
        """Flips one bit of a gradient."""
        gradient = gradient.contiguous().clone()
        gradient.view(self.torch.int32).view(-1)[0] ^= 1 << 12
        return gradient

    def update(self) -> None:
        """The optimizer's step."""
        if self.clips_with_torch and self.strategy is None:
            self.torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        else:
            self.model.clip_grad_norm(0.5)
        self.optimizer.step()
        self.schedule.step()


class TorchMlp(_Torch):
    """Layers of several sizes, and dropout."""

    def data(self) -> tuple[Any, Any]:
        rng = np.random.default_rng(_SEED)
        x = self.torch.from_numpy(rng.standard_normal((200, 12)).astype("f4"))
        return x, self.torch.from_numpy(rng.integers(0, 5, 200))

    def net(self) -> Any:
        nn = self.torch.nn
        return nn.Sequential(
            nn.Linear(12, 33), nn.ReLU(), nn.Dropout(0.1), nn.Linear(33, 17), nn.ReLU(), nn.Linear(17, 5)
        )


class Cnn(_Torch):
    """Convolutions, running statistics and dropout."""

    def data(self) -> tuple[Any, Any]:
        rng = np.random.default_rng(_SEED)
        x = self.torch.from_numpy(rng.standard_normal((160, 1, 8, 8)).astype("f4"))
        return x, self.torch.from_numpy(rng.integers(0, 10, 160))

    def net(self) -> Any:
        nn = self.torch.nn
        return nn.Sequential(
            nn.Conv2d(1, 9, 3), nn.BatchNorm2d(9), nn.ReLU(), nn.Conv2d(9, 7, 3), nn.BatchNorm2d(7), nn.ReLU(),
            nn.Dropout(0.2), nn.Flatten(), nn.Linear(7 * 4 * 4, 10),
        )  # fmt: skip


class Rounds(Cnn):
    """Rounds of DiLoCo."""

    def build(self, group: Any, **settings: Any) -> Any:
        """The training state."""
        torch = self.torch
        torch.manual_seed(_SEED)
        self._net = self.net()
        self.optimizer = torch.optim.AdamW(self._net.parameters(), lr=3e-3)
        self.model = paceline.torch.DiLoCo(self._net, self.optimizer, group, bucket_mb=0.005)
        sampler = paceline.ElasticSampler(len(self.x), global_batch=_BATCH, **settings)
        return paceline.TrainState(model=self.model, sampler=sampler)

    def compute(self, micro: Any) -> None:
        """Inner steps."""
        for batch in self.model.replica_batches(micro, 2):
            self.torch.nn.functional.cross_entropy(self._net(self.x[batch]), self.t[batch]).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def update(self) -> None:
        """The outer step."""
        self.model.outer_step()


class Characters(_Torch):
    """A small transformer that reads characters."""

    clips_with_torch = True

    def data(self) -> tuple[Any, Any]:
        text = np.frombuffer((__doc__ * 20).encode(), np.uint8).astype(np.int64) % 64
        windows = np.lib.stride_tricks.sliding_window_view(text, 17)[:300]
        tensor = self.torch.from_numpy(windows.copy())
        return tensor[:, :-1], tensor[:, 1:]

    def net(self) -> Any:
        nn = self.torch.nn
        layer = nn.TransformerEncoderLayer(24, 3, 48, dropout=0.1, batch_first=True, norm_first=True)
        return nn.Sequential(
            nn.Embedding(64, 24), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(24, 64)
        )
