"""Where a program listens or is asked: the same for whoever says an address and whoever is told."""

from __future__ import annotations

import ipaddress
import re

__all__ = ["is_host", "is_loopback", "is_loopback_host", "split_address", "wrong_in_target"]

# Of DNS: RFC 1035, and underscores, which container networks have in names.
HOST_CHARS = 253
HOST = re.compile(r"[\w-]{1,63}(\.[\w-]{1,63})*\.?")
PORT = re.compile(r"[0-9]{1,5}")
PORTS = "ports are 1 to 65535"
HOSTS = "a name, an IPv4 address, or an IPv6 address in brackets"
# gRPC's own ways to write a target, other than host:port.
SCHEMES = re.compile(r"(dns|ipv4|ipv6|unix|unix-abstract|vsock|xds):.+")


def split_address(value: str, *, any_port: bool = False) -> tuple[str, int]:
    """Host and port of `host:port`; an IPv6 address has brackets there and none here. `any_port`:
    0 too, for a free one to listen on. ValueError says what is wrong."""
    host, colon, port = value.rpartition(":")
    if not value.strip():
        wrong = "it is empty"
    elif "://" in value:
        wrong = f"leave {value[: value.index('://') + 3]} out"
    elif not colon or "]" in port:
        wrong = "it has no port"
    elif not PORT.fullmatch(port) or not (0 if any_port else 1) <= int(port) <= 65_535:
        wrong = PORTS
    elif not is_host(host):
        wrong = f"its host must be {HOSTS}"
    else:
        return host.strip("[]"), int(port)
    raise ValueError(f"{value!r} is not host:port: {wrong}")


def wrong_in_target(value: str) -> str:
    """Why gRPC has nothing to connect to there, with the value; empty if it may have."""
    if SCHEMES.fullmatch(value):
        return ""
    try:
        split_address(value)
    except ValueError as error:
        return str(error)
    return ""


def is_host(text: str) -> bool:
    """Whether it can stand before a port: a name, an IPv4 address, or an IPv6 one in brackets."""
    if "[" not in text:
        return len(text) <= HOST_CHARS and HOST.fullmatch(text) is not None
    try:
        ipaddress.IPv6Address(text[1:-1])
    except ValueError:
        return False
    return text[0] == "[" and text[-1] == "]"


def is_loopback(target: str) -> bool:
    """Whether `host:port` (or `unix:path`) is on this machine for certain."""
    return target.startswith("unix:") or is_loopback_host(target.rpartition(":")[0].strip("[]"))


def is_loopback_host(host: str) -> bool:
    """Whether it can be reached from this machine only; without brackets."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
