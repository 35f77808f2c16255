"""Puts together what the workers' modules log, and their torchmetrics: all get the values of all samples."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum

import paceline
from paceline.errors import UnsupportedOp

_LABEL = "logged_values"


class _Value(NamedTuple):
    """A value that a pass has changed, which the attribute `name` of `owner` holds."""

    owner: Any
    name: str
    before: Any
    """The value before the pass; None for a minimum or maximum."""
    mine: Any
    """This worker's contribution: the increase, the new elements of a list, or its own minimum or maximum."""


class _Changed:
    """The values that a pass has changed, by how those of the workers are put together."""

    def __init__(self) -> None:
        self.names: list[str] = []
        """Names of all of them, which must be the same on all workers."""
        self.means: list[Any] = []
        """Logged values whose mean over an epoch is asked for."""
        self.sums: list[_Value] = []
        self.lists: list[_Value] = []
        self.extremes: dict[Literal["min", "max"], list[_Value]] = {"min": [], "max": []}


class Gains:
    """The increase of logged values and metrics in a pass or an evaluation, which all workers add up.

    It keeps the values as they are when it is made, so make it before the pass begins.
    """

    def __init__(self, results: Any, metrics: Sequence[Metric]) -> None:
        self._results = results
        self._metrics = metrics
        self._logged = {id(result): dict(vars(result)) for result in results.values()}
        self._counted = list(metric_states(metrics))

    def share(
        self,
        group: paceline.Group,
        weight: float,
        rows: int = 0,
        numbers: Sequence[float] = (),
        *,
        flag: bool = False,
        usual: int = 0,
    ) -> tuple[list[float], bool]:
        """Puts what the workers have added together, in place.

        Args:
            group: the workers.
            weight: this worker's part of the samples; nothing of what it has added counts if that is 0.
            rows: its number of samples; 0 if it has added up several batches.
            numbers: other numbers to average, such as a loss.
            flag: a condition that may hold on some of the workers.
            usual: number of rows of a whole batch.

        Returns:
            The weighted sum of each number over the workers; and whether the condition holds on any of them.

        Collectives: one sum, for minima and maxima one each, and a gathering for each list of a metric.
        """
        changed = _Changed()
        self._find_logged(changed, weight)
        self._find_counted(changed)
        names = zlib.crc32(" ".join(changed.names).encode())
        odd_sizes = {1, usual} - {rows} if rows else set()
        means = [self._mean_terms(result, weight, odd_sizes) for result in changed.means]
        terms = [np.array([*numbers]) * weight, *means, *(_flat(value.mine) for value in changed.sums)]
        if not weight:
            terms = [np.zeros_like(term) for term in terms]
        ends = np.cumsum([len(term) for term in terms])
        own = np.concatenate([*terms, [bool(weight), float(flag), names]])
        *found, (counted, flags, all_names) = np.split(group.all_reduce(own, label=_LABEL), ends)
        if all_names != names * group.size:
            raise UnsupportedOp(
                f"the workers have logged different values, or updated different metrics; this one {changed.names}: "
                "do so alike on all workers, whatever samples they have"
            )
        averaged, *rest = found
        for result, total in zip(changed.means, rest, strict=False):
            self._add_mean(result, total, int(counted))
        for value, gained in zip(changed.sums, rest[len(means) :], strict=True):
            setattr(value.owner, value.name, value.before + _like(value.mine, gained))
        for op, values in changed.extremes.items():
            self._share_extremes(group, op, values, counts=bool(weight))
        self._share_lists(group, changed.lists, counts=bool(weight))
        self._follow(changed)
        return averaged.tolist(), bool(flags)

    def _share_lists(self, group: paceline.Group, values: Sequence[_Value], *, counts: bool) -> None:
        for value in values:
            some = value.mine or [value.before[-1][:0] if value.before else torch.zeros(0)]
            own = torch.cat([torch.atleast_1d(each) for each in some]).detach()
            shown = own.float() if own.dtype == torch.bfloat16 else own  # which NumPy lacks; `to` brings it back
            every = group.all_gather((shown if counts else shown[:0]).cpu().numpy(), uneven=True)
            setattr(value.owner, value.name, [*value.before, torch.from_numpy(np.ascontiguousarray(every)).to(own)])

    def _mean_terms(self, result: Any, weight: float, odd_sizes: set[int]) -> NDArray[np.float64]:
        """Returns the numbers to add up for a mean: the sum over samples, their number, and three for `_add_mean`."""
        before = self._before(result)
        total = float(result.value) - float(before["value"])
        size = int(result.cumulated_batch_size) - int(before["cumulated_batch_size"])
        return np.array([total, size, size * size, size in odd_sizes, weight * total / max(size, 1)])

    def _add_mean(self, result: Any, total: NDArray[np.float64], counted: int) -> None:
        """Adds the contributions of `counted` workers to a mean.

        A module may give the loader's batch size, or 1, as a constant `batch_size=`, which is not the number of a
        worker's rows then. It is taken once, so that a batch weighs the same whatever the number of workers.
        """
        before = self._before(result)
        added, size, squares, odd, mean = total.tolist()
        if odd and counted * squares == size * size:
            size /= counted
            added = mean * size
        result.value = torch.as_tensor(before["value"]).to(result.value) + added
        result.cumulated_batch_size = torch.as_tensor(before["cumulated_batch_size"]).to(result.device) + int(size)

    def _before(self, result: Any) -> dict[str, Any]:
        return self._logged.get(id(result)) or {**result._defaults, "_forward_cache": None}

    def _find_logged(self, changed: _Changed, weight: float) -> None:
        """Finds what was logged as a number: in each pass, and as a mean, sum or extreme over the epoch."""
        for key, result in sorted(self._results.items(), key=lambda item: item[0]):
            before = self._before(result)
            if not result.is_tensor or result.has_reset:
                continue
            if result.value is before["value"] and result._forward_cache is before["_forward_cache"]:
                continue
            changed.names.append(key)
            meta = result.meta
            extreme: Literal["min", "max", ""] = (
                "min" if meta.is_min_reduction else "max" if meta.is_max_reduction else ""
            )
            if extreme:
                names = [
                    name for name, is_kept in (("_forward_cache", meta.on_step), ("value", meta.on_epoch)) if is_kept
                ]
                changed.extremes[extreme] += [_Value(result, name, None, getattr(result, name)) for name in names]
                continue
            if meta.on_step:
                now = result._forward_cache
                mine = now if meta.is_sum_reduction else now * weight
                changed.sums.append(_Value(result, "_forward_cache", torch.zeros_like(now), mine))
            if meta.on_epoch and meta.is_mean_reduction:
                changed.means.append(result)
            elif meta.on_epoch:
                was = torch.as_tensor(before["value"]).to(result.value)
                changed.sums.append(_Value(result, "value", was, result.value - was))

    def _find_counted(self, changed: _Changed) -> None:
        """Finds the states of metrics."""
        for number, (metric, (count, before)) in enumerate(zip(self._metrics, self._counted, strict=True)):
            if metric._update_count == count:
                continue
            changed.names.append(f"{type(metric).__name__} {number}")
            for name, reduce in metric._reductions.items():
                now, was = getattr(metric, name), before[name]
                if isinstance(now, list) and reduce is dim_zero_cat:
                    changed.lists.append(_Value(metric, name, was, now[len(was) :]))
                elif reduce is dim_zero_sum and not isinstance(now, list):
                    changed.sums.append(_Value(metric, name, was, now - was))
                elif reduce in (dim_zero_max, dim_zero_min):
                    changed.extremes["max" if reduce is dim_zero_max else "min"].append(_Value(metric, name, None, now))
                else:
                    raise UnsupportedOp(
                        f"{type(metric).__name__}.{name} cannot be put together from the workers' parts: only states "
                        "with dist_reduce_fx sum, min, max, or cat for lists, can"
                    )

    def _share_extremes(
        self, group: paceline.Group, op: Literal["min", "max"], values: Sequence[_Value], *, counts: bool
    ) -> None:
        if not values:
            return
        terms = [_flat(value.mine) for value in values]
        own = np.concatenate(terms)
        if not counts:
            own = np.full_like(own, np.inf if op == "min" else -np.inf)
        best = group.all_reduce(own, op=op, label=_LABEL)
        for value, found in zip(values, np.split(best, np.cumsum([len(term) for term in terms])[:-1]), strict=True):
            setattr(value.owner, value.name, _like(value.mine, found))

    def _follow(self, changed: _Changed) -> None:
        """Computes anew what follows from the values that are shared now."""
        for metric in self._metrics:
            metric._computed = None
        for result in self._results.values():
            result._computed = None
            if result.has_reset or not result.meta.on_step:
                continue
            if not result.is_tensor:
                result._forward_cache = self._value_of_pass(result, changed)
            elif not result.meta.on_epoch:
                result.value = result._forward_cache

    def _value_of_pass(self, result: Any, changed: _Changed) -> Any:
        """Returns a metric's value for what all workers have added in one pass; this worker's, if it has extremes."""
        metric = result.value
        now = {name: getattr(metric, name) for name in metric._defaults}
        gained = {value.name: value.before for value in (*changed.sums, *changed.lists) if value.owner is metric}
        if not now or gained.keys() != now.keys():
            return result._forward_cache
        try:
            for name, value in now.items():
                was = gained[name]
                setattr(metric, name, value[len(was) :] if isinstance(value, list) else value - was)
            metric._computed = None
            return metric.compute()
        finally:
            for name, value in now.items():
                setattr(metric, name, value)
            metric._computed = None


def metric_states(metrics: Sequence[Metric]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields how often each metric was updated, and a copy of its states: updates may change them in place."""
    for metric in metrics:
        states = ((name, getattr(metric, name)) for name in metric._defaults)
        yield (
            metric._update_count,
            {name: list(now) if isinstance(now, list) else now.detach().clone() for name, now in states},
        )


def _flat(value: Tensor) -> NDArray[np.float64]:
    flat: NDArray[np.float64] = value.detach().cpu().double().numpy().reshape(-1)
    return flat


def _like(value: Tensor, flat: NDArray[np.float64]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(flat)).reshape(value.shape).to(value)
