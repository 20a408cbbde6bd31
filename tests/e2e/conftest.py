"""Real engines, started once for all end-to-end tests: three of them side by side on two cores."""

from __future__ import annotations

from collections.abc import Iterator
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
)
from tests.support.conversation import Oracle
from tests.support.leaks import assert_nothing_leaked, free_blocks

ROOT = Path(__file__).parents[2]
TINY = ROOT / ".models" / "tiny"
PREFILL, DECODE = "prefill-0", "decode-0"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here needs engines, and waits for them to start or to compute."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker("engines")
            if not any(item.iter_markers("timeout")):
                item.add_marker(pytest.mark.timeout(300))


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

    def assert_nothing_leaked(self) -> None:
        """Ends all sessions and waits until nothing is held."""
        assert_nothing_leaked(self.view, self.baseline)

    def restart_worker(self, engine: Engine) -> None:
        """Starts a killed engine again, and waits for its agent to be registered and empty."""
        engine.restart()
        self.stack.wait_registered(self.control_plane.target, [engine.name])


@pytest.fixture(scope="session")
def logs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the programs' logs go."""
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="session")
def engines(logs: Path) -> Iterator[tuple[Stack, ControlPlane, Engine, Engine, Engine]]:
    """Control plane, prefill, decode and the plain engine, started side by side."""
    assert (TINY / "config.json").exists(), "no model: run `make model`"
    cpus = engine_cpus()
    with Stack() as stack:
        control_plane = ControlPlane(directory=logs)
        stack.start(control_plane)
        prefill, decode = (
            Engine(
                engine_spec(
                    name,
                    cpu,
                    kv_transfer=kvshuttle_transfer(
                        control_plane=control_plane.target, worker_id=name, role=role
                    ),
                ),
                log_dir=logs,
            )
            for name, role, cpu in ((PREFILL, "prefill", cpus[0]), (DECODE, "decode", cpus[1]))
        )
        plain = Engine(engine_spec("plain", cpus[1]), log_dir=logs)
        stack.start(prefill, decode, plain)
        yield stack, control_plane, prefill, decode, plain


@pytest.fixture(scope="session")
def cluster(
    engines: tuple[Stack, ControlPlane, Engine, Engine, Engine], logs: Path
) -> Iterator[Cluster]:
    """Prefill, decode, control plane and gateway, with nothing held."""
    stack, control_plane, prefill, decode, _ = engines
    stack.wait_registered(control_plane.target, [PREFILL, DECODE])
    gateway = Gateway(
        directory=logs,
        control_plane=control_plane.target,
        prefill_urls=[prefill.url],
        decode_urls=[decode.url],
    )
    stack.start(gateway)
    with ControlPlaneView(control_plane.target) as view, ChatClient(gateway.url) as client:
        yield Cluster(
            stack, control_plane, prefill, decode, gateway, view, client, free_blocks(view)
        )


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
