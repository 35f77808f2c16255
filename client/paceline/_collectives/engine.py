"""Runs a program over links: moves bytes, reduces, and turns every failure into one suspicion.

The engine checks what a frame must carry to be accepted, and decides which member to blame if it does not. It runs in
the calling thread and starts no thread.

Letters: N elements, W world size. `base` and `out` are flat, shape [N].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any, NoReturn, TypeVar

import numpy as np

from paceline._base.arrays import Array, Signature, as_bytes, copy_bytes, from_bytes
from paceline._collectives import blame
from paceline._collectives.arithmetic import Arithmetic
from paceline._collectives.choose import nodes_of
from paceline._collectives.exchange import Disagreement, Exchange, History
from paceline._collectives.program import SEGMENT_BYTES, Area, Do, Move, Program
from paceline._links.base import LEND_BYTES, LinkEnded, LinkTimeout, Mesh
from paceline._links.fault import Suspicion
from paceline._links.frame import Frame, FrameKind
from paceline.errors import PacelineError

T = TypeVar("T")

PHASE = 1 << 28
"""The parts of phase p of an operation are numbered from p * PHASE."""

_NOTHING = memoryview(bytearray())  # writable, because empty frames are received into it

_SETTLING = -1
"""Used instead of a part's number: all frames are sent, and other ranks still read the last ones."""


@dataclass(slots=True)
class CollectiveCall:
    """One call of a collective; `started`, when it was issued, and `deadline` are `time.monotonic()` values.

    Part 0 must carry `signature`. `phase` is the index of the program, from 0, in an operation that runs several one
    after the other.
    """

    operation: int
    signature: bytes
    started: float
    deadline: float
    phase: int = 0

    def __str__(self) -> str:
        return self.signature.decode("ascii")


class Engine:
    """Runs one program at a time over a mesh's links for collectives.

    `history` returns the signatures of this member's operations in the group. Members of a part of the view must agree
    on `label`, which is part of every signature. The length of frames follows from `segment_bytes`, the same at all
    members. Tasks store in `plans` the programs and signatures of earlier operations, by arguments.
    """

    def __init__(self, mesh: Mesh, history: History, label: str = "") -> None:
        self.mesh = mesh
        self.segment_bytes = SEGMENT_BYTES
        self.nodes = nodes_of(mesh.peers)
        self.neighbours = mesh.neighbours  # read once, because it counts all peers
        self.plans: dict[Any, Any] = {}
        self._label = f"group={label}" if label else ""
        self._exchange = Exchange(mesh, history)
        self._call: CollectiveCall | None = None
        self._program: Program | None = None
        self._at: Move | None = None  # the move that is being carried out, for blame

    def run(
        self,
        call: CollectiveCall,
        program: Program,
        base: Array,
        out: Array,
        arithmetic: Arithmetic | None = None,
        first: Frame | None = None,
        terms: Sequence[Array] = (),
    ) -> None:
        """Carries out all moves; then `out` holds the result, and no rank reads `base` or `out` any more.

        `base`, this rank's value, is not written to unless it is `out`. Programs that reduce need `arithmetic`. `first`
        is the frame for the first receive, if it has already arrived. `terms` are this rank's values, each as long as
        `base`, if it contributes several (`Arithmetic.terms_of`); frames then have a piece of each. If the generation
        has failed, here or elsewhere, every rank raises the same PacelineError.
        """
        exchange, deadline, size = self._exchange, call.deadline, base.itemsize
        scratch = np.empty(program.scratch, base.dtype) if program.scratch else out[:0]
        areas, out_bytes = (base, out, scratch), as_bytes(out)
        base_bytes = out_bytes if base is out else as_bytes(base)
        data = (base_bytes, out_bytes, as_bytes(scratch) if program.scratch else _NOTHING)
        enters = arithmetic is not None and (arithmetic.scale is not None or len(terms) > 1)  # not as it lies in `base`
        held: dict[int, Array] = {}
        self._program = program
        for move in program.moves:
            self._at = move
            do, peer, part, n, own_area, own_lo, to_area, to_lo = move
            if do is Do.SEND:
                lend = program.lend and n * size >= LEND_BYTES and own_area is not Area.SCRATCH
                if enters and own_area is Area.BASE:
                    assert arithmetic is not None
                    payload = as_bytes(_entering(arithmetic, base, terms, own_lo, n))
                    lend = False  # nobody keeps the new array
                else:
                    payload = data[own_area][own_lo * size : (own_lo + n) * size]
                exchange.send(peer, self._frame(call, part, payload), deadline, lend=lend)
                continue
            place = data[to_area][to_lo * size : (to_lo + n) * size] if do is Do.STORE else None
            if first is None:
                frame = exchange.recv(peer, deadline, place)
            else:
                frame, first = first, None
            count = arithmetic.terms_of(peer) if do >= Do.FOLD and arithmetic is not None else 1
            self._check(call, peer, part, n * size * count, frame)
            if place is not None:
                if frame.payload is not place:
                    copy_bytes(frame.payload, place)
            else:
                assert arithmetic is not None, "a program that reduces was started without arithmetic"
                received = from_bytes(frame.payload, base.dtype)
                if do is Do.HOLD:
                    held[peer] = received
                    continue
                own, target = areas[own_area][own_lo : own_lo + n], areas[to_area][to_lo : to_lo + n]
                if enters and own_area is Area.BASE:
                    own = _entering(arithmetic, base, terms, own_lo, n)
                if do is Do.FOLD:
                    held[peer], held[self.mesh.rank] = received, own
                    arithmetic.fold(held, target)
                    held.clear()
                else:
                    # The lower rank's value is always the left operand, so both ranks of a pair compute the same.
                    left, right = (received, own) if peer < self.mesh.rank else (own, received)
                    arithmetic.combine(left, right, target)
                    if do is Do.FINALIZE:
                        arithmetic.finish(target)
            exchange.release()
        if base is not out:
            for base_lo, out_lo, n in program.keep:
                out[out_lo : out_lo + n] = base[base_lo : base_lo + n]
        if exchange.lent:
            self._await_release(deadline)

    def run_empty(self, call: CollectiveCall, program: Program) -> None:
        """Runs a program whose frames carry no array, as a barrier does."""
        exchange, deadline = self._exchange, call.deadline
        self._program = program
        for move in program.moves:
            self._at = move
            if move.do is Do.SEND:
                if move.part or not exchange.mark(move.peer, call.operation, deadline):
                    exchange.send(move.peer, self._frame(call, move.part, _NOTHING), deadline)
                continue
            found = exchange.recv(move.peer, deadline) if move.part else exchange.await_mark(move.peer, deadline)
            if found != call.operation:
                self._check(call, move.peer, move.part, 0, found if isinstance(found, Frame) else self._marked(found))
        exchange.release()

    def _marked(self, operation: int) -> Frame:
        """Returns the frame that a mark stands for: a barrier's, with this number."""
        signature = self.sign("barrier").encode()
        return Frame(FrameKind.DATA, self.mesh.generation, operation, 0, signature, _NOTHING)

    def _frame(self, call: CollectiveCall, part: int, payload: memoryview) -> Frame:
        signature = b"" if part else call.signature
        part += call.phase * PHASE
        return Frame(FrameKind.DATA, self.mesh.generation, call.operation, part, signature, payload)

    def _check(self, call: CollectiveCall, peer: int, part: int, nbytes: int, frame: Frame) -> None:
        """Refuses every frame except the one that is due (I4)."""
        if (
            frame.operation != call.operation
            or frame.part != part + call.phase * PHASE
            or frame.generation != self.mesh.generation
            or frame.signature != (b"" if part else call.signature)
            or len(frame.payload) != nbytes
        ):
            self._refuse(call, peer, part + call.phase * PHASE, nbytes, frame)

    def _await_release(self, deadline: float) -> None:
        """Waits until no other rank reads this rank's arrays."""
        for peer in sorted(self._exchange.lent):
            self._at = _wait_for(Do.SEND, peer, _SETTLING)
            self._exchange.await_release(peer, deadline)

    def sign(
        self, kind: str, detail: str = "", dtype: np.dtype[Any] | None = None, shape: tuple[int, ...] | None = None
    ) -> Signature:
        """Returns the signature of an operation of this group."""
        return Signature(kind, " ".join(filter(None, (self._label, detail))), dtype, shape)

    def disagree(self, call: CollectiveCall, peer: int, what: str) -> NoReturn:
        """Ends the generation, because a rank's arguments do not fit this member's."""
        mesh = self.mesh
        self._raise(blame.misfits(mesh.peers, mesh.rank, peer, call.operation, str(call), what))

    def first_frame(
        self, call: CollectiveCall, peer: int, asked: Signature
    ) -> tuple[Frame, np.dtype[Any], tuple[int, ...]]:
        """Receives the first frame of an operation whose dtype and shape the sender decides, and returns these too.

        Kind and detail must be the same as in `asked`.
        """
        self._at = _wait_for(Do.STORE, peer, 0)
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

    def attempt(self, call: CollectiveCall, body: Callable[[CollectiveCall], T]) -> T:
        """Runs the body of an operation; any error that it raises ends the generation.

        The body's own error is raised after the other members were told.
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
            if self._exchange.holds_frames:
                with suppress(LinkEnded):  # a rank took back an array that this member read: checked before the result
                    self._exchange.release()
            if fault.failed:
                self._exchange.recall()  # from now on only the caller touches the arrays (I7)
            self._call = self._at = None

    def abort(self, operation: int, cause: BaseException) -> None:
        """Ends the generation from another thread, because the caller no longer waits for this operation.

        The operation runs or is queued. If the cause is a TimeoutError, the rank that the running operation waits for
        is to blame; otherwise this member.
        """
        mesh, call, at = self.mesh, self._call, self._at
        if isinstance(cause, TimeoutError):
            if call is None or at is None:
                mesh.fault.suspect(blame.not_begun(mesh.peers, mesh.rank, operation))
            else:
                mesh.fault.suspect(self._late(call, at))
        else:
            name = str(call) if call is not None and call.operation == operation else "queued"
            mesh.fault.suspect(blame.raised(mesh.peers, mesh.rank, operation, name, cause))

    def _refuse(self, call: CollectiveCall, peer: int, part: int, nbytes: int, frame: Frame) -> NoReturn:
        """Blames a peer for a wrong frame: it is in another call, or it breaks the protocol."""
        mesh = self.mesh
        if frame.generation != mesh.generation:
            self._breach(call, peer, f"a frame of generation {frame.generation} in generation {mesh.generation}")
        self._exchange.compare(peer, frame)  # an earlier operation's frame shows where the calls diverged
        if frame.operation > call.operation:
            self._exchange.ask(peer, call.deadline)  # the peer is ahead, and remembers this operation
        described = part == frame.part and part % PHASE == 0
        if frame.operation != call.operation or (described and frame.signature != call.signature):
            self._raise(blame.disagrees(mesh.peers, mesh.rank, peer, call.operation, str(call), frame))
        elif frame.part != part:
            what = f"frame {frame.part} where frame {part} was due"
        else:
            what = f"{len(frame.payload)} bytes in frame {part} where {nbytes} were due"
        self._breach(call, peer, what)

    def _breach(self, call: CollectiveCall, peer: int, what: str) -> NoReturn:
        mesh = self.mesh
        self._raise(blame.broke_protocol(mesh.peers, mesh.rank, peer, call.operation, str(call), what))

    def _blame_link(self, call: CollectiveCall, error: LinkEnded | LinkTimeout) -> Suspicion:
        mesh, at = self.mesh, self._at
        assert at is not None, "a link failed outside a move"
        if isinstance(error, LinkEnded):
            peer = at.peer if self._exchange.releasing is None else self._exchange.releasing
            return blame.link_ended(mesh.peers, mesh.rank, peer, call.operation, str(call), error)
        return self._late(call, at)

    def _late(self, call: CollectiveCall, at: Move) -> Suspicion:
        mesh, seconds = self.mesh, monotonic() - call.started
        sending = at.do is Do.SEND
        moves = self._program.moves if self._program is not None else ()
        total = sum(move.peer == at.peer and (move.do is Do.SEND) is sending for move in moves)
        if at.part == _SETTLING:
            what = "finish reading the array that it was lent"
        else:
            what = f"{'take' if sending else 'send'} frame {at.part + 1}{f' of {total}' if total else ''}"
        return blame.timed_out(mesh.peers, mesh.rank, at.peer, call.operation, str(call), what, seconds)

    def _raise(self, suspicion: Suspicion) -> NoReturn:
        self.mesh.fault.suspect(suspicion)
        raise self.mesh.fault.error() from None


def _entering(arithmetic: Arithmetic, base: Array, terms: Sequence[Array], lo: int, n: int) -> Array:
    """Returns n elements of this rank's values as they enter a reduction; of all its terms, one after the other."""
    if len(terms) > 1:
        return np.concatenate([term[lo : lo + n] for term in terms])
    return arithmetic.scaled(base[lo : lo + n])


def _wait_for(do: Do, peer: int, part: int) -> Move:
    """Makes a move that is in no program, so that a failure says what this member waited for."""
    return Move(do, peer, part, 0, Area.OUT, 0, Area.OUT, 0)
