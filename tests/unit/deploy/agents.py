"""The agent's configuration as deployment files give it to vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvshuttle.dataplane.config import AgentConfig

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"


def checked(transfer: str, path: Path) -> AgentConfig:
    """What is in --kv-transfer-config, read as the agent reads it. Its certificates are said to
    be there."""
    loaded: dict[str, Any] = json.loads(transfer)
    assert loaded["kv_connector"] == "KVShuttleConnector"
    assert loaded["kv_connector_module_path"] == "kvshuttle.dataplane.connector"
    assert loaded["kv_role"] == "kv_both"
    assert loaded["kv_load_failure_policy"] == "recompute"
    extra = loaded["kv_connector_extra_config"]
    there = path / "there.pem"
    there.touch()
    for key in ("tls_ca", "tls_cert", "tls_key"):
        assert extra[key].startswith("/")
        extra[key] = str(there)
    return AgentConfig.parse(extra)
