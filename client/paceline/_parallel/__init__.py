"""Data-parallel training of NumPy modules: DistributedDataParallel and FullyShardedDataParallel."""

from paceline._parallel._data_parallel import DDP
from paceline._parallel._fully_sharded import FSDP
from paceline._parallel._parameter import Module, Parameter
from paceline._parallel.sharding._placement import ShardingStrategy

__all__ = ["DDP", "FSDP", "Module", "Parameter", "ShardingStrategy"]
