"""Training in parallel, for NumPy modules: DistributedDataParallel and FullyShardedDataParallel."""

from paceline.parallel.ddp import DDP
from paceline.parallel.fsdp import FSDP
from paceline.parallel.module import Module
from paceline.parallel.parameter import Parameter
from paceline.parallel.sharding.strategy import ShardingStrategy

__all__ = ["DDP", "FSDP", "Module", "Parameter", "ShardingStrategy"]
