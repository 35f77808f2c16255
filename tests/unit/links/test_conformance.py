"""The published check passes on local links, and fails, by the rule's name, on links that break one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from paceline._links.base import Link, LinkEnded, LinkTimeout
from paceline._links.conformance import RULES, LinkPatience, check_rule, rule_7_lend
from paceline._links.frame import Frame
from paceline.testing import LinkPair, check_link, local_link_pair


def test_local_links_keep_the_rules() -> None:
    check_link(local_link_pair)


class Broken(Link):
    """A good link, wrapped so that it breaks one rule."""

    def __init__(self, link: Link) -> None:
        self.peer = link.peer
        self.kind = link.kind
        self.link = link
        self.held: Frame | None = None

    def send(self, frame: Frame, deadline: float) -> None:
        self.link.send(frame, deadline)

    def recv(self, deadline: float, into: memoryview | None = None) -> Frame:
        return self.link.recv(deadline)

    def on_readable(self, notify: Callable[[], None]) -> None:
        self.link.on_readable(notify)

    def close(self, deadline: float) -> None:
        self.link.close(deadline)


class Twice(Broken):
    def send(self, frame: Frame, deadline: float) -> None:
        self.link.send(frame, deadline)
        self.link.send(frame, deadline)


class Swapped(Broken):
    def send(self, frame: Frame, deadline: float) -> None:
        if self.held is None:
            self.held = frame
            return
        self.link.send(frame, deadline)
        self.link.send(self.held, deadline)
        self.held = None


class Truncated(Broken):
    def recv(self, deadline: float, into: memoryview | None = None) -> Frame:
        frame = self.link.recv(deadline)
        return replace(frame, payload=bytes(frame.payload)[:-1])


class Aliased(Broken):
    """Keeps the caller's buffer for the first frame, and sends it with the second."""

    def send(self, frame: Frame, deadline: float) -> None:
        if self.held is None and isinstance(frame.payload, memoryview):
            self.held = frame
            return
        if self.held is not None:
            held, self.held = self.held, None
            self.link.send(held, deadline)
        self.link.send(frame, deadline)


class Narrow(Broken):
    """Takes no more where 7 MiB are unread."""

    unread = 0  # of both ends: one sends, the other receives

    def send(self, frame: Frame, deadline: float) -> None:
        if Narrow.unread + len(frame.payload) > 7 << 20:
            raise LinkTimeout("full")
        Narrow.unread += len(frame.payload)
        self.link.send(frame, deadline)

    def recv(self, deadline: float, into: memoryview | None = None) -> Frame:
        frame = self.link.recv(deadline)
        Narrow.unread -= len(frame.payload)
        return frame


class Impatient(Broken):
    def recv(self, deadline: float, into: memoryview | None = None) -> Frame:
        return self.link.recv(0.0)


class Silent(Broken):
    def on_readable(self, notify: Callable[[], None]) -> None:
        notify()


class Deaf(Broken):
    """Does not hear of the failure until its deadline."""

    def recv(self, deadline: float, into: memoryview | None = None) -> Frame:
        while True:
            try:
                return self.link.recv(min(deadline, time.monotonic() + 0.01))
            except LinkTimeout:
                if time.monotonic() >= deadline:
                    raise
            except LinkEnded:
                raise
            except ConnectionError:  # the generation's error
                time.sleep(0.3)
                raise


class Forgetful(Broken):
    """Lends, and does not wait for the reader."""

    def lend(self, frame: Frame, deadline: float) -> None:
        self.link.lend(frame, deadline)


class Lending(Forgetful):
    """As good as the link that it wraps."""

    def await_release(self, deadline: float) -> None:
        self.link.await_release(deadline)

    def recall(self) -> None:
        self.link.recall()

    def release(self) -> None:
        self.link.release()


class Hasty(Lending):
    """Takes back what is being read."""

    def recall(self) -> None:
        pass


class Late(Lending):
    """Puts a payload into place too late."""

    def recv(self, deadline: float, into: memoryview | None = None) -> Frame:
        frame = self.link.recv(deadline)
        if into is None:
            return frame
        self.link.release()
        return replace(frame, payload=into)


class Clinging(Lending):
    """Puts a payload into place, and still waits for its release."""

    def recv(self, deadline: float, into: memoryview | None = None) -> Frame:
        frame = self.link.recv(deadline)
        if into is None:
            return frame
        into[:] = frame.payload
        return replace(frame, payload=into)


class Unmarked(Broken):
    """Says that it has marks, and tells none."""

    def mark(self, number: int, deadline: float) -> bool:
        return True


class Disorderly(Broken):
    def recv(self, deadline: float, into: memoryview | None = None) -> Frame:
        try:
            return self.link.recv(deadline)
        except LinkEnded as error:
            raise LinkEnded(str(error), orderly=not error.orderly) from error


def test_a_correctly_lending_link_keeps_rule_7() -> None:
    with local_link_pair() as good:
        rule_7_lend(replace(good, a=Lending(good.a), b=Lending(good.b)), LinkPatience())


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        (Twice, "rule_1"),
        (Swapped, "rule_1"),
        (Truncated, "rule_1"),
        (Aliased, "rule_2"),
        (Narrow, "rule_2"),
        (Impatient, "rule_3"),
        (Silent, "rule_3"),
        (Deaf, "rule_4"),
        (Disorderly, "rule_4_cut"),
        (Forgetful, "rule_7"),
        (Hasty, "rule_7"),
        (Clinging, "rule_7"),
        (Late, "rule_7"),
        (Unmarked, "rule_8"),
    ],
)
def test_check_link_names_the_rule_that_a_link_breaks(broken: type[Broken], rule: str) -> None:
    patience = LinkPatience(prompt_s=0.1, long_s=1.0)  # what a good link never needs
    # Those alone that it breaks: others are about time too, and a busy machine breaks them for any link.
    rules = [each for each in RULES if each.__name__.startswith(rule)]

    @contextmanager
    def pair() -> Iterator[LinkPair]:
        with local_link_pair() as good:
            yield replace(good, a=broken(good.a), b=broken(good.b))

    with pytest.raises(AssertionError, match=rule):  # noqa: PT012  any of them
        for each in rules:
            check_rule(each, pair, patience)
