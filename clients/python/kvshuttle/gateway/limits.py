"""What the gateway remembers at most, and how much of an answer it takes note of or keeps back."""

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

EVENT_BYTES = 128 << 20
"""Of a stream, kept back until its event is whole: an engine that never ends one would take all
memory. The largest that engines mean is a response's last event, which repeats all of it: with 20
log probabilities a token (1.5 KB) that is 48 MiB for an answer of 32,000 tokens. Also what a stream
may say before its first token."""

TOKENS = 1 << 40
"""In one count of an engine's: more than all engines compute in years, so what is above it is no
count; and the control plane takes no more."""
