"""`import paceline.torch` where torch is not installed."""

from __future__ import annotations

import importlib
import sys

import pytest

from pacelinepb import install_command


def test_importing_paceline_torch_without_torch_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name == "torch" or name.startswith(("torch.", "paceline.torch"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [NoTorch(), *sys.meta_path])
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module("paceline.torch")
    assert caught.value.name == "torch"
    assert str(caught.value) == f"paceline.torch needs PyTorch: {install_command('torch')}"


class NoTorch:
    """A finder that makes torch missing where it is installed."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
