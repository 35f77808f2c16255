"""The conformance check of engines: the rules of `paceline.engines`, each as a check that a wrong engine fails.

Use it through `paceline.testing.check_engine`. The ranks are threads of this process. Every wait is bounded, and calls
that must not block run in a thread that can be abandoned.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from time import monotonic, sleep
from typing import TypeAlias

import numpy as np

from paceline._base.arrays import Array
from paceline._links.base import Peer
from paceline.engines import MAX_CONTACT_BYTES, DataEngine, EngineFailed, EngineTimeout, Ticket

MakeEngines: TypeAlias = Callable[[int], AbstractContextManager[Sequence[DataEngine]]]
"""Makes the engines of all ranks of a world of this size, by rank, not open yet."""

_PROMPT = 0.1
"""Seconds within which `abort` must end a wait (I7)."""

_AT_ONCE = 1.0
"""Seconds that a call which must not wait may take on a busy machine."""

_LONG = 10.0
"""Seconds that any other step may take; only a broken engine needs them."""

_BIG = 4 << 20
"""Elements of a sum that is under way for a while: 16 MiB of float32."""


def check_engine(make_engines: MakeEngines, rules: Sequence[Callable[[MakeEngines], None]] | None = None) -> None:
    """Checks that an engine keeps all rules.

    Args:
        make_engines: makes the engines of a fresh world of a given size; each rule is checked in its own world.
        rules: the rules to check; all of them if left out.

    Raises:
        AssertionError: a rule is broken; the text names it.
    """
    for rule in ENGINE_RULES if rules is None else rules:
        try:
            rule(make_engines)
        except (AssertionError, EngineFailed, EngineTimeout) as error:
            raise AssertionError(f"{rule.__name__}: {rule.__doc__}\n{type(error).__name__}: {error}") from error


def open_engines(engines: Sequence[DataEngine], patience: float = _LONG) -> None:
    """Opens the engines of a world whose ranks are all in this process."""
    peers = [Peer(rank, str(rank), "localhost", "127.0.0.1:1") for rank in range(len(engines))]
    for rank, engine in enumerate(engines):
        _at_once("open", lambda engine=engine, rank=rank: engine.open(rank, peers, patience))  # type: ignore[misc]
    contacts = [engine.contact(_soon()) for engine in engines]
    for contact in contacts:
        assert len(contact) <= MAX_CONTACT_BYTES, f"a contact has {len(contact)} bytes"
    for engine in engines:
        _at_once("connect", lambda engine=engine: engine.connect(contacts))  # type: ignore[misc]
    for engine in engines:
        engine.await_ready(_soon())


def rule_1_opening(make: MakeEngines) -> None:
    """`open` and `connect` return at once, and an `await_ready` without the others ends at its deadline."""
    with make(2) as engines:
        peers = [Peer(rank, str(rank), "localhost", "127.0.0.1:1") for rank in range(2)]
        _at_once("open", lambda: engines[0].open(0, peers, _LONG))
        engines[0].contact(_soon())
        late = _Call(lambda: engines[0].await_ready(monotonic() + 0.05))
        assert late.ends_within(_LONG), "await_ready blocked past its deadline"
        assert isinstance(late.error, EngineTimeout), f"await_ready without the others gave {late.error!r}"
    with make(3) as engines:
        open_engines(engines)
        for engine in engines:
            engine.await_ready(0.0)


def rule_2_sums(make: MakeEngines) -> None:
    """`all_reduce` sums in place, in all dtypes and sizes, several at once; all ranks get the same bits if promised."""
    with make(3) as engines:
        open_engines(engines)
        traits = engines[0].traits
        for dtype in sorted(traits.dtypes):
            for size in (1, 3, 1000, _BIG):
                arrays = [np.full(size, rank + 1, dtype) for rank in range(3)]
                _wait_for([engine.all_reduce(x) for engine, x in zip(engines, arrays, strict=True)])
                for rank, x in enumerate(arrays):
                    assert (x == 6).all(), f"rank {rank}: the sum of 1, 2 and 3 is {x[x != 6][0]} in {dtype}[{size}]"
        rng = [np.random.default_rng(rank) for rank in range(3)]
        several = [[rng[rank].standard_normal(100_003).astype(np.float32) for rank in range(3)] for _ in range(4)]
        exact = [np.sum(arrays, axis=0, dtype=np.float64) for arrays in several]
        tickets = [engine.all_reduce(x) for arrays in several for engine, x in zip(engines, arrays, strict=True)]
        _wait_for(tickets)
        for arrays, sums in zip(several, exact, strict=True):
            for rank, x in enumerate(arrays):
                assert np.allclose(x, sums, atol=1e-5), f"rank {rank}: sums of several operations are mixed up"
                same = x.tobytes() == arrays[0].tobytes()
                assert same or not traits.same_bits, f"ranks 0 and {rank} hold different bits"


def rule_2_shards(make: MakeEngines) -> None:
    """With `traits.shards`, `all_gather` keeps the order of ranks, and `reduce_scatter` gives each its part."""
    with make(3) as engines:
        if not engines[0].traits.shards:
            return
        open_engines(engines)
        dtypes = sorted(engines[0].traits.dtypes)
        for size, dtype in itertools.product((1, 1000, _BIG // 4), ("uint8", *dtypes)):
            # At first rank r has r + 1 in its own part, and 9 in the others.
            gathered = [np.repeat(np.where(np.arange(3) == rank, rank + 1, 9).astype(dtype), size) for rank in range(3)]
            _wait_for([engine.all_gather(x) for engine, x in zip(engines, gathered, strict=True)])
            for rank, x in enumerate(gathered):
                wrong = x != np.repeat([1, 2, 3], size)
                assert not wrong.any(), f"rank {rank} has gathered {x[wrong][0]} in {dtype}[{len(x)}]"
            if dtype not in dtypes:
                continue
            summed = [np.repeat((rank * np.array([1, 10, 100])).astype(dtype), size) for rank in range(3)]
            _wait_for([engine.reduce_scatter(x) for engine, x in zip(engines, summed, strict=True)])
            for rank, x in enumerate(summed):
                part = np.split(x, 3)[rank]
                wrong = part != 3 * 10**rank
                assert not wrong.any(), f"rank {rank}: the sum of its part is {part[wrong][0]}, not {3 * 10**rank}"


def rule_3_deadlines(make: MakeEngines) -> None:
    """A ticket's `wait` ends at its deadline, and the sum goes on."""
    with make(2) as engines:
        open_engines(engines)
        mine, theirs = np.ones(1000, np.float32), np.ones(1000, np.float32)
        ticket = _started(engines[0], mine)
        late = _Call(lambda: ticket.wait(monotonic() + 0.05))
        assert late.ends_within(_LONG), "wait blocked past its deadline"
        assert isinstance(late.error, EngineTimeout), f"a wait whose deadline passed gave {late.error!r}"
        assert not ticket.done(), "a sum was done although another rank had not begun"
        assert not engines[0].drained(0.0), "drained said that nothing runs"
        _wait_for([ticket, engines[1].all_reduce(theirs)])
        assert (mine == 2).all() and (theirs == 2).all(), "a sum that outlasted a deadline is wrong"  # noqa: PT018
        assert engines[0].drained(_soon()), "drained said that something runs"


def rule_4_abort(make: MakeEngines) -> None:
    """`abort` ends every wait within 100 ms, from another thread, twice; later calls raise at once."""
    for size in (1000, _BIG):
        with make(2) as engines:
            open_engines(engines)
            _abort_one(engines[0], np.ones(size, np.float32))
            engines[1].abort()


def rule_4_abort_in_the_middle(make: MakeEngines) -> None:
    """`abort` ends a sum that bytes have moved for already, while another rank stands still."""
    with make(3) as engines:
        open_engines(engines)
        tickets = [_started(engine, np.ones(_BIG, np.float32)) for engine in engines[:2]]  # rank 2 never comes
        sleep(0.05)  # lets bytes move; if none have moved, the check is only weaker
        waits = [_Call(lambda ticket=ticket: ticket.wait(_soon())) for ticket in tickets]  # type: ignore[misc]
        for rank, (engine, wait) in enumerate(zip(engines[:2], waits, strict=True)):
            engine.abort()
            assert wait.ends_within(_PROMPT), f"rank {rank}: a wait was not ended within {_PROMPT} s"
            assert isinstance(wait.error, EngineFailed), f"rank {rank}: a wait ended with {wait.error!r}"
        engines[2].abort()


def rule_4_abort_while_opening(make: MakeEngines) -> None:
    """`abort` ends the wait for an engine that does not open."""
    with make(2) as engines:
        peers = [Peer(rank, str(rank), "localhost", "127.0.0.1:1") for rank in range(2)]
        engines[0].open(0, peers, _LONG)
        engines[0].contact(_soon())
        waiting = _Call(lambda: engines[0].await_ready(_soon()))
        sleep(0.02)  # lets the call block; if it does not block yet, the check is only weaker
        engines[0].abort()
        assert waiting.ends_within(_PROMPT), f"await_ready was not ended within {_PROMPT} s"
        assert isinstance(waiting.error, EngineFailed), f"await_ready ended with {waiting.error!r}"


def rule_4_abort_shards(make: MakeEngines) -> None:
    """`abort` ends gathers and scatters that another rank does not take part in."""
    for method in ("all_gather", "reduce_scatter"):
        with make(2) as engines:
            if not engines[0].traits.shards:
                return
            open_engines(engines)
            ticket = getattr(engines[0], method)(np.ones(_BIG, np.float32))
            wait = _Call(lambda ticket=ticket: ticket.wait(_soon()))  # type: ignore[misc]
            assert not wait.ends_within(0.02), f"{method} ended without the other rank: {wait.error!r}"
            engines[0].abort()
            assert wait.ends_within(_PROMPT), f"a wait for {method} was not ended within {_PROMPT} s"
            assert isinstance(wait.error, EngineFailed), f"a wait for {method} ended with {wait.error!r}"
            assert engines[0].drained(_soon()), f"{method} still touches the array"
            engines[1].abort()


def rule_5_arrays(make: MakeEngines) -> None:
    """After an abort nothing touches the array any more, though other ranks still send."""
    with make(2) as engines:
        open_engines(engines)
        mine, theirs = np.ones(_BIG, np.float32), np.ones(_BIG, np.float32)
        ticket = _started(engines[0], mine)
        engines[0].abort()
        wait = _Call(lambda: ticket.wait(_soon()))
        assert wait.ends_within(_LONG), "a wait was not ended by abort"
        assert ticket.done(), "wait raised before the sum was over"
        assert engines[0].drained(0.0), "wait raised before the engine had let go of the array"
        mine[:] = 7
        other = _Call(lambda: _started(engines[1], theirs).wait(monotonic() + 0.2))
        other.ends_within(_LONG)
        assert (mine == 7).all(), "an array was changed after the abort"
        engines[1].abort()


def rule_6_close(make: MakeEngines) -> None:
    """`close` delivers what is under way, ends threads, and may be repeated; a closed engine raises."""
    with make(3) as engines:
        before = set(threading.enumerate())
        open_engines(engines)
        arrays = [np.ones(1000, np.float32) for _ in engines]
        tickets = [engine.all_reduce(x) for engine, x in zip(engines, arrays, strict=True)]
        for _ in range(2):
            for engine in engines:
                started = monotonic()
                engine.close(_soon())
                assert monotonic() - started < _LONG / 2, "close waited for its deadline"
        _wait_for(tickets)
        assert all((x == 3).all() for x in arrays), "close did not wait for the sums under way"
        _raises("all_reduce on a closed engine", lambda: engines[0].all_reduce(arrays[0]).wait(_soon()))
        left = [thread.name for thread in threading.enumerate() if thread not in before and thread.is_alive()]
        assert not left, f"threads outlived close: {left}"


def rule_6_generations(make: MakeEngines) -> None:
    """Engines of the next generation work beside those that were aborted and not closed yet."""
    with make(2) as old, make(2) as new:
        open_engines(old)
        ticket = _started(old[0], np.ones(_BIG, np.float32))
        for engine in old:
            engine.abort()
        open_engines(new)
        arrays = [np.ones(1000, np.float32) for _ in new]
        _wait_for([engine.all_reduce(x) for engine, x in zip(new, arrays, strict=True)])
        assert all((x == 2).all() for x in arrays)
        _raises("wait after abort", lambda: ticket.wait(_soon()))


ENDING_RULES: tuple[Callable[[MakeEngines], None], ...] = (
    rule_4_abort,
    rule_4_abort_while_opening,
    rule_5_arrays,
)
"""The rules about abort that an engine keeps even if none of its sums ever completes."""

ENGINE_RULES: tuple[Callable[[MakeEngines], None], ...] = (
    rule_1_opening,
    rule_2_sums,
    rule_2_shards,
    rule_3_deadlines,
    *ENDING_RULES,
    rule_4_abort_in_the_middle,
    rule_4_abort_shards,
    rule_6_close,
    rule_6_generations,
)


class _Call:
    """A call in a thread of its own, which is abandoned if it never returns."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.error: BaseException | None = None
        self._call = call
        self._thread = threading.Thread(target=self._run, name="check-engine", daemon=True)
        self._thread.start()

    def ends_within(self, seconds: float) -> bool:
        """Waits until the call has returned and its thread has ended: no rule may take it for a thread of an engine."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as error:  # noqa: BLE001  the check looks at it
            self.error = error


def _abort_one(engine: DataEngine, x: Array) -> None:
    ticket = _started(engine, x)
    waits = [_Call(lambda: ticket.wait(_soon())) for _ in range(2)]
    sleep(0.02)  # lets the calls block; if they do not block yet, the check is only weaker
    assert not waits[0].ends_within(0.0), f"a sum ended without the other rank: {waits[0].error!r}"
    for _ in range(2):
        _at_once("abort", engine.abort)
    for wait in waits:
        assert wait.ends_within(_PROMPT), f"a wait was not ended within {_PROMPT} s"
        assert isinstance(wait.error, EngineFailed), f"a wait ended with {wait.error!r}"
    _raises("all_reduce after abort", lambda: engine.all_reduce(x.copy()).wait(_soon()))
    _raises("wait after abort", lambda: ticket.wait(_soon()))


def _started(engine: DataEngine, x: Array) -> Ticket:
    started = monotonic()
    ticket = engine.all_reduce(x)
    assert monotonic() - started < _AT_ONCE, "all_reduce did not return at once"
    return ticket


def _wait_for(tickets: Sequence[Ticket]) -> None:
    for ticket in tickets:
        ticket.wait(_soon())
        assert ticket.done(), "wait returned before the sum was done"


def _at_once(name: str, call: Callable[[], object]) -> None:
    done = _Call(call)
    assert done.ends_within(_AT_ONCE), f"{name} blocked"
    if done.error is not None:
        raise done.error


def _raises(name: str, call: Callable[[], object]) -> None:
    done = _Call(call)
    assert done.ends_within(_AT_ONCE), f"{name} blocked"
    assert isinstance(done.error, EngineFailed), f"{name} gave {done.error!r}"


def _soon() -> float:
    return monotonic() + _LONG
