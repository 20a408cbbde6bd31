"""Which tenant a request is for."""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING

import yaml

from kvshuttle.gateway.errors import unauthorized

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

DEFAULT_TENANT = "default"
# A tenant's name travels as gRPC metadata and as a label of the log.
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,127}")
_SHA256_HEX = re.compile(r"[0-9a-f]{64}")


class KeyFileError(Exception):
    """The API keys file cannot be used; the text says why."""


class Authenticator:
    """Maps `Authorization: Bearer <key>` to a tenant.

    The file holds the keys' SHA-256, never the keys: whoever reads it can use none of them. Keys
    must be random; a guessable one is guessable by its hash too.
    """

    def __init__(self, tenants_by_hash: dict[str, str] | None) -> None:
        self._tenants_by_hash = tenants_by_hash

    @classmethod
    def from_file(cls, path: Path | None) -> Authenticator:
        """Reads the file, a YAML or JSON mapping of hex SHA-256 to tenant; None: no keys."""
        return cls(None if path is None else _read_keys(path))

    @property
    def is_open(self) -> bool:
        """Whether everyone is served, without a key."""
        return self._tenants_by_hash is None

    def tenant(self, headers: Mapping[str, str]) -> str:
        """The caller's tenant, by its key in `Authorization`, or in `X-Api-Key` as clients of
        Anthropic's API send it. Raises a 401 ApiError where the key is missing or unknown."""
        if self._tenants_by_hash is None:
            return DEFAULT_TENANT
        scheme, _, key = headers.get("authorization", "").strip().partition(" ")
        if scheme.lower() != "bearer":
            key = headers.get("x-api-key", "")
        if not key.strip():
            raise unauthorized(
                "No API key. Send it in the header Authorization: Bearer <key>, or X-Api-Key."
            )
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogatepass")).hexdigest()
        tenant = self._tenants_by_hash.get(digest)
        if tenant is None:
            raise unauthorized(
                "The API key is not known here. Check it, or ask the operator for one."
            )
        return tenant


def _read_keys(path: Path) -> dict[str, str]:
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise KeyFileError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise KeyFileError(f"{path}: neither YAML nor JSON") from error
    if not isinstance(entries, dict) or not entries:
        raise KeyFileError(f"{path}: must map the SHA-256 of each key (hex) to its tenant")
    keys: dict[str, str] = {}
    for digest, tenant in entries.items():
        name = str(digest).lower()
        if not _SHA256_HEX.fullmatch(name):
            # Not quoted: it may be a key that was written in the clear.
            raise KeyFileError(
                f"{path}: an entry's name is not a SHA-256 in hex (printf %s KEY | sha256sum)"
            )
        if not isinstance(tenant, str) or not _TENANT.fullmatch(tenant):
            raise KeyFileError(f"{path}: {name[:8]}…: a tenant is 1 to 128 of A-Z a-z 0-9 . _ @ -")
        keys[name] = tenant
    return keys
