"""NIXL, as far as kvshuttle uses it: one agent a rank, READs, WRITEs and notices, one owner."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvshuttle.dataplane.descriptors import breaks, in_order, merge_runs, parts_of, rows_of
from kvshuttle.dataplane.limits import MAX_PREPARED
from kvshuttle.dataplane.log import get_logger
from kvshuttle.dataplane.messages import WHOLE, HeadSlice, PeerRegion

__all__ = [
    "BlockList",
    "LocalRegion",
    "NixlTransport",
    "ReadHandle",
    "TransportError",
    "counted_bytes",
]

_log = get_logger("transport")

# NIXL's name for this agent in lists of its own memory.
_OURSELVES = "NIXL_INIT_AGENT"


class TransportError(RuntimeError):
    """NIXL is missing, refused, or reported an error."""


@dataclass(frozen=True)
class LocalRegion:
    """A registered KV region of this rank; block i starts at ``base + i * block_bytes``."""

    layer: str
    base: int
    block_bytes: int
    num_blocks: int
    memory_type: str
    device_id: int


@dataclass(eq=False)
class ReadHandle:
    """A posted READ or WRITE."""

    raw: Any
    expected_bytes: int
    descriptors: int = 0


@dataclass(eq=False)
class BlockList:
    """Blocks of one side, all regions, that are written from or to in several WRITEs. `runs`: of
    our own, the descriptors that NIXL has prepared of them and of where they are written to."""

    raw: Any
    size: int
    agent_name: str
    runs: _Runs | None = None


@dataclass(frozen=True)
class _Runs:
    """Prepared descriptors of both sides, `count` a region: run i of region r is
    ``r * count + i`` on each."""

    target: BlockList
    offset: int
    mine: Any
    theirs: Any
    count: int


@dataclass(frozen=True)
class _Pool:
    """Prepared descriptors of all blocks of an agent: block i of region r is ``r * blocks + i``."""

    agent_name: str
    raw: Any
    blocks: int
    regions: int

    def pick(self, which: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """Indices of these blocks, region by region."""
        _check_within(self.agent_name, self.blocks, which)
        starts = np.arange(self.regions, dtype=np.int64)[:, None] * self.blocks
        return (starts + which).ravel().astype(np.int32)


class NixlTransport:
    """One NIXL agent without a progress thread: nothing moves unless its owner calls in."""

    def __init__(self, agent_name: str, backend: str, backend_params: dict[str, str]) -> None:
        # As vLLM's own connector does, before NIXL is there: else UCX may keep what it has let go.
        os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")
        try:
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise TransportError(
                f"NIXL cannot be imported ({error}): install nixl for this platform"
            ) from error
        # No progress thread: it would spin on a whole core, idle or not. The owner polls while a
        # lease is open.
        config = nixl_agent_config(enable_prog_thread=False, capture_telemetry=True, backends=[])
        self.name = agent_name
        self.backend = backend
        self._agent = nixl_agent(agent_name, config)
        if backend not in self._agent.get_plugin_list():
            raise TransportError(
                f"nixl_backend: {backend!r} is not among NIXL's plugins "
                f"{self._agent.get_plugin_list()}"
            )
        try:
            self._agent.create_backend(backend, backend_params)
        except Exception as error:  # NIXL raises many types of its own
            raise TransportError(
                f"nixl_backend: {backend!r} with {backend_params} could not be made ({error!r}); "
                "is its hardware or library on this machine?"
            ) from error
        self._regions: list[LocalRegion] = []
        self._peers: dict[str, list[PeerRegion]] = {}
        # What is read of a peer's blocks; it has no entry if nothing is.
        self._heads: dict[str, HeadSlice] = {}
        # Ours, and of those peers only that whole blocks are read from.
        self._pools: dict[str, _Pool] = {}
        self._registered: list[Any] = []

    def register(self, regions: Sequence[LocalRegion]) -> bytes:
        """Registers this rank's KV and returns the metadata that peers need to reach it."""
        by_type: dict[str, list[tuple[int, int, int, str]]] = {}
        for r in regions:
            by_type.setdefault(r.memory_type, []).append(
                (r.base, r.block_bytes * r.num_blocks, r.device_id, r.layer)
            )
        for memory_type, descs in by_type.items():
            self._registered.append(
                self._agent.register_memory(descs, memory_type, backends=[self.backend])
            )
        self._regions = list(regions)
        metadata = self._agent.get_agent_metadata()
        return metadata if isinstance(metadata, bytes) else bytes(metadata)

    def add_peer(
        self,
        agent_name: str,
        metadata: bytes,
        regions: list[PeerRegion],
        heads: HeadSlice | None = WHOLE,
    ) -> None:
        """Loads a peer and starts to connect; raises :class:`TransportError` if it does not fit.

        `heads` is what is read of it; None: nothing.
        """
        if heads is not None and not _fit(self._regions, regions, heads):
            raise TransportError(
                f"peer {agent_name}: its {len(regions)} regions have other block sizes than our "
                f"{len(self._regions)}; the fingerprints should have caught this"
            )
        if agent_name in self._peers:
            return
        try:
            loaded = self._agent.add_remote_agent(metadata)
            name = loaded.decode() if isinstance(loaded, bytes) else str(loaded)
            if name != agent_name:
                raise TransportError(f"peer {agent_name}: its metadata names {name!r}")
            self._agent.make_connection(agent_name)
            if heads is not None and heads.whole:
                self._prepare_pool(_OURSELVES, self._regions)
                self._prepare_pool(agent_name, regions)
        except TransportError:
            raise
        except Exception as error:  # NIXL raises many types of its own
            raise TransportError(f"peer {agent_name}: {error}") from error
        self._peers[agent_name] = regions
        if heads is not None:
            self._heads[agent_name] = heads

    def drop_peer(self, agent_name: str) -> None:
        """Forgets a peer; unknown ones are fine."""
        self._heads.pop(agent_name, None)
        pool = self._pools.pop(agent_name, None)
        if pool is not None:
            self._forget_prepared(pool.raw)
        if self._peers.pop(agent_name, None) is not None:
            try:
                self._agent.remove_remote_agent(agent_name)
            except Exception as error:
                raise TransportError(f"peer {agent_name}: {error}") from error

    def knows(self, agent_name: str) -> bool:
        """Whether the peer is loaded."""
        return agent_name in self._peers

    def post_read(
        self, agent_name: str, local: Sequence[int], remote: Sequence[int], notice: bytes
    ) -> ReadHandle:
        """Posts a READ of blocks, or of what the peer has of them, all regions, with a notice to
        the peer at its completion.

        Raises :class:`TransportError` when NIXL refuses.
        """
        try:
            peer, heads = self._peers[agent_name], self._heads[agent_name]
        except KeyError:
            raise TransportError(f"peer {agent_name} is not connected") from None
        mine, theirs = self._pools.get(_OURSELVES), self._pools.get(agent_name)
        if mine is not None and theirs is not None:
            return self._post_prepared(mine, theirs, local, remote, notice)
        if heads.whole:
            first_local, first_remote, lengths = merge_runs(local, remote)
            local_rows = rows_of(self._regions, first_local, lengths)
            remote_rows = rows_of(peer, first_remote, lengths)
        else:
            # A part of a page ends before the next block's begins, on one side at least.
            both = list(zip(self._regions, peer, strict=True))
            sizes = [heads.count * (a.block_bytes // heads.my_heads) for a, _ in both]
            local_rows = np.concatenate(
                [
                    parts_of(a, local, heads.mine, heads.my_heads, size)
                    for (a, _), size in zip(both, sizes, strict=True)
                ]
            )
            remote_rows = np.concatenate(
                [
                    parts_of(b, remote, heads.theirs, heads.their_heads, size)
                    for (_, b), size in zip(both, sizes, strict=True)
                ]
            )

        def make() -> Any:
            return self._agent.initialize_xfer(
                "READ",
                self._agent.get_xfer_descs(local_rows, self._regions[0].memory_type),
                self._agent.get_xfer_descs(remote_rows, peer[0].memory_type),
                agent_name,
                notice,
                backends=[self.backend],
            )

        return self._start(agent_name, make, int(local_rows[:, 1].sum()), len(local_rows))

    def _post_prepared(
        self,
        mine: _Pool,
        theirs: _Pool,
        local: Sequence[int],
        remote: Sequence[int],
        notice: bytes,
    ) -> ReadHandle:
        """As `post_read`, of whole blocks, out of the pools' descriptors. NIXL joins neighbours."""
        a, b = in_order(local, remote)
        my_indices, their_indices = mine.pick(a), theirs.pick(b)
        runs = 1 + len(breaks(a, b))
        total = len(a) * sum(r.block_bytes for r in self._regions)
        make = partial(
            self._agent.make_prepped_xfer,
            "READ",
            mine.raw,
            my_indices,
            theirs.raw,
            their_indices,
            notice,
            backends=[self.backend],
        )
        return self._start(theirs.agent_name, make, total, runs * len(self._regions))

    def _start(
        self, agent_name: str, make: Callable[[], Any], total: int, pieces: int
    ) -> ReadHandle:
        """Makes a transfer of so many bytes in so many pieces, and posts it."""
        try:
            raw = make()
        except Exception as error:  # NIXL raises many types of its own
            raise TransportError(f"peer {agent_name}: {error}") from error
        try:
            refused = "" if self._agent.transfer(raw) != "ERR" else "ERR"
        except Exception as error:
            refused = str(error) or repr(error)
        if refused:
            # Some of its pieces may be on their way: its state says that it failed, and whoever
            # asks waits until it can be released.
            _log.warning("transfer_refused", peer=agent_name, error=refused)
        return ReadHandle(raw, total, pieces)

    def prepare(self, agent_name: str, blocks: Sequence[int]) -> BlockList:
        """A peer's blocks, or our own (no name), for `post_write`.

        Raises :class:`TransportError` where there is no such peer.
        """
        if agent_name and agent_name not in self._peers:
            raise TransportError(f"peer {agent_name} is not connected")
        return BlockList(np.asarray(blocks, dtype=np.int64), len(blocks), agent_name)

    def post_write(
        self, local: BlockList, remote: BlockList, offset: int, regions: range
    ) -> ReadHandle:
        """Posts a WRITE of all of `local` to `remote` from position `offset` on, of these regions.
        Blocks that are neighbours on both sides go as one descriptor. Those are prepared for all
        regions when the first is written, since a model has many.

        Raises :class:`TransportError` when NIXL refuses.
        """
        try:
            runs = self._runs(local, remote, offset)
        except Exception as error:
            raise TransportError(f"peer {remote.agent_name}: {error}") from error
        steps = np.asarray(regions, dtype=np.int32)[:, None]
        which = (steps * runs.count + np.arange(runs.count, dtype=np.int32)[None, :]).ravel()
        total = sum(self._regions[r].block_bytes for r in regions) * local.size
        make = partial(
            self._agent.make_prepped_xfer,
            "WRITE",
            runs.mine,
            which,
            runs.theirs,
            which,
            b"",
            backends=[self.backend],
        )
        return self._start(remote.agent_name, make, total, len(which))

    def _runs(self, local: BlockList, remote: BlockList, offset: int) -> _Runs:
        known = local.runs
        if known is not None and known.target is remote and known.offset == offset:
            return known
        self.drop_list(local)
        _check_within(_OURSELVES, self._regions[0].num_blocks, local.raw)
        _check_within(remote.agent_name, self._peers[remote.agent_name][0].num_blocks, remote.raw)
        # NIXL 1.5 joins neighbours of a list of a whole pool, and not those of a lease's blocks.
        mine, theirs, lengths = merge_runs(local.raw, remote.raw[offset : offset + local.size])
        peer = self._peers[remote.agent_name]
        local.runs = _Runs(
            remote,
            offset,
            self._prepared(_OURSELVES, self._regions, mine, lengths),
            self._prepared(remote.agent_name, peer, theirs, lengths),
            len(lengths),
        )
        return local.runs

    def _prepare_pool(self, agent_name: str, regions: Sequence[LocalRegion | PeerRegion]) -> None:
        """Once for all READs, if it is known how many blocks there are and they are not too many;
        else each READ makes its own."""
        blocks = regions[0].num_blocks
        if agent_name in self._pools or not 0 < blocks * len(regions) <= MAX_PREPARED:
            return
        each = np.arange(blocks, dtype=np.int64)
        raw = self._prepared(agent_name, regions, each, np.ones_like(each))
        self._pools[agent_name] = _Pool(agent_name, raw, blocks, len(regions))

    def _prepared(
        self,
        agent_name: str,
        regions: Sequence[LocalRegion | PeerRegion],
        first: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
    ) -> Any:
        rows = rows_of(regions, first, lengths)
        descs = self._agent.get_xfer_descs(rows, regions[0].memory_type)
        return self._agent.prep_xfer_dlist(agent_name, descs, backends=[self.backend])

    def drop_list(self, blocks: BlockList) -> None:
        """Lets prepared descriptors go; transfers that use them have ended."""
        runs, blocks.runs = blocks.runs, None
        if runs is None:
            return
        for prepared in (runs.mine, runs.theirs):
            self._forget_prepared(prepared)

    def _forget_prepared(self, prepared: Any) -> None:
        # A list of a peer that NIXL has dropped is gone already.
        with contextlib.suppress(Exception):
            self._agent.release_dlist_handle(prepared)

    def state(self, handle: ReadHandle) -> str:
        """``PROC``, ``DONE`` or ``ERR``; asking drives progress."""
        try:
            return str(self._agent.check_xfer_state(handle.raw))
        except Exception:  # NIXL raises its own type when the connection is gone
            return "ERR"

    def bytes_moved(self, handle: ReadHandle) -> int:
        """What NIXL counted for a completed READ, in bytes; raises :class:`TransportError`."""
        try:
            return int(self._agent.get_xfer_telemetry(handle.raw).totalBytes)
        except Exception as error:
            raise TransportError(f"telemetry: {error}") from error

    def release(self, handle: ReadHandle) -> bool:
        """Lets go of a READ. False: NIXL could not cancel it and it may still write."""
        try:
            self._agent.release_xfer_handle(handle.raw)
        except Exception:
            return False
        return True

    def notify(self, agent_name: str, message: bytes) -> None:
        """Sends a notice; raises :class:`TransportError` when it cannot be sent."""
        try:
            # Without naming the backend: NIXL 1.5's binding takes none here, and we have but one.
            self._agent.send_notif(agent_name, message)
        except Exception as error:
            raise TransportError(f"peer {agent_name}: {error}") from error

    def notices(self) -> list[tuple[str, bytes]]:
        """New notices as (peer, message); asking drives progress for both roles."""
        received: dict[Any, list[bytes]] = self._agent.get_new_notifs()
        return [
            (peer.decode() if isinstance(peer, bytes) else str(peer), bytes(message))
            for peer, messages in received.items()
            for message in messages
        ]

    def close(self) -> None:
        """Deregisters the memory; errors at shutdown are of no use to anyone."""
        for pool in self._pools.values():
            self._forget_prepared(pool.raw)
        self._pools.clear()
        for descs in self._registered:
            try:
                self._agent.deregister_memory(descs)
            except Exception:  # noqa: S112
                continue
        self._registered.clear()


class _Counts(Protocol):
    def bytes_moved(self, handle: ReadHandle) -> int:
        """Bytes of a completed READ or WRITE."""


def counted_bytes(transport: _Counts, handle: ReadHandle, lease_id: str) -> int:
    """Bytes of a completed READ or WRITE; 0, and a warning, where NIXL does not say."""
    try:
        return transport.bytes_moved(handle)
    except TransportError as error:
        _log.warning("bytes_uncounted", lease=lease_id, error=str(error))
        return 0


def _fit(mine: Sequence[LocalRegion], theirs: Sequence[PeerRegion], heads: HeadSlice) -> bool:
    """Whether a head has as many bytes in each region of both."""
    return len(mine) == len(theirs) and all(
        a.block_bytes % heads.my_heads == 0
        and b.block_bytes % heads.their_heads == 0
        and a.block_bytes // heads.my_heads == b.block_bytes // heads.their_heads
        for a, b in zip(mine, theirs, strict=True)
    )


def _check_within(agent_name: str, blocks: int, which: npt.NDArray[np.int64]) -> None:
    """Raises :class:`TransportError` for a block past the end, which NIXL would take for one of the
    next region; `blocks` is 0 where it is not known."""
    if which.min() < 0 or which.max() >= (blocks or np.inf):
        raise TransportError(
            f"agent {agent_name}: blocks {which.min()} to {which.max()}, of {blocks}"
        )
