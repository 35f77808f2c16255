"""Which cores a launcher's workers get."""

from __future__ import annotations

import pytest

from paceline.launch._environment import share_of_cores


@pytest.mark.parametrize(
    ("workers", "cores", "shares"),
    [
        (1, {0, 1}, [None]),
        (2, {0, 1}, [{0}, {1}]),
        (2, {3, 5, 9}, [{3}, {5, 9}]),
        (3, set(range(8)), [{0, 1}, {2, 3, 4}, {5, 6, 7}]),
        (3, {0, 1}, [None] * 3),
        (2, set(), [None] * 2),
    ],
)
def test_share_of_cores_divides_cores_among_workers(
    workers: int, cores: set[int], shares: list[set[int] | None]
) -> None:
    assert [share_of_cores(index, workers, cores) for index in range(workers)] == shares
