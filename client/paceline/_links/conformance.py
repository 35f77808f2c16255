"""The conformance check of links: the eight rules of `_links/base.py`, each as a check that a wrong link fails.

Use it through `paceline.testing.check_link`. A check that finds a rule broken raises an AssertionError that names the
rule. Every wait is bounded, and calls that must not block run in a thread that can be abandoned.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any, TypeAlias

from paceline._base.arrays import MAX_SIGNATURE_BYTES
from paceline._links.base import MARKS, Link, LinkEnded, LinkTimeout
from paceline._links.fault import Fault
from paceline._links.frame import Frame, FrameKind
from paceline.errors import PacelineError
from paceline_protocol import Verdict
from pacelinepb.v1.errors_pb2 import ErrorReason

_MIB = 1 << 20


def _anywhere(nbytes: int) -> memoryview:
    """Returns ordinary memory of this process."""
    return memoryview(bytearray(nbytes))


@dataclass(frozen=True, slots=True)
class LinkPair:
    """The two ends of one link.

    Attributes:
        a: one end.
        b: the other end.
        fault_a: the fault that `a` obeys.
        fault_b: the fault that `b` obeys; not the same object.
        cut: breaks the link as the death of the process at `b` would.
        generation: the generation of both ends.
        empty: makes memory of that many bytes, which `a` can lend if it can lend any.
    """

    a: Link
    b: Link
    fault_a: Fault
    fault_b: Fault
    cut: Callable[[], None]
    generation: int = 1
    empty: Callable[[int], memoryview] = _anywhere


@dataclass(frozen=True, slots=True)
class LinkPatience:
    """Times that a check gives a link."""

    prompt_s: float = 1.0
    """Seconds within which a failure must wake a blocked call (I7), and a deadline must end one. Links do it in well
    under 0.1 s; the rest is for busy machines, on which a thread may wait for a core."""

    long_s: float = 10.0
    """Seconds that any other step may take; only a broken link needs them."""

    def soon(self) -> float:
        """Returns the deadline of a step that starts now."""
        return monotonic() + self.long_s


LinkRule: TypeAlias = Callable[[LinkPair, LinkPatience], None]


def check_link(make_pair: Callable[[], AbstractContextManager[LinkPair]]) -> None:
    """Checks that a kind of link keeps all rules.

    Args:
        make_pair: makes a fresh pair; each rule is checked on its own pair.

    Raises:
        AssertionError: a rule is broken; the text names it.
    """
    for rule in RULES:
        check_rule(rule, make_pair, LinkPatience())


def check_rule(
    rule: LinkRule, make_pair: Callable[[], AbstractContextManager[LinkPair]], patience: LinkPatience
) -> None:
    """Checks that a kind of link keeps one rule, as `check_link` does."""
    with make_pair() as pair:
        try:
            rule(pair, patience)
        except (AssertionError, LinkEnded, LinkTimeout, PacelineError) as error:
            raise AssertionError(f"{rule.__name__}: {rule.__doc__}\n{type(error).__name__}: {error}") from error


def rule_1_frames(pair: LinkPair, patience: LinkPatience) -> None:
    """Frames arrive whole, in order, once, and unchanged, both ways."""
    frames = [
        _frame(pair, 1, 0, b"all_reduce op=sum float32[3]", b"\x00\x01\x02"),
        _frame(pair, 1, 1, b"", b""),
        _frame(pair, 2**63, 2**32 - 1, b"x" * MAX_SIGNATURE_BYTES, bytes(range(256)) * 4096),
        *(_frame(pair, 3, part, b"", part.to_bytes(2, "little") * (part + 1)) for part in range(50)),
    ]
    for source, target in ((pair.a, pair.b), (pair.b, pair.a)):
        for frame in frames:
            source.send(frame, patience.soon())
            _same(target.recv(patience.soon()), frame)
        for frame in frames[3:]:
            source.send(frame, patience.soon())
        for frame in frames[3:]:
            _same(target.recv(patience.soon()), frame)
        _nothing_comes(target)


def rule_2_send(pair: LinkPair, patience: LinkPatience) -> None:
    """`send` lets go of the payload, takes 8 MiB without a reader, and blocks no longer than its deadline."""
    buffer = bytearray(b"before")
    pair.a.send(_frame(pair, 1, 0, b"", memoryview(buffer)), patience.soon())
    buffer[:] = b"after!"
    two = [_frame(pair, 1, part, b"", bytes(4 * _MIB)) for part in (1, 2)]
    for frame in two:
        pair.a.send(frame, patience.soon())
    got = bytes(pair.b.recv(patience.soon()).payload)
    assert got == b"before", f"the payload changed with the caller's buffer: {got!r}"
    four = [_frame(pair, 2, part, b"", bytes(2 * _MIB)) for part in range(4)]
    for frame in two:
        _same(pair.b.recv(patience.soon()), frame)
    pair.b.release()
    for frame in four:
        pair.a.send(frame, patience.soon())
    for frame in four:
        _same(pair.b.recv(patience.soon()), frame)
    pair.b.release()
    for part in range(_fill(pair, 0, patience)):
        frame = pair.b.recv(patience.soon())
        assert frame.part == part, f"part {frame.part} came where {part} was due: a send that timed out was sent"
    _nothing_comes(pair.b)


def rule_3_recv(pair: LinkPair, patience: LinkPatience) -> None:
    """`recv` waits until its deadline, consumes nothing then, polls with a deadline that is past; arrivals notify."""
    started = monotonic()
    _nothing_comes(pair.b, 0.05)
    waited = monotonic() - started
    assert 0.045 <= waited < 0.05 + patience.prompt_s, f"recv with a deadline in 0.05 s came back after {waited:.3f} s"
    rung = threading.Event()
    pair.b.on_readable(rung.set)
    assert rung.is_set(), "on_readable did not call at once"
    rung.clear()
    pair.a.send(_frame(pair, 1, 0, b"", b"late"), patience.soon())
    assert rung.wait(patience.long_s), "on_readable's callback was not called for a frame"
    _same(pair.b.recv(0.0), _frame(pair, 1, 0, b"", b"late"))
    _nothing_comes(pair.b, 0.0)
    rung.clear()
    pair.cut()
    assert rung.wait(patience.long_s), "on_readable's callback was not called for the end of the link"


def rule_4_failure(pair: LinkPair, patience: LinkPatience) -> None:
    """A failure wakes a blocked `send` and `recv` within 100 ms, and every later call raises at once."""
    _fill(pair, 0, patience)
    sender = _Blocked(lambda: _send_for_ever(pair, patience))
    receiver = _Blocked(lambda: pair.a.recv(patience.soon()))
    sleep(0.02)  # lets both calls block; if one does not block yet, the check is only weaker
    assert not receiver.over.is_set(), f"recv with nothing to receive ended: {receiver.error!r}"
    pair.fault_a.settle(Verdict(pair.generation, ErrorReason.ERROR_REASON_PEER_LOST, (1,), 7, "rank 1 is lost"))
    for name, call in (("recv", receiver), ("send", sender)):
        assert call.over.wait(patience.prompt_s), f"a blocked {name} was not woken within {patience.prompt_s} s"
        assert isinstance(call.error, PacelineError), f"a blocked {name} was woken with {call.error!r}"
    for name, later in (
        ("recv", lambda: pair.a.recv(patience.soon())),
        ("send", lambda: _send_for_ever(pair, patience)),
    ):
        call = _Blocked(later)
        assert call.over.wait(patience.prompt_s), f"a later {name} blocked"
        assert isinstance(call.error, PacelineError), f"a later {name} gave {call.error!r}"


def rule_4_cut(pair: LinkPair, patience: LinkPatience) -> None:
    """The death of the other side wakes a blocked `recv`, and is no orderly end."""
    receiver = _Blocked(lambda: pair.a.recv(patience.soon()))
    sleep(0.02)  # lets the call block; if it does not block yet, the check is only weaker
    assert not receiver.over.is_set(), f"recv with nothing to receive ended: {receiver.error!r}"
    pair.cut()
    assert receiver.over.wait(1.0), "a blocked recv was not woken within 1 s of the other side's death"
    error = receiver.error
    assert isinstance(error, PacelineError | LinkEnded), f"a blocked recv was woken with {error!r}"
    assert not (isinstance(error, LinkEnded) and error.orderly), "a death was reported as an orderly end"


def rule_5_close(pair: LinkPair, patience: LinkPatience) -> None:
    """`close` delivers what was sent; the other side reads all of it, then gets an orderly `LinkEnded`."""
    frames = [_frame(pair, 1, part, b"", bytes([part]) * 1000) for part in range(20)]
    for frame in frames:
        pair.a.send(frame, patience.soon())
    for _ in range(2):
        started = monotonic()
        pair.a.close(patience.soon())
        assert monotonic() - started < patience.long_s / 2, "close waited for its deadline"
    for frame in frames:
        _same(pair.b.recv(patience.soon()), frame)
    for _ in range(2):
        end = _Blocked(lambda: pair.b.recv(patience.soon()))
        assert end.over.wait(1.0), "recv blocked behind the last frame of a closed link"
        error = end.error
        assert isinstance(error, LinkEnded), f"behind the last frame came {error!r}"
        assert error.orderly, "an orderly close was reported as a death"
    assert not pair.fault_b.failed, "an orderly close failed the generation"
    late = _Blocked(lambda: pair.a.send(frames[0], patience.soon()))
    assert late.over.wait(1.0), "send on a closed link blocked"
    assert isinstance(late.error, LinkEnded), f"send on a closed link gave {late.error!r}"


def rule_6_threads(pair: LinkPair, patience: LinkPatience) -> None:
    """One thread may send while another receives, at both ends at once."""
    frames = [_frame(pair, 1, part, b"", part.to_bytes(4, "little") * 16384) for part in range(200)]

    def send(link: Link) -> None:
        for frame in frames:
            link.send(frame, patience.soon())

    def receive(link: Link) -> None:
        for frame in frames:
            _same(link.recv(patience.soon()), frame)

    calls = [_Blocked(lambda do=do, link=link: do(link)) for link in (pair.a, pair.b) for do in (send, receive)]  # type: ignore[misc]
    for call in calls:
        assert call.over.wait(patience.long_s), "sending and receiving at once deadlocked"
        if call.error is not None:
            raise call.error


def rule_7_lend(pair: LinkPair, patience: LinkPatience) -> None:
    """A lent array stays as it was until `await_release` or `recall` has returned; failing ends the wait in 100 ms."""
    for size, make in itertools.product((100, 1 << 18), (pair.empty, _anywhere)):
        buffer = make(size)
        buffer[:] = b"b" * size
        pair.a.lend(_frame(pair, 1, 0, b"", buffer), patience.soon())
        if _settled(pair.a):
            buffer[:] = b"a" * size
        frame = pair.b.recv(patience.soon())
        if _settled(pair.a):
            buffer[:] = b"a" * size
        assert bytes(frame.payload) == b"b" * size, "await_release returned while the other side still reads"
        pair.b.release()
        pair.a.await_release(patience.soon())
        pair.a.await_release(0.0)
        place = memoryview(bytearray(size))
        pair.a.lend(_frame(pair, 1, 2, b"", buffer), patience.soon())
        frame = pair.b.recv(patience.soon(), place)
        assert bytes(frame.payload) == bytes(buffer), "the payload received in place differs from what was sent"
        if frame.payload is not place:
            pair.b.release()
        pair.a.await_release(patience.soon())  # a payload that was written to `place` needs no release
    lent = pair.empty(1 << 18)
    lent[:] = b"b" * len(lent)
    pair.a.lend(_frame(pair, 1, 1, b"", lent), patience.soon())
    settling = _Blocked(lambda: pair.a.await_release(patience.soon()))
    copied = settling.over.wait(0.02)
    frame = pair.b.recv(patience.soon())
    pair.fault_a.settle(Verdict(pair.generation, ErrorReason.ERROR_REASON_PEER_LOST, (1,), 7, "rank 1 is lost"))
    assert settling.over.wait(patience.prompt_s), f"a blocked await_release was not woken within {patience.prompt_s} s"
    assert copied or isinstance(settling.error, PacelineError), f"await_release was woken with {settling.error!r}"
    recall = _Blocked(pair.a.recall)
    if recall.over.wait(0.02):
        lent[:] = b"a" * len(lent)
    read, believed = bytes(frame.payload), True
    try:
        pair.b.release()
    except LinkEnded:  # the sender took it back, and the reader learns that
        believed = False
    assert not believed or read == b"b" * len(lent), "recall returned while the other side still reads"
    assert recall.over.wait(patience.long_s), "recall did not return when the other side had read"


def rule_8_marks(pair: LinkPair, patience: LinkPatience) -> None:
    """Marks come in order, once; a frame that comes instead is returned; a link without marks says so."""
    if not pair.a.mark(7, patience.soon()):
        assert not pair.a.mark(8, patience.soon()), "a link must support marks always or never"
        sent = _frame(pair, 7, 0, b"barrier", b"")
        pair.a.send(sent, patience.soon())
        found = pair.b.await_mark(patience.soon())
        assert isinstance(found, Frame), f"{found} came over a link without marks"
        _same(found, sent)
        return
    numbers = [7, *range(8, 7 + MARKS)]
    for number in numbers[1:]:
        assert pair.a.mark(number, patience.soon()), "a link must support marks always or never"
    assert [pair.b.await_mark(patience.soon()) for _ in numbers] == numbers
    for number in range(100, 100 + 3 * MARKS):
        pair.a.mark(number, patience.soon())
        assert pair.b.await_mark(patience.soon()) == number
    try:
        found = pair.b.await_mark(monotonic() + 0.02)
    except LinkTimeout:
        pass
    else:
        raise AssertionError(f"a mark came twice: {found!r:.100}")
    for operation in (190, 192):
        pair.a.send(_frame(pair, operation, 0, b"all_reduce", b"x"), patience.soon())
        pair.a.mark(operation + 1, patience.soon())
    assert pair.a.mark(194, patience.soon())
    pair.a.send(_frame(pair, 195, 0, b"all_reduce", b"x"), patience.soon())
    order = [pair.b.await_mark(patience.soon()) for _ in range(5)]
    told = [each.operation if isinstance(each, Frame) else each for each in order]
    assert told == [190, 191, 192, 193, 194], f"frames and marks came in the order {told}"
    assert pair.b.recv(patience.soon()).operation == 195, "a frame of a later operation did not wait"
    sent = _frame(pair, 200, 0, b"all_reduce", b"x")
    pair.a.send(sent, patience.soon())
    found = pair.b.await_mark(patience.soon())
    assert isinstance(found, Frame), f"{found!r:.100} came, but a frame was sent"
    _same(found, sent)
    waiting = _Blocked(lambda: pair.b.await_mark(patience.soon()))
    pair.fault_b.settle(Verdict(pair.generation, ErrorReason.ERROR_REASON_PEER_LOST, (0,), 7, "rank 0 is lost"))
    assert waiting.over.wait(patience.prompt_s), f"a blocked await_mark was not woken within {patience.prompt_s} s"
    assert isinstance(waiting.error, PacelineError), f"a blocked await_mark was woken with {waiting.error!r}"


RULES: tuple[LinkRule, ...] = (
    rule_1_frames,
    rule_2_send,
    rule_3_recv,
    rule_4_failure,
    rule_4_cut,
    rule_5_close,
    rule_6_threads,
    rule_7_lend,
    rule_8_marks,
)


class _Blocked:
    """A call in a thread of its own, which is abandoned if it never returns."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.error: BaseException | None = None
        self.over = threading.Event()
        self._call = call
        threading.Thread(target=self._run, name="check-link", daemon=True).start()

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as error:  # noqa: BLE001  the check looks at it
            self.error = error
        finally:
            self.over.set()


def _frame(pair: LinkPair, operation: int, part: int, signature: bytes, payload: bytes | memoryview) -> Frame:
    return Frame(FrameKind.DATA, pair.generation, operation, part, signature, payload)


def _same(got: Frame, sent: Frame) -> None:
    for name in ("kind", "generation", "operation", "part", "signature"):
        assert getattr(got, name) == getattr(sent, name), f"{name} is {getattr(got, name)}, not {getattr(sent, name)}"
    assert bytes(got.payload) == bytes(sent.payload), f"the payload of part {sent.part} differs"


def _nothing_comes(link: Link, seconds: float = 0.02) -> None:
    try:
        frame = link.recv(monotonic() + seconds if seconds else 0.0)
    except LinkTimeout:
        return
    raise AssertionError(f"a frame came twice, or was never sent: {frame!r:.200}")


def _settled(link: Link) -> bool:
    """Returns True if the other side has released everything that the link has lent."""
    try:
        link.await_release(monotonic() + 0.02)
    except LinkTimeout:
        return False
    return True


def _fill(pair: LinkPair, part: int, patience: LinkPatience) -> int:
    """Sends from `a` until it blocks, 128 MiB at most. Returns how many frames were sent."""
    for count in range(512):
        started = monotonic()
        try:
            pair.a.send(_frame(pair, 1, part + count, b"", bytes(_MIB // 4)), started + 0.1)
        except LinkTimeout:
            waited = monotonic() - started
            assert 0.09 <= waited < 0.1 + patience.prompt_s, (
                f"send with a deadline in 0.1 s came back after {waited:.3f} s"
            )
            return count
    return 512


def _send_for_ever(pair: LinkPair, patience: LinkPatience) -> None:
    while True:
        pair.a.send(_frame(pair, 1, 0, b"", b""), patience.soon())
