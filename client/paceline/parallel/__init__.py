"""Training in parallel, for NumPy modules: DistributedDataParallel and FullyShardedDataParallel."""

from paceline.parallel._data_parallel import DDP
from paceline.parallel._fully_sharded import FSDP
from paceline.parallel._parameter import Module, Parameter
from paceline.parallel.sharding._placement import ShardingStrategy

__all__ = ["DDP", "FSDP", "Module", "Parameter", "ShardingStrategy"]
