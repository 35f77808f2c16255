"""Finds an engine by its name: Paceline's own, and plug-ins' (entry points in the group "paceline.engines")."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import NamedTuple

from paceline.config import plug_in_engines
from paceline.engines import DataEngine
from paceline.errors import LinkUnavailable


class _Own(NamedTuple):
    """One of Paceline's own engines, which all need torch: what makes it, in which module, and the build it needs."""

    module: str
    make: str
    build: str


_DEVICES = "paceline.torch._device_engine"

_OWN = {
    "gloo": _Own("paceline.torch._gloo_engine", "GlooEngine", "torch"),
    "nccl": _Own(_DEVICES, "nccl", "torch for CUDA on a machine with a GPU"),
    "xccl": _Own(_DEVICES, "xccl", "torch for Intel GPUs on a machine with one"),
    "ucc": _Own(_DEVICES, "ucc", "torch that is built with USE_UCC=1 on a machine with a GPU"),
}


def missing_package(name: str) -> str:
    """Returns the package that one of Paceline's own engines needs and that is not installed; empty if all are."""
    return "torch" if name in _OWN and find_spec("torch") is None else ""


def load_engine(name: str) -> None:
    """Imports the module of an engine: torch takes seconds, for which all other members would wait in a step."""
    if name != "links":
        with _what_it_needs(name):
            _maker(name)


def make_engine(name: str) -> DataEngine:
    """Makes an engine, which is not open yet."""
    with _what_it_needs(name):
        return _maker(name)()


def _maker(name: str) -> Callable[[], DataEngine]:
    if name in _OWN:
        make: Callable[[], DataEngine] = getattr(importlib.import_module(_OWN[name].module), _OWN[name].make)
    else:
        make = plug_in_engines()[name].load()
    return make


@contextlib.contextmanager
def _what_it_needs(name: str) -> Iterator[None]:
    """Turns an ImportError in the block into an error that says what to install; a plug-in's own text says it."""
    try:
        yield
    except ImportError as error:
        wanted = f": install {_OWN[name].build}, or name no engine" if name in _OWN else ""
        raise LinkUnavailable(f"the engine {name!r} cannot be used, because {error}{wanted}") from error
