"""Pages of reference that are made of the code: the command line, from typer, and the settings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import typer.main

from paceline.cli.app import app
from paceline.config import ENVIRONMENT, Config

__all__ = ["command_line", "settings"]


def command_line() -> str:
    """Returns a page with every command, its arguments and its options."""
    lines = [
        "# Command line",
        "",
        "This page is made from the commands themselves; `paceline COMMAND --help` shows the same. Addresses and "
        "tokens can also be set by [variables](settings.md).",
        "",
    ]
    for path, command in _commands("paceline", typer.main.get_command(app)):
        lines += [f"## {path}", "", _plain(command.help or ""), ""]
        arguments = [each for each in command.params if each.param_type_name == "argument"]
        options = [
            each for each in command.params if each.param_type_name == "option" and not getattr(each, "hidden", False)
        ]
        usage = " ".join([path, *(["[OPTIONS]"] if options else []), *map(_argument, arguments)])
        lines += ["```text", usage, "```", ""]
        if arguments or options:
            lines += ["| Argument or option | Meaning | Default |", "| --- | --- | --- |"]
            lines += [_row(each) for each in [*arguments, *options]]
            lines.append("")
    return "\n".join(lines)


def _commands(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Yields the commands that do something, with what is typed for them."""
    if not hasattr(command, "list_commands"):
        yield path, command
        return
    for name in sorted(command.list_commands(None)):  # those of plug-ins too
        inner = command.get_command(None, name)
        if not inner.hidden:
            yield from _commands(f"{path} {name}", inner)


def _argument(parameter: Any) -> str:
    name = parameter.metavar or parameter.name.upper()
    name += "..." if parameter.nargs == -1 and not name.endswith("...") else ""
    return name if parameter.required or name.startswith("[") else f"[{name}]"


def _row(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        name = f"`{_argument(parameter)}`"
    else:
        names = ", ".join(f"`{each}`" for each in sorted([*parameter.opts, *parameter.secondary_opts], key=len))
        value = "" if parameter.is_flag or parameter.count else f" {parameter.metavar or _value(parameter)}"
        name = names + value.replace("|", "\\|")
    meaning = _plain(getattr(parameter, "help", None) or "").replace("|", "\\|")
    if variable := parameter.envvar:
        meaning += f" Variable: `{variable}`."
    default = parameter.default
    shown = "" if default in (None, False, (), []) or callable(default) else f"`{default}`"
    return f"| {name} | {meaning} | {shown} |"


def _value(parameter: Any) -> str:
    """Returns a word for the value of an option that names none."""
    return "NUMBER" if isinstance(parameter.default, int | float) else str(parameter.name).upper()


def _plain(text: str) -> str:
    """Without rich's markup, and without words that Markdown would read as HTML."""
    return re.sub(r"\[/?(?:bold|dim|italic|cyan|green|red|yellow)[^]]*\]", "", text).replace("<", "&lt;").strip()


def settings() -> str:
    """Returns a page with every PACELINE_* variable and every field of `paceline.Config`."""
    defaults = {f"PACELINE_{field.name.upper()}": field.default for field in fields(Config)}
    lines = [
        "# Settings",
        "",
        "An argument takes precedence over a variable, a variable over the default. Timeouts are in seconds. All "
        "workers of a job need the same `PACELINE_FAILURE_TIMEOUT` and `PACELINE_TUNING`.",
        "",
        "| Variable | Meaning | Default |",
        "| --- | --- | --- |",
    ]
    for name, meaning in ENVIRONMENT.items():
        default = defaults.get(name, "")
        shown = f"`{default:g}`" if isinstance(default, float) else ""
        lines.append(f"| `{name}` | {_plain(meaning[0].upper() + meaning[1:])} | {shown} |")
    names = ", ".join(f"`{field.name}`" for field in fields(Config))
    lines += [
        "",
        f"In Python, `paceline.Config` has {names}: `paceline.join(config=paceline.Config(step_timeout=60))`.",
        "",
    ]
    return "\n".join(lines)
