"""What an engine's base URL may be: the same for whoever says one and whoever is told."""

from __future__ import annotations

from urllib.parse import urlsplit

from kvshuttle.addresses import HOSTS, PORTS, is_host

__all__ = ["wrong_in_base_url"]


def wrong_in_base_url(value: str) -> str:
    """Why no path of an API can be put behind it, or no request be sent there; empty if one can."""
    if " " in value or "?" in value or "#" in value:
        return "it must have no space, query or fragment"
    try:
        url = urlsplit(value)
        port = url.port
    except ValueError:
        return f"its host or port cannot be read ({PORTS})"
    if url.scheme not in ("http", "https"):
        return "it must begin with http:// or https://"
    if "@" in url.netloc:
        return "it must have no user or password"
    if port == 0:
        return PORTS
    host, colon, number = url.netloc.rpartition(":")
    if not is_host(host if colon and "]" not in number else url.netloc):
        return f"it must have a host: {HOSTS}"
    return ""
