"""`__all__` agrees with what is there, and importing the package stays light."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import paceline
from paceline import errors
from support.blocks import PAGES, blocks


def test_every_public_name_exists_and_dir_lists_no_others() -> None:
    for name in paceline.__all__:
        assert getattr(paceline, name) is not None
    assert set(paceline.__all__) == set(dir(paceline))


def test_help_begins_with_the_public_names_by_purpose() -> None:
    _, table, *_ = str(paceline.__doc__).split("\n\n")
    named = set(re.findall(r"\w+", " ".join(line[27:] for line in table.splitlines())))
    assert named >= set(paceline.__all__) - set(errors.__all__) - {"__version__"}
    assert named >= {module.rpartition(".")[2] for module in FOR_USERS}


def test_an_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = paceline.no_such_name


def test_user_modules_define_all_and_internal_ones_only_for_reexports() -> None:
    for package in ("paceline", "paceline_protocol", "paceline_server"):
        root = importlib.import_module(package)
        for info in pkgutil.walk_packages(root.__path__, f"{package}."):
            if info.name.endswith("__main__"):
                continue
            if info.name.startswith("paceline.torch") and find_spec("torch") is None:
                continue  # where it is there, tests/pytorch looks at these
            module = importlib.import_module(info.name)
            offered = getattr(module, "__all__", None)
            if info.name in {f"paceline.{name}" for name in (*_MODULES, *_OFFERED_ABOVE)}:
                assert offered, f"{info.name} has no __all__"
            for name in offered or ():
                assert hasattr(module, name), f"{info.name}.__all__ names {name}, which is not there"
            if offered and any(word.startswith("_") for word in info.name.split(".")):
                assert handed_on(module) & set(offered), f"{info.name} is internal and needs no __all__"


def handed_on(module: ModuleType) -> set[str]:
    """The names that a module has imported from others."""
    assert module.__file__ is not None
    imports = (node for node in ast.parse(Path(module.__file__).read_text()).body if isinstance(node, ast.ImportFrom))
    return {alias.asname or alias.name for node in imports for alias in node.names}


def test_errors_docstring_tree_lists_every_error() -> None:
    drawn = {line.split()[0] for line in (errors.__doc__ or "").splitlines() if line.strip() and line[0] in " PD"}
    assert drawn >= set(errors.__all__)
    for name in errors.__all__:
        assert name == "Dismissed" or issubclass(getattr(errors, name), errors.PacelineError)
        assert getattr(paceline, name) is getattr(errors, name)


def test_importing_the_package_loads_neither_grpc_nor_the_command_line() -> None:
    code = "import sys, paceline; print([m for m in ('grpc', 'typer', 'rich', 'numpy', 'sklearn') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


ROOT = Path(__file__).parents[3]

_MODULES = ("checkpoint", "compression", "engines", "launch", "nn", "optim", "testing", "torch")
FOR_USERS = ("paceline", *(f"paceline.{name}" for name in _MODULES))
"""Where the names for users are; everything else is internal."""

_PROGRAMS = {"cli", "demo"}
_OFFERED_ABOVE = {"config", "credentials", "errors"}
"""Modules whose names for users are those of `paceline` itself."""


COLLECTIVES = "all_gather all_reduce all_reduce_compressed all_to_all average barrier broadcast gather reduce"
OF_OBJECTS = "all_gather_object broadcast_object gather_object"
WRAPPER = "backward clip_grad_norm drop_gradients forward group module named_buffers named_parameters no_sync prepare"

PUBLIC = {
    "Group": f"{COLLECTIVES} {OF_OBJECTS} reduce_scatter scatter shift send recv bytes_sent close empty generation "
    "global_rank group_rank hand_over members rank ranks size split split_by_host subgroup",
    "Session": "barrier batches close generation group job leave log members on_commit on_view rank replica replicas "
    "retry size stats steps stop store",
    "Step": "applied attempt cause count entered generation indices keep_copy keeps_copy kept_microbatches left "
    "lr_scale microbatches number rank rng rng_for sampler samples shares skip skipped weight world",
    "TrainState": "fingerprint is_whole load_state_dict receipts sampler state_dict step",
    "ElasticSampler": "advance ahead batch batch_size check_every current current_microbatch epoch global_batch "
    "load_state_dict lr_scale microbatches microbatches_ahead n offset order same_bits seed settings share state_dict "
    "steps_per_epoch",
    "DDP": f"{WRAPPER} begin_step sync_gradients",
    "FSDP": f"{WRAPPER} sync_gradients broadcast_updated_params has_pending_prefetch is_sharded "
    "load_sharded_state_dict load_state_dict padded_gradients prefetch_forward_params sharded_state_dict state_dict "
    "strategy unshard update_shards",
}
"""The names of objects that users hold. A new one is promised to them: an internal one begins with an underscore."""


def test_objects_of_users_show_only_names_for_users() -> None:
    sampler = paceline.ElasticSampler(4, global_batch=2)
    state = paceline.TrainState(sampler=sampler)
    with paceline.join() as session:
        model = paceline.nn.Linear(2, 2, rng=np.random.default_rng(0))
        wrapped = [wrap(model, session.group) for wrap in (paceline.DDP, paceline.FSDP)]
        for step in session.steps(state, total=1):
            with step:
                shown = {"Session": session, "Group": session.group, "Step": step, "TrainState": state}
    shown |= {"ElasticSampler": sampler, "DDP": wrapped[0], "FSDP": wrapped[1]}
    assert shown.keys() == PUBLIC.keys()
    for name, thing in shown.items():
        assert {each for each in dir(thing) if not each.startswith("_")} == set(PUBLIC[name].split()), name


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_of_a_class_are_described(name: str) -> None:
    kind = getattr(paceline, name)
    told = " ".join(base.__doc__ or "" for base in kind.__mro__)
    attributes = set(re.findall(r"\w+", told.partition("Attributes:")[2]))
    for each in PUBLIC[name].split():
        assert getattr(getattr(kind, each, None), "__doc__", None) or each in attributes, f"{name}.{each}"


def test_internal_packages_and_modules_start_with_an_underscore() -> None:
    package = ROOT / "client" / "paceline"
    # A folder that has moved away may still hold what Python compiled there.
    folders = {path.parent.name for path in package.glob("*/*.py")}
    found = folders | {path.stem for path in package.glob("*.py")}
    plain = {name for name in found if not name.startswith("_")}
    assert plain == {*_MODULES, *_PROGRAMS, *_OFFERED_ABOVE}


def source_of(module: str) -> ast.Module:
    """The file of a module, or the `__init__` of a package, which may need what is not installed."""
    path = ROOT.joinpath("client", *module.split("."))
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())


def offered_by(module: str) -> set[str]:
    """`__all__` of a module."""
    for node in source_of(module).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


def shown_to_users() -> Iterator[tuple[str, ast.Module]]:
    """The Python code of README.md, docs/ and the examples."""
    for block in (block for page in PAGES for block in blocks(page) if block.language == "python"):
        yield block.where, ast.parse(block.code)
    for file in sorted((ROOT / "examples").rglob("*.py")):
        yield file.name, ast.parse(file.read_text())


def names_used(code: ast.Module) -> Iterator[tuple[str, str]]:
    """What a script uses of paceline: (module, name)."""
    modules = {"paceline": "paceline"}
    for node in ast.walk(code):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "paceline":
            for alias in node.names:
                yield str(node.module), alias.name
                modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "__all__") for alias in node.names if alias.name.startswith("paceline."))
    for node in ast.walk(code):
        if isinstance(node, ast.Attribute):
            *outer, name = ast.unparse(node).split(".")
            module = ".".join([modules.get(outer[0], ""), *outer[1:]])
            if module in FOR_USERS:
                yield module, name


def test_documents_and_examples_use_only_public_names() -> None:
    wrong = []
    for where, code in shown_to_users():
        for module, name in names_used(code):
            known = (
                {"__all__"}
                | offered_by(module)
                | {each.rpartition(".")[2] for each in FOR_USERS if module == "paceline"}
            )
            if module not in FOR_USERS or name not in known:
                wrong.append(f"{where} uses {name} of {module}")
    assert not wrong


@pytest.mark.parametrize("module", FOR_USERS)
def test_public_names_of_a_user_module_are_documented_and_in_all(module: str) -> None:
    """A name without an underscore that is made there, or taken from another module of paceline, is for users."""
    if module != "paceline.torch":  # where torch is there, tests/pytorch looks at its names
        for name in offered_by(module) - {"__version__"}:
            assert getattr(importlib.import_module(module), name).__doc__, f"{module}.{name} has no description"
    made = set()
    for node in source_of(module).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            made.add(node.name)
        elif isinstance(node, ast.Assign):
            made |= {ast.unparse(target) for target in node.targets}
        elif isinstance(node, ast.ImportFrom) and (ROOT / "client" / module.replace(".", "/")).is_dir():
            made |= {alias.asname or alias.name for alias in node.names if str(node.module).startswith("paceline")}
    assert {name for name in made if not name.startswith("_")} <= offered_by(module)
