"""A member's place in its line, rule by rule."""

import pytest

from paceline.checkpoint.tag import Tag
from paceline.elastic.place import Meet, Phase, Place, Take, ViewNews

START = Tag(0, 0)


def news(generation: int, base: Tag | None, *newcomers: int) -> ViewNews:
    return ViewNews(generation, 0, base, frozenset(newcomers))


def in_view(held: Tag = START, generation: int = 2) -> Place:
    """A member that may begin a step."""
    place = Place(held)
    assert place.formed(news(generation, held)) is None
    return place


@pytest.mark.parametrize(
    ("held", "view", "says"),
    [
        (START, news(1, None), Meet(1, START, False)),  # nobody knows yet what the others hold
        (START, news(2, START), None),
        (START, news(2, Tag(1, 5), 0), Take(Tag(1, 5))),
        (Tag(2, 6), news(3, Tag(2, 5)), Meet(3, Tag(2, 6), True)),  # its generation went on: it must not be lost
        (Tag(2, 6), news(3, Tag(2, 5), 0), Take(Tag(2, 5))),  # a newcomer takes what the line holds
    ],
)
def test_a_view_forms(held: Tag, view: ViewNews, says: Meet | Take | None) -> None:
    assert Place(held).formed(view) == says


def test_an_applied_step_gives_a_tag_and_an_undone_one_none() -> None:
    place = in_view()
    place.begin()
    place.applied(1)
    assert place.held == Tag(2, 1)
    place.begin()
    assert place.meet() == Meet(2, Tag(2, 1), True)


def test_an_interrupted_update_holds_nothing_until_the_base_is_taken() -> None:
    place = in_view()
    place.begin()
    place.spoiled()
    assert place.meet() == Meet(2, None, True)
    assert place.catch_up(2, Tag(2, 1)) == Take(Tag(2, 1))
    assert place.took() == Meet(2, Tag(2, 1), True)


def test_until_a_base_is_taken_what_was_held_is_held() -> None:
    place = Place(Tag(1, 3))
    place.formed(news(5, Tag(4, 9), 0))
    assert place.meet() == Meet(5, Tag(1, 3), False)


def test_a_base_that_is_taken_for_a_view_lets_a_step_begin() -> None:
    place = Place(START)
    place.formed(news(5, Tag(4, 9), 0))
    assert place.took() is None
    assert (place.phase, place.held, place.holds_base) == (Phase.READY, Tag(4, 9), True)


def test_a_meeting_that_is_past_asks_for_nothing() -> None:
    place = in_view()
    assert place.catch_up(2, Tag(2, 1)) is None  # it has not met
    place.meet()
    assert place.catch_up(1, Tag(1, 1)) is None


def test_an_old_view_changes_nothing() -> None:
    place = in_view(generation=7)
    assert place.formed(news(6, START)) is None
    assert place.generation == 7


def test_it_goes_on_in_its_generation_if_the_coordinator_is_away() -> None:
    place = in_view()
    place.begin()
    place.applied(1)
    place.meet()
    place.go_on()
    place.begin()
    place.applied(2)
    assert place.formed(news(3, Tag(2, 1))) == Meet(3, Tag(2, 2), True)


def test_who_is_cast_out_brings_what_it_holds_and_leads_nothing() -> None:
    place = in_view(Tag(4, 2), 5)
    assert place.cast_out() == Meet(0, Tag(4, 2), False)
    assert place.formed(news(6, Tag(5, 3), 0)) == Take(Tag(5, 3))
