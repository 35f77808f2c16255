"""A spare imports what its script is going to import, before it is needed. This runs in the spare.

No code of the user's runs early. Scripts and modules that are not installed packages are read, not run: their imports
are followed, in the order in which Python would meet them, and those of installed packages are made. The search ends at
the first statement that does something else, such as setting `os.environ`, which the imports behind it may depend on.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import site
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

import paceline

__all__ = ["Import", "find_imports", "warm_up"]


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module.

    Attributes:
        module: its full name.
        names: what follows on `from MODULE import`; some may be submodules.
    """

    module: str
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Source:
    """A module that is read in place of being imported.

    Attributes:
        name: its full name; "__main__" for a script.
        package: what its relative imports are relative to; empty for none.
        text: its source.
    """

    name: str
    package: str
    text: bytes


class _Acts(Exception):
    """A statement does more than import or define something."""


def find_imports(main: Source, find: Callable[[str], Source | None]) -> list[Import]:
    """The imports of installed packages that a program makes before it does anything else, in order.

    Args:
        main: the script, or the module of `-m`.
        find: the source of a module that is to be read; None for one that is to be imported, or is not there.
    """
    found: list[Import] = []
    seen = {main.name}

    def follow(source: Source) -> None:
        try:
            body = ast.parse(source.text).body
        except (SyntaxError, ValueError):  # Python will say so when it runs the script
            raise _Acts from None
        for wanted in _imports(body, source.package):
            if not read(wanted) and wanted not in found:
                found.append(wanted)

    def read(wanted: Import) -> bool:
        """Follows the modules of an import that are to be read; True if there are any."""
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
            read(Import(main.package))  # Python runs these before a module of theirs
        follow(main)
    except _Acts:
        pass  # what was found up to there is what can be imported early
    return found


def warm_up(arguments: Sequence[str], needed: Callable[[], bool]) -> None:
    """Imports what a script or module is going to import, and the rest of Paceline where NumPy is among that.

    Paceline loads its parts when they are first used, NumPy with them; a script that has not imported NumPy by itself
    may still be about to set the variables that NumPy reads.

    Args:
        arguments: SCRIPT ARGS..., or -m MODULE ARGS...
        needed: asked before each import; the rest is left to the script once it is true.

    Raises:
        BaseException: whatever an import raises.
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
        if name != "testing":  # that one brings the coordinator
            getattr(paceline, name)


def _imports(body: Sequence[ast.stmt], package: str) -> Iterator[Import]:
    """The imports at the top level of a module, until a statement acts."""
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
    """The modules that Python runs for an import, outermost package first."""
    parts = wanted.module.split(".")
    for end in range(1, len(parts) + 1):
        yield ".".join(parts[:end])
    for name in wanted.names:
        if name != "*":
            yield f"{wanted.module}.{name}"


def _main(arguments: Sequence[str]) -> Source | None:
    """The source of the program; None if it is no file of Python's."""
    if arguments[0] != "-m":
        path = Path(arguments[0])
        return Source("__main__", "", path.read_bytes()) if path.is_file() else None
    spec = _spec(arguments[1])
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _spec(f"{arguments[1]}.__main__")
    return _read(spec)


def _find_source(name: str) -> Source | None:
    """The source of a module that is neither Python's own, nor Paceline's, nor installed."""
    top = _spec(name.partition(".")[0])
    if top is None or top.name == "paceline" or _is_installed(top):
        return None
    return _read(_spec(name))


def _spec(name: str) -> ModuleSpec | None:
    """Where a module is, without running the packages that it is in."""
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
    readable = path.suffix == ".py" and path.is_file()  # no extension module, nor one from an archive
    return Source(spec.name, package, path.read_bytes() if readable else b"")


def _is_installed(spec: ModuleSpec) -> bool:
    """True for the standard library and what pip or the system has installed."""
    places = [spec.origin, *(spec.submodule_search_locations or ())]
    if spec.origin in ("built-in", "frozen") or not any(places):
        return True
    path = Path(next(place for place in places if place))
    if {"site-packages", "dist-packages"} & set(path.parts):
        return True
    names = sysconfig.get_paths()
    roots = [names[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    return any(path.is_relative_to(root) for root in [*roots, site.getusersitepackages()])
