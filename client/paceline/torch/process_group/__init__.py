"""torch.distributed's process group over a `paceline.Group`.

torch's C++ calls what is defined here by name. DESIGN.md, 10.5, says why this is no subclass of `Backend`.
"""

from __future__ import annotations

from paceline.torch.process_group.messages import Messages
from paceline.torch.process_group.moving import Moving
from paceline.torch.process_group.reducing import Reducing

__all__ = ["ProcessGroup"]


class ProcessGroup(Reducing, Moving, Messages):
    """A process group: made by `torch.distributed.init_process_group("paceline")` and `new_group`."""
