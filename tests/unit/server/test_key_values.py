"""The key-value store: values, limits, repeats, and those who wait for keys."""

import asyncio

import pytest

from paceline_server.errors import BadRequest, LimitMet, SessionEnded, TimedOut
from paceline_server.key_values import KeyValues, Storeroom
from paceline_server.limits import Budget
from paceline_server.settings import ServerSettings
from paceline_server.storage.base import AnswerKept, KeyDeleted, KeySet
from support.coordinator import run


def values(budget: Budget | None = None, **limits: int) -> KeyValues:
    return KeyValues("job", ServerSettings(**limits), budget or Budget(1 << 30), {})  # type: ignore[arg-type]


def test_set_get_delete() -> None:
    store = values()
    assert store.set("k", b"v") == [KeySet("job", "k", b"v")]
    assert (store.get("k"), "k" in store, len(store)) == (b"v", True, 1)
    assert store.delete("k") == (True, [KeyDeleted("job", "k")])
    assert (store.get("k"), store.delete("k")) == (None, (False, []))


def test_add_starts_from_zero_and_accepts_negative_amounts() -> None:
    store = values()
    assert store.add("", 0, "k", 3) == (3, [KeySet("job", "k", b"3")])
    assert store.add("m", 2, "k", -5)[0] == -2
    assert store.get("k") == b"-2"


def test_a_repeated_call_gets_the_first_answer() -> None:
    store = values()
    assert store.add("m", 1, "k", 1) == (1, [KeySet("job", "k", b"1"), AnswerKept("job", "m", 1, 1, 1)])
    assert store.add("other", 1, "k", 1)[0] == 2
    assert store.add("m", 1, "k", 1) == (1, [])
    swapped = [KeySet("job", "c", b"a"), AnswerKept("job", "m", 2, 2, True)]
    assert store.compare_set("m", 2, "c", None, b"a") == (True, b"a", swapped)
    assert store.compare_set("m", 2, "c", None, b"a") == (True, b"a", [])
    assert store.forget("m")
    assert not store.forget("m")
    assert store.add("m", 1, "k", 1)[0] == 3


def test_a_repeated_write_does_not_overwrite_later_writes() -> None:
    store = values()
    assert store.set("k", b"mine", "m", 1) == [KeySet("job", "k", b"mine"), AnswerKept("job", "m", 1, 1, 0)]
    store.set("k", b"theirs", "other", 1)
    assert store.set("k", b"mine", "m", 1) == []
    assert store.get("k") == b"theirs"
    assert store.delete("k", "m", 2) == (True, [KeyDeleted("job", "k"), AnswerKept("job", "m", 2, 2, True)])
    store.set("k", b"theirs", "other", 2)
    assert store.delete("k", "m", 2) == (True, [])
    assert store.get("k") == b"theirs"
    assert store.delete("gone", "m", 3) == (False, [])
    store.set("gone", b"theirs", "other", 3)
    assert store.delete("gone", "m", 3) == (False, [])


def test_repeating_an_unstored_write_stores_the_current_value() -> None:
    store = values()
    store.add("m", 1, "k", 1)
    store.not_stored("m", 1)
    assert not store.is_stored("m", 1)
    store.add("other", 1, "k", 1)
    assert store.add("m", 1, "k", 1) == (1, [KeySet("job", "k", b"2"), AnswerKept("job", "m", 1, 1, 1)])
    assert store.add("m", 1, "k", 1) == (1, []), "it is on its way"
    store.delete("k", "m", 2)
    store.not_stored("m", 2)
    assert store.delete("k", "m", 2) == (True, [KeyDeleted("job", "k"), AnswerKept("job", "m", 2, 2, True)])
    store.set("k", b"v", "m", 3)
    store.set("k", b"w", "m", 19)
    store.not_stored("m", 3)
    assert store.is_stored("m", 3), "it is over"
    store.not_stored("m", 19)
    store.forget("m")
    store.not_stored("m", 19)
    assert store.is_stored("m", 19), "the session has ended"


def test_the_last_answers_are_kept_and_restored() -> None:
    kept = {"m": {n % 16: (n, n) for n in range(5, 21)}}
    store = KeyValues("job", ServerSettings(), Budget(1 << 30), {"k": b"20"}, kept)
    assert [store.add("m", n, "k", 1) for n in (5, 20)] == [(5, []), (20, [])]
    assert store.add("m", 21, "k", 1) == (21, [KeySet("job", "k", b"21"), AnswerKept("job", "m", 5, 21, 21)])
    with pytest.raises(BadRequest, match="call 5 is over: call 21, which has its slot, came later"):
        store.add("m", 5, "k", 1)
    assert store.get("k") == b"21"


def test_a_lost_compare_set_returns_false_with_the_current_value() -> None:
    store = values()
    store.set("k", b"theirs")
    assert store.compare_set("m", 1, "k", None, b"mine") == (False, b"theirs", [])
    assert store.compare_set("m", 2, "gone", b"x", b"mine") == (False, None, [])
    assert store.compare_set("m", 3, "k", b"theirs", b"mine")[0]
    store.set("gone", b"x")
    assert store.compare_set("m", 2, "gone", b"x", b"mine") == (False, b"x", []), "a late repeat changes nothing"


@pytest.mark.parametrize("text", [b"", b"1.5", b"1_0", b" 1", b"0x1", "\u0661".encode()])
def test_only_decimal_integers_can_be_added_to(text: bytes) -> None:
    store = values()
    store.set("k", text)
    with pytest.raises(BadRequest, match="holds no integer"):
        store.add("m", 1, "k", 1)


def test_a_sum_above_64_bits_is_refused() -> None:
    store = values()
    store.set("k", b"%d" % (2**63 - 1))
    with pytest.raises(BadRequest, match="64 bits"):
        store.add("m", 1, "k", 1)


def test_value_size_store_size_and_key_count_are_limited() -> None:
    store = values(Budget(2 * (2 * 200 + 9)), max_keys=2, max_value_bytes=4)  # each key takes 200 bytes besides
    with pytest.raises(LimitMet, match="at most 4 bytes, not 5"):
        store.set("a", b"12345")
    store.set("a", b"1234")
    with pytest.raises(LimitMet, match="is full: it has 205 bytes"):
        store.set("b", b"1234")
    store.set("b", b"1")
    with pytest.raises(LimitMet, match="has 2 keys"):
        store.set("c", b"")
    store.set("a", b"")  # shrinking makes room
    store.set("b", b"1234")
    store.delete("a")
    store.set("c", b"123")


def test_stores_share_one_budget_and_none_takes_all_of_it() -> None:
    budget = Budget(12_000)
    greedy, other = (KeyValues(job, ServerSettings(), budget, {}) for job in ("greedy", "other"))
    for number in range(4):
        greedy.set(str(number), b"x" * 1_000)
    with pytest.raises(LimitMet, match="the store of job 'greedy' is full"):
        greedy.set("4", b"x" * 1_000)
    assert (len(greedy), budget.held("greedy")) == (4, 4 * 1_201)
    other.set("k", b"x" * 3_000)
    greedy.set("0", b"")  # less is always taken
    greedy.clear()
    other.delete("k")
    assert (len(greedy), budget.used) == (0, 0)


def test_restored_values_above_the_budget_are_kept_and_counted() -> None:
    budget = Budget(1_000)
    store = KeyValues("job", ServerSettings(), budget, {"k": b"x" * 2_000})
    with pytest.raises(LimitMet):
        store.set("l", b"")
    store.set("k", b"")
    assert budget.used == 201


async def waiter(room: Storeroom, *keys: str, timeout: float = 10.0) -> "asyncio.Task[None]":
    task = asyncio.create_task(room.until_there("m", keys, timeout))
    await asyncio.sleep(0)  # it runs as far as it can
    assert room.waiting == 1
    return task


def test_a_wait_ends_when_all_keys_are_set() -> None:
    async def main() -> None:
        room = Storeroom(values())
        task = await waiter(room, "a", "b")
        for key in ("a", "b"):
            assert not task.done()
            room.values.set(key, b"")
            room.wake(key)
            await asyncio.sleep(0)
        await task
        assert room.waiting == 0

    run(main)


def test_a_wait_checks_a_key_again_only_after_a_deletion() -> None:
    """Every key of a Wait was looked at again after each change: a thousand Waits for a thousand keys, by one `set`."""

    class Looked(KeyValues):
        looks = 0

        def __contains__(self, key: str) -> bool:
            self.looks += 1
            return super().__contains__(key)

    async def main() -> None:
        store = Looked("job", ServerSettings(), Budget(1 << 20), {})
        room = Storeroom(store)
        keys = [str(number) for number in range(100)]

        async def change(key: str, *, there: bool) -> None:
            store.set(key, b"") if there else store.delete(key)
            room.wake(key)
            for _ in range(3):
                await asyncio.sleep(0)

        task = await waiter(room, *keys)
        for key in keys[:-1]:
            await change(key, there=True)
        assert store.looks <= 2 * len(keys)
        store.looks = 0
        await change("0", there=False)
        await change("another", there=True)
        assert store.looks == 0, "nothing that it waits for now"
        await change(keys[-1], there=True)
        assert not task.done(), "the first key is missing again"
        await change("0", there=True)
        await task
        assert store.looks <= 2 * len(keys) + 4

    run(main)


def test_a_wait_that_times_out_names_the_missing_keys() -> None:
    async def main() -> None:
        room = Storeroom(values())
        room.values.set("a", b"")
        with pytest.raises(TimedOut, match="not set within 0 s: 'b', 'c'"):
            await room.until_there("m", ["a", "b", "c"], 0.0)
        assert room.waiting == 0

    run(main)


def test_a_wait_ends_with_its_session() -> None:
    async def main() -> None:
        room = Storeroom(values())
        task = await waiter(room, "a")
        room.end("m", SessionEnded("gone"))
        with pytest.raises(SessionEnded, match="gone"):
            await task
        assert room.waiting == 0

    run(main)


def test_a_cancelled_wait_leaves_nothing_behind() -> None:
    async def main() -> None:
        room = Storeroom(values())
        task = await waiter(room, "a")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert room.waiting == 0

    run(main)
