"""The example's configuration for the tests: it prints each loss in full, and a replica waits while it is alone."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, fields
from typing import Any

import llama
from torchtitan.components.metrics import MetricsProcessor

from paceline_torchtitan import ElasticTrainer


class Exact(MetricsProcessor):  # type: ignore[misc]
    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):  # type: ignore[misc]
        pass

    def log(self, step: int, loss: float, *others: Any, **more: Any) -> None:
        super().log(step, loss, *others, **more)
        sys.stdout.write(f"step {step}: {loss.hex()} by pid {os.getpid()}\n")
        sys.stdout.flush()


class Waiting(ElasticTrainer):
    @dataclass(kw_only=True, slots=True)
    class Config(ElasticTrainer.Config):
        pass

    def train_step(self, batches: Any) -> None:
        super().train_step(batches)
        if self._step.world == 1:
            time.sleep(float(os.environ.get("ALONE_S", "0")))  # until the other replica is back


def debugmodel() -> Any:
    config = llama.debugmodel()
    config.metrics = Exact.Config(log_freq=1, disable_color_printing=True)
    config.training.seq_len = 32
    config.training.mixed_precision_param = "float32"
    config.debug.seed = 1
    return Waiting.Config(**{field.name: getattr(config, field.name) for field in fields(config)})
