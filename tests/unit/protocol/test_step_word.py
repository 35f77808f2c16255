"""The step word: what any member asks, and whether all are at one step with one digest, out of sums."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline._elastic.differences import _WINDOW_BYTES, partial_digest
from paceline._group.group_core import PIGGYBACK_SIZE
from paceline_protocol import STEP_WORD_SIZE, StepFlag, agrees, flags_of, step_word

digests = st.integers(0, 2**32 - 1)
flags = st.integers(0, int(StepFlag.JOIN | StepFlag.LEAVE | StepFlag.WRITES | StepFlag.STOP)).map(StepFlag)
numbers = st.tuples(st.integers(1, 9), st.sampled_from([0, 1, 2**32 - 1]) | digests)


def total(words: list[Any], dtype: Any) -> Any:
    """As a bucket of that dtype adds them up."""
    return np.sum([np.array(each, dtype) for each in words], axis=0, dtype=dtype)


def test_the_step_word_fits_into_the_piggyback_of_a_bucket() -> None:
    assert len(step_word(StepFlag.JOIN, 1, 2)) == STEP_WORD_SIZE
    assert STEP_WORD_SIZE <= PIGGYBACK_SIZE


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@given(members=st.lists(st.tuples(flags, numbers), min_size=1, max_size=6))
@settings(deadline=None, max_examples=50)
def test_summed_words_give_all_flags_and_detect_disagreement(
    dtype: Any, members: list[tuple[StepFlag, tuple[int, int]]]
) -> None:
    words = [step_word(asked, step, digest) for asked, (step, digest) in members]
    assert all(len(each) == STEP_WORD_SIZE for each in words)
    sums = total(words, dtype)
    everything = StepFlag(0)
    for asked, _ in members:
        everything |= asked
    assert flags_of(sums) == everything
    assert agrees(sums, len(members)) == (len({found for _, found in members}) == 1)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@given(step=st.integers(1, 10**9), digest=digests, world=st.sampled_from([1, 2, 3, 7, 64, 1000]))
@settings(deadline=None, max_examples=50)
def test_equal_words_agree(dtype: Any, step: int, digest: int, world: int) -> None:
    sums = total([step_word(StepFlag(0), step, digest)] * world, dtype)
    assert agrees(sums, world)
    assert flags_of(sums) == StepFlag(0)


@given(digest=digests, bit=st.integers(0, 31), world=st.sampled_from([2, 3, 100, 1000]))
@settings(deadline=None, max_examples=50)
def test_one_flipped_bit_in_one_digest_is_detected(digest: int, bit: int, world: int) -> None:
    words = [step_word(StepFlag(0), 5, digest)] * (world - 1) + [step_word(StepFlag(0), 5, digest ^ 1 << bit)]
    assert not agrees(total(words, np.float32), world)


@given(size=st.integers(1, 3 * _WINDOW_BYTES // 8), at=st.integers(0, 3 * _WINDOW_BYTES // 8))
@settings(deadline=None, max_examples=30)
def test_every_element_is_digested_in_some_step(size: int, at: int) -> None:
    arrays = [np.zeros(size), np.ones(3)]
    rounds = 2 * (size * 8 // _WINDOW_BYTES + 1)
    before = [partial_digest(arrays, step) for step in range(rounds)]
    arrays[0][at % size] = 1
    assert [partial_digest(arrays, step) for step in range(rounds)] != before


def test_digest_does_not_depend_on_the_layout() -> None:
    array = np.arange(60_000.0).reshape(200, 300)
    for turn in range(10):
        of_rows = partial_digest([array], turn)
        assert of_rows == partial_digest([np.asfortranarray(array)], turn)
        assert of_rows == partial_digest([np.repeat(array, 2, axis=1)[:, ::2]], turn)
    assert partial_digest([array], 0) == zlib.crc32(array.tobytes()[:_WINDOW_BYTES])


def test_digest_of_empty_and_scalar_arrays() -> None:
    assert partial_digest([], 3) == 0
    assert partial_digest([np.zeros((0, 4))], 3) == 0
    assert partial_digest([np.float32(2).reshape(())], 1) == zlib.crc32(np.float32(2).tobytes())
