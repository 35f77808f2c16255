"""Collectives of Python objects. They send arrays of bytes by the collectives of arrays; nothing is pickled."""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline._base.arrays import Array
from paceline._collectives import blame
from paceline._collectives.gather_tasks import all_gather_task, gather_task
from paceline._collectives.objects import decode_object, encode_object
from paceline._collectives.tasks import broadcast_task
from paceline._group.group_face import GroupFace

_HEAD = 8
"""Bytes of the length that precedes each object."""


class ObjectCollectives(GroupFace):
    """The collectives of objects of a `Group`."""

    def broadcast_object(self, o: object = None, *, root: int = 0, timeout: float | None = None) -> Any:
        """Gives the root's object to all ranks; each gets a copy of its own, the root too.

        Args:
            o: the root's object; ignored elsewhere.
            root: rank of the root; must agree.
            timeout: seconds.

        Raises:
            UnsupportedOp: the object, or something in it, has a type that cannot be sent; the text says where.
            InvalidRank, PacelineError: as for `broadcast`.
        """
        self._core.check_rank("root", root)
        data = _encode(o) if self.rank == root else None
        sent = self._core.issue(
            lambda bound: broadcast_task(bound.engine, data, root, None, self._core.choose, "broadcast_object"),
            timeout,
            async_op=False,
        )
        return self._decode(sent, root)

    def all_gather_object(self, o: object, *, timeout: float | None = None) -> list[Any]:
        """Returns the objects of all ranks, in rank order.

        Raises:
            UnsupportedOp, PacelineError: as for `broadcast_object`.
        """
        data = _encode(o)
        joined = self._core.issue(
            lambda bound: all_gather_task(
                bound.engine, data, None, self._core.choose, uneven=True, kind="all_gather_object"
            ),
            timeout,
            async_op=False,
        )
        return self._split(joined)

    def gather_object(self, o: object, *, root: int = 0, timeout: float | None = None) -> list[Any] | None:
        """Returns the objects of all ranks, in rank order, at the root; None elsewhere.

        Raises:
            UnsupportedOp, InvalidRank, PacelineError: as for `broadcast_object`.
        """
        self._core.check_rank("root", root)
        data = _encode(o)
        joined = self._core.issue(
            lambda bound: gather_task(
                bound.engine, data, root, None, self._core.choose, uneven=True, kind="gather_object"
            ),
            timeout,
            async_op=False,
        )
        return None if joined is None else self._split(joined)

    def _split(self, joined: Array) -> list[Any]:
        objects: list[Any] = []
        at = 0
        for rank in range(self.size):
            size = int.from_bytes(joined[at : at + _HEAD].tobytes(), "little")
            objects.append(self._decode(joined[at : at + _HEAD + size], rank))
            at += _HEAD + size
        return objects

    def _decode(self, data: Array, source: int) -> Any:
        """Decodes a rank's object; an invalid encoding ends the generation."""
        try:
            if data.ndim != 1 or data.dtype != np.uint8:
                raise ValueError(f"an array of shape {data.shape} and dtype {data.dtype}")
            return decode_object(data[_HEAD:].data)
        except ValueError as error:
            mesh = self._core.mesh
            mesh.fault.suspect(blame.broke_protocol(mesh.peers, mesh.rank, source, 0, "objects", str(error)))
            raise mesh.fault.error() from None


def _encode(o: object) -> Array:
    """Encodes an object as its bytes, preceded by their number, so that they can be told from the next rank's."""
    data = encode_object(o)
    return np.frombuffer(len(data).to_bytes(_HEAD, "little") + data, np.uint8)
