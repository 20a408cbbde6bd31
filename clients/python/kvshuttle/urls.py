"""What an engine's base URL may be: the same for whoever says one and whoever is told."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

__all__ = ["wrong_in_base_url"]

# Of DNS: RFC 1035, and underscores, which container networks have in names.
HOST_CHARS = 253
HOST = re.compile(r"[\w-]{1,63}(\.[\w-]{1,63})*\.?")


def wrong_in_base_url(value: str) -> str:
    """Why no path of an API can be put behind it, or no request be sent there; empty if one can."""
    if " " in value or "?" in value or "#" in value:
        return "it must have no space, query or fragment"
    try:
        url = urlsplit(value)
        host, port = url.hostname or "", url.port
    except ValueError:
        return "its host or port cannot be read (ports are 1 to 65535)"
    if url.scheme not in ("http", "https"):
        return "it must begin with http:// or https://"
    if "@" in url.netloc:
        return "it must have no user or password"
    if port == 0:
        return "ports are 1 to 65535"
    if not _is_host(host, url.netloc):
        return "it must have a host: a name, an IPv4 address, or an IPv6 address in brackets"
    return ""


def _is_host(host: str, netloc: str) -> bool:
    if "[" not in netloc:
        return len(host) <= HOST_CHARS and HOST.fullmatch(host) is not None
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    before, behind = netloc[: netloc.index("[")], netloc[netloc.index("]") + 1 :]
    return not before and behind[:1] in ("", ":")
