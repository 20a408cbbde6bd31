"""One gRPC stream between an agent and a control plane: in order, late, and lost when it breaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvshuttle.v1 import agent_service_pb2 as agent_pb2
from tests.simulation.kernel import MS, Kernel, Thread, between

__all__ = ["Stream", "StreamEnd"]


class StreamEnd(Protocol):
    """The control plane's handlers."""

    thread: Thread

    def request(self, stream: Stream, message: agent_pb2.ConnectRequest) -> None:
        """A message has come."""

    def lost(self, stream: Stream, why: str) -> None:
        """The stream has ended, as seen from there."""


class Stream:
    """`up` and `down` keep their order. What is on its way when the stream is cut never arrives,
    and each end hears of the cut at a time of its own, if it hears at all."""

    def __init__(
        self,
        kernel: Kernel,
        agent_thread: Thread,
        heard: Callable[[Stream, agent_pb2.ConnectResponse], None],
        closed: Callable[[Stream, str], None],
        server: StreamEnd,
        *,
        delay_ms: float,
        blocked: Callable[[], bool],
        copy: bool,
    ) -> None:
        self.kernel = kernel
        self.server = server
        self.open = True
        self.delay_ms = delay_ms
        self._agent_thread = agent_thread
        self._heard = heard
        self._closed = closed
        self._blocked = blocked
        self._copy = copy
        self._last = {"up": 0, "down": 0}

    def up(self, message: agent_pb2.ConnectRequest) -> None:
        """From the agent."""
        if self._copy:
            message = agent_pb2.ConnectRequest.FromString(message.SerializeToString())
        self._carry("up", self.server.thread, self._arrive_up, message)

    def down(self, message: agent_pb2.ConnectResponse) -> None:
        """From the control plane."""
        if self._copy:
            message = agent_pb2.ConnectResponse.FromString(message.SerializeToString())
        self._carry("down", self._agent_thread, self._arrive_down, message)

    def cut(self, why: str, *, agent_knows: bool = False, server_knows: bool = False) -> None:
        """Breaks it."""
        if not self.open:
            return
        self.open = False
        rng = self.kernel.rng
        # A FIN gets lost with a dead machine or a partition: then gRPC's keepalive tells, at last.
        if not agent_knows:
            late = rng.random() < 0.2
            delay = between(rng, 5_000, 15_000) if late else between(rng, 0.1, 300)
            self.kernel.at(delay, self._agent_thread, self._closed, self, why)
        if not server_knows:
            late = rng.random() < 0.2
            delay = between(rng, 10_000, 30_000) if late else between(rng, 0.1, 300)
            self.kernel.at(delay, self.server.thread, self.server.lost, self, why)

    def _carry(
        self,
        way: str,
        to: Thread,
        arrive: Callable[..., None],
        message: object,
    ) -> None:
        if not self.open:
            return
        rng = self.kernel.rng
        at = self.kernel.now + (
            between(rng, 0.1, self.delay_ms)
            if self.delay_ms < 50
            else int(rng.uniform(0.1, self.delay_ms) * MS)
        )
        at = max(at, self._last[way])
        self._last[way] = at
        self.kernel.at(at - self.kernel.now, to, arrive, message)

    def _arrive_up(self, message: agent_pb2.ConnectRequest) -> None:
        if self.open:
            if self._blocked():
                self.cut("partition")
            else:
                self.server.request(self, message)

    def _arrive_down(self, message: agent_pb2.ConnectResponse) -> None:
        if self.open:
            if self._blocked():
                self.cut("partition")
            else:
                self._heard(self, message)
