"""Which conversation a request belongs to, by what was said before."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from kvshuttle.gateway import limits
from kvshuttle.gateway.conversations import Conversations, Place

Said = list[Any]


def numbered() -> Any:
    count = itertools.count(1)
    return lambda: str(next(count))


@pytest.fixture
def known() -> Conversations:
    return Conversations(numbered())


def turn(known: Conversations, said: Said, answer: Said | None = None, key: str = "k") -> Place:
    """A request that was answered."""
    place = known.place("t", key, said)
    place.answered(answer)
    place.close()
    return place


def test_a_conversation_goes_on_from_its_last_answer(known: Conversations) -> None:
    first = turn(known, ["u1"], ["a1"])
    second = turn(known, ["u1", "a1", "u2"], ["call", "text"])
    third = turn(known, ["u1", "a1", "u2", "call", "text", "result"], ["a3"])
    assert [one.session_id for one in (first, second, third)] == ["k"] * 3
    assert [one.how for one in (first, second, third)] == ["begun", "prefix", "prefix"]
    assert len(known) == 1


def test_an_answer_that_comes_back_in_another_form_does_not_end_it(known: Conversations) -> None:
    for answer in (["a1"], None):
        key = str(answer)
        turn(known, ["u1"], answer, key)
        assert turn(known, ["u1", "other", "u2"], ["a2"], key).session_id == key


def test_two_that_begin_equally_at_once_are_two(known: Conversations) -> None:
    one, other = known.place("t", "k", ["u1"]), known.place("t", "k", ["u1"])
    assert (one.session_id, other.session_id, other.how) == ("k", "k-1", "forked")
    other.answered(["b"])
    one.answered(["a"])
    # Each goes on as itself, by its own answer.
    assert turn(known, ["u1", "b", "u2"], ["b2"]).session_id == "k-1"
    assert turn(known, ["u1", "a", "u2"], ["a2"]).session_id == "k"
    assert turn(known, ["u1", "b", "u2", "b2", "u3"]).session_id == "k-1"


def test_two_with_equal_answers_too_are_two_as_well(known: Conversations) -> None:
    places = [known.place("t", "k", ["u1"]) for _ in range(2)]
    for place in places:
        place.answered(["a"])
    later = [known.place("t", "k", ["u1", "a", "u2"]) for _ in range(2)]
    assert {one.session_id for one in later} == {one.session_id for one in places}


def test_one_after_the_other_share_a_session_until_they_part(known: Conversations) -> None:
    """A prompt that is sent again and again is not a session each time."""
    assert [turn(known, ["u1"], [answer]).session_id for answer in "abc"] == ["k"] * 3
    assert turn(known, ["u1", "a", "u2"], ["a2"]).session_id == "k"
    assert turn(known, ["u1", "b", "u2"], ["b2"]).session_id == "k-1"
    assert turn(known, ["u1", "a", "u2", "a2", "u3"]).session_id == "k"
    assert turn(known, ["u1", "b", "u2", "b2", "u3"]).session_id == "k-1"


def test_who_goes_on_from_an_earlier_point_is_another(known: Conversations) -> None:
    turn(known, ["u1"], ["a1"])
    turn(known, ["u1", "a1", "u2"], ["a2"])
    fork = turn(known, ["u1", "a1", "other"], ["b2"])
    assert (fork.session_id, fork.how) == ("k-1", "forked")
    assert turn(known, ["u1", "a1", "other", "b2", "u3"]).session_id == "k-1"
    assert turn(known, ["u1", "a1", "u2", "a2", "u3"]).session_id == "k"


def test_the_longest_beginning_counts(known: Conversations) -> None:
    """Two answers to one prompt; one of them is the other's beginning."""
    one, other = known.place("t", "k", ["u1"]), known.place("t", "k", ["u1"])
    one.answered(["a"])
    other.answered(["a", "more"])
    assert turn(known, ["u1", "a", "more", "u2"]).session_id == other.session_id
    assert turn(known, ["u1", "a", "u2"]).session_id == one.session_id


def test_an_edited_history_with_its_last_answer_in_it_is_still_that(known: Conversations) -> None:
    """As with reminders that an agent puts into its newest message only."""
    turn(known, ["u1"], ["a1"])
    turn(known, ["u1", "a1", "u2 + reminder"], ["a2"])
    assert turn(known, ["u1", "a1", "u2", "a2", "u3 + reminder"], ["a3"]).session_id == "k"
    assert turn(known, ["u1", "a1", "u2", "a2", "u3", "a3", "u4"]).session_id == "k"


def test_a_turn_that_failed_leaves_the_state_before_it(known: Conversations) -> None:
    known.place("t", "k", ["u1"]).close()
    again = known.place("t", "k", ["u1"])
    assert again.session_id == "k"
    again.answered(["a1"])
    known.place("t", "k", ["u1", "a1", "u2"]).close()
    # Sent again, or with other words, or with half an answer.
    for said in (["u2"], ["other"], ["u2", "half", "u3"]):
        place = known.place("t", "k", ["u1", "a1", *said])
        assert place.session_id == "k"
        place.close()


def test_other_keys_and_tenants_have_nothing_in_common(known: Conversations) -> None:
    turn(known, ["u1"], ["a1"])
    assert turn(known, ["u1", "a1", "u2"], key="other").session_id == "other"
    assert known.place("v", "k", ["u1", "a1", "u2"]).how == "begun"


def test_what_was_not_seen_here_has_its_first_name(known: Conversations) -> None:
    """Another gateway had the turns before, or this one is new: all of them call it that."""
    assert turn(known, ["u1", "a1", "u2", "a2", "u3"]).session_id == "k"


def test_answered_counts_once_and_close_after_it_changes_nothing(known: Conversations) -> None:
    place = known.place("t", "k", ["u1"])
    place.answered(["a"])
    later = known.place("t", "k", ["u1", "a", "u2"])
    place.answered(["b"])
    place.close()
    assert known.place("t", "k", ["u1", "a", "u2"]).session_id != later.session_id


def test_answers_to_one_prompt_are_bounded(known: Conversations) -> None:
    for number in range(limits.ANSWERS_OF_A_PROMPT + 1):
        turn(known, ["u1"], [f"a{number}"])
    (one,) = known._tenants["t"].known.values()
    assert len(one.answers) == limits.ANSWERS_OF_A_PROMPT


def test_tenants_share_the_room() -> None:
    known = Conversations(numbered(), limit=4)
    for number in range(6):
        known.place("a", f"k{number}", ["u"]).answered(["a"])
    assert list(known._tenants["a"].known) == ["k2", "k3", "k4", "k5"]
    known.place("a", "k2", ["u"]).close()
    for number in range(9):
        known.place("b", f"k{number}", ["u"]).close()
        assert len(known) == 4
    # The one that was used last is kept; nobody gets more than an equal part of a full room.
    assert list(known._tenants["a"].known) == ["k5", "k2"]
    assert list(known._tenants["b"].known) == ["k7", "k8"]


def test_what_was_forgotten_while_it_was_answered_does_no_harm() -> None:
    known = Conversations(numbered(), limit=1)
    place = known.place("t", "k", ["u1"])
    known.place("t", "other", ["u1"]).close()
    place.answered(["a1"])
    assert len(known) == 1
    assert known.place("t", "k", ["u1", "a1", "u2"]).session_id == "k"


class _Talk:
    """A client's conversation."""

    def __init__(self, said: Said) -> None:
        self.said = said
        self.session = ""
        self.open: Place | None = None
        # How much of it was said when each answer was whole.
        self.turns: list[int] = []


class Clients(RuleBasedStateMachine):
    """Clients that begin, go on, fork and fail in any order. All answers differ."""

    talks: Bundle[_Talk] = Bundle("talks")
    limit = 1_000
    crowded = False

    def __init__(self) -> None:
        super().__init__()
        self.known = Conversations(numbered(), self.limit)
        self.numbers = itertools.count()
        self.all: list[_Talk] = []
        # Who has a session's last answer, and nobody else was there since.
        self.last: dict[str, _Talk] = {}

    def ask(self, talk: _Talk, words: str) -> None:
        talk.said = [*talk.said, words]
        talk.open = self.known.place("t", "k", talk.said)
        running = [one.session for one in self.all if one is not talk and one.open is not None]
        assert self.crowded or talk.open.session_id not in running
        talk.session = talk.open.session_id
        if self.last.get(talk.session) is not talk:
            self.last.pop(talk.session, None)

    def new(self, said: Said) -> _Talk:
        talk = _Talk(said)
        self.all.append(talk)
        return talk

    @rule(target=talks, words=st.sampled_from("xy"))
    def begin(self, words: str) -> _Talk:
        talk = self.new([])
        self.ask(talk, words)
        return talk

    @rule(talk=talks)
    def answer(self, talk: _Talk) -> None:
        if talk.open is not None:
            answer = [f"a{next(self.numbers)}"]
            talk.open.answered(answer)
            talk.said = [*talk.said, *answer]
            talk.turns.append(len(talk.said))
            talk.open = None
            self.last[talk.session] = talk

    @rule(talk=talks)
    def fail(self, talk: _Talk) -> None:
        if talk.open is not None:
            talk.open.close()
            talk.said = talk.said[:-1]
            talk.open = None

    @rule(talk=talks, words=st.sampled_from("xy"))
    def go_on(self, talk: _Talk, words: str) -> None:
        if talk.open is not None or not talk.turns:
            return
        session, own = talk.session, self.last.get(talk.session) is talk
        self.ask(talk, words)
        if own and not self.crowded:
            assert talk.session == session

    @rule(target=talks, talk=talks, data=st.data())
    def fork(self, talk: _Talk, data: st.DataObject) -> Any:
        if talk.open is not None or len(talk.turns) < 2:
            return multiple()
        at = data.draw(st.sampled_from(talk.turns[:-1]))
        fork = self.new(talk.said[:at])
        own = self.last.get(talk.session) is talk
        self.ask(fork, f"fork{next(self.numbers)}")
        if own and not self.crowded:
            assert fork.session != talk.session
        fork.turns.append(at)
        return fork

    @invariant()
    def all_is_bounded_and_fits_together(self) -> None:
        tenant = self.known._tenants.get("t")
        if tenant is None:
            return
        assert len(self.known) == len(tenant.known) <= self.limit
        marks = {mark: dict(found) for mark, found in tenant._by_mark.items()}
        answered = {one.session for one in self.all if one.open is not None}
        for one in tenant.known.values():
            for mark in one.marks():
                # What was forgotten while it was answered may be known again.
                if one.id not in answered or self.crowded:
                    assert marks.get(mark, {}).pop(one.id, one) is one
                    assert self.crowded or one.id in tenant._by_mark[mark]
        assert not any(marks.values())


TestClients = Clients.TestCase


class CrowdedClients(Clients):
    """There is no room for all."""

    limit = 3
    crowded = True


TestCrowdedClients = CrowdedClients.TestCase
