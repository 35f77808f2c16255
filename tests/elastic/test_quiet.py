"""While nothing goes wrong a step costs no message beyond those of its gradients, and the coordinator hears nothing."""

from __future__ import annotations

import pytest
from elastic.wrapping import WRAP, WRAPPERS

from paceline.testing import coordinator
from support.processes import workers

CODE = """
from paceline._session.control import ControlStream

rng = np.random.default_rng(0)
model = paceline.nn.Sequential(*[paceline.nn.Linear(16, 16, rng=rng) for _ in range(3)])
x = np.ones((4, 16), np.float32)
said = []
send = ControlStream.send
def counted(self, request):
    said.append(request.WhichOneof("event"))
    send(self, request)
ControlStream.send = counted
sent = {"elastic": [], "plain": []}
frames = {"elastic": [], "plain": []}
with paceline.join() as session:
    wrapped, trained = wrap(model, session.group)
    optimizer = paceline.optim.SGD(trained, lr=0.01)
    state = paceline.TrainState(model=trained, optimizer=optimizer)
    bare = type(optimizer).step
    def one(update):
        y = wrapped(x)
        optimizer.zero_grad()
        wrapped.backward(y)
        update()
    def count():
        return np.array([session.group.bytes_sent, session.group._core.progress().operation])
    for step in session.steps(state, total=30):
        if step.number == 4:
            said.clear()
        with step:
            one(optimizer.step)
        if step.number >= 5:  # the first steps also agree on settings
            elastic = count()
            session.group._core.ban_collectives("")  # this is none of the line's
            one(lambda: bare(optimizer))
            plain = count()
            sent["elastic"].append(int(elastic[0] - before[0]))
            frames["elastic"].append(int(elastic[1] - before[1]))
            sent["plain"].append(int(plain[0] - elastic[0]))
            frames["plain"].append(int(plain[1] - elastic[1]))
        before = count()  # here, since the next step sends its word before the loop yields it
        if step.number == 29:
            told = [what for what in said if what != "heartbeat"]
    emit("facts", sent=sent, operations=frames, told=told)
"""


WORDS_BYTES = 8 * (26 + 1)
"""Of both words of a step, from one of two members."""


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_an_elastic_step_sends_only_gradients_and_words(wrapper: str) -> None:
    """The word rides with DDP's; where the state is spread, it and the second word at the gate go by themselves."""
    with (
        coordinator() as address,
        workers(2, WRAP + CODE, COORDINATOR=address, MIN_WORKERS="2", WRAPPER=wrapper) as started,
    ):
        facts = [worker.expect("facts") for worker in started]
        assert [worker.wait() for worker in started] == [0, 0]
    for each in facts:
        more = [whole - plain for whole, plain in zip(each["sent"]["elastic"], each["sent"]["plain"], strict=True)]
        operations = zip(each["operations"]["elastic"], each["operations"]["plain"], strict=True)
        assert set(more) == {0 if wrapper == "ddp" else WORDS_BYTES}
        assert {whole - plain for whole, plain in operations} == {0 if wrapper == "ddp" else 2}
        assert each["told"] == []
