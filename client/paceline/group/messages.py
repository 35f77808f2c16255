"""Messages between two ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

import numpy as np
import numpy.typing as npt

from paceline.arrays import Array, as_array, check_writable, native
from paceline.errors import UnsupportedOp
from paceline.group.binding import Binding
from paceline.group.core import GroupCore
from paceline.signature import Signature

__all__ = ["Messages"]


class Messages(GroupCore):
    """send, recv: see `Group`. Any thread may call them at any time."""

    def send(self, x: npt.ArrayLike, dst: int, *, tag: int = 0, timeout: float | None = None) -> None:
        """Sends an array to a rank, oneself included; returns when `x` may be changed, perhaps before it is received.

        Messages of one tag from one rank are received in the order of sending.

        Args:
            x: the array.
            dst: rank of the receiver.
            tag: 0 or more; the receiver asks for it.
            timeout: seconds; running out of them voids nothing.

        Raises:
            InvalidRank: `dst` lies outside the world.
            UnsupportedOp: the dtype cannot travel.
            OperationTimeout: the receiver takes in no more.
            PacelineError: the generation has failed.
        """
        bound = self._enter()
        self._check_rank("dst", dst)
        array, tag = as_array(x), _check_tag(tag)
        detail = f"to={dst} tag={tag}"
        with self._recorded(bound, Signature("send", detail, native(array.dtype), array.shape)):
            bound.mailbox.send(array, dst, tag, self._deadline(timeout, monotonic()))

    def recv(
        self, src: int | None = None, *, tag: int = 0, out: Array | None = None, timeout: float | None = None
    ) -> tuple[Array, int]:
        """Receives the next array with a tag.

        Args:
            src: rank of the sender; None for any.
            tag: 0 or more.
            out: where to put it. A message that does not fit stays, to be received again.
            timeout: seconds; running out of them loses no message and voids nothing.

        Returns:
            The array, and the rank that sent it.

        Raises:
            InvalidRank: `src` lies outside the world.
            SizeMismatch: the message has another shape than `out`.
            UnsupportedOp: the message has another dtype than `out`.
            OperationTimeout: no such message came in time.
            PacelineError: the generation has failed, or whoever could send has left.
        """
        bound = self._enter()
        if src is not None:
            self._check_rank("src", src)
        if out is not None:
            check_writable(out)
        tag = _check_tag(tag)
        detail = f"from={'any' if src is None else src} tag={tag}"
        with self._recorded(bound, Signature("recv", detail)):
            return bound.mailbox.recv(src, tag, out, self._deadline(timeout, monotonic()))

    @contextmanager
    def _recorded(self, bound: Binding, signature: Signature) -> Iterator[None]:
        """Remembers a message; unlike a collective it has no number that all ranks share."""
        entry = self.recorder.issue(bound.name, 0, signature.encode(), bound.mesh.generation)
        entry.begin()
        try:
            yield
        except BaseException as error:
            entry.end(error)
            self._tell_abort(error)
            raise
        entry.end()


def _check_tag(tag: object) -> int:
    if isinstance(tag, bool) or not isinstance(tag, int | np.integer) or not 0 <= tag < 1 << 63:
        raise UnsupportedOp(f"a tag is a whole number from 0 to 2**63 - 1, not {tag!r}")
    return int(tag)
