"""A model of twelve equal units, spread by FSDP over real processes."""

from __future__ import annotations

from typing import Any

from paceline.testing import coordinator
from support.processes import workers

__all__ = ["UNITS", "facts"]

UNITS = 12

MODEL = """
from paceline import FSDP, ShardingStrategy, nn, optim

class Block:
    '''y = x * w[0] with n parameters, and a place to act in the middle of each pass.'''
    def __init__(self, n, act):
        self.w = paceline.Parameter(np.full(n, 1, np.float32))
        self.act = act
    def named_parameters(self):
        yield "w", self.w
    def forward(self, x):
        self.act()
        return x * self.w.data[0]
    def backward(self, dy):
        self.act()
        self.w.accumulate(np.full(self.w.shape, dy.sum(), np.float32))
        return dy * self.w.data[0]

def model(n, act, group, **settings):
    blocks = [FSDP(Block(n, act), group, **settings) for _ in range(12)]
    return FSDP(nn.Sequential(*blocks), group, **settings)

ONE = np.ones((1, 1), np.float32)
"""


def facts(world: int, code: str) -> list[dict[str, Any]]:
    """What each of the workers tells in its event "facts"."""
    with (
        coordinator() as address,
        workers(world, MODEL + code, COORDINATOR=address, LINKS="grpc", MIN_WORKERS=str(world)) as started,
    ):
        found = [worker.expect("facts", timeout=120.0) for worker in started]
        assert [worker.wait() for worker in started] == [0] * world
        return found
