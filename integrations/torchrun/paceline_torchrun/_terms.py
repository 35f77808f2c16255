"""The meaning of torchrun's flags for a run. Pure, but for the environment that it is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_MAX_RUN_ID_BYTES = 100
"""A job's name has at most 128 bytes, and a round's name is the run's and a few bytes more."""


@dataclass(frozen=True, slots=True)
class Terms:
    """The settings of one agent's run before it meets the others.

    Attributes:
        coordinator: address of the coordinator; of several, all addresses with commas between them.
        run_id: name of the run.
        address: where other hosts reach this one; None to detect it.
        join_timeout: seconds for the agents to meet.
        last_call: seconds for which a round of fewer than `max_nodes` waits for more.
    """

    coordinator: str
    run_id: str
    min_nodes: int
    max_nodes: int
    address: str | None
    join_timeout: float
    last_call: float


def read_terms(parameters: Any, environ: Mapping[str, str]) -> Terms:
    """Reads torch's `RendezvousParameters`; ValueError if they name no coordinator, or something is out of range."""
    coordinator = parameters.endpoint or environ.get("PACELINE_COORDINATOR")
    if not coordinator:
        raise ValueError(
            "--rdzv-backend paceline needs the address of a coordinator: --rdzv-endpoint HOST:7400, or "
            "PACELINE_COORDINATOR; `paceline coordinator` starts one"
        )
    if len(parameters.run_id.encode()) > _MAX_RUN_ID_BYTES:
        raise ValueError(f"--rdzv-id can have at most {_MAX_RUN_ID_BYTES} bytes")
    return Terms(
        coordinator,
        parameters.run_id,
        parameters.min_nodes,
        parameters.max_nodes,
        parameters.local_addr,
        _seconds(parameters, "join_timeout", 600.0),
        _seconds(parameters, "last_call_timeout", 3.0),
    )


def _seconds(parameters: Any, name: str, default: float) -> float:
    """Reads an option of --rdzv-conf."""
    text = parameters.get(name, default)
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise ValueError(f"--rdzv-conf: {name} must be a number of seconds from 0, not {text!r}")
    return seconds
