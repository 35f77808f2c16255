"""FSDP over gRPC: 20 steps equal one process's, under every strategy, with uneven shares."""

from __future__ import annotations

from functools import partial

import pytest
from unit.parallel.sharding.models import Case, check_training

from paceline.config import Config
from support.worlds import run_over


@pytest.mark.parametrize("name", ["full", "grad", "none", "hybrid2"])
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("sgd", "float64"),
        pytest.param("adam", "float32", marks=pytest.mark.slow),
        pytest.param("sgd", "float32", marks=pytest.mark.slow),
        pytest.param("adam", "float64", marks=pytest.mark.slow),
    ],
)
@pytest.mark.sampled(3)
def test_four_ranks_reach_the_parameters_of_one_process(name: str, kind: str, dtype: str) -> None:
    tolerance = 1e-12 if dtype == "float64" else 1e-5
    case = Case(4, name, "each layer in a unit", kind, (dtype, dtype), 20, tolerance)
    check_training(case, partial(run_over, "grpc", config=Config()))
