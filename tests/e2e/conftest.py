"""Real engines, started once for all end-to-end tests: three of them side by side on two cores."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvshuttle.localstack import (
    ChatClient,
    ControlPlane,
    ControlPlaneView,
    Engine,
    EngineSpec,
    Gateway,
    Stack,
    engine_cpus,
    kvshuttle_transfer,
    local_http,
)
from kvshuttle.localstack.metrics import EXTERNAL_HITS
from tests.support.conversation import Oracle
from tests.support.history import History
from tests.support.leaks import assert_nothing_leaked, free_blocks
from tests.support.otlp import Collector

ROOT = Path(__file__).parents[2]
TINY = ROOT / ".models" / "tiny"
STORES_RESPONSES = {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}
AGENT_ERRORS = ("hook_failed", "inbox_item_failed", "mover_failed")
PREFILL, DECODE = "prefill-0", "decode-0"
# 12,800 tokens: three prompts of the greatest length, so that memory can be made short.
POOL_BLOCKS = 400


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here needs engines, and waits for them to start or to compute."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker("engines")
            if not any(item.iter_markers("timeout")):
                item.add_marker(pytest.mark.timeout(600))


def hooks_failed(engine: Engine) -> list[str]:
    """The first lines of an engine's log that tell of a failure inside its agent."""
    text = engine.log_path.read_text(errors="replace")
    return [line for line in text.splitlines() if any(x in line for x in AGENT_ERRORS)][:3]


def engine_spec(name: str, cpu: int, **changes: object) -> EngineSpec:
    """The tiny model's engine; `changes` are fields of EngineSpec."""
    settings: dict[str, object] = {"name": name, "model": TINY, "cpu": cpu, "max_model_len": 4_096}
    return EngineSpec(**(settings | changes))  # type: ignore[arg-type]


@dataclass
class Cluster:
    """One whole kvshuttle."""

    stack: Stack
    control_plane: ControlPlane
    prefill: Engine
    decode: Engine
    gateway: Gateway
    view: ControlPlaneView
    client: ChatClient
    # Free blocks by worker when nothing is held.
    baseline: dict[str, int]
    logs: Path

    def assert_nothing_leaked(self) -> None:
        """Ends all sessions and waits until nothing is held."""
        assert_nothing_leaked(self.view, self.baseline)

    def forget_prefill(self) -> None:
        """Empties prefill's own cache, as an eviction would, once nothing is held there."""
        self.prefill.wait_prefix_cache_reset()

    def held(self, worker_id: str) -> int:
        """Held blocks, as of the last heartbeat."""
        return self.view.workers()[worker_id].pool.held_blocks

    def wait_offered(self, session: str, tokens: int = 1) -> None:
        """Waits until decode has offered so much of a session."""
        deadline = time.monotonic() + 20
        while True:
            best = max(
                (
                    r.num_tokens
                    for r in self.view.session(session).replicas
                    if r.worker.worker_id == DECODE
                ),
                default=0,
            )
            if best >= tokens:
                return
            assert time.monotonic() < deadline, f"{session}: {best} tokens offered, not {tokens}"
            time.sleep(0.05)

    def returned_tokens(self) -> int:
        """vLLM's own count of the tokens that prefill did not compute because they were moved."""
        return int(self.prefill.metrics().total(EXTERNAL_HITS))

    def forward_tokens(self) -> int:
        """As `returned_tokens`, of decode."""
        return int(self.decode.metrics().total(EXTERNAL_HITS))

    @contextlib.contextmanager
    def faults(self, worker_id: str, **planted: object) -> Iterator[None]:
        """Plants faults in a worker's transfers."""
        path = self.logs / f"{worker_id}.faults.json"
        path.write_text(json.dumps(planted))
        try:
            yield
        finally:
            path.unlink()

    def fence(self, worker_id: str) -> None:
        """Attests that the worker's last boot is dead."""
        self.view.fence(self.view.workers()[worker_id].ref, "killed by a test")

    def start_control_plane(self) -> None:
        """Starts the stopped control plane, and waits until agents and gateway are back on it."""
        start = time.monotonic()
        self.control_plane.start()
        self.control_plane.wait_ready()
        self.stack.wait_registered(self.control_plane.target, [PREFILL, DECODE])
        deadline = time.monotonic() + 30
        while True:
            # Turns that begin before are answered all the same, but nobody knows of them.
            seen = local_http.get(f"{self.gateway.url}/health", timeout=10).json()["control_plane"]
            age = seen["seconds_since_answer"]
            if seen["state"] == "ok" and age is not None and age < time.monotonic() - start:
                return
            assert time.monotonic() < deadline, f"the gateway does not see it: {seen}"
            time.sleep(0.1)

    @contextlib.contextmanager
    def control_plane_with(self, *flags: str) -> Iterator[None]:
        """Restarts the control plane with other flags, and back with its usual ones."""
        usual = self.control_plane.extra_args
        for arguments in (store_args(self.logs, *flags), usual):
            self.control_plane.stop()
            self.control_plane.extra_args = arguments
            self.start_control_plane()
            if arguments is not usual:
                yield

    def restart_worker(self, engine: Engine) -> None:
        """Starts a killed engine again, and waits for its agent to be registered and empty."""
        engine.restart()
        self.stack.wait_registered(self.control_plane.target, [engine.name])


@pytest.fixture(scope="session")
def logs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the programs' logs go."""
    return tmp_path_factory.mktemp("logs")


def store_args(logs: Path, *flags: str) -> list[str]:
    """On disk, so that the control plane can be stopped and started between turns; and with a log
    of each lease."""
    store = ["--store", str(logs / "controlplane.sqlite")]
    if "--direct-tokens" not in flags:
        # Short turns too go to prefill: what is moved is what most tests are about.
        store += ["--direct-tokens", "0"]
    if "--lookup-wait-ms" not in flags:
        # A lookup waits as long as computing would take, which for the tiny model is not as long
        # as a busy machine takes for a grant. What is late there is no finding.
        store += ["--lookup-wait-ms", "3000"]
    return [*store, "--log-format=json", "--log-level=debug", "--traces", *flags]


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    """Where the spans of all programs go. They make some only for requests whose client says that
    its trace is wanted."""
    collector = Collector()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        patch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        yield collector
    collector.stop()


def control_plane_of(logs: Path) -> ControlPlane:
    """Lazy by default: what a request waits for is what most tests are about."""
    return ControlPlane(directory=logs, extra_args=store_args(logs, "--no-eager"))


def worker(
    logs: Path,
    control_plane: ControlPlane,
    name: str,
    role: str,
    *,
    env: Mapping[str, str] | None = None,
    **changes: object,
) -> Engine:
    """One with an agent, not started; prefill on the first core, decode on the second."""
    return Engine(
        engine_spec(
            name,
            engine_cpus()[role == "decode"],
            # For /reset_prefix_cache, the stand-in for an eviction.
            env={"VLLM_SERVER_DEV_MODE": "1", "KVSHUTTLE_LOG_LEVEL": "debug", **(env or {})},
            kv_transfer=kvshuttle_transfer(
                control_plane=control_plane.target,
                worker_id=name,
                role=role,
                extra={"fault_file": str(logs / f"{name}.faults.json"), "traces": True},
            ),
            **changes,
        ),
        log_dir=logs,
    )


def workers(
    logs: Path, control_plane: ControlPlane, traces: str, env: Mapping[str, str] | None = None
) -> tuple[Engine, Engine]:
    """Prefill and decode, not started."""
    prefill, decode = (
        worker(
            logs,
            control_plane,
            name,
            role,
            num_blocks=POOL_BLOCKS,
            env={**STORES_RESPONSES, **(env or {})},
            extra_args=("--otlp-traces-endpoint", traces),
        )
        for name, role in ((PREFILL, "prefill"), (DECODE, "decode"))
    )
    return prefill, decode


@pytest.fixture(scope="session")
def more_agents() -> list[Engine]:
    """Engines that some tests add to the cluster for a while; the run's history is theirs too."""
    return []


@pytest.fixture(scope="session")
def engines(
    logs: Path, collector: Collector, more_agents: list[Engine]
) -> Iterator[tuple[Stack, ControlPlane, Engine, Engine, Engine]]:
    """Control plane, prefill, decode and the plain engine, started side by side."""
    assert (TINY / "config.json").exists(), "no model: run `make model`"
    with Stack() as stack:
        control_plane = control_plane_of(logs)
        stack.start(control_plane)
        prefill, decode = workers(logs, control_plane, collector.url)
        plain = Engine(engine_spec("plain", engine_cpus()[1], env=STORES_RESPONSES), log_dir=logs)
        stack.start(prefill, decode, plain)
        yield stack, control_plane, prefill, decode, plain
    check_history(control_plane, prefill, decode, *more_agents)


def check_history(control_plane: ControlPlane, *agents: Engine) -> None:
    """Of what control plane and agents have logged, when all of them have ended."""
    history = History()
    history.read_control_plane(control_plane.log_path, "control plane")
    for engine in agents:
        history.read_agent(engine.log_path, engine.name)
    granted = sum(1 for _ in history.named("lease_granted"))
    read = sum(bool(x.fields["published"]) for x in history.named("read_over"))
    wrote = sum(not x.fields["reason"] for x in history.named("writes_over"))
    print(
        f"history: {len(history.entries)} entries, {granted} grants, {read} reads published, "
        f"{wrote} pushes written"
    )
    assert not history.problems(), history.problems()[:5]
    # A checker that was given nothing finds nothing.
    assert not granted or any(history.named("obeys"))
    assert not wrote or (any(history.named("landing_held")) and any(history.named("chunk_held")))
    assert not read or (any(history.named("range_held")) and any(history.named("handed_out")))


@pytest.fixture(scope="session")
def cluster(
    engines: tuple[Stack, ControlPlane, Engine, Engine, Engine], logs: Path
) -> Iterator[Cluster]:
    """Prefill, decode, control plane and gateway, with nothing held."""
    with open_cluster(*engines[:4], logs) as cluster:
        yield cluster


@contextlib.contextmanager
def open_cluster(
    stack: Stack, control_plane: ControlPlane, prefill: Engine, decode: Engine, logs: Path
) -> Iterator[Cluster]:
    """Once the workers have registered, with a gateway before them."""
    stack.wait_registered(control_plane.target, [PREFILL, DECODE])
    gateway = Gateway(
        directory=logs,
        control_plane=control_plane.target,
        prefill_urls=[prefill.url],
        decode_urls=[decode.url],
        # On two cores that three engines use, an answer may take longer than half a second.
        extra_args=["--begin-turn-timeout-s", "5", "--traces"],
    )
    stack.start(gateway)
    with (
        ControlPlaneView(control_plane.target) as view,
        # What comes back is what is tested, not whether it pays: the tiny model computes a hundred
        # tokens sooner than a busy machine moves them, and the planner learns that.
        ChatClient(gateway.url, returns="always") as client,
    ):
        yield Cluster(
            stack, control_plane, prefill, decode, gateway, view, client, free_blocks(view), logs
        )


@pytest.fixture
def nothing_leaked(cluster: Cluster) -> Iterator[None]:
    """Checks after the test that nothing is held any more, and that no hook of the agents' failed:
    what fails inside is recomputed, and would be seen nowhere else."""
    yield
    cluster.assert_nothing_leaked()
    for engine in (cluster.prefill, cluster.decode):
        assert not hooks_failed(engine)


@pytest.fixture(scope="session")
def plain(logs: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """One engine without a connector. Alone, if no test of this run needs the cluster."""
    wants_cluster = any(
        "cluster" in getattr(item, "fixturenames", ()) for item in request.session.items
    )
    if wants_cluster:
        yield request.getfixturevalue("engines")[4]
        return
    assert (TINY / "config.json").exists(), "no model: run `make model`"
    with Stack() as stack:
        engine = Engine(engine_spec("plain", engine_cpus()[1]), log_dir=logs)
        stack.start(engine)
        yield engine


@pytest.fixture(scope="session")
def oracle(plain: Engine) -> Iterator[Oracle]:
    """The plain engine's answers."""
    with ChatClient(plain.url) as client:
        yield Oracle(client)
