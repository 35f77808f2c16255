"""Runs in a spare process, and imports in advance what its script will import.

None of the user's code runs early. Scripts, and modules outside of installed packages, are read and not run: their
imports are followed in the order in which Python would run them, and installed packages among them are imported. The
search ends at the first statement that does anything else, such as setting `os.environ`, because later imports may
depend on it.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import site
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

import paceline


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module, by its full name; some of its `names` may be submodules."""

    module: str
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Source:
    """A module that is read instead of being imported; its relative imports refer to `package`."""

    name: str
    package: str
    text: bytes


class _Acts(Exception):
    """A statement does more than import or define something."""


def find_imports(main: Source, find: Callable[[str], Source | None]) -> list[Import]:
    """Lists, in order, the installed packages that a program imports before it does anything else.

    `find` returns the source of a module to read; None for one to import, or if there is none.
    """
    found: list[Import] = []
    seen = {main.name}

    def follow(source: Source) -> None:
        try:
            body = ast.parse(source.text).body
        except (SyntaxError, ValueError):  # Python will report it when it runs the script
            raise _Acts from None
        for wanted in _imports(body, source.package):
            if not read(wanted) and wanted not in found:
                found.append(wanted)

    def read(wanted: Import) -> bool:
        """Reads and follows the modules of an import that are not to be imported; True if there are any."""
        any_read = False
        for name in _to_read(wanted):
            if name not in seen:
                if (inner := find(name)) is None:
                    continue
                seen.add(name)
                follow(inner)
            any_read = True
        return any_read

    try:
        if main.package:
            read(Import(main.package))  # Python imports the packages first that contain the module
        follow(main)
    except _Acts:
        pass  # only the imports up to there can be done early
    return found


def warm_up(arguments: Sequence[str], needed: Callable[[], bool]) -> None:
    """Imports what a script or module will import; and, if that includes NumPy, the rest of Paceline and the engine.

    Paceline loads its parts on first use, and they load NumPy. A script that has not imported NumPy itself may first
    set the variables that NumPy reads. `needed` is called before each import; once it returns True, the other imports
    are left to the script. Raises whatever an import raises.
    """
    main = _main(arguments)
    if main is None:
        return
    for wanted in find_imports(main, _find_source):
        if needed():
            return
        if _spec(wanted.module.partition(".")[0]) is not None:
            __import__(wanted.module, fromlist=wanted.names)
    if "numpy" not in sys.modules:
        return
    for module in ("numpy.random", "paceline._elastic.steps"):
        if needed():
            return
        importlib.import_module(module)
    for name in paceline.__all__:
        if needed():
            return
        if name != "testing":  # it imports the coordinator
            getattr(paceline, name)
    if not needed():
        from paceline.engines._catalogue import load_engine  # it loads NumPy

        load_engine(os.environ.get("PACELINE_ENGINE", "links"))


def _imports(body: Sequence[ast.stmt], package: str) -> Iterator[Import]:
    """Yields the imports at the top level of a module; raises `_Acts` at a statement that does anything else."""
    for statement in body:
        match statement:
            case ast.Import(names=names):
                yield from (Import(alias.name) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                try:
                    full = importlib.util.resolve_name("." * level + (module or ""), package)
                except ImportError:
                    raise _Acts from None
                yield Import(full, tuple(alias.name for alias in names))
            case ast.Try(body=inner, orelse=orelse, finalbody=finalbody):
                yield from _imports([*inner, *orelse, *finalbody], package)
            case ast.If(test=test) if _is_guard(test):
                pass  # `if TYPE_CHECKING` is for type checkers, `if __name__ == "__main__"` comes last
            case ast.Assign(targets=targets) if all(isinstance(target, ast.Name) for target in targets):
                pass
            case ast.Expr(value=ast.Constant()) | ast.AnnAssign(target=ast.Name()) | ast.Pass():
                pass
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                pass
            case _:
                raise _Acts


def _is_guard(test: ast.expr) -> bool:
    """True for the tests `TYPE_CHECKING`, `typing.TYPE_CHECKING` and `__name__ == ...`."""
    match test:
        case ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"):
            return True
        case ast.Compare(left=ast.Name(id="__name__")):
            return True
        case _:
            return False


def _to_read(wanted: Import) -> Iterator[str]:
    """Yields the names of the modules that Python runs for an import, the outermost package first."""
    parts = wanted.module.split(".")
    for end in range(1, len(parts) + 1):
        yield ".".join(parts[:end])
    for name in wanted.names:
        if name != "*":
            yield f"{wanted.module}.{name}"


def _main(arguments: Sequence[str]) -> Source | None:
    """Returns the source of the program; None if the script is not a file or the module is not found."""
    if arguments[0] != "-m":
        path = Path(arguments[0])
        return Source("__main__", "", path.read_bytes()) if path.is_file() else None
    spec = _spec(arguments[1])
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _spec(f"{arguments[1]}.__main__")
    return _read(spec)


def _find_source(name: str) -> Source | None:
    """Returns the source of a module of the user's own; None for one of Python, of Paceline, or installed."""
    top = _spec(name.partition(".")[0])
    if top is None or top.name == "paceline" or _is_installed(top):
        return None
    return _read(_spec(name))


def _spec(name: str) -> ModuleSpec | None:
    """Finds a module without running the packages that contain it."""
    top, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # a module without a spec, such as __main__
        return None
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(f"{spec.name}.{part}", spec.submodule_search_locations)
    return spec


def _read(spec: ModuleSpec | None) -> Source | None:
    if spec is None:
        return None
    package = spec.name if spec.submodule_search_locations is not None else spec.parent or ""
    if spec.origin is None:  # a package without __init__.py
        return Source(spec.name, package, b"")
    path = Path(spec.origin)
    readable = path.suffix == ".py" and path.is_file()  # not an extension module or one in an archive
    return Source(spec.name, package, path.read_bytes() if readable else b"")


def _is_installed(spec: ModuleSpec) -> bool:
    """True for the standard library and for packages that pip or the system has installed."""
    places = [spec.origin, *(spec.submodule_search_locations or ())]
    if spec.origin in ("built-in", "frozen") or not any(places):
        return True
    path = Path(next(place for place in places if place))
    if {"site-packages", "dist-packages"} & set(path.parts):
        return True
    names = sysconfig.get_paths()
    roots = [names[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    return any(path.is_relative_to(root) for root in [*roots, site.getusersitepackages()])
