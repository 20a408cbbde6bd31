"""The process harness: what it starts is ready or fails loudly, and nothing of it survives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvshuttle.localstack import Engine, EngineSpec, ManagedProcess, ProcessError, Stack
from kvshuttle.localstack import metrics as prometheus
from kvshuttle.localstack.engine import kvshuttle_transfer
from kvshuttle.localstack.ports import free_port
from kvshuttle.localstack.watchdog import session_pids

# A parent with a child that ignores SIGTERM; writes "up" when both are there.
PARENT = """
import subprocess, sys, time
child = '''
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(60)
'''
subprocess.Popen([sys.executable, "-c", child])
time.sleep(60)
"""


class Family(ManagedProcess):
    """Ready when its log says so."""

    def __init__(self, directory: Path, source: str = PARENT, name: str = "family") -> None:
        super().__init__(
            name,
            [sys.executable, "-c", source],
            log_path=directory / f"{name}.log",
            ready_timeout_s=10.0,
        )

    def is_ready(self) -> bool:
        return "up" in self.log_path.read_text()


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_stop_ends_children_that_ignore_sigterm(tmp_path: Path) -> None:
    with Stack() as stack:
        family = Family(tmp_path)
        stack.start(family)
        assert len(family.pids()) == 2
        session = family.pid
        family.stop(grace_s=1.0)
        assert session_pids(session) == []
        assert not family.running


def test_kill_ends_orphans_too(tmp_path: Path) -> None:
    family = Family(tmp_path)
    family.start()
    family.wait_ready()
    os.kill(family.pid, signal.SIGKILL)
    eventually(lambda: not family.running)
    assert len(family.pids()) == 1
    family.kill()
    assert family.pids() == []


def test_what_ends_by_itself_is_told_once(tmp_path: Path) -> None:
    with Stack() as stack:
        first, second = Family(tmp_path, name="first"), Family(tmp_path, name="second")
        stack.start(first, second)
        ended = stack.ended()
        os.kill(second.pid, signal.SIGKILL)
        assert next(ended) is second
        os.kill(first.pid, signal.SIGKILL)
        assert list(ended) == [first]


def test_pause_stops_every_process_and_resume_goes_on(tmp_path: Path) -> None:
    def states() -> set[str]:
        return {
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            for pid in family.pids()
        }

    with Stack() as stack:
        family = Family(tmp_path)
        stack.start(family)
        family.pause()
        eventually(lambda: states() == {"T"})
        family.resume()
        eventually(lambda: "T" not in states())


def test_restart_is_another_process_in_the_same_place(tmp_path: Path) -> None:
    with Stack() as stack:
        family = Family(tmp_path)
        stack.start(family)
        before = family.pid
        family.kill()
        family.restart()
        assert family.pid != before
        assert session_pids(before) == []


def test_an_early_end_is_told_with_the_tail_of_the_log(tmp_path: Path) -> None:
    with Stack() as stack:
        broken = Family(tmp_path, "print('the reason'); raise SystemExit(3)")
        with pytest.raises(ProcessError, match=r"ended with 3 while starting[^$]*the reason"):
            stack.start(broken)


def test_what_is_left_over_does_not_hide_what_went_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def left_over(stack: Stack) -> None:
        raise ProcessError("a process is still there")

    monkeypatch.setattr(Stack, "close", left_over)
    with pytest.raises(ProcessError, match="the reason") as found, Stack() as stack:
        stack.start(Family(tmp_path, "raise SystemExit('the reason')"))
    assert found.value.__notes__ == ["a process is still there"]
    with pytest.raises(ProcessError, match="still there"), Stack():
        pass


def test_one_failure_stops_a_start_of_several(tmp_path: Path) -> None:
    good = Family(tmp_path, name="good")
    with Stack() as stack, pytest.raises(ProcessError, match="broken"):
        stack.start(good, Family(tmp_path, "raise SystemExit(1)", name="broken"))
    assert good.pids() == []


def test_too_slow_a_start_is_killed(tmp_path: Path) -> None:
    slow = Family(tmp_path, "import time; time.sleep(60)")
    slow.ready_timeout_s = 0.3
    slow.start()
    with pytest.raises(ProcessError, match="was not ready after"):
        slow.wait_ready()
    assert slow.pids() == []


def test_progress_ends_with_ready(tmp_path: Path) -> None:
    seen: list[tuple[str, str]] = []
    with Stack(lambda process, phase: seen.append((process.name, phase))) as stack:
        stack.start(Family(tmp_path))
    assert seen[0] == ("family", "starting")
    assert seen[-1] == ("family", "ready")


def test_nothing_survives_the_death_of_its_starter(tmp_path: Path) -> None:
    starter = f"""
import sys, time
from pathlib import Path
from tests.unit.support.test_localstack import Family
family = Family(Path({str(tmp_path)!r}))
family.start()
family.wait_ready()
print(family.pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen(
        [sys.executable, "-c", starter], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        session = int(process.stdout.readline())
        assert len(session_pids(session)) == 2
        process.kill()
    eventually(lambda: session_pids(session) == [])


def test_ports_are_free_and_never_given_twice() -> None:
    ports = {free_port() for _ in range(50)}
    assert len(ports) == 50


def test_metrics_are_summed_over_the_labels_that_are_not_named() -> None:
    scrape = prometheus.parse(
        "# TYPE vllm:prompt_tokens counter\n"
        'vllm:prompt_tokens_total{engine="0",model_name="m"} 5.0\n'
        'vllm:prompt_tokens_total{engine="1",model_name="m"} 7.0\n'
    )
    assert scrape.total(prometheus.PROMPT_TOKENS) == 12.0
    assert scrape.total(prometheus.PROMPT_TOKENS, engine="1") == 7.0
    assert scrape.total(prometheus.EXTERNAL_HITS) == 0.0
    assert scrape.names() == {"vllm:prompt_tokens_total"}


def test_an_engine_is_told_its_own_url(tmp_path: Path) -> None:
    transfer = kvshuttle_transfer(
        control_plane="127.0.0.1:1", worker_id="decode-0", role="decode", extra={"x": 1}
    )
    engine = Engine(
        EngineSpec("decode-0", tmp_path, kv_transfer=transfer, prefix_caching=False),
        log_dir=tmp_path,
    )
    command = engine.argv()
    assert "--no-enable-prefix-caching" in command
    config = command[command.index("--kv-transfer-config") + 1]
    assert f'"url": "{engine.url}"' in config
    assert '"kv_load_failure_policy": "recompute"' in config


def test_an_engine_listens_on_loopback_only(tmp_path: Path) -> None:
    engine = Engine(EngineSpec("decode-0", tmp_path), log_dir=tmp_path)
    command = engine.argv()
    assert command[command.index("--host") + 1] == "127.0.0.1"
    # UCX listens on every interface that it uses.
    assert engine.env["UCX_NET_DEVICES"] == "lo"
