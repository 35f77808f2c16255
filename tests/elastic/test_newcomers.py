"""Newcomers that do not train what is trained: they are refused, and those who train go on."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.testing import coordinator
from support.processes import workers

pytestmark = pytest.mark.slow

WORKER = """
rng = np.random.default_rng(0)
hidden, compression, wrapped, of_critic = PLAN
model, other = (paceline.nn.Linear(4, width, rng=rng) for width in (hidden, wrapped))
x = np.ones((4, 4), np.float32)
stop, undone = threading.Event(), 0
try:
    with paceline.join() as session:
        ddp = paceline.DDP(model if wrapped == hidden else other, session.group, compression=compression)
        critic = paceline.DDP(paceline.nn.Linear(4, 1, rng=rng), session.group, compression=of_critic)
        optimizer = paceline.optim.SGD(model, lr=0.01)
        for step in session.steps(paceline.TrainState(model=model, optimizer=optimizer), total=1_000_000):
            with step:
                y = ddp(x)
                if step.number % 50 == 1:  # first used by a newcomer when it has long trained
                    critic(x)
                optimizer.zero_grad()
                ddp.backward(y)
                optimizer.step()
            undone += not step.applied
            if step.number == 3 and step.applied:
                emit("trains")
                threading.Thread(target=lambda: (sys.stdin.readline(), stop.set()), daemon=True).start()
            if stop.is_set() and step.applied:
                break
        emit("done", step=step.number, undone=undone, world=session.size)
except paceline.PacelineError as error:
    emit_error(error)
    raise
"""


@pytest.mark.parametrize(
    ("plan", "kind", "text", "undone"),
    [
        ((5, None, 5, None), "SizeMismatch", "model: 'weight' is float32[5, 4] here but float32[4, 4] on rank 0", 0),
        ((4, "bf16", 4, None), "SettingsMismatch", "compression is bf16 on rank 1 and None on rank 0", 1),
        ((4, None, 4, "bf16"), "SettingsMismatch", "compression is bf16 on rank 1 and None on rank 0", 1),
        ((4, None, 5, None), "SizeMismatch", "differs from rank 0's: it has trained 'weight' float32 [5, 4]", 1),
    ],
)
def test_a_mismatched_newcomer_is_refused_and_the_member_trains_on(
    plan: Any, kind: str, text: str, undone: int
) -> None:
    environment = {"MIN_WORKERS": "1", "MAX_WORKERS": "2"}
    with (
        coordinator() as address,
        workers(1, f"PLAN = (4, None, 4, None)\n{WORKER}", COORDINATOR=address, **environment) as (veteran,),
    ):
        veteran.expect("trains")
        with workers(1, f"PLAN = {plan!r}\n{WORKER}", COORDINATOR=address, **environment) as (odd,):
            error = odd.expect("error")
            assert error["type"] == kind, error
            assert text in error["text"], error
            assert odd.wait() == 1
        veteran.go()
        end = veteran.expect("done")
        assert end["step"] > 3
        assert end["undone"] == undone
        assert veteran.wait() == 0
