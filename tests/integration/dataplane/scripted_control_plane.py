"""A control plane that says what a test tells it to, over a real gRPC stream."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc

from kvshuttle.dataplane.limits import MAX_MESSAGE_BYTES
from kvshuttle.v1 import agent_service_pb2 as agent_pb2
from kvshuttle.v1 import agent_service_pb2_grpc as agent_grpc


class ScriptedControlPlane(agent_grpc.AgentServiceServicer):
    """Serves on a loopback port; `streams` gets every stream that an agent opens."""

    def __init__(self, port: int = 0, credentials: grpc.ServerCredentials | None = None) -> None:
        self.streams: queue.Queue[Stream] = queue.Queue()
        self.refuse: tuple[grpc.StatusCode, str] | None = None
        self.refused = threading.Event()
        self._generation = 0
        self._server = grpc.server(
            futures.ThreadPoolExecutor(8),
            # As the real one's.
            options=[("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)],
        )
        agent_grpc.add_AgentServiceServicer_to_server(self, self._server)
        address = f"127.0.0.1:{port}"
        self.port = (
            self._server.add_secure_port(address, credentials)
            if credentials is not None
            else self._server.add_insecure_port(address)
        )
        self._server.start()

    def stop(self) -> None:
        self._server.stop(None).wait()

    def Connect(  # noqa: N802
        self, request_iterator: Iterator[agent_pb2.ConnectRequest], context: Any
    ) -> Iterator[agent_pb2.ConnectResponse]:
        if self.refuse is not None:
            self.refused.set()
            context.abort(*self.refuse)
        self._generation += 1
        stream = Stream(self._generation)
        stream.identities = list(context.auth_context().get("x509_subject_alternative_name", ()))
        threading.Thread(target=stream.read_from, args=(request_iterator,), daemon=True).start()
        self.streams.put(stream)
        while (response := stream.outgoing.get()) is not None:
            yield response


class Stream:
    """One conversation with an agent."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.incoming: queue.Queue[agent_pb2.ConnectRequest | None] = queue.Queue()
        self.outgoing: queue.Queue[agent_pb2.ConnectResponse | None] = queue.Queue()
        self.boot_id = ""
        # What the caller's certificate names, where there is one.
        self.identities: list[bytes] = []

    def read_from(self, requests: Iterator[agent_pb2.ConnectRequest]) -> None:
        try:
            for request in requests:
                self.incoming.put(request)
        except grpc.RpcError:
            pass
        self.incoming.put(None)
        self.outgoing.put(None)

    def next(self, kind: str, seconds: float = 20) -> Any:
        """The next message of this kind; others before it are dropped."""
        while True:
            request = self.incoming.get(timeout=seconds)
            assert request is not None, "the stream ended"
            if request.WhichOneof("message") == kind:
                return getattr(request, kind)

    def next_event(self, kind: str) -> Any:
        """The next event of this kind; others before it are dropped."""
        while True:
            for event in self.next("events").events:
                if event.WhichOneof("event") == kind:
                    return getattr(event, kind)

    def welcome(self, *, epoch: int = 1, heartbeat_s: float = 0.2) -> agent_pb2.AgentHello:
        """Reads the hello and answers it."""
        hello: agent_pb2.AgentHello = self.next("hello")
        self.boot_id = hello.boot_id
        welcome = agent_pb2.AgentWelcome(incarnation=1, lineage_id="L", clock_drift_ppm=200)
        welcome.heartbeat_interval.FromMilliseconds(int(heartbeat_s * 1000))
        welcome.silence_limit.FromSeconds(5)
        self.say(epoch=epoch, welcome=welcome)
        return hello

    def say(self, *, epoch: int = 1, **message: Any) -> None:
        self.outgoing.put(
            agent_pb2.ConnectResponse(
                epoch=epoch,
                boot_id=self.boot_id,
                stream_generation=self.generation,
                **message,
            )
        )

    def command(self, *, epoch: int = 1, **command: Any) -> None:
        self.say(
            epoch=epoch,
            commands=agent_pb2.AgentCommands(commands=[agent_pb2.AgentCommand(**command)]),
        )

    def close(self) -> None:
        self.outgoing.put(None)
