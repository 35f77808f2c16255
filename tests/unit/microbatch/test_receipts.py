"""Receipts: a chain in which a changed or missing line is found, and which goes on whoever writes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

import paceline
from paceline import ElasticSampler, TrainState
from paceline._base.terminal import UsageError
from paceline._elastic.step import Step
from paceline._microbatch.machine_bits import machine_words
from paceline._microbatch.receipts import Receipt, ReceiptBook, ReceiptDamaged, due, read_chain
from paceline._microbatch.replay import SCRIPT, Replay, ReplayOrder, ReplayResult, compare, compare_inputs
from paceline.cli.replay_command import gap_before, plan
from paceline.errors import Dismissed, SizeMismatch, UnsupportedOp

WORDS = {"seed": "0", "sampler parts": "8", "libraries": "numpy 2"}


def new_state() -> TrainState:
    return TrainState(values={"n": np.zeros(3)}, sampler=ElasticSampler(64, global_batch=16, microbatches=8))


def take_step(state: TrainState, book: ReceiptBook, *, writes: int = 0) -> None:
    """One step of a state; as rank 0 of generation `writes`, if that is not 0."""
    state._core._given["values"]["n"] += 1
    state._core.advance(1)
    book.applied(state._core)
    if writes:
        book.committed(state._core, writes)


def new_book(path: Path, *, every: int = 1, total: int = 100) -> ReceiptBook:
    return ReceiptBook(path, WORDS, total=total, every=every, checkpoint_every=None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "receipts.jsonl"


def written(path: Path, steps: int) -> list[str]:
    state, book = new_state(), new_book(path)
    for _ in range(steps):
        take_step(state, book, writes=1)
    return path.read_text().splitlines()


def test_each_due_step_writes_one_receipt_chained_to_the_previous(path: Path) -> None:
    state, book = new_state(), new_book(path, every=3, total=10)
    digests = {}
    for _ in range(10):
        take_step(state, book, writes=1)
        digests[state.step] = state.fingerprint().hex()
    chain = read_chain(path)
    assert [(receipt.step, receipt.state) for receipt in chain] == [(step, digests[step]) for step in (3, 6, 9, 10)]
    assert [receipt.previous for receipt in chain] == ["", *(receipt.hash for receipt in chain[:-1])]
    assert (chain[1].epoch, chain[1].offset) == (1, 32)
    assert len(path.read_text().splitlines()) == 4


def test_a_step_with_a_checkpoint_has_a_receipt() -> None:
    assert [step for step in range(1, 13) if due(step, 12, 5, 4)] == [4, 5, 8, 10, 12]


def test_the_digest_of_a_state_does_not_depend_on_its_receipts(path: Path) -> None:
    one, other = new_state(), new_state()
    take_step(one, new_book(path))
    take_step(other, new_book(path, every=50))
    assert one.receipts
    assert not other.receipts
    assert one.fingerprint() == other.fingerprint()


@pytest.mark.parametrize("lost", [0, 1])
def test_a_new_rank_0_writes_the_missing_receipts(path: Path, lost: int) -> None:
    states = [new_state(), new_state()]
    books = [new_book(path), new_book(path)]
    for number in range(1, 6):
        for rank in (0, 1):
            take_step(states[rank], books[rank], writes=int(rank == 0 and number <= 5 - lost))
    books[1].committed(states[1]._core, 2)
    take_step(states[1], books[1], writes=2)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4, 5, 6]
    assert len(read_chain(path)) == 6


def test_a_line_truncated_by_a_crash_is_written_again(path: Path) -> None:
    lines = written(path, 3)
    path.write_text("\n".join(lines)[:-40])
    state, book = new_state(), new_book(path)
    for _ in range(4):
        take_step(state, book)
    state_before = new_state()
    state_before.load_state_dict(state.state_dict())
    new_book(path).committed(state_before._core, 2)
    assert [receipt.step for receipt in read_chain(path)] == [1, 2, 3, 4]


def test_a_chain_continues_from_the_receipts_of_a_checkpoint(path: Path) -> None:
    state, book = new_state(), new_book(path)
    for _ in range(4):
        take_step(state, book, writes=1)
    saved = state.state_dict()
    for _ in range(2):
        take_step(state, book, writes=1)
    again, other_words = new_state(), ReceiptBook(path, WORDS | {"seed": "1"}, total=9, every=1, checkpoint_every=None)
    again.load_state_dict(saved)
    for _ in range(2):
        take_step(again, other_words, writes=1)
    chain = read_chain(path)
    assert [receipt.step for receipt in chain] == [1, 2, 3, 4, 5, 6]
    assert [receipt.settings["seed"] for receipt in chain] == ["0"] * 4 + ["1"] * 2
    lines = path.read_text().splitlines()
    assert len(lines) == 8
    path.write_text("\n".join((*lines[4:], *lines[:4])))
    assert read_chain(path) == chain


@pytest.mark.parametrize("field", ["step", "offset", "settings", "state", "previous"])
def test_a_changed_receipt_is_reported_with_its_line(path: Path, field: str) -> None:
    lines = written(path, 4)
    read = json.loads(lines[1])
    changed = {"step": 9, "offset": 1, "settings": {"seed": "7"}, "state": "0" * 64, "previous": "1" * 64}
    lines[1] = json.dumps(read | {field: changed[field]})
    path.write_text("\n".join(lines))
    with pytest.raises(ReceiptDamaged, match=rf"line 2: the receipt of step {9 if field == 'step' else 2} was changed"):
        read_chain(path)


@pytest.mark.parametrize("how", ["new hash", "left out", "no JSON"])
def test_the_chain_begins_after_a_replaced_or_missing_receipt(path: Path, how: str) -> None:
    lines = written(path, 5)
    if how == "new hash":
        lines[1] = replace(Receipt.from_line(lines[1]), state="0" * 64).to_line()
    elif how == "left out":
        del lines[1]
    else:
        lines[1] = lines[1][:50]
    path.write_text("\n".join(lines))
    chain = read_chain(path)
    assert [receipt.step for receipt in chain] == [3, 4, 5]
    said = "The chain begins at step 3: the receipt before it is missing, or was changed"
    assert gap_before(chain) == said
    with pytest.raises(UsageError, match=f"step 2 has no receipt; the nearest that have one: 3 and 4. {said}"):
        plan(chain, [], 2)
    assert [receipt.step for receipt in plan(chain, [2], 5).receipts] == [3, 4, 5]


def test_two_lost_rank_0s_in_a_row_leave_a_gap(path: Path) -> None:
    """A is lost before it writes step 2, B before it writes 2 and 3; the state of C holds 3 and 4."""
    states = {name: new_state() for name in "ABC"}
    books = {name: new_book(path) for name in "ABC"}
    for members in ("ABC", "ABC", "BC", "C"):
        for name in members:
            take_step(states[name], books[name], writes=int(name == "A" and states[name].step == 0))
    for _ in range(2):
        books["C"].committed(states["C"]._core, 3)
        take_step(states["C"], books["C"], writes=3)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 3, 4, 5, 6]
    assert [receipt.step for receipt in read_chain(path)] == [3, 4, 5, 6]


@pytest.mark.parametrize("begins", [0, 2], ids=["at the start", "at a checkpoint"])
@pytest.mark.parametrize("order", ["ab", "ba"])
def test_receipts_of_several_hosts_merge_in_any_order(path: Path, order: str, begins: int) -> None:
    lines = written(path, 8)[begins:]
    hosts = {"a": [*lines[:3], *lines[-2:]], "b": lines[2:-1]}  # host a had rank 0 at first and at last
    path.write_text("".join(f"{line}\n" for host in order for line in hosts[host]))
    chain = read_chain(path)
    assert [receipt.step for receipt in chain] == [*range(begins + 1, 9)]
    assert bool(gap_before(chain)) == bool(begins)


def test_duplicate_lines_do_not_hide_later_receipts(path: Path) -> None:
    """A run was repeated from step 3, as it was, and has come to step 5."""
    lines = written(path, 8)
    path.write_text("".join(f"{line}\n" for line in (*lines, *lines[3:5])))
    assert [receipt.step for receipt in read_chain(path)] == [*range(1, 9)]


@pytest.mark.parametrize(
    "odd", [7, ["no json"], ["{}"], ["[]"], [3], ["x" * 70000], ['{"hash":"","step":"1"}'], ["[" * 5000]]
)
def test_malformed_receipts_in_a_state_are_refused(path: Path, odd: object) -> None:
    state, saved = new_state(), new_state().state_dict()
    with pytest.raises(SizeMismatch, match="the state does not fit"):
        state.load_state_dict(saved | {"receipts": odd})


def test_receipts_that_cannot_be_written_do_not_end_training(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.mkdir(parents=True)
    state, book = new_state(), new_book(path)
    take_step(state, book, writes=1)
    assert "receipts cannot be written to" in caplog.text
    path.rmdir()
    take_step(state, book, writes=1)
    assert [receipt.step for receipt in read_chain(path)] == [1, 2]


def test_compare_reports_differences_from_a_receipt() -> None:
    receipt = Receipt(4, 0, 64, WORDS, "a" * 64, "")
    assert compare(receipt, (0, 64), "a" * 64, WORDS, "it") == ""
    assert compare(receipt, (0, 64), "a" * 64, WORDS | {"libraries": "numpy 3"}, "it") == ""
    assert "libraries is numpy 3 here but numpy 2 there" in compare(
        receipt, (0, 64), "b" * 64, WORDS | {"libraries": "numpy 3"}, "it"
    )
    assert "epoch 1, offset 0, but at epoch 0, offset 64" in compare(receipt, (1, 0), "a" * 64, WORDS, "it")


def test_replay_inputs_may_differ_in_machine_and_script() -> None:
    receipt = Receipt(4, 0, 64, WORDS, "a" * 64, "")
    for name in (*machine_words(), SCRIPT):
        assert compare_inputs(receipt, WORDS | {name: "another"}) == "", name
        assert compare_inputs(receipt, WORDS | {f"{name} is old": "another"}), name


@pytest.mark.parametrize("began", [0, 2])
def test_replay_reports_another_seed_before_computing_a_step(tmp_path: Path, began: int) -> None:
    """Also without a checkpoint, and with one whose step has no receipt."""
    lines = tuple(Receipt(step, 0, 16 * step, WORDS, "a" * 64, "").to_line() for step in (3, 4))
    replay = Replay(ReplayOrder(4, "runs/checkpoint" if began else "", lines, str(tmp_path / "result")))
    replay.words = WORDS | {"seed": "1"}
    state = new_state()
    for _ in range(began):
        state._core.advance(1)

    def steps() -> Iterator[Step]:
        pytest.fail("a step was computed")
        yield

    with pytest.raises(Dismissed):
        next(replay.follow(steps(), state._core))
    assert ReplayResult.read(tmp_path / "result").wrong == (
        "the run of step 3 had other settings: seed is 1 here but 0 there"
    )


def test_a_replay_begins_with_the_latest_checkpoint_before_its_step() -> None:
    chain = [Receipt(step, 0, 0, WORDS, "a" * 64, "") for step in (4, 8, 10, 12)]
    found = plan(chain, [4, 9], 12)
    assert (found.start, [receipt.step for receipt in found.receipts]) == (9, [8, 10, 12])
    found = plan(chain, [], 8)
    assert (found.start, [receipt.step for receipt in found.receipts]) == (0, [4, 8])
    with pytest.raises(UsageError, match="step 9 has no receipt; the nearest that have one: 8 and 10"):
        plan(chain, [], 9)


def test_a_line_holds_a_receipt_and_its_hash() -> None:
    receipt = Receipt(4, 0, 64, WORDS, "a" * 64, "")
    assert json.loads(receipt.to_line()) == asdict(receipt) | {"hash": receipt.hash}
    assert Receipt.from_line(receipt.to_line()) == receipt


def in_a_session(path: Path, **sampler: int) -> TrainState:
    state = TrainState(values={"n": np.zeros(3)}, sampler=ElasticSampler(64, global_batch=16, **sampler))
    with paceline.join() as session:
        for step in session.steps(state, total=5, receipts=path, receipts_every=2):
            with step:
                pass
    return state


def test_a_single_worker_writes_receipts_up_to_the_last_step(path: Path) -> None:
    state = in_a_session(path, microbatches=8)
    chain = read_chain(path)
    assert [receipt.step for receipt in chain] == [2, 4, 5]
    assert chain[-1].state == state.fingerprint().hex()
    assert chain[-1].settings["sampler parts"] == "8"


def test_receipts_do_not_depend_on_check_every(tmp_path: Path) -> None:
    for name, every in (("with", 9), ("without", 0)):
        in_a_session(tmp_path / name, microbatches=8, check_every=every)
    assert (tmp_path / "with").read_text() == (tmp_path / "without").read_text()


def test_receipts_without_microbatches_are_refused(path: Path) -> None:
    with pytest.raises(UnsupportedOp, match="receipts need steps whose result does not depend on the workers"):
        in_a_session(path)
