"""What differs between two manifests, in words. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from paceline.errors import PacelineError, SettingsMismatch, SizeMismatch
from paceline.links.base import Peer

__all__ = ["difference"]


def difference(mine: bytes, theirs: bytes, donor: Peer) -> PacelineError:
    """The error for a worker that trains something else than the line does; it names the first difference.

    Args:
        mine: this worker's manifest.
        theirs: the line's.
        donor: who gave that.
    """
    try:
        here, there = json.loads(mine), json.loads(theirs)
        found = next(_settings(here["settings"], there["settings"]), None)
        if found is not None:
            return SettingsMismatch(f"{found} on {donor} and the line's other members")
        found = next(_parts(here["parts"], there["parts"]), None)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return SettingsMismatch(f"{donor} trains something else, and does not say what: {error!s:.200}")
    return SizeMismatch(
        f"{found or 'what this worker trains is not what is trained'} on {donor} and the line's other members"
    )


def _settings(here: dict[str, str], there: dict[str, str]) -> Iterator[str]:
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            yield f"{name} is {here.get(name, 'not set')} here but {there.get(name, 'not set')}"


def _parts(here: dict[str, Any], there: dict[str, Any]) -> Iterator[str]:
    for name in sorted(here.keys() | there.keys()):
        if name not in here or name not in there:
            yield f"the training state has {'no ' if name not in here else 'a '}part {name!r} here, which differs"
            continue
        (kind, arrays), (their_kind, their_arrays) = here[name], there[name]
        if kind != their_kind:
            yield f"{name} is a {kind} here but a {their_kind}"
        mine, others = ({path: (dtype, shape) for path, dtype, shape in each} for each in (arrays, their_arrays))
        for path in [*mine, *(path for path in others if path not in mine)]:
            if mine.get(path) != others.get(path):
                yield f"{name}: {path!r} is {_words(mine.get(path))} here but {_words(others.get(path))}"


def _words(described: tuple[str, list[int]] | None) -> str:
    return "not there" if described is None else f"{described[0]}{described[1]}"
