"""Gradients that live elsewhere, and another engine that moves them: DDP's reducer asks its transport alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from paceline._parallel import Parameter
from paceline._parallel._bucket_reducer import BucketReducer
from paceline._parallel._transport import GradientBucket, GradientTransport

OTHERS_WEIGHT, OTHERS_GRADIENT = 3.0, 5.0
"""What the only other rank adds to every bucket: its weight, and each element of its gradients times that."""


class FarBucket:
    """Its memory is a list that only the transport reads. It has no home for gradients: they are copied at `pack`."""

    divisible = False
    piggyback = np.empty(0)
    nbytes = 1 << 20

    def __init__(self, parameters: Mapping[str, Parameter], log: list[str]) -> None:
        self.name = " ".join(parameters)
        self.parameters = list(parameters.values())
        self.far: list[list[float]] = []
        self.weights = np.zeros(1)
        self.log = log

    @property
    def total(self) -> Any:
        return self.weights

    def pack(self, weight: float, *, alone: bool) -> None:
        assert not alone
        self.weights[0] = weight
        self.far = [[0.0] * p.data.size if p.grad is None else p.grad.tolist() for p in self.parameters]

    def unpack(self, total: float, *, divided: bool) -> None:
        assert not divided
        for parameter, values in zip(self.parameters, self.far, strict=True):
            parameter._hold(np.array(values) / total)

    def vacate(self) -> None:
        self.log.append(f"vacate {self.name}")

    def reclaim(self) -> None:
        self.log.append(f"reclaim {self.name}")

    def renew(self) -> None:
        self.log.append(f"renew {self.name}")

    def commit(self) -> None:
        self.log.append(f"commit {self.name}")

    def new_generation(self) -> None:
        return


class FarWork:
    """A collective that ends when the test says so."""

    def __init__(self) -> None:
        self.ended = False

    def wait(self, timeout: float | None = None) -> Any:
        self.ended = True

    def done(self) -> bool:
        return self.ended


class FarTransport:
    """Sums with one other rank."""

    size, ban_reason = 2, ""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.works: list[FarWork] = []

    def new_bucket(self, parameters: Mapping[str, Parameter], *, room: int) -> FarBucket:
        return FarBucket(parameters, self.log)

    def take_piggyback(self) -> None:
        return None

    def start(self, bucket: FarBucket, *, divisor: Callable[[], float] | None, in_background: bool) -> Any:
        self.log.append(f"start {bucket.name}")
        assert divisor is None
        bucket.far = [[value + OTHERS_GRADIENT * OTHERS_WEIGHT for value in values] for values in bucket.far]
        bucket.weights += OTHERS_WEIGHT
        if not in_background:
            return None
        self.works.append(FarWork())
        return self.works[-1]

    def complete(self, bucket: FarBucket) -> None:
        self.log.append(f"complete {bucket.name}")


def made() -> tuple[dict[str, Parameter], FarTransport, BucketReducer]:
    parameters = {name: Parameter(np.zeros(2)) for name in "ab"}
    transport = FarTransport()
    as_protocols: tuple[GradientTransport, GradientBucket] = transport, transport.new_bucket(parameters, room=0)
    assert as_protocols
    return parameters, transport, BucketReducer(parameters, transport, cap_bytes=16)


def backward(parameters: Mapping[str, Parameter], reducer: BucketReducer, weight: float, *, then: Any = None) -> None:
    with reducer.watching(weight=weight, early=True):
        for name in "ba":
            parameters[name].grad = np.full(2, 2.0 * weight)
            if then is not None:
                then(name)
    reducer.finish(weight=weight)


def test_means_are_unpacked_from_the_transport_s_memory() -> None:
    parameters, transport, reducer = made()
    backward(parameters, reducer, 1.0)
    assert transport.log == [f"{what} {name}" for what in ("start", "complete", "commit") for name in "ba"]
    for parameter in parameters.values():
        np.testing.assert_array_equal(parameter.grad, [(2.0 + 15.0) / 4] * 2)  # type: ignore[arg-type]
        parameter.grad = None
    transport.log.clear()
    sent: list[int] = []
    backward(parameters, reducer, 1.0, then=lambda name: sent.append(len(transport.log)))
    assert sent == [1, 2], "from the second pass on each bucket is sent with its last gradient"


def test_memory_of_an_abandoned_collective_is_not_reused() -> None:
    parameters, transport, reducer = made()
    backward(parameters, reducer, 1.0)
    with pytest.raises(ZeroDivisionError):
        backward(parameters, reducer, 1.0, then=lambda name: 1 // (name == "b"))
    transport.log.clear()
    reducer.give_up()
    assert transport.log == ["vacate b", "vacate a"]
    assert all(parameter.grad is None for parameter in parameters.values())
    transport.works[-1].ended = True  # that of the last bucket; the other still runs
    backward(parameters, reducer, 1.0)
    assert transport.log[2:4] == ["renew b", "reclaim a"]
