"""`__all__` agrees with what is there, and importing the package stays light."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import subprocess
import sys
from importlib.util import find_spec

import pytest

import paceline
from paceline import errors


def test_every_public_name_is_there() -> None:
    for name in paceline.__all__:
        assert getattr(paceline, name) is not None
    assert set(paceline.__all__) == set(dir(paceline))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = paceline.no_such_name


def test_every_module_names_what_it_offers() -> None:
    for package in ("paceline", "paceline_protocol", "paceline_server"):
        root = importlib.import_module(package)
        for info in pkgutil.walk_packages(root.__path__, f"{package}."):
            if info.name.endswith("__main__") or info.name.endswith("_version"):
                continue
            if info.name.startswith("paceline.torch") and find_spec("torch") is None:
                continue  # where it is there, tests/pytorch looks at these
            module = importlib.import_module(info.name)
            offered = getattr(module, "__all__", None)
            if offered is None:
                assert info.ispkg, f"{info.name} has no __all__"
                continue
            for name in offered:
                assert hasattr(module, name), f"{info.name}.__all__ names {name}, which is not there"


def test_the_tree_at_the_top_of_errors_is_the_tree() -> None:
    drawn = {line.split()[0] for line in (errors.__doc__ or "").splitlines() if line.strip() and line[0] in " PD"}
    assert drawn >= set(errors.__all__)
    for name in errors.__all__:
        assert name == "Dismissed" or issubclass(getattr(errors, name), errors.PacelineError)
        assert getattr(paceline, name) is getattr(errors, name)


def test_importing_the_package_loads_neither_grpc_nor_the_command_line() -> None:
    code = "import sys, paceline; print([m for m in ('grpc', 'typer', 'rich', 'numpy', 'sklearn') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
