"""When spares are started, how many are of use, and which imports they make early."""

from __future__ import annotations

import textwrap

import pytest

from paceline.cli.launcher.spares import SpareSchedule, default_spares, spares_error
from paceline.cli.warm import Import, Source, find_imports
from paceline.launch._supervision import Exit, Supervision, Terms

SCRIPT, MODULE, PROGRAM = ["train.py", "x"], ["-m", "train"], ["--", "train"]


@pytest.mark.parametrize(
    ("command", "restarts", "spares"), [(SCRIPT, 3, 1), (MODULE, 1, 1), (SCRIPT, 0, 0), (PROGRAM, 3, 0)]
)
def test_default_number_of_spares(command: list[str], restarts: int, spares: int) -> None:
    assert default_spares(command, restarts) == spares


@pytest.mark.parametrize(
    ("command", "restarts", "spares", "words"),
    [
        (SCRIPT, 1, -1, "must be 0 or more"),
        (SCRIPT, 0, 1, "give --restarts too"),
        (PROGRAM, 1, 1, "does not go with --no-python"),
        (PROGRAM, 1, 0, ""),
        (SCRIPT, 0, 0, ""),
        (MODULE, 1, 9, ""),
    ],
)
def test_spares_error_names_the_conflicting_options(command: list[str], restarts: int, spares: int, words: str) -> None:
    error = spares_error(command, restarts, spares)
    assert words in error
    assert bool(error) == bool(words)


def test_a_spare_is_started_half_a_second_after_the_last_worker() -> None:
    schedule = SpareSchedule(1)
    schedule.worker_started(100.0, from_spare=False)
    schedule.worker_started(100.2, from_spare=False)
    assert schedule.due_at(0, restartable=2) == 100.7
    assert schedule.due_at(1, restartable=2) is None
    schedule.worker_started(200.0, from_spare=True)
    assert schedule.due_at(0, restartable=2) == 200.5


def test_there_are_no_more_spares_than_restartable_workers() -> None:
    schedule = SpareSchedule(3)
    assert [schedule.wanted(workers) for workers in (0, 2, 5)] == [0, 2, 3]
    assert schedule.due_at(2, restartable=2) is None
    assert SpareSchedule(0).due_at(0, restartable=2) is None


def test_failed_spares_are_replaced_with_exponential_backoff() -> None:
    schedule = SpareSchedule(1)
    now, pauses = 100.0, []
    for _ in range(8):
        schedule.failed(now)
        due = schedule.due_at(0, restartable=1)
        assert due is not None
        pauses.append(due - now)
        now = due
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    schedule.worker_started(now, from_spare=False)  # with no spare at hand: nothing is known to be better
    schedule.failed(now)
    assert schedule.due_at(0, restartable=1) == now + 60
    schedule.worker_started(now + 60, from_spare=True)
    schedule.failed(now + 70)
    assert schedule.due_at(0, restartable=1) == now + 71


def test_restartable_counts_workers_with_a_restart_left() -> None:
    supervision = Supervision(1.0, Terms(workers=3, minimum=1, elastic=True, restarts=1))
    for slot in range(3):
        supervision.began(slot, 0.0)
    assert supervision.restartable([0, 1, 2]) == 3
    supervision.ended(Exit("rank 0", 1, -9, slot=0, joined=True), 10.0)
    assert supervision.restartable([1, 2]) == 3  # one of them is about to be
    assert supervision.restarts_due(11.0) == [0]
    supervision.began(0, 11.0)
    assert supervision.restartable([0, 1, 2]) == 2  # its only restart is used up
    assert supervision.restartable([0, 1]) == 1  # another one is done
    supervision.stop(12.0)
    assert supervision.restartable([0, 1]) == 0


def found(script: str, package: str = "", name: str = "__main__", **modules: str) -> list[str]:
    """The modules that are imported early; __ in the names of those that are read stands for a point."""
    sources = {}
    for key, text in modules.items():
        full = key.replace("__", ".")
        is_package = any(other.startswith(f"{key}__") for other in modules)
        sources[full] = Source(full, full if is_package else full.rpartition(".")[0], textwrap.dedent(text).encode())
    main = Source(name, package, textwrap.dedent(script).encode())
    return [wanted.module for wanted in find_imports(main, sources.get)]


def test_imports_are_found_up_to_the_first_statement_with_effects() -> None:
    script = '''
        """What it is."""
        from __future__ import annotations
        import os, sys as system
        from typing import TYPE_CHECKING
        import a.b
        from c import d, e
        if TYPE_CHECKING:
            import only_for_types
        try:
            import f
        except ImportError:
            f = None
        LR: float = 0.1
        log = g()
        def function():
            import inner
        class Class:
            import inside
        import h
        os.environ["OMP_NUM_THREADS"] = "4"
        import too_late
    '''
    assert found(script) == ["__future__", "os", "sys", "typing", "a.b", "c", "f", "h"]


def test_submodules_that_are_imported_by_from_are_named() -> None:
    assert find_imports(Source("__main__", "", b"from a.b import c, d as e"), lambda _: None) == [
        Import("a.b", ("c", "d"))
    ]


@pytest.mark.parametrize(
    "statement",
    [
        "os.environ['A'] = 'b'",
        "os.environ.setdefault('A', 'b')",
        "matplotlib.use('Agg')",
        "del x",
        "if condition(): pass",
        "for _ in range(3): pass",
        "with context(): pass",
        "x.y = 1",
        "a, b.c = 1, 2",
        "from ... import beyond",
    ],
)
def test_a_statement_with_effects_ends_the_search(statement: str) -> None:
    assert found(f"import a\n{statement}\nimport b") == ["a"]


def test_a_script_that_is_not_python_has_no_imports() -> None:
    assert found("import a\nimport b +") == []
    assert find_imports(Source("__main__", "", b"\x00\xff"), lambda _: None) == []


def test_user_modules_are_followed_in_order_but_not_imported() -> None:
    assert found(
        """
        import first
        from model import Net
        import model
        import last
        """,
        model="""
        import torch
        from data.loading import Loader
        class Net(torch.nn.Module): ...
        if __name__ == "__main__":
            os.environ["A"] = "b"
        """,
        data="import in_the_package",
        data__loading="from . import sizes\nfrom .sizes import SIZE\nimport numpy\nimport model",
        data__sizes="import math",
    ) == ["first", "torch", "in_the_package", "math", "numpy", "last"]


def test_a_user_module_with_effects_ends_the_whole_search() -> None:
    assert found("import a\nimport settings\nimport b", settings="import c\nos.environ['A'] = 'b'\nimport d") == [
        "a",
        "c",
    ]


def test_imports_of_parent_packages_come_before_their_module() -> None:
    own = {"top": "import a", "top__sub": "import b", "top__sub__train": "", "top__other": "import d"}
    assert found("import c\nfrom ..other import x", "top.sub", "top.sub.train", **own) == ["a", "b", "c", "d"]
