"""A member's place in its line, rule by rule."""

import pytest

from paceline_protocol import WHOLE, Meet, MemberState, MemberView, Phase, Share, Tag, Take

START = Tag(0, 0)


def news(generation: int, base: Tag | None, *newcomers: int) -> MemberView:
    return MemberView(generation, 0, base, frozenset(newcomers))


def in_view(held: Tag = START, generation: int = 2) -> MemberState:
    """A member that may begin a step."""
    place = MemberState(held)
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
def test_the_answer_to_a_new_view_depends_on_the_held_tag(
    held: Tag, view: MemberView, says: Meet | Take | None
) -> None:
    assert MemberState(held).formed(view) == says


def test_an_applied_step_gives_a_new_tag_and_an_undone_step_none() -> None:
    place = in_view()
    place.begin()
    place.applied(1)
    assert place.held == Tag(2, 1)
    place.begin()
    assert place.meet() == Meet(2, Tag(2, 1), True)


def test_a_step_that_was_not_entered_leaves_the_member_ready() -> None:
    place = in_view()
    place.begin()
    place.step_dropped()
    assert (place.phase, place.held) == (Phase.READY, START)


def test_no_tag_is_held_after_an_interrupted_update_until_a_take() -> None:
    place = in_view()
    place.begin()
    place.spoiled()
    assert place.meet() == Meet(2, None, True, shares=())
    assert place.catch_up(2, Tag(2, 1)) == Take(Tag(2, 1))
    assert place.took() == Meet(2, Tag(2, 1), True)


def test_a_member_keeps_its_old_tag_until_a_base_is_taken() -> None:
    place = MemberState(Tag(1, 3))
    place.formed(news(5, Tag(4, 9), 0))
    assert place.meet() == Meet(5, Tag(1, 3), False)


def test_taking_the_base_of_a_view_makes_the_member_ready() -> None:
    place = MemberState(START)
    place.formed(news(5, Tag(4, 9), 0))
    assert place.took() is None
    assert (place.phase, place.held, place.holds_base) == (Phase.READY, Tag(4, 9), True)


def test_catch_up_outside_the_current_meeting_is_ignored() -> None:
    place = in_view()
    assert place.catch_up(2, Tag(2, 1)) is None  # it has not met
    place.meet()
    assert place.catch_up(1, Tag(1, 1)) is None


def test_an_old_or_repeated_view_changes_nothing() -> None:
    place = in_view(generation=7)
    place.begin()
    place.applied(1)
    for generation in (6, 7):  # one that is past, and its own, told a second time
        assert place.formed(news(generation, START)) is None
        assert (place.generation, place.held, place.phase) == (7, Tag(7, 1), Phase.READY)


def test_a_member_goes_on_in_its_generation_without_the_coordinator() -> None:
    place = in_view()
    place.begin()
    place.applied(1)
    place.meet()
    place.go_on()
    place.begin()
    place.applied(2)
    assert place.formed(news(3, Tag(2, 1))) == Meet(3, Tag(2, 2), True)


def test_a_cast_out_member_brings_its_tag_but_does_not_lead() -> None:
    place = in_view(Tag(4, 2), 5)
    assert place.cast_out() == Meet(0, Tag(4, 2), False)
    assert place.formed(news(6, Tag(5, 3), 0)) == Take(Tag(5, 3))


# Of a state that is spread --------------------------------------------------------------------------------------------

FIRST, SECOND = Share(0, 2), Share(1, 2)


def in_spread_view(rank: int = 0, world: int = 2, *kept: Share) -> MemberState:
    """A member that may begin a step, and kept more than its share."""
    place = MemberState(START, 0, (Share(rank, world), *kept))
    assert place.formed(MemberView(2, rank, START, frozenset(), world)) is None
    return place


def test_a_meet_states_the_held_shares_or_a_stored_checkpoint() -> None:
    assert MemberState(START, 0, (FIRST, WHOLE)).meet() == Meet(0, START, False, node_size=0, shares=(FIRST, WHOLE))
    assert MemberState(Tag(1, 2), 2, stored=True).meet() == Meet(
        0, Tag(1, 2), False, node_size=2, shares=(), stored=True
    )


@pytest.mark.parametrize(
    ("shares", "rank", "enters"),
    [((FIRST, WHOLE), 0, True), ((WHOLE, FIRST), 0, True), ((SECOND,), 0, False), ((SECOND,), 1, True)],
)
def test_a_view_is_entered_only_with_the_share_of_its_seat(shares: tuple[Share, ...], rank: int, enters: bool) -> None:
    place = MemberState(START, 0, shares)
    says = place.formed(MemberView(2, rank, START, frozenset(), 2))
    assert (says is None) == enters
    assert isinstance(says, Meet) != enters
    if enters:
        assert place.shares[0] == Share(rank, 2), "it trains on that one"
        assert set(place.shares) == set(shares), "and keeps the rest"


def test_a_newcomer_takes_its_share_before_the_view_forms() -> None:
    place = MemberState(START, 0)
    place.meet()
    assert place.catch_up(0, Tag(4, 9), SECOND) == Take(Tag(4, 9), SECOND)
    assert place.took() == Meet(0, Tag(4, 9), False, node_size=0, shares=(SECOND,))
    assert place.formed(MemberView(5, 1, Tag(4, 9), frozenset({1}), 2)) is None
    assert place.holds_base


def test_old_shares_are_kept_beside_the_new_one_until_all_have_begun() -> None:
    place = in_spread_view()
    place.begin()
    place.applied(1)
    place.meet()
    assert place.catch_up(2, Tag(2, 1), Share(1, 3), own=True) == Take(Tag(2, 1), Share(1, 3), own=True)
    assert place.took() == Meet(2, Tag(2, 1), True, node_size=0, shares=(Share(1, 3), FIRST))
    place.formed(MemberView(3, 1, Tag(2, 1), frozenset({2}), 3))
    assert place.shares == (Share(1, 3), FIRST)
    place.all_began()
    assert place.shares == (Share(1, 3),)


def test_shares_of_another_state_are_dropped() -> None:
    place = in_spread_view()
    place.meet()
    place.catch_up(2, Tag(2, 1), SECOND)
    assert place.took() == Meet(2, Tag(2, 1), True, node_size=0, shares=(SECOND,))


def test_a_take_that_fails_changes_nothing() -> None:
    place = in_spread_view()
    place.meet()
    place.catch_up(2, START, SECOND, own=True)
    assert place.meet() == Meet(2, START, True, node_size=0, shares=(FIRST,))


def prepared() -> MemberState:
    """It has sent the second word of step 1, and not seen it complete."""
    place = in_spread_view()
    place.begin()
    place.prepare(1)
    assert place.meet() == Meet(2, START, True, node_size=0, shares=(FIRST,), prepared=Tag(2, 1))
    return place


def test_a_prepared_member_finishes_the_step_that_others_applied() -> None:
    place = prepared()
    assert place.catch_up(2, Tag(2, 1), WHOLE, own=True) == Take(Tag(2, 1), FIRST, finish=True)
    assert place.took() == Meet(2, Tag(2, 1), True, node_size=0, shares=(FIRST,))


def test_copies_are_kept_when_all_have_begun_and_finished_with_the_step() -> None:
    place = in_spread_view(0, 2, WHOLE)
    place.begin()
    place.copied((SECOND,))
    assert place.shares == (FIRST, SECOND, WHOLE)
    place.all_began()
    place.prepare(1)
    assert place.meet() == Meet(2, START, True, node_size=0, shares=(FIRST, SECOND), prepared=Tag(2, 1))
    place.catch_up(2, Tag(2, 1), WHOLE)
    assert place.took() == Meet(2, Tag(2, 1), True, node_size=0, shares=(FIRST, SECOND))
    assert place.formed(MemberView(3, 1, Tag(2, 1), frozenset(), 2)) is None
    assert place.shares == (SECOND, FIRST)
    place.begin()
    place.all_began()
    assert place.shares == (SECOND,), "in the next view it takes its copies anew"


def test_a_member_reports_at_most_64_shares() -> None:
    shares = tuple(Share(0, parts) for parts in range(2, 102))
    assert MemberState(START, 0, shares).meet().shares == shares[:64]


@pytest.mark.parametrize("base", [START, Tag(1, 1), Tag(2, 2)])
def test_a_prepared_step_other_than_the_base_is_undone(base: Tag) -> None:
    place = prepared()
    assert place.catch_up(2, base, SECOND, own=base == START) == Take(base, SECOND, base == START)
    assert place.prepared is None
    place.took()
    assert place.held == base


def test_a_view_from_the_old_base_clears_the_prepared_step() -> None:
    place = prepared()
    assert place.formed(MemberView(3, 0, START, frozenset(), 2)) is None
    assert place.prepared is None


def test_a_cast_out_member_stays_prepared_and_is_unproven() -> None:
    place = prepared()
    assert place.cast_out() == Meet(0, START, False, node_size=0, shares=(FIRST,), prepared=Tag(2, 1), unproven=True)
    assert place.catch_up(0, Tag(2, 1)) == Take(Tag(2, 1), FIRST, finish=True)


def test_an_interrupted_update_leaves_no_share() -> None:
    place = in_spread_view()
    place.begin()
    place.spoiled()
    assert place.meet() == Meet(2, None, True, node_size=0, shares=())


def test_a_member_of_a_lost_state_brings_only_its_checkpoint_tag() -> None:
    place = prepared()
    assert place.lost(Tag(1, 4)) == Meet(0, Tag(1, 4), False, node_size=0, shares=(), stored=True)
    place.found(Tag(1, 2))  # the other was removed meanwhile, or is damaged
    assert place.held == Tag(1, 2)
    place.catch_up(0, Tag(1, 2), SECOND)
    assert place.took() == Meet(0, Tag(1, 2), False, node_size=0, shares=(SECOND,))
    place.found(Tag(1, 9))
    assert place.held == Tag(1, 2), "what it holds comes from no checkpoint now"


@pytest.mark.parametrize(("node_size", "may"), [(1, True), (0, False), (2, False)])
def test_may_go_on_is_false_for_a_sharded_state(node_size: int, may: bool) -> None:
    place = MemberState(START, node_size, (Share(0, node_size or 2),))
    place.formed(MemberView(2, 0, START, frozenset(), 2))
    place.begin()
    assert not place.may_go_on
    place.applied(1)
    place.meet()
    assert place.may_go_on == may
