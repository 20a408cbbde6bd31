"""The ways to serve a conversation that are compared: which engines, which proxy, which cache."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import httpx

from benchmarks.ttft.params import Mode
from kvshuttle.localstack import (
    ControlPlane,
    ControlPlaneView,
    Engine,
    EngineSpec,
    Gateway,
    ManagedProcess,
    ProcessError,
    Stack,
    engine_cpus,
    kvshuttle_transfer,
    local_http,
)
from kvshuttle.localstack.ports import free_port

__all__ = ["ARMS", "Arm", "ArmKind", "Pool", "Scenario", "open_arm"]

# lost: prefill has nothing of a conversation when its next turn comes. kept: it has what it had.
Scenario = Literal["lost", "kept"]
PROXY_READY_S = 60.0


@dataclass(frozen=True)
class ArmKind:
    """One way. `proxy` is for upstream's connectors, `eager` and `push` for ours; a plain engine
    has none."""

    key: str
    name: str
    connector: str | None = None
    proxy: Mode | None = None
    eager: bool | None = None
    push: bool = False

    @property
    def engines(self) -> int:
        """How many engines it starts."""
        return 1 if self.connector is None else 2

    @property
    def together(self) -> bool:
        """Whether decode's leg waits beside prefill's, to be written to."""
        return self.push or self.proxy == "push"

    @property
    def ours(self) -> bool:
        """Whether it is kvshuttle."""
        return self.eager is not None


# In the order in which they are started while there is memory and time: what the last line of the
# benchmark is computed from comes first.
ARMS: tuple[ArmKind, ...] = (
    ArmKind("a", "one plain engine"),
    ArmKind("g", "kvshuttle push + eager", "kvshuttle", eager=True, push=True),
    # Beside g: what pushing costs prefill is seen by the pair.
    ArmKind("f", "kvshuttle eager", "kvshuttle", eager=True),
    ArmKind("c", "upstream bidirectional", "NixlConnector", proxy="bidirectional"),
    ArmKind("b", "upstream one way", "NixlConnector", proxy="one-way"),
    ArmKind("e", "kvshuttle lazy", "kvshuttle", eager=False),
    ArmKind("d", "upstream push", "NixlPushConnector", proxy="push"),
)


@dataclass(frozen=True)
class Pool:
    """What all engines have in common."""

    model: Path
    dtype: str
    block_size: int
    tokens: int
    kv_cache_gib: int
    max_model_len: int
    # Random weights, for the tiny model of the tests.
    dummy_weights: bool = False

    @property
    def blocks(self) -> int:
        """KV blocks an engine."""
        return self.tokens // self.block_size

    def spec(self, name: str, cpu: int, **changes: Any) -> EngineSpec:
        """One engine."""
        made = EngineSpec(
            name,
            self.model,
            cpu=cpu,
            dtype=self.dtype,
            block_size=self.block_size,
            num_blocks=self.blocks,
            kv_cache_gib=self.kv_cache_gib,
            max_model_len=self.max_model_len,
            dummy_weights=self.dummy_weights,
            # For /reset_prefix_cache, the stand-in for an eviction.
            env={"VLLM_SERVER_DEV_MODE": "1"},
        )
        env = {**made.env, **changes.pop("env", {})}
        return replace(made, env=env, **changes)


class ProxyProcess(ManagedProcess):
    """`python -m benchmarks.ttft.proxy` as a child process."""

    def __init__(self, name: str, directory: Path, argv: list[str]) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        super().__init__(
            name,
            [sys.executable, "-m", "benchmarks.ttft.proxy", "--port", str(port), *argv],
            log_path=directory / f"{name}.log",
            ready_timeout_s=PROXY_READY_S,
        )

    def is_ready(self) -> bool:
        try:
            return local_http.get(f"{self.url}/health", timeout=2.0).status_code == 200
        except httpx.HTTPError:
            return False


@dataclass
class Arm:
    """A running way. `url` is where the client asks."""

    kind: ArmKind
    stack: Stack
    url: str
    prefill: Engine
    decode: Engine
    view: ControlPlaneView | None = None
    control_plane: ControlPlane | None = None
    gateway: Gateway | None = None
    # Whether prefill keeps a prefix cache.
    prefix_caching: bool = True
    _paused: bool = field(default=False, init=False)

    @property
    def engines(self) -> list[Engine]:
        """Each once."""
        return [self.prefill] if self.prefill is self.decode else [self.prefill, self.decode]

    def pids(self) -> list[int]:
        """Every process of it."""
        return [pid for process in self.stack.processes for pid in process.pids()]

    def rest(self) -> None:
        """Stops upstream's engines until their next turn: their progress threads take both cores.

        Ours and the plain one go on: what they cost while idle is part of what is measured.
        """
        if self.kind.proxy is not None and not self._paused:
            for engine in self.engines:
                engine.pause()
            self._paused = True

    def wake(self) -> bool:
        """Lets them run again; whether they had been stopped."""
        was, self._paused = self._paused, False
        if was:
            for engine in self.engines:
                engine.resume()
        return was

    def close(self) -> None:
        """Stops all of it."""
        self.wake()
        if self.view is not None:
            self.view.close()
        self.stack.close()


def open_arm(kind: ArmKind, scenario: Scenario, pool: Pool, directory: Path, stack: Stack) -> Arm:
    """Starts one way in `stack`. Raises ProcessError where something does not start."""
    cpus = engine_cpus()
    directory.mkdir(parents=True, exist_ok=True)
    if kind.connector is None:
        engine = Engine(pool.spec("plain", cpus[0]), log_dir=directory)
        stack.start(engine)
        return Arm(kind, stack, engine.url, engine, engine)
    if kind.ours:
        return _ours(kind, scenario, pool, directory, stack, cpus)
    return _upstream(kind, scenario, pool, directory, stack, cpus)


def _ours(
    kind: ArmKind, scenario: Scenario, pool: Pool, directory: Path, stack: Stack, cpus: list[int]
) -> Arm:
    # Eager returns go into prefill's prefix cache, so it has one, and loses what is in it by a
    # reset; lazy ones do without, as upstream's.
    prefix_caching = bool(kind.eager) or scenario == "kept"
    flags = ["--eager" if kind.eager else "--no-eager"]
    flags += ["--forward", "push" if kind.push else "pull"]
    flags += ["--direct-tokens", "0"]
    control_plane = ControlPlane(directory=directory, extra_args=flags)
    stack.start(control_plane)
    engines = [
        Engine(
            pool.spec(
                name,
                cpu,
                prefix_caching=prefix_caching if role == "prefill" else True,
                kv_transfer=kvshuttle_transfer(
                    control_plane=control_plane.target, worker_id=name, role=role
                ),
            ),
            log_dir=directory,
        )
        for name, role, cpu in (
            (f"{kind.key}-prefill", "prefill", cpus[0]),
            (f"{kind.key}-decode", "decode", cpus[1]),
        )
    ]
    stack.start(*engines)
    stack.wait_registered(control_plane.target, [engine.name for engine in engines])
    gateway = Gateway(
        directory=directory,
        control_plane=control_plane.target,
        prefill_urls=[engines[0].url],
        decode_urls=[engines[1].url],
    )
    stack.start(gateway)
    view = ControlPlaneView(control_plane.target)
    prefill, decode = engines
    return Arm(
        kind, stack, gateway.url, prefill, decode, view, control_plane, gateway, prefix_caching
    )


def _upstream(
    kind: ArmKind, scenario: Scenario, pool: Pool, directory: Path, stack: Stack, cpus: list[int]
) -> Arm:
    ids = {role: f"{kind.key}-{role}" for role in ("prefill", "decode")}
    ports = {role: free_port() for role in ids}
    engines = []
    for role, cpu in zip(ids, cpus, strict=False):
        changes: dict[str, Any] = {}
        if role == "decode" and kind.proxy == "bidirectional":
            changes["server"] = "benchmarks.ttft.streamed_params"
        engines.append(
            Engine(
                pool.spec(
                    ids[role],
                    cpu,
                    prefix_caching=scenario == "kept" if role == "prefill" else True,
                    kv_transfer=_upstream_transfer(kind, ids[role]),
                    env={"VLLM_NIXL_SIDE_CHANNEL_PORT": str(ports[role])},
                    **changes,
                ),
                log_dir=directory,
            )
        )
    stack.start(*engines)
    for engine in engines:
        _back_to_its_core(engine)
    assert kind.proxy is not None
    proxy = ProxyProcess(
        f"{kind.key}-proxy",
        directory,
        [
            *("--mode", kind.proxy),
            *("--prefill-url", engines[0].url, "--decode-url", engines[1].url),
            *("--prefill-engine-id", ids["prefill"]),
            *("--prefill-side-port", str(ports["prefill"])),
        ],
    )
    stack.start(proxy)
    prefill, decode = engines
    return Arm(kind, stack, proxy.url, prefill, decode, prefix_caching=scenario == "kept")


def _back_to_its_core(engine: Engine) -> None:
    """Gives the worker's own thread, which computes, the core back that the engine was given.

    On CPU upstream's connector moves that thread to the last core of the machine, where there
    should be none but it. On two cores that is decode's: both engines would compute there, beside
    decode's progress thread, and prefill would get a third of it. NIXL's thread stays where it is.
    """
    workers = [pid for pid in engine.pids() if "Worker" in Path(f"/proc/{pid}/comm").read_text()]
    if not workers:
        raise ProcessError(f"{engine.name} has no worker process\n{engine.tail()}")
    for pid in workers:
        os.sched_setaffinity(pid, {engine.spec.cpu})


def _upstream_transfer(kind: ArmKind, engine_id: str) -> dict[str, Any]:
    config: dict[str, Any] = {
        "kv_connector": kind.connector,
        "kv_role": "kv_both",
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "recompute",
        "engine_id": engine_id,
    }
    if kind.proxy == "bidirectional":
        config["kv_connector_extra_config"] = {"bidirectional_kv_xfer": True}
    return config
