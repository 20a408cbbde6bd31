"""One stream to the control plane, without its transport: what is heard, and for how long not."""

from __future__ import annotations

from kvshuttle.dataplane.clock import NS
from kvshuttle.dataplane.scheduler import CommandBatch, StreamLife, StreamUp
from kvshuttle.v1 import agent_service_pb2 as agent_pb2

__all__ = ["Conversation"]


class Conversation:
    """The state of one stream. Instants are readings of the agent's clock, in ns."""

    def __init__(self, hello: agent_pb2.AgentHello, now: int) -> None:
        self.hello = hello
        self.life = StreamLife()
        # Set by the owner once it has passed on the StreamUp.
        self.generation = 0
        self.heartbeat_ns = NS
        self.silence_ns = 0
        self._heard_ns = now

    def hear(self, response: agent_pb2.ConnectResponse, now: int) -> StreamUp | CommandBatch | None:
        """What a message is to the scheduler side; None: nothing."""
        self._heard_ns = now
        if response.boot_id != self.hello.boot_id:
            return None
        if response.HasField("welcome"):
            welcome = response.welcome
            self.heartbeat_ns = max(welcome.heartbeat_interval.ToNanoseconds(), NS // 100)
            self.silence_ns = welcome.silence_limit.ToNanoseconds()
            return StreamUp(response.stream_generation, response.epoch, welcome)
        if response.HasField("commands") and response.commands.commands:
            return CommandBatch(
                response.stream_generation, response.epoch, response.commands.commands, self.life
            )
        return None

    def silent(self, now: int) -> bool:
        """Whether the control plane, which answers every heartbeat, has not been heard too long."""
        return self.silence_ns > 0 and now - self._heard_ns > self.silence_ns + self.heartbeat_ns
