"""Training in parallel: buckets and DistributedDataParallel for NumPy modules."""

from paceline.parallel.ddp import DDP
from paceline.parallel.module import Module
from paceline.parallel.parameter import Parameter

__all__ = ["DDP", "Module", "Parameter"]
