"""`TrainState`: what users see of the state that training changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline._elastic.sampler import ElasticSampler
from paceline._elastic.state import StateCore


class TrainState:
    """The state that training changes: model, optimizer, sampler, and values of the user.

        sampler = paceline.ElasticSampler(n, global_batch=256)
        state = paceline.TrainState(model=model, optimizer=optimizer, sampler=sampler)
        for step in session.steps(state, total=1000): ...

    Takes modules (wrapped or not), optimizers, samplers, dicts of arrays and values, nested or not, and anything that
    has `state_dict()` and `load_state_dict()`; of any framework whose memory NumPy can view. Arrays of a dict,
    torch's tensors too, are restored in place, if shape and dtype are the same.

    What only `optimizer.step` changes is never copied: `session.steps` runs that call only when it is sure that the
    step will be applied on every worker. Everything else is copied when a step begins. So give every object that
    `optimizer.step` changes, and change them nowhere else; gradients need not be given.

    For a model that FSDP shards, give the wrapper and one optimizer of `paceline.optim`, or of `torch.optim` for
    `paceline.torch.FSDP`: their shards move with the ranks.

    Args:
        parts: the objects, by names that are the same on every member.

    Raises:
        UnsupportedOp: a part cannot be given to another member, or there are two samplers.
    """

    def __init__(self, **parts: Any) -> None:
        self._core = StateCore(**parts)

    def __repr__(self) -> str:
        return f"TrainState({', '.join(self._core.given)}; step {self.step})"

    @property
    def step(self) -> int:
        """Number of steps that were applied to it.

        A script that loads what was trained elsewhere may set it before `session.steps`, which then begins with the
        step after it (not with FSDP: use its checkpoints).
        """
        return self._core.step

    @step.setter
    def step(self, number: int) -> None:
        self._core.step = number

    @property
    def receipts(self) -> tuple[str, ...]:
        """The receipts of the last two steps that have one, as lines of JSON; see `Session.steps`."""
        return self._core.receipts

    @property
    def sampler(self) -> ElasticSampler | None:
        """The `ElasticSampler` among the parts; None if there is none."""
        return self._core.sampler

    @property
    def is_whole(self) -> bool:
        """False while a step or a load changes it, and afterwards if that was interrupted.

        Then it is unusable until `load_state_dict` has replaced all of it.
        """
        return self._core.is_whole

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of everything that this member holds, for a checkpoint; sharded arrays as `Shard`s."""
        return self._core.state_dict()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Loads everything in place, or nothing if it raises.

        Args:
            saved: as `state_dict` returned it. For an array that is sharded here, the whole array or this member's
                shard; None leaves it as it is.

        Raises:
            SizeMismatch: the saved state has other parts or shapes; the text names them.
            Exception: what a part's own `load_state_dict` raised.
        """
        self._core.load_state_dict(saved)

    def fingerprint(self) -> bytes:
        """Returns the SHA-256 of the whole state but its receipts: the same for all numbers of members that hold it.

        Where the state is sharded over the members (FSDP) the call is a collective, which gathers one array at a time.

        Raises:
            StepOrderError: the state is sharded, and no collective may be called now.
            PacelineError: a collective failed.
        """
        return self._core.fingerprint()
