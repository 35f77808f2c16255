"""Sentences about the job that each of its workers says: which are new to the user. Pure."""

from __future__ import annotations

from typing import Any

_KEPT = 64
"""Most sentences that are remembered, the latest ones."""


class Notices:
    """The sentences so far, each with the workers that have said it."""

    def __init__(self) -> None:
        self._said: dict[str, set[int]] = {}

    def read(self, pid: int, record: dict[str, Any]) -> str | None:
        """Returns the sentence to show for a worker's record; None if it is no notice, or is shown already.

        A worker says a thing once for each time that it happens. So it has happened again when a worker says it that
        has said it before. The record is as `launcher_pipe.tell_once` sends it.
        """
        text, key = record.get("text"), record.get("key")
        if record.get("kind") != "notice" or not isinstance(text, str):
            return None
        if not isinstance(key, str) or not key:
            key = text
        said = self._said.pop(key, set())
        is_new = not said or pid in said
        self._said[key] = {pid} if is_new else said | {pid}
        while len(self._said) > _KEPT:
            del self._said[next(iter(self._said))]
        return text if is_new else None
