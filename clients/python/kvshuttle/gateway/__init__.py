"""OpenAI-compatible gateway that runs each request as a turn of a conversation."""

from kvshuttle.gateway.app import create_app
from kvshuttle.gateway.server import GatewayServer
from kvshuttle.gateway.settings import GatewaySettings, load

__all__ = ["GatewayServer", "GatewaySettings", "create_app", "load"]
