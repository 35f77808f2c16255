"""How a member comes to the state that it is told to hold, and what it does when nobody gives it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paceline._elastic import recovery
from paceline._elastic.peer_calls import Holder
from paceline.errors import LinkUnavailable, OrphanedError
from paceline_protocol import Meet, MemberState, MemberView, Share, Tag

NOBODY = LinkUnavailable("no member sent it")
FIRST = Share(0, 2)


class Scene:
    """A member in generation 2 of a spread state, and what is done with its state."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.did: list[str] = []
        self.slept: list[float] = []
        self.now = 0.0
        self.takes = 0.0  # seconds that a take lasts
        self.fails = 0  # takes that fail
        self.breaks = False  # an update that is interrupted
        self.latest = Tag(0, 0)
        self.has = False
        self.parameter = SimpleNamespace(requires_grad=True)  # and frozen in every other state
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self.slept.append)
        monkeypatch.setattr(recovery, "time", clock)
        self.place = MemberState(Tag(0, 0), 0, (FIRST,))
        self.place.formed(MemberView(2, 0, Tag(0, 0), frozenset(), 2))
        plan = SimpleNamespace(wanted=["run"])
        offered = SimpleNamespace(withdraw=lambda: self._note("withdraw"))
        config = SimpleNamespace(failure_timeout=3.0)
        inbox = SimpleNamespace(asks=False, draining="")
        port: Any = SimpleNamespace(
            take=self._take, take_shards=self._take_shards, offered=offered, config=config, inbox=inbox
        )
        state: Any = SimpleNamespace(
            is_sharded=True,
            shares=lambda: self.place.shares,
            retire_copies=lambda: None,
            resharding=lambda share, own=True: self._note("plan", plan),
            switch=lambda plan, rest: self._switch(rest),
            objects={"model": (None, SimpleNamespace(parameters=lambda: {"w": self.parameter}))},
            offered=lambda: None,
            put_back=lambda small: self._note(f"put back {small['lr']}"),
            take_gradients=lambda: ["gradients"],
            update=self._update,
            load_state_dict=lambda rest: self._note(f"load {rest}"),
            clear_gradients=lambda: self._note("clear"),
        )
        saver: Any = SimpleNamespace(
            tag=Tag(0, 0),
            fingerprint=b"",
            latest=lambda: self.latest,
            where=lambda tag: f"folder/{tag}",
            has=lambda tag: self.has,
            read=lambda tag, plan, interrupted: self._note(f"read {tag.step}", "the disk's"),
        )
        self.taking = recovery.StateRecovery(port, self.place, state, saver)
        self.taking.learn([Holder(SimpleNamespace(), (FIRST,))])  # type: ignore[arg-type]

    def order(self, base: Tag, share: Share = FIRST, *, own: bool = False) -> Any:
        return self.taking.carry_out(self.place.catch_up(self.place.generation, base, share, own=own))

    def _update(self, gradients: list[str]) -> None:
        assert gradients == ["gradients"]
        self._note("update")
        if self.breaks:
            raise ZeroDivisionError

    def _note(self, what: str, result: Any = None) -> Any:
        self.did.append(what)
        return result

    def _switch(self, rest: Any) -> None:
        self.parameter.requires_grad = rest is None
        self._note(f"switch {rest}")

    def _take(self, *_: Any) -> Any:
        self._fail_perhaps()
        return SimpleNamespace(tree=lambda: "the rest")

    def _take_shards(self, *_: Any) -> None:
        self._fail_perhaps()

    def _fail_perhaps(self) -> None:
        self.now += self.takes
        if self.fails:
            self.fails -= 1
            raise NOBODY


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    made = Scene(monkeypatch)
    made.place.meet()
    return made


def prepare(scene: Scene, *, updated: bool = True) -> None:
    scene.place.formed(MemberView(3, 0, Tag(0, 0), frozenset(), 2))
    scene.place.begin()
    scene.place.prepare(1)
    scene.taking.keep_gradients({"lr": 0.5}, updated=updated)
    scene.place.meet()


def test_own_state_is_resharded_and_the_old_share_is_kept(scene: Scene) -> None:
    meet = scene.order(Tag(0, 0), Share(1, 3), own=True)
    assert scene.did == ["plan", "switch None"]
    assert meet.shares == (Share(1, 3), FIRST)


def test_a_share_of_another_state_is_taken_in_full(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    assert scene.order(Tag(2, 4)).tag == Tag(2, 4)
    assert scene.did == ["plan", "withdraw", "switch the rest"]
    assert "frozen" not in caplog.text


def test_a_state_that_no_member_sends_is_read_from_a_checkpoint(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.fails, scene.has = 1, True
    assert scene.order(Tag(2, 4)).tag == Tag(2, 4)
    assert scene.did == ["plan", "read 4", "withdraw", "switch the disk's"]
    assert scene.taking.read_a_checkpoint
    assert "the checkpoint of step 4 has frozen 1 parameter" in caplog.text


def test_a_newcomer_leaves_after_repeated_failed_takes(scene: Scene) -> None:
    scene.place.holds_base = False  # a newcomer
    scene.fails, scene.takes = 9, 10.0
    for _ in range(4):  # 30 s after the first failure
        scene.order(Tag(2, 4))
    with pytest.raises(
        LinkUnavailable, match=r"could not fetch .*s0000000004, 5 times in 40 s.*leaves.*no member sent it"
    ):
        scene.order(Tag(2, 4))


def test_two_long_failed_takes_do_not_make_a_newcomer_leave(scene: Scene) -> None:
    scene.place.holds_base = False  # a newcomer
    scene.fails, scene.takes = 2, 1_000.0
    for _ in range(3):
        scene.order(Tag(2, 4))
    assert scene.place.held == Tag(2, 4)


def test_failed_takes_of_different_states_do_not_add_up(scene: Scene) -> None:
    scene.place.holds_base = False  # a newcomer
    scene.fails, scene.takes = 9, 20.0
    for step in range(4, 13):
        scene.order(Tag(2, step))


def test_a_member_with_a_needed_share_stays_despite_failed_takes(scene: Scene) -> None:
    """Nobody else has it: the others, who wait, would lose the state."""
    scene.order(Tag(2, 4))
    assert scene.place.is_needed
    scene.fails, scene.takes = 20, 20.0
    for _ in range(20):
        scene.order(Tag(2, 6))
    scene.place.spoiled()
    assert not scene.place.is_needed


def test_a_failed_take_leaves_the_held_state_unchanged(scene: Scene) -> None:
    scene.fails = 1
    meet = scene.order(Tag(2, 4))
    assert (meet.tag, meet.shares, scene.did) == (Tag(0, 0), (FIRST,), ["plan"])


def test_pauses_grow_between_takes_that_fail_at_once(scene: Scene) -> None:
    """The coordinator orders the next one as soon as it hears of it."""
    for _ in range(8):
        scene.fails = 1
        scene.order(Tag(2, 4))
    assert scene.slept == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0], "whoever failed the first is gone, as a rule"
    scene.order(Tag(2, 4))
    scene.slept.clear()
    scene.fails = 1
    scene.order(Tag(2, 5))
    assert scene.slept == [], "it has worked since"


def test_a_long_failed_take_is_followed_by_no_pause(scene: Scene) -> None:
    scene.takes = 3.0
    for _ in range(3):
        scene.fails = 1
        scene.order(Tag(2, 4))
    assert scene.slept == [0.0, 0.0]


@pytest.mark.parametrize(("updated", "update"), [(True, ["update"]), (False, [])])
def test_a_prepared_step_is_finished_from_the_kept_gradients(scene: Scene, updated: bool, update: list[str]) -> None:
    prepare(scene, updated=updated)
    meet = scene.order(Tag(3, 1))
    assert scene.did == ["withdraw", "put back 0.5", *update, "load the rest", "clear"]
    assert (meet.tag, meet.prepared) == (Tag(3, 1), None)


def test_a_step_that_cannot_be_finished_yet_stays_prepared(scene: Scene) -> None:
    prepare(scene)
    scene.fails = 1
    assert scene.order(Tag(3, 1)).prepared == Tag(3, 1)
    assert scene.did == []
    scene.order(Tag(3, 1))
    assert scene.did[-1] == "clear"


def test_an_interrupted_finish_leaves_no_held_state(scene: Scene) -> None:
    prepare(scene)
    scene.breaks = True
    with pytest.raises(ZeroDivisionError):
        scene.order(Tag(3, 1))
    assert (scene.place.held, scene.place.shares) == (None, ())


def test_a_repeated_order_is_carried_out_once(scene: Scene) -> None:
    prepare(scene)
    scene.order(Tag(3, 1), FIRST)
    scene.did.clear()
    assert scene.order(Tag(3, 1), FIRST).tag == Tag(3, 1)
    assert scene.did == []


def test_gradients_of_a_step_that_no_member_applied_are_dropped(scene: Scene) -> None:
    prepare(scene)
    scene.order(Tag(0, 0), Share(1, 3), own=True)
    assert scene.taking._kept is None
    assert scene.did == ["plan", "switch None"]


def test_a_lost_state_restarts_from_the_latest_checkpoint(scene: Scene) -> None:
    prepare(scene)
    scene.latest = Tag(1, 7)
    step, meet = scene.taking.start_from_checkpoint("part 1 of 2 is lost")
    assert (step, meet.tag, meet.stored, meet.shares) == (7, Tag(1, 7), True, ())
    assert scene.taking._kept is None


def test_a_lost_state_without_a_checkpoint_raises_orphaned_error(scene: Scene) -> None:
    with pytest.raises(OrphanedError, match="there is no checkpoint: part 1 of 2 is lost"):
        scene.taking.start_from_checkpoint("part 1 of 2 is lost")


def test_train_on_the_held_share_does_nothing(scene: Scene) -> None:
    scene.taking.train_on(FIRST)
    assert scene.did == []


def test_a_loaded_state_has_a_fingerprint_until_the_line_has_a_base(scene: Scene) -> None:
    found = Tag(2, 12)
    scene.taking._own = found, b"this disk's"
    meet = Meet(1, found, holds_base=False)
    assert scene.taking.fingerprint(meet) == b"this disk's"
    scene.taking.learn(scene.taking._holders, b"the leader's")
    scene.order(found)
    assert scene.taking.fingerprint(meet) == b"the leader's"
    scene.taking.has_a_base()
    assert scene.taking.fingerprint(meet) == b""


def test_a_state_after_a_step_has_no_fingerprint(scene: Scene) -> None:
    scene.taking._own = Tag(2, 12), b"this disk's"
    assert scene.taking.fingerprint(Meet(2, Tag(2, 13), holds_base=True)) == b""
