"""A bit that changes on the way between two workers breaks the link: it is neither summed nor ever handed out."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.testing import coordinator
from support.processes import workers

_TESTS = Path(__file__).parent.parent

CODE = (
    f"""
sys.path.insert(0, {str(_TESTS)!r})
from support.flipping import Flipper, send_through
"""
    """
N = 1 << 20
flipper = Flipper(np.ones(64, np.float32).tobytes())
send_through(flipper)

def messages():
    other = 1 - session.rank
    steps = [lambda: group.send(x, other), lambda: group.recv(other, out=y)]
    for step in steps if session.rank == 0 else steps[::-1]:
        step()
    return y

with paceline.join(timeout=20) as session:
    group = session.group
    x, y = np.ones(N, np.float32), np.zeros(N, np.float32)
    call, expected = CALL
    assert (call() == expected).all()
    session.barrier("whole")
    if session.rank == 0:
        flipper.arm()
    try:
        while True:
            wrong = call() != expected
            if wrong.any():
                emit("wrong", at=np.flatnonzero(wrong).tolist()[:5])
                break
    except paceline.PacelineError as error:
        emit_error(error)
    emit("flipped", flipped=flipper.flipped.is_set())
"""
)

CALLS = {
    "all_reduce": "lambda: group.all_reduce(x, out=y), 2.0",
    "all_gather": "lambda: group.all_gather(x), 1.0",
    "messages": "messages, 1.0",
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("kind", "streams"), [("tcp", 1), ("tcp", 3), ("grpc", 1)])
def test_a_flipped_bit_breaks_the_link(kind: str, streams: int, call: str) -> None:
    with (
        coordinator() as address,
        workers(
            2, CODE.replace("CALL", CALLS[call]), COORDINATOR=address, MIN_WORKERS="2", LINKS=kind,
            TCP_STREAMS=str(streams), FLIGHT_DIR="off",
        ) as started,
    ):  # fmt: skip
        ends = [worker.expect_any(30.0, "error") for worker in started]
        assert [end["event"] for end in ends] == ["error", "error"], ends
        assert {end["type"] for end in ends} == {"PeerLost"}, ends
        assert any([worker.expect("flipped")["flipped"] for worker in started])
        said = "".join(worker.stderr for worker in started)
        assert "changed on the way" in said
