"""What the gateway remembers at most, and of how much of an answer it takes note."""

from __future__ import annotations

KNOWN_RESPONSES = 50_000
"""Stored responses whose engine and session are known; about 300 bytes each."""

KNOWN_CONVERSATIONS = 50_000
"""Conversations that are recognized by what was said in them, of all tenants; about 1.2 KB each. A
tenant may have all of them, or an equal part where there are several and no room."""

ANSWERS_OF_A_PROMPT = 4
"""Answers to one prompt, from any of which its conversation goes on: one that was asked for again
has several."""

HEARD_CHARS = 1 << 20
"""Of an answer. One that is longer is not taken note of; the next turn is recognized by its prompt
alone."""
