"""A Ray cluster of several raylets on this machine (`ray.cluster_utils.Cluster`), with room for one worker each."""

from __future__ import annotations

from typing import Any

import ray
from ray.cluster_utils import Cluster

__all__ = ["RayNodes"]

_STORE_BYTES = 80 << 20
"""Ray's object store, for each raylet; nothing large is in it here, and 75 MiB is the least that it takes."""


class RayNodes:
    """The head, which the test's process is connected to, and two more nodes that come and go."""

    def __init__(self) -> None:
        self._cluster = Cluster()
        self.others: list[Any] = []

    def start(self) -> None:
        """Starts three raylets and connects to them."""
        self._cluster.add_node(num_cpus=1, object_store_memory=_STORE_BYTES, include_dashboard=False)
        for _ in range(2):
            self.add()
        ray.init(address=self._cluster.address, configure_logging=False, log_to_driver=False)

    @property
    def address(self) -> str:
        """Where other programs of this machine connect to the cluster."""
        return str(self._cluster.address)

    def add(self) -> None:
        """Adds a node."""
        self.others.append(
            self._cluster.add_node(num_cpus=1, object_store_memory=_STORE_BYTES, include_dashboard=False)
        )

    def remove(self, node_id: str) -> None:
        """Kills the raylet of a node, as the loss of a machine would; what runs on it dies with it."""
        (node,) = [node for node in self.others if node.node_id == node_id]
        self.others.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def stop(self) -> None:
        """Ends all that was started."""
        ray.shutdown()
        self._cluster.shutdown()
