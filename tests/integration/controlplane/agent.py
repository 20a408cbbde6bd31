"""A scripted agent over the real stream: a test says what it holds, and reads what it is told."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import uuid
from collections.abc import Iterable
from typing import Any

import grpc

from kvshuttle.dataplane.checkpoints import checkpoints
from kvshuttle.dataplane.clock import boottime_ns
from kvshuttle.v1 import agent_service_pb2 as pb
from kvshuttle.v1 import agent_service_pb2_grpc as pb_grpc
from kvshuttle.v1 import cluster_service_pb2 as cluster
from kvshuttle.v1 import session_service_pb2 as sessions
from kvshuttle.v1 import types_pb2 as types
from tests.support.history import History

BLOCK = 32
FINGERPRINT = {"model": "tiny", "dtype": "bfloat16", "kv_layout": "HND"}


def hashes(name: str, count: int) -> list[bytes]:
    """The chain of a conversation: equal names share prefixes."""
    found: list[bytes] = []
    for number in range(count):
        found.append(
            hashlib.sha256((found[-1] if found else b"") + f"{name}{number}".encode()).digest()
        )
    return found


class Agent:
    """One boot of one worker. `connect` may be called again, for another stream of the boot."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        worker_id: str,
        role: types.WorkerRole.ValueType,
        **hello: Any,
    ) -> None:
        self.stub = pb_grpc.AgentServiceStub(channel)
        self.worker_id = worker_id
        self.boot_id = uuid.uuid4().hex
        self.hello = pb.AgentHello(
            worker_id=worker_id,
            boot_id=self.boot_id,
            role=role,
            url=f"http://{worker_id}:8000",
            fingerprint=[
                cluster.FingerprintField(name=name, value=value)
                for name, value in FINGERPRINT.items()
            ],
            block_size=BLOCK,
            num_blocks=1_000,
            bytes_per_block=23_000 * BLOCK,
            prefix_caching=True,
            ranks=[pb.RankEndpoint(rank=0, agent_name=f"{worker_id}-0", agent_metadata=b"m")],
            clock=1_000,
            vllm_version="0.32.0",
        )
        self.hello.MergeFrom(pb.AgentHello(**hello))
        self.welcome = pb.AgentWelcome()
        self.epoch = 0
        self.generation = 0
        self.seen: list[pb.AgentCommand] = []
        self._call: Any = None
        self._reader: asyncio.Task[None] | None = None
        self._more = asyncio.Condition()
        self._writing = asyncio.Lock()
        self.ended: BaseException | None = None
        self.record: History | None = None
        """What it does, for whoever checks the run."""
        self._reading: set[str] = set()

    def note(self, event: str, **fields: Any) -> None:
        """One step of this boot, if anybody wants to know."""
        if self.record is not None:
            life = f"{self.worker_id}#{self.boot_id}"
            self.record.note(self.worker_id, event, life, at=boottime_ns(), **fields)

    def _told(self, command: pb.AgentCommand, epoch: int) -> None:
        """Notes what it is about to obey. A reader reads from its grant until it says that it has
        stopped."""
        kind = command.WhichOneof("command")
        if kind not in ("harden", "grant", "extend", "revoke", "reader_stopped"):
            return
        lease = getattr(command, kind).lease_id
        self.note("obeys", order=kind, lease=lease, epoch=epoch)
        if kind == "grant":
            self._reading.add(lease)
            self.note("read_posted", lease=lease, read="r")
        elif kind == "reader_stopped":
            self.note("range_let_go", lease=lease, reason="READER_STOPPED")

    @property
    def ref(self) -> types.WorkerRef:
        return types.WorkerRef(worker_id=self.worker_id, incarnation=self.welcome.incarnation)

    async def connect(self) -> Agent:
        """Says hello and waits for the welcome; raises the status of a refusal."""
        while True:
            try:
                return await self._connect()
            except grpc.aio.AioRpcError as error:
                # A hello that meets the end of a call, refused before it was read, gives the call
                # this status in the place of the server's own: that is asked for again.
                if "Internal error from Core" not in (error.details() or ""):
                    raise

    async def _connect(self) -> Agent:
        self._call = self.stub.Connect()
        # Refused already: its status comes with the read.
        with contextlib.suppress(asyncio.InvalidStateError):
            await self._call.write(pb.ConnectRequest(hello=self.hello))
        first = await self._call.read()
        if first is grpc.aio.EOF:
            # Raises the status of a refusal.
            await self._call.wait_for_connection()
            raise grpc.aio.AioRpcError(
                await self._call.code(),
                await self._call.initial_metadata(),
                await self._call.trailing_metadata(),
                await self._call.details(),
            )
        self.welcome = first.welcome
        self.epoch = first.epoch
        self.generation = first.stream_generation
        self.note(
            "welcomed",
            incarnation=self.welcome.incarnation,
            epoch=self.epoch,
            lineage=self.welcome.lineage_id,
        )
        self.seen = []
        self.ended = None
        self._reader = asyncio.create_task(self._read(self._call))
        return self

    async def _read(self, call: Any) -> None:
        error: BaseException = EOFError("the stream ended")
        try:
            while (response := await call.read()) is not grpc.aio.EOF:
                for command in response.commands.commands:
                    self._told(command, response.epoch)
                async with self._more:
                    self.epoch = response.epoch
                    self.seen += response.commands.commands
                    self._more.notify_all()
        except Exception as problem:
            error = problem
        async with self._more:
            self.ended = error
            self._more.notify_all()

    async def told(self, kind: str, **fields: Any) -> Any:
        """The next command of this kind with these fields; taken out of what was seen."""

        def find() -> Any:
            for command in self.seen:
                if command.WhichOneof("command") == kind:
                    body = getattr(command, kind)
                    if all(getattr(body, name) == value for name, value in fields.items()):
                        self.seen.remove(command)
                        return body
            return None

        async with asyncio.timeout(10), self._more:
            while (found := find()) is None:
                if self.ended is not None:
                    raise AssertionError(f"the stream ended: {self.ended!r}")
                await self._more.wait()
            return found

    def kinds(self) -> list[str]:
        """Kinds of the commands that were seen and not taken."""
        return [command.WhichOneof("command") or "" for command in self.seen]

    async def until_ended(self) -> BaseException:
        """Waits for the control plane to end the stream."""
        async with asyncio.timeout(10), self._more:
            while self.ended is None:
                await self._more.wait()
            return self.ended

    async def _write(self, **request: Any) -> None:
        """One message at a time: gRPC ends a call on which a second is begun before that."""
        async with self._writing:
            await self._call.write(pb.ConnectRequest(**request))

    async def say(self, **event: Any) -> None:
        """One event."""
        await self.say_all([event])

    async def say_all(self, events: Iterable[dict[str, Any]]) -> None:
        """Events in one message."""
        said = [pb.AgentEvent(**event) for event in events]
        await self._write(events=pb.AgentEvents(events=said))

    async def beat(self, clock: int, **stats: Any) -> None:
        """A heartbeat."""
        await self._write(heartbeat=pb.AgentHeartbeat(clock=clock, **stats))

    async def offer(
        self, chain: list[bytes], session_id: str, turn_token: str, leg: types.Leg.ValueType
    ) -> None:
        """A request of a turn ended."""
        await self.say(offered=self.replica(chain, session_id, turn_token=turn_token, leg=leg))

    def replica(self, chain: list[bytes], session_id: str, **more: Any) -> pb.ReplicaOffered:
        """A hard replica of a whole chain."""
        offered = pb.ReplicaOffered(
            tenant="default",
            session_id=session_id,
            head_hash=chain[-1],
            num_blocks=len(chain),
            num_tokens=len(chain) * BLOCK,
            state=sessions.REPLICA_STATE_HARD,
            **more,
        )
        if offered.leg != types.LEG_PREFILL:
            found = checkpoints(chain, len(chain), self.welcome.checkpoint_interval)
            offered.checkpoints.extend(found)
        offered.hold_remaining.FromSeconds(300)
        return offered

    async def ask(self, chain: list[bytes], turn_token: str, have: int = 0) -> None:
        """A prefill leg's request looks for what other sessions have of its chain."""
        await self.say(
            prefix_wanted=pb.PrefixWanted(
                turn_token=turn_token,
                leg=types.LEG_PREFILL,
                checkpoints=checkpoints(chain, len(chain), self.welcome.checkpoint_interval),
                have_blocks=have,
                usable_blocks=len(chain),
            )
        )

    async def computed(self, turn_token: str, tokens: int, elapsed_ms: int) -> None:
        """A prefill leg has computed so many tokens."""
        leg = pb.LegComputed(
            turn_token=turn_token,
            leg=types.LEG_PREFILL,
            prompt_tokens=tokens,
            computed_tokens=tokens,
        )
        leg.compute_time.FromMilliseconds(elapsed_ms)
        await self.say(leg_computed=leg)

    async def harden(self, order: pb.Harden, chain: list[bytes]) -> None:
        """Obeys a Harden."""
        held = chain[order.range.start : order.range.end]
        self.note("range_held", lease=order.lease_id)
        await self.say(
            hardened=pb.LeaseHardened(
                lease_id=order.lease_id,
                version=order.version,
                blocks=types.BlockDescriptors(
                    range=order.range,
                    block_ids=list(range(100, 100 + len(held))),
                    hashes=b"".join(held),
                    hash_size=32,
                ),
            )
        )

    async def publish(self, lease_id: str, blocks: int) -> None:
        """Reads under a lease, from its start to its end."""
        await self.say(active=pb.LeaseActive(lease_id=lease_id, blocks=blocks))
        self.note("read_completed", lease=lease_id, read="r")
        self._read_over(lease_id, published=True)
        stopped = pb.LeaseStopped(lease_id=lease_id, outcome=pb.TRANSFER_OUTCOME_PUBLISHED)
        stopped.stats.blocks = blocks
        stopped.stats.tokens = blocks * BLOCK
        stopped.stats.bytes = blocks * self.hello.bytes_per_block
        stopped.stats.transfer_time.FromMilliseconds(5)
        stopped.stats.wait_time.FromMilliseconds(8)
        await self.say(stopped=stopped)

    async def stop(self, lease_id: str, outcome: pb.TransferOutcome.ValueType) -> None:
        """Lets go of a lease without having read."""
        self._read_over(lease_id, published=False)
        await self.say(stopped=pb.LeaseStopped(lease_id=lease_id, outcome=outcome))

    def _read_over(self, lease_id: str, *, published: bool) -> None:
        """A revoke that crosses the end of a READ finds none: it is over once."""
        if lease_id in self._reading:
            self._reading.remove(lease_id)
            self.note("read_over", lease=lease_id, read="r", published=published)

    async def close(self) -> None:
        """Ends the stream from this side, as a process that dies does."""
        if self._call is not None:
            self._call.cancel()
        if self._reader is not None:
            await asyncio.gather(self._reader, return_exceptions=True)
            self._reader = None
