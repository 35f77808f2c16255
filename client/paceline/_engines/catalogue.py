"""The engines that there are, by name; each is imported by `join` in a worker that will use it.

To add an engine: write a `DataEngine` (`data_engine.py` is its contract), name it here and in `config.ENGINES`, and run
`paceline.testing.check_engine` over it.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from paceline._engines.data_engine import DataEngine
from paceline.config import know_engine
from paceline.errors import LinkUnavailable


class _Entry(NamedTuple):
    """How an engine is made, the package that it needs, which build of it if that matters, and what is imported."""

    make: Callable[[], DataEngine]
    package: str
    build: str = ""
    module: str = ""


def _imported(module: str, name: str, package: str, build: str = "") -> _Entry:
    """Returns the entry of an engine that is a class in a module."""

    def make() -> DataEngine:
        engine: DataEngine = getattr(importlib.import_module(module), name)()
        return engine

    return _Entry(make, package, build, module)


_DEVICES = "paceline.torch._device_engines"
_UCC = "torch that is built with USE_UCC=1"

_entries = {
    "gloo": _imported("paceline.torch._gloo_engine", "GlooEngine", "torch"),
    "mpi": _imported("paceline._engines.mpi_engine", "MpiEngine", "mpi4py"),
    "nccl": _imported(_DEVICES, "NcclEngine", "torch", "torch for CUDA on a machine with a GPU"),
    "ucc": _imported("paceline.torch._ucc_engine", "UccEngine", "torch", _UCC),
    "xccl": _imported(_DEVICES, "XcclEngine", "torch", "torch for Intel GPUs on a machine with one"),
}


def register(name: str, make: Callable[[], DataEngine], package: str = "") -> None:
    """Makes an engine known under a name, for `Config.engine`.

    Args:
        name: its name.
        make: makes one engine, for one group in one generation.
        package: what has to be installed for it.
    """
    _entries[name] = _Entry(make, package)
    know_engine(name)


def unregister(name: str) -> None:
    """Undoes `register`."""
    del _entries[name]
    know_engine(name, known=False)


def package_of(name: str) -> str:
    """Returns the package that an engine needs; empty for "links", and for an engine that needs none."""
    return _entries[name].package if name in _entries else ""


def load_engine(name: str) -> None:
    """Imports the module of an engine: torch takes seconds, for which all other members would wait in a step.

    Raises:
        LinkUnavailable: its package is not installed; the text names it.
    """
    if name in _entries and _entries[name].module:
        with _what_it_needs(name):
            importlib.import_module(_entries[name].module)


def make_engine(name: str) -> DataEngine:
    """Makes an engine, which is not open yet.

    Raises:
        LinkUnavailable: its package is not installed; the text names it.
    """
    with _what_it_needs(name):
        return _entries[name].make()


@contextlib.contextmanager
def _what_it_needs(name: str) -> Iterator[None]:
    """Turns an ImportError in the block into an error that says what to install."""
    try:
        yield
    except ImportError as error:
        wanted = _entries[name].build or _entries[name].package
        text = f"the engine {name!r} cannot be used, because {error}: install {wanted}, or name no engine"
        raise LinkUnavailable(text) from error
