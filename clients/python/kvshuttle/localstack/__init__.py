"""A whole kvshuttle on this machine, as child processes: for the demo, tests and benchmarks."""

from kvshuttle.localstack import local_http
from kvshuttle.localstack.chat import Answer, ChatClient, Message, user
from kvshuttle.localstack.engine import Engine, EngineSpec, engine_cpus, kvshuttle_transfer
from kvshuttle.localstack.process import ManagedProcess, ProcessError
from kvshuttle.localstack.services import ControlPlane, Gateway
from kvshuttle.localstack.stack import Stack
from kvshuttle.localstack.view import ControlPlaneView

__all__ = [
    "Answer",
    "ChatClient",
    "ControlPlane",
    "ControlPlaneView",
    "Engine",
    "EngineSpec",
    "Gateway",
    "ManagedProcess",
    "Message",
    "ProcessError",
    "Stack",
    "engine_cpus",
    "kvshuttle_transfer",
    "local_http",
    "user",
]
