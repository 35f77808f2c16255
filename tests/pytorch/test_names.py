"""`paceline.torch`: every name is there, and nothing else imports torch."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
from unit.protos.grpc_settings import SET, run_asked

import paceline

pytestmark = pytest.mark.needs(what="torch")


def test_every_public_name_exists() -> None:
    import paceline.torch as package

    assert set(package.__all__) == set(dir(package))
    for name in package.__all__:
        assert getattr(package, name) is not None
    for info in pkgutil.walk_packages(package.__path__, "paceline.torch."):
        module = importlib.import_module(info.name)
        for name in getattr(module, "__all__", ()):
            assert hasattr(module, name), f"{info.name}.__all__ names {name}, which is not there"


def test_torch_loads_little_of_paceline_and_paceline_no_torch() -> None:
    code = """
import sys, torch
import torch.distributed as dist
assert "paceline" in dist.Backend.backend_list
print([name for name in ("grpc", "paceline._group", "paceline.torch.backend") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    names = "paceline.join, paceline.DDP, paceline.FSDP, paceline.TrainState"
    code = f"import sys, paceline; {names}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_importing_torch_inside_the_package_folder_explains_the_error() -> None:
    folder = Path(str(paceline.__file__)).parent
    done = subprocess.run(
        [sys.executable, "-c", "import torch"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert "this is the folder torch of Paceline, not PyTorch: Python was started in the folder" in done.stderr


def test_grpc_is_set_up_when_the_backend_imports_it() -> None:
    code = """
import torch.distributed as dist
dist.init_process_group("paceline", store=dist.HashStore(), rank=0, world_size=1)
dist.destroy_process_group()
"""
    assert run_asked(code).stdout == SET
