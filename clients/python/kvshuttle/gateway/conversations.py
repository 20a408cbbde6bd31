"""Conversations that name no session, told apart by what was said in them.

A conversation's latest state is its last prompt and the answer to it. A request belongs to the one
whose state is the longest beginning of what the request says. One that begins like a conversation
that is known, but goes on from an earlier point of it, or while that one is being answered, is
another conversation. Only hashes are kept, no texts.

No wrong guess does harm: KV is matched by the hash of its tokens, never by the session's name.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Literal

from kvshuttle.gateway import limits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["Conversations", "How", "Place"]

How = Literal["begun", "prefix", "forked"]
_DIGEST_BYTES = 16


class _Conversation:
    """One that is known: its session, and the marks by which it is found."""

    __slots__ = ("answers", "id", "key", "last_piece", "prompt")

    def __init__(self, key: str, session_id: str) -> None:
        self.key = key
        self.id = session_id
        # Its latest prompt, and what it is with each of the answers that it got.
        self.prompt: bytes | None = None
        self.answers: list[bytes] = []
        # The end of its latest answer, to be found where something before it was edited.
        self.last_piece: bytes | None = None

    def marks(self) -> list[bytes]:
        """All that it is found by."""
        return [mark for mark in (self.prompt, *self.answers, self.last_piece) if mark is not None]


class _Tenant:
    """One tenant's, the one that was used last at the end."""

    def __init__(self) -> None:
        self.known: OrderedDict[str, _Conversation] = OrderedDict()
        # Those that can be gone on from: none that is being answered. Conversations with equal
        # beginnings have marks in common.
        self._by_mark: dict[bytes, dict[str, _Conversation]] = {}

    def first(self, marks: Iterable[bytes]) -> _Conversation | None:
        """One that has the first of these marks that any has."""
        for mark in marks:
            found = self._by_mark.get(mark)
            if found:
                return next(iter(found.values()))
        return None

    def offer(self, one: _Conversation) -> None:
        """It can be gone on from."""
        for mark in one.marks():
            self._by_mark.setdefault(mark, {})[one.id] = one

    def forget(self, session_id: str) -> None:
        """As if it had never been."""
        self.take(self.known.pop(session_id))

    def take(self, one: _Conversation) -> None:
        """Nothing else can go on from it."""
        for mark in one.marks():
            sharing = self._by_mark.get(mark)
            if sharing is not None:
                sharing.pop(one.id, None)
                if not sharing:
                    del self._by_mark[mark]


class Place:
    """A request's place in its conversation. `close` once it is over, however it ends."""

    def __init__(self, tenant: _Tenant, one: _Conversation, how: How, prompt: bytes) -> None:
        self._tenant = tenant
        self._one = one
        self._prompt = prompt
        self._open = True
        self.session_id = one.id
        self.how: How = how

    def answered(self, said: Sequence[Any] | None) -> None:
        """The answer is whole; `said` is what it says, None if that is not known. To be called
        before the client has the last of it, since it may go on at once."""
        if not self._ends():
            return
        one = self._one
        answers: list[bytes] = []
        last_piece = None
        if said:
            answers.append(_chain(self._prompt, said)[-1])
            last_piece = _link(_seed(one.key, b"edited"), said[-1])
        if one.prompt == self._prompt:  # asked again: the client may go on from either answer
            answers += [other for other in one.answers if other not in answers]
        one.prompt, one.answers = self._prompt, answers[: limits.ANSWERS_OF_A_PROMPT]
        one.last_piece = last_piece
        self._tenant.offer(one)

    def close(self) -> None:
        """Where there was no whole answer, the state is as it was before the request."""
        if self._ends():
            if self._one.prompt is None:
                self._one.prompt = self._prompt
            self._tenant.offer(self._one)

    def _ends(self) -> bool:
        was_open, self._open = self._open, False
        # It may have been forgotten meanwhile, for others.
        return was_open and self._tenant.known.get(self._one.id) is self._one


class Conversations:
    """All that are known, of all tenants."""

    def __init__(
        self, new_suffix: Callable[[], str], limit: int = limits.KNOWN_CONVERSATIONS
    ) -> None:
        """`new_suffix` makes what tells sessions apart whose conversations begin equally."""
        self._new_suffix = new_suffix
        self._limit = limit
        self._tenants: dict[str, _Tenant] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def place(self, tenant: str, key: str, said: Sequence[Any]) -> Place:
        """Where a request belongs. `key` names what all turns of a conversation have in common, and
        is the session's id unless that is another conversation's; `said` is all that the request
        says, piece by piece, in JSON's terms."""
        own = self._tenants.setdefault(tenant, _Tenant())
        chain = _chain(_seed(key, b"prompt"), said)
        how: How = "prefix"
        one = own.first(reversed(chain))
        if one is None and key in own.known:
            # Something before its last answer was edited, as agents do with their reminders.
            edited = _seed(key, b"edited")
            one = own.first(_link(edited, piece) for piece in reversed(said))
        if one is None:
            how = "begun" if key not in own.known else "forked"
            one = _Conversation(key, key if how == "begun" else f"{key}-{self._new_suffix()}")
            if one.id in own.known:
                own.forget(one.id)
                self._count -= 1
            own.known[one.id] = one
            self._count += 1
        own.known.move_to_end(one.id)
        own.take(one)
        self._make_room(own)
        return Place(own, one, how, chain[-1])

    def _make_room(self, own: _Tenant) -> None:
        """Forgets the one that was not used for longest: of the tenant that has just got one, if
        that has more than an equal part, else of the one that has most."""
        while self._count > self._limit:
            share = self._limit // len(self._tenants)
            most = own
            if len(own.known) <= max(1, share):
                most = max(self._tenants.values(), key=lambda tenant: len(tenant.known))
            most.forget(next(iter(most.known)))
            self._count -= 1


def _seed(key: str, use: bytes) -> bytes:
    return hashlib.blake2b(key.encode(), person=use, digest_size=_DIGEST_BYTES).digest()


def _chain(start: bytes, said: Sequence[Any]) -> list[bytes]:
    """The hash of each beginning, the empty one first; each covers all before it."""
    chain = [start]
    for piece in said:
        chain.append(_link(chain[-1], piece))
    return chain


def _link(before: bytes, piece: Any) -> bytes:
    text = json.dumps(piece, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), key=before, digest_size=_DIGEST_BYTES).digest()
