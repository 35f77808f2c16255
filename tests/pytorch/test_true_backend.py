"""Why the backend is no subclass of torch's `Backend` (docs/decisions/19). A failure means that torch has changed."""

from __future__ import annotations

import pytest

from support.processes import Worker

pytestmark = [pytest.mark.needs(what="torch"), pytest.mark.newest]

CODE = """
import torch, torch.distributed as dist
from torch._C._distributed_c10d import Backend

class Done(dist.Work):
    def wait(self, timeout=None):
        return True
    def is_completed(self):
        return True
    def result(self):
        return [torch.ones(1)]
    def source_rank(self):
        return 0
    _source_rank = source_rank

class Small(Backend):
    members = 1
    def size(self):
        return self.members
    def getBackendName(self):
        return "small"
    def allreduce(self, tensors, opts):
        return Done()
    def recv_anysource(self, tensors, tag):
        return Done()

made = []
def make(store, rank, size, timeout):
    made.append(Small(rank, size))
    return made[0]

dist.Backend.register_backend("small", make, devices=["cpu"])
dist.init_process_group("small", store=dist.HashStore(), rank=0, world_size=1)
work = dist.all_reduce(torch.ones(1), async_op=True)
work.wait()
facts = {"over": work.is_completed()}
try:
    facts["result"] = str(work.result())
except RuntimeError as error:
    facts["result"] = str(error)
try:
    facts["from"] = str(dist.recv(torch.ones(1)))
except RuntimeError as error:
    facts["from"] = str(error)
made[0].members = 3  # as after `reconfigure`
emit("seen", sizes=[dist.get_world_size(), dist.group.WORLD.size()], name=dist.group.WORLD.name(), **facts)
"""


def test_a_subclass_of_torch_backend_cannot_report_its_state() -> None:
    worker = Worker(CODE, {})
    try:
        seen = worker.expect("seen", 60.0)
    finally:
        worker.close()
    assert not seen["over"]
    assert "not implemented" in seen["result"]
    assert "only be called on work objects that correspond to a recv" in seen["from"]
    assert seen["sizes"] == [1, 1]
    assert seen["name"] == "custom"
