"""How a turn, a pair of prompts and an arm's engines are made comparable."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from benchmarks.ttft import arms, session
from benchmarks.ttft.arms import ARMS, ArmKind, Pool, Scenario, open_arm
from benchmarks.ttft.report import summary
from benchmarks.ttft.session import Options, Results, Run
from benchmarks.ttft.turns import Sample, _Dropper
from kvshuttle.localstack import EngineSpec, Message
from tests.unit.benchmarks.test_stats import sample

POOL = Pool(
    model=Path("model"),
    dtype="float32",
    block_size=32,
    tokens=16_384,
    kv_cache_gib=1,
    max_model_len=8_192,
)
KINDS = {kind.key: kind for kind in ARMS}


def options(directory: Path, **changes: Any) -> Options:
    """Of a run without conversations."""
    made = Options(
        pool=POOL,
        plans=(),
        scenarios=("lost",),
        arms=tuple(KINDS),
        directory=directory,
        idle_seconds=0.0,
        idle_sessions=3,
        budget_s=None,
    )
    return replace(made, **changes)


# Prefill's cache, lost before the answer ended or not


def dropper(reset: Callable[[], bool]) -> _Dropper:
    """Of an arm whose prefill answers a reset so."""
    arm: Any = SimpleNamespace(prefill=SimpleNamespace(reset_prefix_cache=reset))
    return _Dropper(arm)


def test_a_cache_emptied_while_decode_answers_counts_as_lost() -> None:
    emptied = threading.Event()

    def reset() -> bool:
        emptied.set()
        return True

    found = dropper(reset)
    found.start()
    assert emptied.wait(10)
    found._thread.join(10)
    assert found.finish() is True


def test_a_cache_that_is_still_in_use_when_the_answer_ends_does_not() -> None:
    asked = threading.Event()

    def reset() -> bool:
        asked.set()
        return False

    found = dropper(reset)
    found.start()
    assert asked.wait(10)
    assert found.finish() is False


def test_an_answer_without_a_first_token_has_lost_no_cache() -> None:
    assert dropper(lambda: True).finish() is False


def test_a_reset_that_fails_is_not_taken_for_a_loss() -> None:
    def reset() -> bool:
        raise httpx.ConnectError("refused")

    found = dropper(reset)
    found.start()
    with pytest.raises(httpx.ConnectError):
        found.finish()


def test_turns_whose_cache_was_not_lost_are_counted_apart() -> None:
    lost = [replace(sample("g", turn, 600.0), cache_dropped=True) for turn in (1, 2, 3)]
    late = [replace(sample("g", turn, 1.0), cache_dropped=False) for turn in (4, 5)]
    cold = replace(sample("g", 1, 1.0, "fixed-1"), cache_dropped=False)
    found = summary(Results(samples=[*lost, *late, cold]), {}, {})
    arm = found["scenarios"]["lost"]["fixed"]["arms"]["g"]
    assert (arm["turns"], arm["turns_not_counted"], arm["ttft_ms"]) == (2, 2, 600.0)


# Prompts that push and pull compute side by side


class FakeClient:
    """An arm that answers at once, and notes the order."""

    def __init__(self, kind: ArmKind, order: list[tuple[str, str]]) -> None:
        self.arm = SimpleNamespace(kind=kind)
        self._order = order
        self.settled: list[str] = []
        self.ended: list[str] = []
        self.asked: list[tuple[tuple[str, ...], bool | None]] = []

    def turn(
        self,
        conversation: str,
        turn: int,
        messages: Sequence[Message],
        wanted: int,
        output: int,
        gap_s: float,
        *,
        drops: bool | None = None,
    ) -> tuple[Sample, None]:
        """As Client's."""
        key = self.arm.kind.key
        self._order.append((key, conversation.removesuffix(f"-{key}-0")))
        self.asked.append((tuple(str(m["content"]) for m in messages), drops))
        return sample(key, turn, 100.0, conversation), None

    def settle(self, conversation: str) -> None:
        """As Client's."""
        self.settled.append(conversation)

    def end(self, conversation: str) -> None:
        """As Client's."""
        self.ended.append(conversation)


def pairs(
    keys: Sequence[str], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Run, list[tuple[str, str]], list[FakeClient]]:
    """Three pairs on these arms."""

    def words(messages: Sequence[Message]) -> int:
        return sum(len(str(m["content"]).split()) for m in messages)

    monkeypatch.setattr(Run, "_count", staticmethod(lambda arm: words))
    monkeypatch.setattr(session, "SPIN_S", 0.0)
    order: list[tuple[str, str]] = []
    clients = [FakeClient(KINDS[key], order) for key in keys]
    run = Run(options(directory, pairs=3), say=lambda line: None)
    run._pairs(clients)  # type: ignore[arg-type]
    return run, order, clients


def test_pairs_go_to_push_and_pull_by_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, order, (_, g, f) = pairs(("a", "g", "f"), tmp_path, monkeypatch)
    first, second, third = ("pair-0", "pair-1", "pair-2")
    assert order == [
        *(("f", first), ("g", first)),
        *(("g", second), ("f", second)),
        *(("f", third), ("g", third)),
    ]
    # The same prompts, all new, nobody's cache emptied, and every session over.
    assert [m for m, _ in g.asked] == [m for m, _ in f.asked]
    assert len({m for m, _ in g.asked}) == 3
    assert {drops for _, drops in g.asked + f.asked} == {False}
    assert len(g.settled) == len(g.ended) == len(f.settled) == len(f.ended) == 3
    # Named alike, or no pair would be found.
    named = [(s.arm, s.conversation) for s in run.results.samples]
    assert sorted(named) == sorted((arm, p) for arm in "fg" for p in (first, second, third))


@pytest.mark.parametrize("keys", [("a", "g"), ("a", "f", "c"), ("a", "e", "g")])
def test_there_are_no_pairs_without_both(
    keys: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, order, _ = pairs(keys, tmp_path, monkeypatch)
    assert not order
    assert not run.results.samples


# The same pool in every engine of every arm


class Recorded(SimpleNamespace):
    """Whatever an arm starts, without a process."""

    url = "http://127.0.0.1:1"
    target = "127.0.0.1:2"

    def close(self) -> None:
        """Nothing to close."""


@pytest.fixture
def specs(monkeypatch: pytest.MonkeyPatch) -> list[EngineSpec]:
    """What each engine is started with."""
    found: list[EngineSpec] = []

    def engine(spec: EngineSpec, log_dir: Path) -> Recorded:
        found.append(spec)
        return Recorded(name=spec.name, spec=spec)

    monkeypatch.setattr(arms, "Engine", engine)
    for name in ("ControlPlane", "Gateway", "ControlPlaneView", "ProxyProcess"):
        monkeypatch.setattr(arms, name, lambda *a, **k: Recorded())
    monkeypatch.setattr(arms, "_back_to_its_core", lambda engine: None)
    return found


def opened(kind: ArmKind, scenario: Scenario, directory: Path) -> None:
    """Starts an arm of nothing but records."""
    stack: Any = SimpleNamespace(
        start=lambda *processes: None, wait_registered=lambda target, names: None
    )
    open_arm(kind, scenario, POOL, directory, stack)


@pytest.mark.parametrize("scenario", ["lost", "kept"])
def test_every_engine_of_every_arm_has_the_same_pool(
    scenario: Scenario, specs: list[EngineSpec], tmp_path: Path
) -> None:
    for kind in ARMS:
        opened(kind, scenario, tmp_path)
    assert len(specs) == sum(kind.engines for kind in ARMS)

    def pool(spec: EngineSpec) -> tuple[object, ...]:
        sizes = (spec.num_blocks, spec.block_size, spec.kv_cache_gib, spec.max_model_len)
        return (spec.model, spec.dtype, *sizes, spec.extra_args)

    assert {pool(spec) for spec in specs} == {pool(specs[0])}
    assert specs[0].num_blocks == 512
    # Prefill computes on the plain engine's core.
    plain = next(spec for spec in specs if spec.kv_transfer is None)
    assert {s.cpu for s in specs if s.name.endswith("prefill")} == {plain.cpu}


def test_prefill_has_a_prefix_cache_where_the_docs_say_so(
    specs: list[EngineSpec], tmp_path: Path
) -> None:
    for kind in ARMS:
        opened(kind, "lost", tmp_path)
    without = {s.name for s in specs if not s.prefix_caching}
    assert without == {f"{key}-prefill" for key in "bcde"}
    specs.clear()
    for kind in ARMS:
        opened(kind, "kept", tmp_path)
    assert all(s.prefix_caching for s in specs)


# Idle


def test_an_arm_that_takes_no_more_sessions_does_not_end_the_run(tmp_path: Path) -> None:
    class Refusing:
        arm = SimpleNamespace(kind=KINDS["d"], wake=lambda: True, rest=lambda: None)

        def touch(self, conversation: str, text: str) -> None:
            raise httpx.ReadTimeout("too slow")

    said: list[str] = []
    run = Run(options(tmp_path, idle_seconds=1.0), say=said.append)
    clients: Any = [Refusing()]
    run._idle("lost", clients)
    assert not run.results.idle
    assert "idle d: not measured" in said[0]
