"""Runs a program over links: moves bytes, reduces, and turns whatever goes wrong into one suspicion.

It owns the wire side of a collective: what a frame must carry to be believed, and who is blamed when it does not.
It runs in the thread that calls it and starts none.

Letters: N elements, W world size. `base` and `out` are flat, shape [N].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any, NoReturn, TypeVar

import numpy as np

from paceline.arrays import Array, as_bytes, from_bytes
from paceline.collectives import blame
from paceline.collectives.exchange import Disagreement, Exchange
from paceline.collectives.ops import Reduction
from paceline.collectives.program import Do, Move, Program
from paceline.errors import PacelineError
from paceline.links.base import LinkEnded, LinkTimeout, Mesh
from paceline.links.fault import Suspicion
from paceline.links.frame import Frame, FrameKind
from paceline.signature import Signature

__all__ = ["Call", "Engine"]

T = TypeVar("T")


@dataclass(slots=True)
class Call:
    """One call of a collective.

    Attributes:
        operation: its number in the generation.
        signature: what part 0 must say.
        started: when it was issued, a `time.monotonic()` value.
        deadline: when its time is over, likewise.
    """

    operation: int
    signature: bytes
    started: float
    deadline: float

    def __str__(self) -> str:
        return self.signature.decode("ascii")


class Engine:
    """Runs one program at a time over a mesh's links for collectives.

    Attributes:
        mesh: the mesh.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._exchange = Exchange(mesh)
        self._call: Call | None = None
        self._program: Program | None = None
        self._at: Move | None = None  # the move of it that is being carried out, for blame

    def run(
        self,
        call: Call,
        program: Program,
        base: Array,
        out: Array,
        reduction: Reduction | None = None,
        first: Frame | None = None,
    ) -> None:
        """Carries out all moves; then `out` holds the result, except what `program.covered` leaves to the caller.

        Args:
            call: the call.
            program: this rank's moves.
            base: this rank's value; not written to unless it is `out`.
            out: where the result goes; may be `base`.
            reduction: for programs that reduce.
            first: the frame for the first receive, if it has been received already.

        Raises:
            PacelineError: the generation has failed, here or elsewhere; every rank gets the same.
        """
        mesh, exchange, operation, deadline = self.mesh, self._exchange, call.operation, call.deadline
        generation, world, size = mesh.generation, mesh.size, base.itemsize
        base_bytes, out_bytes = as_bytes(base), as_bytes(out)
        self._program = program
        for move in program.moves:
            self._at = move
            do, peer, part, lo, hi, fresh = move
            signature = b"" if part else call.signature
            if do is Do.SEND:
                payload = (base_bytes if fresh else out_bytes)[lo * size : hi * size]
                exchange.send(peer, Frame(FrameKind.DATA, generation, operation, part, signature, payload), deadline)
                continue
            if first is None:
                frame = exchange.recv(peer, deadline)
            else:
                frame, first = first, None
            if (
                frame.operation != operation
                or frame.part != part
                or frame.generation != generation
                or frame.signature != signature
                or len(frame.payload) != (hi - lo) * size
            ):
                self._refuse(call, peer, part, (hi - lo) * size, frame)
            if lo == hi:
                continue
            if do is Do.STORE:
                out_bytes[lo * size : hi * size] = frame.payload
                continue
            assert reduction is not None, "a program that reduces was started without a reduction"
            target, received = out[lo:hi], from_bytes(frame.payload, base.dtype)
            reduction.ufunc(received, base[lo:hi] if fresh else target, out=target)
            if do is Do.FINALIZE and reduction.mean:
                np.true_divide(target, base.dtype.type(world), out=target)

    def first_frame(self, call: Call, peer: int, asked: Signature) -> tuple[Frame, np.dtype[Any], tuple[int, ...]]:
        """The first frame of an operation whose array the sender describes; dtype and shape, as it says.

        Args:
            call: the call.
            peer: who sends it.
            asked: kind and detail, which must agree.
        """
        self._at = Move(Do.STORE, peer, 0, 0, 0, True)
        frame = self._exchange.recv(peer, call.deadline)
        if frame.operation != call.operation or frame.part != 0 or frame.generation != self.mesh.generation:
            self._refuse(call, peer, 0, len(frame.payload), frame)
        try:
            told = Signature.decode(frame.signature)
        except ValueError as error:
            self._breach(call, peer, str(error))
        if told[:2] != asked[:2]:
            self._refuse(call, peer, 0, len(frame.payload), frame)
        if told.dtype is None or told.shape is None:
            self._breach(call, peer, "no description of the array")
        return frame, told.dtype, told.shape

    def attempt(self, call: Call, body: Callable[[Call], T]) -> T:
        """Runs the body of an operation; whatever it raises is this generation's end.

        Raises:
            PacelineError: the generation has failed.
            BaseException: what the body raised by itself, after the others were told.
        """
        mesh, fault = self.mesh, self.mesh.fault
        self._call, self._program = call, None
        try:
            fault.check()
            self._exchange.begin(call.operation, call.signature)
            return body(call)
        except PacelineError as error:
            if not fault.failed:
                fault.suspect(blame.raised(mesh.peers, mesh.rank, call.operation, str(call), error))
            raise
        except Disagreement as found:
            mine, frame = found.mine.decode("ascii"), found.frame
            self._raise(blame.disagrees(mesh.peers, mesh.rank, found.peer, frame.operation, mine, frame))
        except (LinkEnded, LinkTimeout) as error:
            self._raise(self._blame_link(call, error))
        except BaseException as error:
            fault.suspect(blame.raised(mesh.peers, mesh.rank, call.operation, str(call), error))
            raise
        finally:
            self._call = self._at = None

    def abort(self, operation: int, cause: BaseException) -> None:
        """Ends the generation from another thread, because nobody waits for this operation any longer.

        Args:
            operation: the operation, running or in line.
            cause: a TimeoutError accuses whom the running operation waits for; anything else is this member's own.
        """
        mesh, call, at = self.mesh, self._call, self._at
        if isinstance(cause, TimeoutError):
            if call is None or at is None:
                mesh.fault.suspect(blame.not_begun(mesh.peers, mesh.rank, operation))
            else:
                mesh.fault.suspect(self._late(call, at))
        else:
            name = str(call) if call is not None and call.operation == operation else "in line"
            mesh.fault.suspect(blame.raised(mesh.peers, mesh.rank, operation, name, cause))

    def _refuse(self, call: Call, peer: int, part: int, nbytes: int, frame: Frame) -> NoReturn:
        """Tells apart a peer that is in another call from one that breaks the protocol."""
        mesh = self.mesh
        if frame.generation != mesh.generation:
            self._breach(call, peer, f"a frame of generation {frame.generation} in generation {mesh.generation}")
        self._exchange.compare(peer, frame)  # a frame of an earlier operation shows where the two parted
        if frame.operation != call.operation or (part == frame.part == 0 and frame.signature != call.signature):
            self._raise(blame.disagrees(mesh.peers, mesh.rank, peer, call.operation, str(call), frame))
        elif frame.part != part:
            what = f"frame {frame.part} where frame {part} was due"
        else:
            what = f"{len(frame.payload)} bytes in frame {part} where {nbytes} were due"
        self._breach(call, peer, what)

    def _breach(self, call: Call, peer: int, what: str) -> NoReturn:
        mesh = self.mesh
        self._raise(blame.broke_protocol(mesh.peers, mesh.rank, peer, call.operation, str(call), what))

    def _blame_link(self, call: Call, error: LinkEnded | LinkTimeout) -> Suspicion:
        mesh, at = self.mesh, self._at
        assert at is not None, "a link failed outside a move"
        if isinstance(error, LinkEnded):
            return blame.link_ended(mesh.peers, mesh.rank, at.peer, call.operation, str(call), error)
        return self._late(call, at)

    def _late(self, call: Call, at: Move) -> Suspicion:
        mesh, seconds = self.mesh, monotonic() - call.started
        sending = at.do is Do.SEND
        moves = self._program.moves if self._program is not None else ()
        total = sum(move.peer == at.peer and (move.do is Do.SEND) is sending for move in moves)
        what = f"{'take' if sending else 'send'} frame {at.part + 1}{f' of {total}' if total else ''}"
        return blame.timed_out(mesh.peers, mesh.rank, at.peer, call.operation, str(call), what, seconds)

    def _raise(self, suspicion: Suspicion) -> NoReturn:
        self.mesh.fault.suspect(suspicion)
        raise self.mesh.fault.error() from None
