"""The backend "paceline" of torch.distributed: its process groups, and how they are created."""

from __future__ import annotations

from paceline.torch.backend._creation import create, rendezvous
from paceline.torch.backend._process_group import ProcessGroup
from paceline.torch.backend._torch_store import Store

__all__ = ["ProcessGroup", "Store", "create", "rendezvous"]
