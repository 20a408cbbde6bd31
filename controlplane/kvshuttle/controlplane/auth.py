"""Who a caller is, and what each role may do.

Identity comes from a client certificate's URI (`kvshuttle://<role>/<name>`), else from a bearer
token whose SHA-256 is in the tokens file, else, in insecure mode only, from nowhere.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import yaml
from cryptography import x509

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["Caller", "Role", "Tokens", "caller_of_certificate", "may"]

TENANT_KEY = "kvshuttle-tenant"
DEFAULT_TENANT = "default"


class Role(Enum):
    """What kind of caller."""

    WORKER = "worker"
    GATEWAY = "gateway"
    CLIENT = "client"
    OPERATOR = "operator"
    ANYONE = "anyone"
    """Insecure mode, loopback only."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls. `tenant` is set where the identity is bound to one."""

    role: Role
    name: str
    tenant: str = ""


_READ_LEASES = frozenset({"GetLease", "ListLeases", "WatchLeases"})


def may(role: Role, service: str, method: str) -> bool:
    """The policy: `service` without its package."""
    if role in (Role.OPERATOR, Role.ANYONE):
        return True
    match service:
        case "SessionService":
            return role in (Role.GATEWAY, Role.CLIENT)
        case "LeaseService":
            return role is Role.CLIENT and method in _READ_LEASES
        case "AgentService":
            return role is Role.WORKER
        case "ServerReflection":
            return True
        case _:
            return False


@lru_cache(maxsize=1_024)
def caller_of_certificate(pem: bytes) -> Caller | None:
    """The caller that a verified client certificate names, if it names one of ours."""
    certificate = x509.load_pem_x509_certificate(pem)
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return None
    for uri in names.value.get_values_for_type(x509.UniformResourceIdentifier):
        scheme, _, rest = uri.partition("://")
        role, _, name = rest.partition("/")
        if scheme == "kvshuttle" and role in ("worker", "gateway", "operator") and name:
            return Caller(Role(role), name)
    return None


class Tokens:
    """The tokens file: YAML, a list of `{sha256, role, name, tenant}`; it never holds a token.

    ValueError, with the entry's number, when it is not so.
    """

    def __init__(self, entries: Mapping[str, Caller]) -> None:
        self._entries = dict(entries)

    def __len__(self) -> int:
        return len(self._entries)

    @classmethod
    def load(cls, path: Path) -> Tokens:
        """Reads the file."""
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(raw, list):
            raise ValueError(f"{path}: a list of tokens is expected")
        return cls(dict(_entry(path, number, entry) for number, entry in enumerate(raw, 1)))

    def find(self, token: str) -> Caller | None:
        """Whose token this is. The look-up is by digest, so its time says nothing of the token."""
        return self._entries.get(hashlib.sha256(token.encode()).hexdigest())


def _entry(path: Path, number: int, entry: Any) -> tuple[str, Caller]:
    where = f"{path}: token {number}"
    if not isinstance(entry, dict):
        raise ValueError(f"{where} is not a mapping")
    digest = str(entry.get("sha256", "")).lower()
    if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        raise ValueError(
            f"{where}: sha256 must be 64 hexadecimal digits (printf %s TOKEN | sha256sum)"
        )
    role = str(entry.get("role", ""))
    if role not in ("gateway", "client", "operator"):
        raise ValueError(f"{where}: role must be gateway, client or operator, not {role!r}")
    tenant = str(entry.get("tenant") or "")
    if (role == "client") != bool(tenant):
        raise ValueError(f"{where}: a client's token names its tenant, and no other does")
    return digest, Caller(Role(role), str(entry.get("name") or f"token-{number}"), tenant)
