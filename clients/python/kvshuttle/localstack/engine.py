"""vLLM engines on a machine without a GPU, with or without a KV connector."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from kvshuttle.localstack import local_http, metrics
from kvshuttle.localstack.ports import free_port
from kvshuttle.localstack.process import ManagedProcess, ProcessError

# One engine takes about 40 s on an idle core, three side by side on two cores about 120 s.
READY_TIMEOUT_S = 420.0
WARM_UP_TIMEOUT_S = 120.0
# Longer than the agent has vLLM wait.
PAUSE_TIMEOUT_S = 40.0
RESET_TIMEOUT_S = 30.0
RESET_POLL_S = 0.1
# Where vLLM is on its way, by what it last logged, for those who wait.
_PHASES = (
    ("Application startup complete", "warming up"),
    ("Started server process", "opening its server"),
    ("Starting vLLM server", "opening its server"),
    ("init engine", "making its KV pool"),
    ("GPU KV cache size", "making its KV pool"),
    ("Loading weights took", "making its KV pool"),
    ("Starting to load model", "loading weights"),
    ("Initializing a V1 LLM engine", "starting its core"),
)


@dataclass(frozen=True)
class EngineSpec:
    """What to start."""

    name: str
    model: Path
    served_name: str = "model"
    # Which core its forward passes run on: one core an engine keeps two of them comparable.
    cpu: int = 0
    # In bfloat16 a prompt computed in other pieces gives logprobs that differ by 0.1 and now and
    # then another token, in plain vLLM too. In float32 what differs is wrong. Without AVX-512 or
    # AMX it is no slower.
    dtype: str = "float32"
    # Random weights, equal in every process; for models without a weights file.
    dummy_weights: bool = False
    prefix_caching: bool = True
    # 32 is the smallest on CPU, where 128 is the default: more full blocks in a short prompt.
    block_size: int = 32
    max_model_len: int = 8_192
    kv_cache_gib: int = 1
    # Fewer blocks than fit into `kv_cache_gib`, to make memory short.
    num_blocks: int | None = None
    # None: a plain engine. Else vLLM's --kv-transfer-config; `{url}` in a text becomes the
    # engine's own base URL.
    kv_transfer: Mapping[str, Any] | None = None
    # Ask once for one token with logprobs before it counts as ready: what vLLM compiles on first
    # use takes up to half a minute, and would be taken for somebody's time to first token.
    warm_up: bool = True
    extra_args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    # What is run with `python -m`: vLLM's server, or a module that runs it.
    server: str = "vllm.entrypoints.openai.api_server"


def kvshuttle_transfer(
    *, control_plane: str, worker_id: str, role: str, extra: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The --kv-transfer-config of an engine with kvshuttle's agent.

    `control_plane` is its gRPC target, `role` is prefill, decode or both; `extra` is added to
    the agent's own settings.
    """
    return {
        "kv_connector": "KVShuttleConnector",
        "kv_connector_module_path": "kvshuttle.dataplane.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "control_plane": control_plane,
            "worker_id": worker_id,
            "role": role,
            "url": "{url}",
            "insecure": True,
            **(extra or {}),
        },
    }


def engine_cpus() -> list[int]:
    """The cores that engines may be bound to, at least two entries (equal on one core)."""
    cpus = sorted(os.sched_getaffinity(0))
    return cpus if len(cpus) > 1 else cpus * 2


class Engine(ManagedProcess):
    """A vLLM OpenAI-compatible server: API server, EngineCore and one worker process."""

    def __init__(self, spec: EngineSpec, *, log_dir: Path) -> None:
        self.spec = spec
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        super().__init__(
            spec.name,
            [],
            log_path=log_dir / f"{spec.name}.log",
            env={
                "VLLM_CPU_OMP_THREADS_BIND": str(spec.cpu),
                "VLLM_CPU_KVCACHE_SPACE": str(spec.kv_cache_gib),
                "HF_HUB_OFFLINE": "1",
                "TRANSFORMERS_OFFLINE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "DO_NOT_TRACK": "1",
                # All is on this machine: NIXL must not listen where others reach it, either.
                "UCX_NET_DEVICES": "lo",
                **spec.env,
            },
            ready_timeout_s=READY_TIMEOUT_S,
        )

    def argv(self) -> list[str]:
        spec = self.spec
        command = [sys.executable, "-m", spec.server]
        command += ["--model", str(spec.model), "--served-model-name", spec.served_name]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--dtype", spec.dtype]
        command += ["--max-model-len", str(spec.max_model_len)]
        command += ["--block-size", str(spec.block_size)]
        command += ["--enforce-eager", "--enable-prompt-tokens-details", "--seed", "0"]
        command += ["--disable-uvicorn-access-log"]
        command.append(
            "--enable-prefix-caching" if spec.prefix_caching else "--no-enable-prefix-caching"
        )
        if spec.dummy_weights:
            command += ["--load-format", "dummy"]
        if spec.num_blocks is not None:
            command += ["--num-gpu-blocks-override", str(spec.num_blocks)]
        if spec.kv_transfer is not None:
            text = json.dumps(spec.kv_transfer).replace("{url}", self.url)
            command += ["--kv-transfer-config", text]
        return command + list(spec.extra_args)

    def is_ready(self) -> bool:
        try:
            healthy = local_http.get(f"{self.url}/health", timeout=2.0).status_code == 200
        except httpx.HTTPError:
            return False
        if healthy and self.spec.warm_up:
            self._warm_up()
        return healthy

    def _warm_up(self) -> None:
        # Too short for a full block, so it leaves nothing in the prefix cache.
        body = {
            "model": self.spec.served_name,
            "messages": [{"role": "user", "content": "Hi"}],
            "max_tokens": 2,
            "temperature": 0.0,
            "logprobs": True,
            "top_logprobs": 0,
        }
        try:
            local_http.post(
                f"{self.url}/v1/chat/completions", json=body, timeout=WARM_UP_TIMEOUT_S
            ).raise_for_status()
        except httpx.HTTPError as error:
            raise ProcessError(f"{self.name}: warm-up: {error!r}\n{self.tail()}") from error

    def phase(self) -> str:
        """One or two words on how far its start is, from its log."""
        try:
            text = self.log_path.read_text(errors="replace")
        except OSError:
            return "starting"
        return next((phase for mark, phase in _PHASES if mark in text), "importing vLLM")

    def reset_prefix_cache(self) -> bool:
        """Asks vLLM to drop its prefix cache; whether it did: it does not while anybody holds a
        block, and says so in its log only. It answers a server in development mode
        (``VLLM_SERVER_DEV_MODE=1``) alone. Raises httpx.HTTPError."""
        with self.log_path.open("rb") as log:
            log.seek(0, os.SEEK_END)
            local_http.post(
                f"{self.url}/reset_prefix_cache", timeout=RESET_TIMEOUT_S
            ).raise_for_status()
            return b"Successfully reset prefix cache" in log.read()

    def wait_prefix_cache_reset(self, timeout_s: float = RESET_TIMEOUT_S) -> None:
        """Returns once the prefix cache is empty. Raises ProcessError when somebody holds a block
        for longer."""
        deadline = time.monotonic() + timeout_s
        while not self.reset_prefix_cache():
            if time.monotonic() > deadline:
                raise ProcessError(f"{self.name}: blocks are held still after {timeout_s:.0f} s")
            time.sleep(RESET_POLL_S)

    def pause_vllm(self, mode: str = "abort", timeout_s: float = PAUSE_TIMEOUT_S) -> httpx.Response:
        """Pauses what it computes, as before new weights; vLLM's answer, 500 too. It answers a
        server in development mode alone. Raises httpx.HTTPError."""
        return local_http.post(f"{self.url}/pause", params={"mode": mode}, timeout=timeout_s)

    def resume_vllm(self) -> None:
        """Goes on after `pause_vllm`. Raises httpx.HTTPError."""
        local_http.post(f"{self.url}/resume", timeout=PAUSE_TIMEOUT_S).raise_for_status()

    def metrics(self) -> metrics.Metrics:
        """vLLM's own counters, now."""
        return metrics.scrape(self.url)
