"""The Trainer's counters as a part of the training state. They are undone with a step, and newcomers take them over."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_OWN = ("log_history", "is_world_process_zero", "is_local_process_zero", "stateful_callbacks")
"""Fields of the Trainer's state that belong to one process, or are kept apart."""

_COUNTED = (
    "_total_loss_scalar",
    "_globalstep_last_logged",
    "_initial_global_step",
    "_initial_num_input_tokens_seen",
    "current_flos",
)
"""Its counters; some are not in all releases."""


class Bookkeeping:
    """The Trainer's state, its control, the counters of its loop, and the callbacks whose state it saves.

    They are kept as text, because they are copied in every step. Logs are encoded only when there are new ones.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._history = "[]"
        self._length = 0

    def state_dict(self) -> dict[str, str]:
        """Returns everything as text."""
        trainer, state = self._trainer, self._trainer.state
        if len(state.log_history) != self._length:
            self._history, self._length = json.dumps(state.log_history), len(state.log_history)
        fields = {name: value for name, value in vars(state).items() if name not in _OWN}
        counted = {name: getattr(trainer, name) for name in _COUNTED if hasattr(trainer, name)}
        counted["_tr_loss"] = trainer._tr_loss.item()
        told = [[type(each).__name__, each.state()] for each in self._exportable()]
        return {"history": self._history, "rest": json.dumps([fields, counted, told])}

    def load_state_dict(self, saved: Mapping[str, str]) -> None:
        """Puts everything back."""
        trainer, state = self._trainer, self._trainer.state
        if saved["history"] != self._history or len(state.log_history) != self._length:
            state.log_history[:] = json.loads(saved["history"])
            self._history, self._length = saved["history"], len(state.log_history)
        fields, counted, told = json.loads(saved["rest"])
        for name, value in fields.items():
            setattr(state, name, value)
        trainer._tr_loss.fill_(counted.pop("_tr_loss"))
        for name, value in counted.items():
            setattr(trainer, name, value)
        for each, (kind, values) in zip(self._exportable(), told, strict=True):
            if type(each).__name__ != kind:
                raise ValueError(f"this worker has the callback {type(each).__name__} where others have {kind}")
            for name, value in {**values["args"], **values["attributes"]}.items():
                setattr(each, name, value)

    def _exportable(self) -> list[Any]:
        handler, control = self._trainer.callback_handler, self._trainer.control
        return [
            each for each in (*handler.callbacks, control) if hasattr(each, "state") and hasattr(each, "from_state")
        ]
