"""A model of NIXL between the simulated workers: one-sided READs and WRITEs, and notices.

What the real thing may do, this does: a READ or WRITE copies its blocks at moments of its own,
whether or not anybody still wants them; it goes on while its poster is paused, and after its handle
was released; one with a dead process fails, or stays in PROC for ever; notices are late or lost. A
WRITE goes on even when its writer has died, until that is attested: what a network still carries,
nobody can see.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvshuttle.dataplane.messages import HeadSlice, PeerRegion
from kvshuttle.dataplane.transport import BlockList, ReadHandle, TransportError
from tests.simulation.kernel import MS, Violation, between

if TYPE_CHECKING:
    from tests.simulation.kernel import Kernel, Thread
    from tests.simulation.pool import Block, BlockPool

__all__ = ["BLOCK_BYTES", "Fabric", "FlyingRead", "FlyingWrite", "SimTransport"]

BLOCK_BYTES = 1_000


@dataclass(eq=False)
class FlyingRead:
    """A READ that NIXL has not ended."""

    reader: SimTransport
    source: SimTransport
    local: list[int]
    remote: list[int]
    notice: bytes
    generations: list[int]
    status: str = "PROC"
    copied: int = 0
    # NIXL never says that the other end has died.
    hangs: bool = False

    @property
    def lease_id(self) -> str:
        """Of its notice."""
        return self.notice.partition(b"|")[2].decode()


@dataclass(eq=False)
class FlyingWrite:
    """A WRITE that NIXL has not ended. `remote` are the target's blocks, with their generations as
    they were when it was posted; `regions` is what is written of each."""

    writer: SimTransport
    target: SimTransport
    local: list[int]
    remote: list[int]
    generations: list[int]
    regions: range
    status: str = "PROC"
    copied: int = 0
    hangs: bool = False


@dataclass(eq=False)
class Fabric:
    """The network between all ranks of all workers."""

    kernel: Kernel
    # Whether the machines of two workers cannot reach each other now.
    cut_off: Callable[[str, str], bool]
    # Kills the process at one end.
    kill: Callable[[SimTransport], None]
    # READs go on while either end's process is paused (RDMA), or need both to run (UCX here).
    one_sided: bool
    slow_ms: float = 20.0
    notice_slow_ms: float = 5.0
    notice_loss: float = 0.0
    read_error: float = 0.0
    # What the next READ or WRITE meets: its other end dies while it runs, or it fails.
    kill_next_source: bool = False
    kill_next_target: bool = False
    fail_next_write: bool = False
    transports: dict[str, SimTransport] = field(default_factory=dict)
    flying: list[FlyingRead] = field(default_factory=list)
    writing: list[FlyingWrite] = field(default_factory=list)
    posted: int = 0
    written: int = 0

    def writes_to(self, pool: BlockPool, block_id: int) -> str:
        """What may still change this block, in words; empty for nothing."""
        for read in self.flying:
            if read.reader.pool is pool and block_id in read.local[read.copied :]:
                return f"a READ of {read.lease_id}"
        for write in self.writing:
            if write.target.pool is pool and block_id in write.remote[write.copied :]:
                return f"a WRITE of {write.writer.name}"
        return ""

    def writers_of(self, pool: BlockPool, block_id: int) -> list[FlyingWrite]:
        """WRITEs that have still to fetch this block."""
        return [
            write
            for write in self.writing
            if write.writer.pool is pool and block_id in write.local[write.copied :]
        ]

    def readers_of(self, pool: BlockPool, block_id: int) -> list[FlyingRead]:
        """READs that have still to fetch this block."""
        return [
            read
            for read in self.flying
            if read.source.pool is pool and block_id in read.remote[read.copied :]
        ]

    def be_well(self) -> None:
        """Nothing goes wrong any more."""
        self.notice_loss = self.read_error = 0.0
        self.kill_next_source = self.kill_next_target = self.fail_next_write = False

    def start(self, read: FlyingRead) -> None:
        """Its bytes move from now on."""
        self.posted += 1
        if read.source.attested:
            return
        self.flying.append(read)
        if self.kill_next_source and read.source.alive:
            self.kill_next_source, read.hangs = False, True
            self.kernel.at(0, None, self.kill, read.source)
        self.kernel.at(between(self.kernel.rng, 0.2, self.slow_ms), None, self._move, read)

    def _move(self, read: FlyingRead) -> None:
        rng, kernel = self.kernel.rng, self.kernel
        if read.status != "PROC" or read.source.attested:
            return
        if not read.reader.alive:
            self._end(read, "ERR")
            return
        if not read.source.alive:
            # UCX notices, or never does.
            if read.hangs or rng.random() < 0.5:
                kernel.fault("read_hangs", read.reader.name, lease=read.lease_id)
                return
            self._end(read, "ERR")
            return
        stuck = self.cut_off(read.reader.machine_name, read.source.machine_name)
        if not self.one_sided:
            stuck |= read.reader.thread.paused or read.source.thread.paused
        if stuck:
            kernel.at(between(rng, 20, 200), None, self._move, read)
            return
        if self.read_error and rng.random() < self.read_error:
            kernel.fault("read_error", read.reader.name, lease=read.lease_id)
            self._end(read, "ERR")
            return
        left = len(read.local) - read.copied
        for _ in range(rng.randint(1, left)):
            self._copy(read)
        if read.copied < len(read.local):
            kernel.at(between(rng, 0.2, self.slow_ms), None, self._move, read)
            return
        self._end(read, "DONE")
        self.send(read.reader, read.source, read.notice)

    def _copy(self, read: FlyingRead) -> None:
        here, there = read.local[read.copied], read.remote[read.copied]
        block = read.reader.pool.blocks[here]
        if block.generation != read.generations[read.copied]:
            raise Violation(
                "landing",
                f"{read.reader.name}: a READ of {read.lease_id} writes to block {here}, which was "
                "handed out again",
            )
        if block.block_hash is not None:
            raise Violation(
                "landing",
                f"{read.reader.name}: a READ of {read.lease_id} writes to block {here}, which is "
                "published",
            )
        block.takes(read.reader.rank, read.source.pool.blocks[there], read.source.rank)
        read.copied += 1

    def start_write(self, write: FlyingWrite) -> None:
        """Its bytes move from now on."""
        self.written += 1
        self.writing.append(write)
        if self.kill_next_target and write.target.alive:
            self.kill_next_target, write.hangs = False, True
            self.kernel.at(0, None, self.kill, write.target)
        self.kernel.at(between(self.kernel.rng, 0.2, self.slow_ms), None, self._move_write, write)

    def _move_write(self, write: FlyingWrite) -> None:
        rng, kernel = self.kernel.rng, self.kernel
        if write not in self.writing:
            return
        if not write.target.alive:
            if write.hangs or rng.random() < 0.5:
                kernel.fault("write_hangs", write.writer.name)
                self.writing.remove(write)
                return
            self._end_write(write, "ERR")
            return
        stuck = self.cut_off(write.writer.machine_name, write.target.machine_name)
        if not self.one_sided:
            stuck |= write.writer.thread.paused or write.target.thread.paused
        if stuck:
            kernel.at(between(rng, 20, 200), None, self._move_write, write)
            return
        if self.fail_next_write or (self.read_error and rng.random() < self.read_error):
            self.fail_next_write = False
            kernel.fault("write_error", write.writer.name)
            self._end_write(write, "ERR")
            return
        for _ in range(rng.randint(1, len(write.local) - write.copied)):
            self._copy_write(write)
        if write.copied < len(write.local):
            kernel.at(between(rng, 0.2, self.slow_ms), None, self._move_write, write)
            return
        self._end_write(write, "DONE")

    def _copy_write(self, write: FlyingWrite) -> None:
        here, there = write.local[write.copied], write.remote[write.copied]
        block = write.target.pool.blocks[there]
        what = f"{write.target.name}: a WRITE of {write.writer.name} changes block {there}"
        if block.generation != write.generations[write.copied]:
            raise Violation("landing", f"{what}, which was handed out again")
        if block.block_hash is not None:
            raise Violation("landing", f"{what}, which is published")
        if not block.refs:
            raise Violation("landing", f"{what}, which nobody holds")
        self._bytes(write, block, write.writer.pool.blocks[here])
        write.copied += 1

    def _bytes(self, write: FlyingWrite, to: Block, source: Block) -> None:
        to.takes(write.target.rank, source, write.writer.rank)

    def _end_write(self, write: FlyingWrite, status: str) -> None:
        write.status = status
        self.writing.remove(write)
        self.kernel.log(write.writer.name, f"write_{status.lower()}", to=write.target.name)
        if write.writer.alive:
            write.writer.poke()

    def _end(self, read: FlyingRead, status: str) -> None:
        read.status = status
        self.flying.remove(read)
        self.kernel.log(read.reader.name, f"read_{status.lower()}", lease=read.lease_id)
        read.reader.poke()

    def send(self, sender: SimTransport, to: SimTransport, message: bytes) -> None:
        """A notice, late or never."""
        rng = self.kernel.rng
        if self.notice_loss and rng.random() < self.notice_loss:
            self.kernel.fault("notice_lost", sender.name, to=to.name, message=message)
            return
        delay = between(rng, 0.1, self.notice_slow_ms)
        self.kernel.at(delay, None, self._arrive, sender, to, message)

    def _arrive(self, sender: SimTransport, to: SimTransport, message: bytes) -> None:
        if not to.alive:
            return
        if self.cut_off(sender.machine_name, to.machine_name):
            if self.kernel.rng.random() < 0.5:
                self.kernel.at(200 * MS, None, self._arrive, sender, to, message)
            return
        to.inbox.append((sender.name, message))
        to.poke()

    def dead(self, transport: SimTransport) -> None:
        """A process has gone: what it was reading is of no interest any more."""
        for read in [r for r in self.flying if r.reader is transport]:
            read.status = "ERR"
            self.flying.remove(read)
        for write in [w for w in self.writing if w.target is transport]:
            # Its memory is gone; its writer may hear of it, or never.
            self.kernel.at(between(self.kernel.rng, 0.2, 50), None, self._move_write, write)

    def attested_dead(self, transport: SimTransport) -> None:
        """Nothing moves out of a dead process, whatever NIXL says of it."""
        transport.attested = True
        for read in [r for r in self.flying if r.source is transport]:
            self.flying.remove(read)
        for write in [w for w in self.writing if transport in (w.writer, w.target)]:
            self.writing.remove(write)


@dataclass(eq=False)
class SimTransport:
    """Implements `kvshuttle.dataplane.transfers.Transport` for one rank of one boot."""

    fabric: Fabric
    name: str
    rank: int
    pool: BlockPool
    thread: Thread
    poke: Callable[[], None]
    check_post: Callable[[SimTransport, SimTransport, bytes], None]
    check_write: Callable[[SimTransport, SimTransport, list[int]], None]
    alive: bool = True
    attested: bool = False
    inbox: list[tuple[str, bytes]] = field(default_factory=list)
    peers: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.fabric.transports[self.name] = self

    @property
    def machine_name(self) -> str:
        """Where it runs."""
        return self.thread.machine.name

    def add_peer(
        self,
        agent_name: str,
        metadata: bytes,
        regions: list[PeerRegion],
        heads: HeadSlice | None = None,
    ) -> None:
        """Connects, if the peer lives."""
        del regions, heads
        if metadata != agent_name.encode() or not self.fabric.transports[agent_name].alive:
            raise TransportError(f"peer {agent_name} is not there")
        self.peers.add(agent_name)

    def drop_peer(self, agent_name: str) -> None:
        """Forgets a peer."""
        self.peers.discard(agent_name)

    def post_read(
        self, agent_name: str, local: Sequence[int], remote: Sequence[int], notice: bytes
    ) -> ReadHandle:
        """Starts to move."""
        if agent_name not in self.peers:
            raise TransportError(f"peer {agent_name} is not connected")
        source = self.fabric.transports[agent_name]
        self.check_post(self, source, notice)
        if not source.alive and self.fabric.kernel.rng.random() < 0.5:
            raise TransportError(f"peer {agent_name} is gone")
        generations = [self.pool.blocks[i].generation for i in local]
        read = FlyingRead(self, source, list(local), list(remote), notice, generations)
        self.fabric.start(read)
        return ReadHandle(read, BLOCK_BYTES * len(local))

    def prepare(self, agent_name: str, blocks: Sequence[int]) -> BlockList:
        """Nothing but the numbers."""
        if agent_name and agent_name not in self.peers:
            raise TransportError(f"peer {agent_name} is not connected")
        return BlockList(list(blocks), len(blocks), agent_name)

    def post_write(
        self, local: BlockList, remote: BlockList, offset: int, regions: range
    ) -> ReadHandle:
        """Starts to move."""
        if remote.agent_name not in self.peers:
            raise TransportError(f"peer {remote.agent_name} is not connected")
        target = self.fabric.transports[remote.agent_name]
        there = remote.raw[offset : offset + local.size]
        self.check_write(self, target, there)
        if not target.alive and self.fabric.kernel.rng.random() < 0.5:
            raise TransportError(f"peer {remote.agent_name} is gone")
        generations = [target.pool.blocks[i].generation for i in there]
        write = FlyingWrite(self, target, list(local.raw), there, generations, regions)
        self.fabric.start_write(write)
        return ReadHandle(write, BLOCK_BYTES * local.size)

    def drop_list(self, blocks: BlockList) -> None:
        """Nothing to let go."""

    def state(self, handle: ReadHandle) -> str:
        """PROC, DONE or ERR."""
        status: str = handle.raw.status
        return status

    def bytes_moved(self, handle: ReadHandle) -> int:
        """All of them."""
        return handle.expected_bytes

    def release(self, handle: ReadHandle) -> bool:
        """Releasing a READ in flight asks to cancel it, which proves nothing: it goes on."""
        return handle.raw.status != "PROC" or self.fabric.kernel.rng.random() < 0.7

    def notify(self, agent_name: str, message: bytes) -> None:
        """Sends a notice."""
        if agent_name not in self.peers:
            raise TransportError(f"peer {agent_name} is not connected")
        self.fabric.send(self, self.fabric.transports[agent_name], message)

    def notices(self) -> list[tuple[str, bytes]]:
        """What has arrived."""
        found, self.inbox = self.inbox, []
        return found
