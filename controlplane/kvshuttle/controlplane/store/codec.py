"""Rows as JSON. A row says nothing of its version: the file's schema version covers all rows."""

from __future__ import annotations

import json
from typing import Any

from kvshuttle.controlplane.model.gaps import NO_GAPS
from kvshuttle.controlplane.model.lease import Lease, Stop
from kvshuttle.controlplane.model.session import Placement, Plan, Session, Turn, Usage
from kvshuttle.controlplane.model.terms import (
    BlockRange,
    Direction,
    Hints,
    LeaseState,
    ReturnMode,
    SessionKey,
    SessionState,
    SessionValue,
    TransferStats,
    TurnOutcome,
    TurnState,
    WorkerRef,
    WorkerRole,
    WorkerState,
)
from kvshuttle.controlplane.model.worker import Worker

__all__ = [
    "lease_from_row",
    "lease_to_row",
    "session_from_row",
    "session_to_row",
    "worker_from_row",
    "worker_to_row",
]

_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


def _turn_out(turn: Turn) -> list[Any]:
    prefill = [*turn.prefill.worker, turn.prefill.url] if turn.prefill else None
    plan, usage = turn.plan, turn.usage
    return [
        turn.number,
        turn.token,
        int(turn.state),
        int(turn.outcome),
        prefill,
        [*turn.decode.worker, turn.decode.url],
        [
            int(plan.return_mode),
            plan.reason,
            plan.reusable_tokens,
            plan.predicted_recompute_ns,
            plan.predicted_transfer_ns,
        ],
        turn.begin_ns,
        turn.end_ns,
        turn.retention_ns,
        [usage.prompt_tokens, usage.cached_tokens, usage.output_tokens, usage.ttft_ns]
        if usage
        else None,
        turn.request_id,
    ]


def _placement_in(row: list[Any]) -> Placement:
    return Placement(WorkerRef(row[0], row[1]), row[2])


def _turn_in(row: list[Any]) -> Turn:
    plan = row[6]
    return Turn(
        number=row[0],
        token=row[1],
        state=TurnState(row[2]),
        outcome=TurnOutcome(row[3]),
        prefill=_placement_in(row[4]) if row[4] else None,
        decode=_placement_in(row[5]),
        plan=Plan(ReturnMode(plan[0]), *plan[1:]),
        begin_ns=row[7],
        end_ns=row[8],
        retention_ns=row[9],
        usage=Usage(*row[10]) if row[10] else None,
        request_id=row[11],
    )


def session_to_row(session: Session) -> str:
    """All but its key, which is the row's."""
    hints = session.hints
    return _encode(
        [
            session.create_ns,
            session.update_ns,
            int(session.state),
            session.turn_count,
            [_turn_out(turn) for turn in session.turns],
            [hints.expected_idle_ns, int(hints.value) if hints.value is not None else None],
            session.last_prefill,
            session.version,
            session.requests,
            session.gaps.hex(),
            session.hint_ns,
        ]
    )


def session_from_row(tenant: str, session_id: str, body: str) -> Session:
    """The inverse."""
    row = json.loads(body)
    idle, value = row[5]
    return Session(
        SessionKey(tenant, session_id),
        create_ns=row[0],
        update_ns=row[1],
        state=SessionState(row[2]),
        turn_count=row[3],
        turns=tuple(_turn_in(turn) for turn in row[4]),
        hints=Hints(idle, SessionValue(value) if value is not None else None),
        last_prefill=row[6],
        version=row[7],
        requests=tuple(row[8]),
        # Rows of before the rhythm of sessions was kept are shorter.
        gaps=bytes.fromhex(row[9]) if len(row) > 9 else NO_GAPS,
        hint_ns=row[10] if len(row) > 10 else 0,
    )


def lease_to_row(lease: Lease) -> str:
    """All but its id. A renewal under way is not stored: after a restart its lease has ended."""
    stats = lease.stats
    return _encode(
        {
            "seq": lease.seq,
            "key": lease.key,
            "turn": lease.turn,
            "token": lease.turn_token,
            "direction": int(lease.direction),
            "source": lease.source,
            "destination": lease.destination,
            "epoch": lease.epoch,
            "ttl": lease.ttl_ns,
            "create": lease.create_ns,
            "ask_head": lease.ask_head.hex(),
            "ask_range": lease.ask_range,
            "state": int(lease.state),
            "version": lease.version,
            "range": lease.range,
            "head": lease.head_hash.hex(),
            "grant": lease.grant_ns,
            "deadline": lease.deadline_ns,
            "end": lease.end_ns,
            "reason": lease.end_reason,
            "stats": [
                stats.blocks,
                stats.tokens,
                stats.bytes,
                stats.transfer_ns,
                stats.wait_ns,
            ]
            if stats
            else None,
            "stop": [int(lease.stop.final), lease.stop.reason] if lease.stop else None,
            "reader_stopped": lease.reader_stopped,
            "requests": lease.requests,
        }
    )


def lease_from_row(lease_id: str, body: str) -> Lease:
    """The inverse."""
    row = json.loads(body)
    return Lease(
        lease_id=lease_id,
        seq=row["seq"],
        key=SessionKey(*row["key"]),
        turn=row["turn"],
        turn_token=row["token"],
        direction=Direction(row["direction"]),
        source=WorkerRef(*row["source"]),
        destination=WorkerRef(*row["destination"]),
        epoch=row["epoch"],
        ttl_ns=row["ttl"],
        create_ns=row["create"],
        ask_head=bytes.fromhex(row["ask_head"]),
        ask_range=BlockRange(*row["ask_range"]),
        state=LeaseState(row["state"]),
        version=row["version"],
        range=BlockRange(*row["range"]) if row["range"] else None,
        head_hash=bytes.fromhex(row["head"]),
        grant_ns=row["grant"],
        deadline_ns=row["deadline"],
        end_ns=row["end"],
        end_reason=row["reason"],
        stats=TransferStats(*row["stats"]) if row["stats"] else None,
        stop=Stop(LeaseState(row["stop"][0]), row["stop"][1]) if row["stop"] else None,
        reader_stopped=row["reader_stopped"],
        requests=tuple(row["requests"]),
    )


def worker_to_row(worker: Worker) -> str:
    """What is remembered of a boot: see `memory.at_rest`."""
    return _encode(
        {
            "incarnation": worker.ref.incarnation,
            "boot": worker.boot_id,
            "role": int(worker.role),
            "url": worker.url,
            "fenced": worker.state is WorkerState.FENCED,
            "register": worker.register_ns,
            "heard": worker.heard_ns,
            "end": worker.end_ns,
            "draining": worker.draining,
            "generation": worker.stream_generation,
            "block_size": worker.block_size,
            "num_blocks": worker.num_blocks,
            "bytes_per_block": worker.bytes_per_block,
            "prefix_caching": worker.prefix_caching,
            "vllm": worker.vllm_version,
            "agent": worker.agent_version,
            "requests": worker.requests,
            "fenced_boots": worker.fenced_boots,
        }
    )


def worker_from_row(worker_id: str, body: str) -> Worker:
    """The inverse."""
    row = json.loads(body)
    return Worker(
        ref=WorkerRef(worker_id, row["incarnation"]),
        boot_id=row["boot"],
        role=WorkerRole(row["role"]),
        url=row["url"],
        state=WorkerState.FENCED if row["fenced"] else WorkerState.LOST,
        register_ns=row["register"],
        heard_ns=row["heard"],
        end_ns=row["end"] or row["heard"],
        draining=row["draining"],
        stream_generation=row["generation"],
        block_size=row["block_size"],
        num_blocks=row["num_blocks"],
        bytes_per_block=row["bytes_per_block"],
        prefix_caching=row["prefix_caching"],
        vllm_version=row["vllm"],
        agent_version=row["agent"],
        requests=tuple(row["requests"]),
        fenced_boots=tuple(row["fenced_boots"]),
    )
