"""Two manifests that differ: the first difference, in words."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.elastic.fakes import Counter, Normed

import paceline
from paceline._elastic.differences import difference
from paceline._elastic.train_state import TrainState
from paceline._links.base import Peer
from paceline.errors import SettingsMismatch, SizeMismatch

DONOR = Peer(2, "m", "somehost", pid=77)
OTHERS = r"rank 2 \(somehost, pid 77\) and the line's other members"


def manifest(width: int = 3, batch: int = 4, dtype: Any = np.float64, total: int = 9, **more: Any) -> bytes:
    model = paceline.nn.Linear(4, width, rng=np.random.default_rng(0), dtype=dtype)
    parts = {"model": model, "sampler": paceline.ElasticSampler(20, global_batch=batch), **more}
    return TrainState(**parts)._core.manifest(total=total)


@pytest.mark.parametrize(
    ("other", "kind", "says"),
    [
        ({"total": 10}, SettingsMismatch, "total is 9 here but 10 on"),
        ({"batch": 5}, SettingsMismatch, "sampler global_batch is 4 here but 5 on"),
        ({"width": 5}, SizeMismatch, r"model: 'weight' is float64\[3, 4\] here but float64\[5, 4\] on"),
        ({"dtype": np.float32}, SizeMismatch, r"model: 'weight' is float64\[3, 4\] here but float32\[3, 4\] on"),
        ({"extra": Counter()}, SizeMismatch, "the training state has no part 'extra' here"),
        ({"model": Counter()}, SizeMismatch, "model is a model here but a Counter on"),
    ],
)
def test_first_difference_is_named(other: dict[str, Any], kind: type[Exception], says: str) -> None:
    error = difference(manifest(), manifest(**other), DONOR)
    assert type(error) is kind
    with pytest.raises(kind, match=f"{says}.*{OTHERS}"):
        raise error


def test_a_setting_on_one_side_only_is_reported() -> None:
    per_rank = TrainState(sampler=paceline.ElasticSampler(20, per_rank_batch=4))._core.manifest()
    mine = TrainState(sampler=paceline.ElasticSampler(20, global_batch=4))._core.manifest()
    assert "sampler global_batch is 4 here but not set on" in str(difference(mine, per_rank, DONOR))


def test_an_array_on_one_side_only_is_reported() -> None:
    model = Normed()
    momentum = TrainState(o=paceline.optim.SGD(model, lr=1.0, momentum=0.5))._core.manifest()
    plain = TrainState(o=paceline.optim.SGD(model, lr=1.0))._core.manifest()
    assert "o: 'weight/momentum' is not there here but float64[3, 4] on" in str(difference(plain, momentum, DONOR))


def test_equal_manifests_give_an_unspecific_error() -> None:
    assert "the training here differs from that on rank 2" in str(difference(manifest(), manifest(), DONOR))


@pytest.mark.parametrize(
    "theirs", [b"", b"[]", b"{", b"[" * 200_000, b'{"settings": 3}', b'{"settings":{},"parts":[]}']
)
def test_a_malformed_manifest_is_reported_as_a_mismatch(theirs: bytes) -> None:
    assert isinstance(difference(manifest(), theirs, DONOR), SettingsMismatch | SizeMismatch)


odd = st.recursive(
    st.none() | st.integers() | st.text(max_size=4) | st.sampled_from(["model", "weight", "float64"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["model", "sampler", "x"]), inner),
    max_leaves=8,
)


@given(parts=odd, named=odd)
@settings(deadline=None, max_examples=50)
def test_arbitrary_manifests_do_not_crash_the_comparison(parts: Any, named: Any) -> None:
    mine = json.loads(manifest())
    for theirs in (mine | {"parts": parts}, mine | {"settings": named}, parts):
        assert isinstance(difference(manifest(), json.dumps(theirs).encode(), DONOR), SettingsMismatch | SizeMismatch)
