"""The lease's life cycle, step by step."""

from __future__ import annotations

import pytest

from kvshuttle.controlplane.model.errors import IllegalTransitionError
from kvshuttle.controlplane.model.lease import TRANSITIONS, Lease
from kvshuttle.controlplane.model.terms import (
    BlockRange,
    Direction,
    LeaseState,
    SessionKey,
    WorkerRef,
)

NEW = Lease(
    lease_id="l",
    seq=1,
    key=SessionKey("t", "s"),
    turn=1,
    turn_token="x",
    direction=Direction.RETURN,
    source=WorkerRef("d", 1),
    destination=WorkerRef("p", 2),
    epoch=1,
    ttl_ns=30,
    create_ns=100,
    ask_head=b"h",
    ask_range=BlockRange(0, 4),
)
GRANTED = NEW.granted(BlockRange(0, 4), b"h", 105)
ACTIVE = GRANTED.active()
ENDS = [s for s in LeaseState if not s.open]


def in_state(state: LeaseState) -> Lease:
    return {
        LeaseState.PENDING: NEW,
        LeaseState.GRANTED: GRANTED,
        LeaseState.ACTIVE: ACTIVE,
    }.get(state) or GRANTED.ended(state, "x", 110)


@pytest.mark.parametrize("before", list(LeaseState))
@pytest.mark.parametrize("after", list(LeaseState))
def test_every_pair_of_states_is_a_step_or_raises(before: LeaseState, after: LeaseState) -> None:
    lease = in_state(before)

    def step() -> Lease:
        if after is LeaseState.GRANTED:
            return lease.granted(BlockRange(0, 4), b"h", 105)
        if after is LeaseState.ACTIVE:
            return lease.active()
        return lease.ended(after, "x", 110)

    if after in TRANSITIONS[before]:
        assert step().state is after
    elif after is not LeaseState.PENDING:
        with pytest.raises(IllegalTransitionError):
            step()


def test_a_grants_deadline_counts_from_the_grant() -> None:
    assert GRANTED.deadline_ns == 135
    assert GRANTED.version > NEW.version


@pytest.mark.parametrize("end", ENDS)
def test_an_end_says_nothing_of_the_reader(end: LeaseState) -> None:
    assert not ACTIVE.ended(end, "x", 110).reader_stopped


def test_a_second_stop_keeps_the_first_reason() -> None:
    once = GRANTED.stopping(LeaseState.REVOKED, "TURN_ENDED")
    twice = once.stopping(LeaseState.FAILED, "SOURCE_LOST")
    assert twice.stop == once.stop
    assert twice.version > once.version


def test_a_renewal_is_for_granted_leases_that_nobody_stops() -> None:
    for lease in (NEW, GRANTED.stopping(LeaseState.REVOKED, "x")):
        with pytest.raises(IllegalTransitionError):
            lease.renewing(50, 110)


def test_a_renewal_never_shortens() -> None:
    renewed = GRANTED.renewing(1, 110).renewed_at_source(111)
    assert renewed.deadline_ns == GRANTED.deadline_ns
    longer = GRANTED.renewing(500, 110).renewed_at_source(111)
    assert longer.deadline_ns == 611
    with pytest.raises(IllegalTransitionError):
        longer.renewed_at_source(112)
