"""How the code of workers wraps a model, by the name of a strategy: what tests run under each of them share."""

from __future__ import annotations

__all__ = ["WRAP", "WRAPPERS"]

WRAPPERS = ["ddp", "full_shard", "shard_grad_op", "hybrid_shard"]
"""What PACELINE_WRAPPER may be."""

WRAP = """
WRAPPER = os.environ["PACELINE_WRAPPER"]

def wrap(model, group):
    '''The wrapper, and what an optimizer and a training state are made of.'''
    if WRAPPER == "ddp":
        return paceline.DDP(model, group), model
    nodes = 2 if WRAPPER == "hybrid_shard" else None
    wrapped = paceline.FSDP(model, group, paceline.ShardingStrategy[WRAPPER.upper()], nodes)
    return wrapped, wrapped

"""
