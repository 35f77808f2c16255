"""Faults in words: kill(rank=1, at="mid_all_reduce", step=3). Declared by the test, inflicted by the worker on itself.

Phases: joining (a candidate), loading (before the batch), forward, in_word, mid_all_reduce (first half of the ring),
late_all_reduce (second half), in_engine (an engine has begun a sum), early_sum and late_sum (in the first and another
sum of microbatches), repairing (in a step of which this worker has kept sums), before_gate, second_word (of a state
that is spread), behind_gate, between_steps, giving and taking state, giving_share, taking_share, meeting, closing,
keeping (the last checkpoint).
Of an FSDP unit: mid_all_gather (of its values), mid_reduce_scatter (of its gradients),
mid_replicas (the sum of those over the nodes). A fault is inflicted once.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from paceline import checkpoint
from support.flipping import Flipper, send_through

__all__ = ["Fault", "abort", "drain", "fail", "flip", "freeze", "hang", "hold_gil", "inflict", "kill", "take_nothing"]


_flipper = Flipper()


@dataclass
class Fault:
    """One fault.

    Attributes:
        what: "kill", "freeze", "hang", "hold_gil", "raise", "fail" (the collective that it is in fails here, and only
            here), "drain" (SIGTERM, as from whoever manages the machine), or "flip" (one bit of what this worker sends
            next, in 400 bytes or more, changes on the way).
        at: the phase.
        rank: whom it hits, by its rank in the step; any rank if None (phases without a step: whoever has the plan).
        step: in which step, in the generation that the first view opens; any if None.
        seconds: of a freeze or a hold; a freeze of 0 s lasts until the test thaws the worker.
        until: a file that the test makes when a hang is to end, or a collective to fail.
        once: a file that whoever comes first makes: it hits one process only, of all that have the fault before them.
        stored: a directory in which there must be a checkpoint before it hits anybody in a step; "" for none.
    """

    what: str
    at: str
    rank: int | None = None
    step: int | None = None
    seconds: float = 0.0
    until: str = ""
    once: str = ""
    stored: str = ""
    done: bool = False
    thawing: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    emit: Callable[..., None] = field(default=print, repr=False)
    fail: Callable[[], None] = field(default=lambda: None, repr=False)

    def plan(self) -> dict[str, Any]:
        """As JSON."""
        return {name: value for name, value in asdict(self).items() if name not in ("done", "thawing", "emit", "fail")}

    def in_step(self, step: Any, phase: str) -> None:
        """Inflicted if this is the place."""
        if phase == self.at and self._fits(step):
            self.strike()

    def waits_for_checkpoint(self) -> bool:
        """True if only a checkpoint is missing before it hits somebody."""
        return bool(self.stored) and not self.done and not checkpoint.tags(self.stored)

    def _fits(self, step: Any) -> bool:
        if self.done or (self.step is not None and (step.number, step.generation) != (self.step, 2)):
            return False
        if self.rank not in (None, step.rank):
            return False
        return not self.stored or bool(checkpoint.tags(self.stored))

    def strike(self) -> None:
        """Does it."""
        if self.done:
            return
        self.done = True
        if self.once and not _is_first(self.once):
            return
        self.emit("fault", what=self.what, phase=self.at)
        match self.what:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "freeze" if not self.seconds:
                os.kill(os.getpid(), signal.SIGSTOP)
            case "freeze":
                # Another program thaws it. A mere fork may hang: it has copies of locks whose holders it lacks.
                thaw = ["sh", "-c", f"sleep {self.seconds}; kill -CONT {os.getpid()}"]
                silent = {name: subprocess.DEVNULL for name in ("stdin", "stdout", "stderr")}
                self.thawing = subprocess.Popen(thaw, **silent)
                os.kill(os.getpid(), signal.SIGSTOP)
            case "hold_gil":
                _hold_gil(self.seconds)
            case "hang":
                self._wait()  # the session goes on heartbeating
            case "fail":
                self._wait()  # the others get through meanwhile
                self.fail()
            case "drain":
                os.kill(os.getpid(), signal.SIGTERM)
            case "flip":
                _flipper.arm()
            case "raise":
                raise ValueError(f"the user's code failed at {self.at}")
            case other:
                raise AssertionError(f"no such fault: {other}")

    def _wait(self) -> None:
        while not os.path.exists(self.until):
            time.sleep(0.005)


def kill(
    at: str, rank: int | None = None, step: int | None = None, once: Path | None = None, stored: Path | None = None
) -> Fault:
    """SIGKILL."""
    return Fault("kill", at, rank, step, once=str(once or ""), stored=str(stored or ""))


def freeze(at: str, seconds: float = 0.0, rank: int | None = None, step: int | None = None) -> Fault:
    """SIGSTOP, and SIGCONT so many seconds later; without a time the test thaws it (`Trainer.thaw`)."""
    return Fault("freeze", at, rank, step, seconds)


def hang(at: str, until: Path, rank: int | None = None, step: int | None = None) -> Fault:
    """The user's code does not come back, as a data loader that waits for a dead disk; Paceline's threads run on."""
    return Fault("hang", at, rank, step, until=str(until))


def hold_gil(at: str, seconds: float, rank: int | None = None, step: int | None = None) -> Fault:
    """One C call that keeps the interpreter lock."""
    return Fault("hold_gil", at, rank, step, seconds)


def fail(at: str, until: Path, rank: int | None = None, step: int | None = None) -> Fault:
    """A collective that has sent all it has to fails before it has heard all."""
    return Fault("fail", at, rank, step, until=str(until))


def drain(at: str, rank: int | None = None, step: int | None = None) -> Fault:
    """SIGTERM to whom it hits: at the same place of the same step of all, if it hits all."""
    return Fault("drain", at, rank, step)


def abort(at: str, rank: int | None = None, step: int | None = None) -> Fault:
    """The user's own code raises."""
    return Fault("raise", at, rank, step)


def inflict(faults: Sequence[Fault], emit: Callable[..., None]) -> None:
    """Puts the faults that happen inside the library where they happen."""
    if not faults:
        return  # the library may be the last release, whose modules have other names
    from paceline._collectives.exchange import Exchange
    from paceline._elastic.job_line import JobLine
    from paceline._elastic.offer import Content, OfferedState
    from paceline._elastic.saver import Saver
    from paceline._elastic.state import StateCore
    from paceline._elastic.training_loop import TrainingLoop
    from paceline._group import wrapper_calls
    from paceline._group.group_core import GroupCore
    from paceline._links.fault import Suspicion
    from paceline._session.member import MemberConnection
    from pacelinepb.v1.errors_pb2 import ErrorReason

    if any(fault.what == "flip" for fault in faults):
        send_through(_flipper)
    current: list[Any] = [None]
    # By exchange, for those of the parts of a view run side by side; none is kept alive by it.
    received: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
    sums: dict[int, set[int]] = {}  # for each step, the operations that sum microbatches
    for fault in faults:
        fault.emit = emit

    def strike(phase: str, step: Any = None) -> None:
        for fault in faults:
            place = step or current[0]
            elsewhere = fault.rank is not None and place is not None and place.rank != fault.rank
            if fault.at == phase and not elsewhere and (step is None or fault._fits(step)):
                fault.strike()

    # A step that failed as it began is no step. The last one stays, so that faults without a step know the rank.
    _after(TrainingLoop, "begin", lambda line, step: step and current.__setitem__(0, step))
    begin, recv = Exchange.begin, Exchange.recv

    def beginning(exchange: Any, operation: int, signature: bytes) -> Any:
        received[exchange] = 0
        return begin(exchange, operation, signature)

    of_unit = {"all_gather": "mid_all_gather", "reduce_scatter": "mid_reduce_scatter", "all_reduce": "mid_replicas"}

    def receiving(exchange: Any, peer: int, deadline: float, into: Any = None) -> Any:
        for fault in faults:
            fault.fail = lambda: exchange._mesh.fault.suspect(
                Suspicion(ErrorReason.ERROR_REASON_PEER_RAISED, None, 1, "a collective failed for a test")
            )
        call = exchange._call[1].decode()
        if current[0] is not None and "label=unit" in call:
            strike(of_unit[call.partition(" ")[0]], current[0])
        elif current[0] is not None and " parts=" in call:
            sums.setdefault(current[0].number, set()).add(exchange._call[0])
            strike("early_sum" if len(sums[current[0].number]) == 1 else "late_sum", current[0])
        elif current[0] is not None and "all_reduce" in call:
            if "label=gate" in call:
                strike("second_word", current[0])
            elif "label=step" in call:
                strike("in_word", current[0])
            elif "float64" in call:
                received[exchange] += 1
                if received[exchange] == 1:
                    strike("mid_all_reduce", current[0])
                if received[exchange] == 2:
                    strike("late_all_reduce", current[0])
        return recv(exchange, peer, deadline, into)

    Exchange.begin, Exchange.recv = beginning, receiving  # type: ignore[method-assign]
    _after(GroupCore, "take_piggyback", lambda group, piggyback: piggyback and strike("in_word", current[0]))
    make = wrapper_calls.make_engine

    def making(name: str) -> Any:
        engine = make(name)
        _after(engine, "all_reduce", lambda *_: strike("in_engine", current[0]))
        return engine

    wrapper_calls.make_engine = making
    _before(OfferedState, "read", lambda *_: strike("giving"))
    _before(OfferedState, "pack", lambda *_: strike("giving_share"))
    _before(Content, "write", lambda *_: strike("taking"))
    _before(StateCore, "switch", lambda *_: strike("taking_share"))
    _after(JobLine, "meet", lambda port, _: port.group.generation > 1 and strike("meeting"))
    _before(TrainingLoop, "close", lambda *_: strike("closing"))
    _before(Saver, "keep", lambda *_: strike("keeping"))
    _before(MemberConnection, "start_line", lambda *_: strike("joining"))


def flip(at: str, rank: int | None = None, step: int | None = None) -> Fault:
    """A bit of a gradient, which is longer than anything else in a step, changes on its way to a peer."""
    return Fault("flip", at, rank, step)


def take_nothing() -> None:
    """Nobody gives this process any state, now or ever."""
    from paceline._elastic.job_line import JobLine
    from paceline.errors import LinkUnavailable

    def refuse(*_: Any) -> Any:
        raise LinkUnavailable("no member sent it, for a test")

    JobLine.take = JobLine.take_shards = refuse  # type: ignore[method-assign]


def _is_first(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def _before(owner: Any, name: str, do: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        do(*args)
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)


def _after(owner: Any, name: str, do: Callable[[Any, Any], Any]) -> None:
    original = getattr(owner, name)

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        do(self, result)
        return result

    setattr(owner, name, wrapped)


def _hold_gil(seconds: float) -> None:
    """Sleeps in C without letting other threads run, as a careless extension would."""
    import ctypes

    ctypes.PyDLL(None).usleep(int(seconds * 1e6))
    assert threading.current_thread() is threading.main_thread()
