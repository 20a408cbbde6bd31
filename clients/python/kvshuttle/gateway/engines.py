"""Which engines exist, as far as the gateway knows.

BeginTurn says where a turn runs. What is remembered here is for the time when it cannot: the
workers of its last answers and of ListWorkers, and those that the operator configured.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvshuttle.v1 import cluster_service_pb2 as cluster
from kvshuttle.v1 import types_pb2 as types

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from kvshuttle.v1 import session_service_pb2 as session

Kind = Literal["decode", "prefill"]

# Conversations whose last engine is remembered: about 200 bytes each.
_MAX_REMEMBERED_SESSIONS = 20_000
# Workers known from placements only, which no list confirms or removes.
_MAX_PLACED_WORKERS = 1_000


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine and what it is used for. `worker_id` is empty for a configured one."""

    url: str
    kind: Kind
    worker_id: str = ""


class EngineDirectory:
    """The engines known, and the order in which to try them."""

    def __init__(self, prefill_urls: Iterable[str], decode_urls: Iterable[str]) -> None:
        self._configured = [
            *(Engine(url, "decode") for url in decode_urls),
            *(Engine(url, "prefill") for url in prefill_urls),
        ]
        self._listed: dict[str, Engine] = {}
        self._placed: OrderedDict[str, Engine] = OrderedDict()
        self._last_decode: OrderedDict[tuple[str, str], str] = OrderedDict()

    def learn_placements(self, tenant: str, session_id: str, turn: session.Turn) -> None:
        """Remembers where a turn was put."""
        for kind, placement in (("decode", turn.decode), ("prefill", turn.prefill)):
            if not placement.url:
                continue
            worker_id = placement.worker.worker_id
            self._placed[worker_id] = Engine(
                placement.url.rstrip("/"), "decode" if kind == "decode" else "prefill", worker_id
            )
            self._placed.move_to_end(worker_id)
        while len(self._placed) > _MAX_PLACED_WORKERS:
            self._placed.popitem(last=False)
        if turn.decode.url:
            self.learn_session(tenant, session_id, turn.decode.url.rstrip("/"))

    def learn_session(self, tenant: str, session_id: str, decode_url: str) -> None:
        """Remembers where a conversation's KV was last left."""
        self._last_decode[tenant, session_id] = decode_url
        self._last_decode.move_to_end((tenant, session_id))
        while len(self._last_decode) > _MAX_REMEMBERED_SESSIONS:
            self._last_decode.popitem(last=False)

    def learn_workers(self, workers: Iterable[cluster.Worker]) -> None:
        """Takes a full list: what it does not have as connected is no longer known."""
        connected = (cluster.WORKER_STATE_READY, cluster.WORKER_STATE_DRAINING)
        seen = list(workers)
        self._listed = {
            worker.ref.worker_id: Engine(
                worker.url.rstrip("/"),
                "prefill" if worker.role == types.WORKER_ROLE_PREFILL else "decode",
                worker.ref.worker_id,
            )
            for worker in seen
            if worker.url and worker.state in connected
        }
        for worker_id in [name for name in self._placed if name not in self._listed]:
            del self._placed[worker_id]

    def known(self) -> list[Engine]:
        """Every engine once, by URL; the control plane's word on it goes before the operator's."""
        by_url: dict[str, Engine] = {}
        for engine in (*self._listed.values(), *self._placed.values(), *self._configured):
            by_url.setdefault(engine.url, engine)
        return list(by_url.values())

    def candidates(
        self, tenant: str, session_id: str, failed_urls: Collection[str] = ()
    ) -> list[Engine]:
        """Where to send a request without the control plane, best first.

        First where the conversation was last: its prefix may be cached there. Then decode engines
        before prefill engines, each in an order of the session's own, so that a conversation stays
        and conversations spread (rendezvous hashing).
        """
        last = self._last_decode.get((tenant, session_id))
        return sorted(
            (engine for engine in self.known() if engine.url not in failed_urls),
            key=lambda engine: (
                engine.url != last,
                engine.kind != "decode",
                _rank(tenant, session_id, engine.url),
            ),
        )


def _rank(tenant: str, session_id: str, url: str) -> bytes:
    return hashlib.sha256(f"{tenant}\0{session_id}\0{url}".encode()).digest()
