"""The classes of all commands: they format help, parse --http, and find the commands of plug-ins."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from inspect import getdoc
from typing import TYPE_CHECKING, Any

import typer
import typer.core
import typer.main

from paceline._base.terminal import UsageError
from paceline.cli.output import one_line_errors

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_ADDRESS = re.compile(r"([\w.:\[\]-]+:)?\d+|localhost|\d+(\.\d+){3}|\[[\da-fA-F:.]+\]")
"""A value that may follow --http: a port, with a host or without one; or an IP address."""

_MOVED = {
    "flight": "debug flight",
    "stacks": "debug stacks",
    "trace": "debug trace",
    "schedules": "debug schedules",
    "forget": "restart --forget",
}
"""Commands of 0.1.0, and what they are called now."""


class Command(typer.core.TyperCommand):
    """A command whose help shows no types for switches, and whose --http may stand alone."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Returns its parameters; switches have no metavar."""
        return _without_types(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Returns the words of the usage line: arguments are shown as they are typed."""
        return ["[OPTIONS]", *(_typed(each) for each in self.params if each.param_type_name == "argument")]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses the arguments."""
        valued = {name for each in self.params if not getattr(each, "is_flag", True) for name in each.opts}
        return super().parse_args(ctx, with_http(args, valued))


class CommandGroup(typer.core.TyperGroup):
    """Commands with a word in front, such as `paceline debug`."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Returns its parameters; switches have no metavar."""
        return _without_types(super().get_params(ctx))


class Commands(CommandGroup):
    """Paceline's commands, and plug-ins': entry points in "paceline.commands", each naming a `typer.Typer`.

    Plug-ins are looked for only if a command is not Paceline's own, or if all are listed.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        """Returns the names of all commands."""
        own = super().list_commands(ctx)
        return [*own, *(name for name in _plugged_in() if name not in own)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Returns a command by its name; None if there is none."""
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        if cmd_name in _plugged_in():
            return _command_of(_plugged_in()[cmd_name])
        if cmd_name in _MOVED:
            return _broken(f"paceline {cmd_name} is now called paceline {_MOVED[cmd_name]}")
        return None


def with_http(args: Sequence[str], valued: set[str]) -> list[str]:
    """Returns arguments in which each --http that stands alone has an empty value, which stands for the default.

    Otherwise typer would take the next word for its value, such as the script. Arguments behind the first positional
    one stay as they are: they may be the script's.

    Args:
        args: what was typed.
        valued: the options that take a value.
    """
    given: list[str] = []
    for position, arg in enumerate(args):
        before = given[-1] if given else ""
        bundled = len(before) > 2 and before[1] != "-" and f"-{before[-1]}" in valued  # -mn 2
        is_value = (before in valued or bundled) and not (before == "--http" and not _ADDRESS.fullmatch(arg))
        if before == "--http" and not is_value:
            given[-1] = "--http="
        given.append(arg)
        if not is_value and (arg in ("-", "--") or not arg.startswith("-")):
            return given + list(args[position + 1 :])
    if given and given[-1] == "--http":
        given[-1] = "--http="
    return given


def reflow(commands: typer.Typer) -> None:
    """Joins the lines of each paragraph of the help texts: rich breaks lines where the terminal ends."""
    for command in commands.registered_commands:
        text = command.help or getdoc(command.callback) or ""
        command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def _without_types(params: list[Any]) -> list[Any]:
    for each in params:
        if getattr(each, "is_flag", False):
            each.metavar = ""
        elif each.param_type_name == "argument":
            each.display_type_rich = lambda ctx: None  # else typer adds <str> to the name, from 0.26 on
    return params


def _typed(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    name += "..." if argument.nargs != 1 and not name.endswith("...") else ""
    return name if argument.required else f"[{name}]"


@cache
def _plugged_in() -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points  # most commands need no plug-in

    return {entry.name: entry for entry in entry_points(group="paceline.commands")}


def _command_of(point: EntryPoint) -> Any:
    """Returns a plug-in's command; if it cannot be loaded, one whose help and error say why."""
    from paceline.cli.plug_ins import errors_of

    try:
        with errors_of(point):
            command = point.load()
            reflow(command)
            found = typer.main.get_command(command)
    except UsageError as error:
        return _broken(str(error))
    found.rich_help_panel = "Plug-ins"  # type: ignore[attr-defined]  # as `Typer.command` sets it
    return found


def _broken(why: str) -> Any:
    """Returns a command whose help and error say why there is none."""
    from rich.markup import escape

    broken = typer.Typer()

    @broken.command(help=escape(why), context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
    def fail() -> None:
        with one_line_errors():
            raise UsageError(why)

    return typer.main.get_command(broken)
