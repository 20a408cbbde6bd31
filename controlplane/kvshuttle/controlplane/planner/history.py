"""What the turns before say of the next: how long its prompt is, and what is where."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvshuttle.controlplane.model.terms import ReplicaState

if TYPE_CHECKING:
    from collections.abc import Collection

    from kvshuttle.controlplane.model.replica import Replica
    from kvshuttle.controlplane.model.session import Session
    from kvshuttle.controlplane.model.worker import Worker

__all__ = ["expected_tokens", "has", "missed"]

HELD_SHARE = 0.5
"""A turn at decode alone that found less than this share of its history in decode's cache was a
mistake: the client changes its history, and prefill had better compute it."""


def expected_tokens(session: Session, asked: int) -> int:
    """A prompt's length: what the engine counted for the last turn, and what the caller's guess has
    grown by since, in the proportion in which it was wrong then. The guess alone for a first turn;
    0 where there is none."""
    last = session.last_ended()
    if not asked or last is None or last.usage is None or not last.asked_tokens:
        return asked
    counted = last.usage.prompt_tokens
    if not counted:
        return asked
    ratio = min(max(counted / last.asked_tokens, 0.125), 8.0)
    if asked < last.asked_tokens:
        return max(1, int(asked * ratio))
    return int(counted + (asked - last.asked_tokens) * ratio)


def has(copies: Collection[Replica], worker: Worker, replica: Replica) -> bool:
    """Whether a worker has all of a replica in its own cache."""
    return any(
        one.worker == worker.ref
        and one.head_hash == replica.head_hash
        and one.state is not ReplicaState.GONE
        and one.num_blocks >= replica.num_blocks
        for one in copies
        if one is not replica
    )


def missed(session: Session) -> bool:
    """Whether a turn at decode alone has just been a mistake."""
    last = session.last_ended()
    if last is None or last.usage is None or last.plan.reason != "SHORT_PROMPT":
        return False
    hoped = min(last.plan.reusable_tokens, last.usage.prompt_tokens)
    return last.usage.cached_tokens < HELD_SHARE * hoped
