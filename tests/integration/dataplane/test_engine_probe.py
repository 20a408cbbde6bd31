"""What the agent knows of the engine that it is in."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is installed with the engines", exc_type=ImportError)
pytestmark = [
    pytest.mark.engines,
    # torch and vLLM warn of themselves when they are imported.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


class Scheduler:
    """Makes its connector while it is made, as vLLM's does."""

    def __init__(self) -> None:
        from vllm.v1.core.sched.interface import PauseState

        from kvshuttle.dataplane.vllm_compat import engine_probe

        self.pause_state: Any = PauseState.UNPAUSED
        self.probe = engine_probe()
        self.seen: list[tuple[int, int]] = []

    def get_request_counts(self) -> tuple[int, int]:
        return 3, 4

    def set_pause_state(self, state: Any) -> None:
        self.pause_state = state

    def schedule(self, throttle: bool) -> Any:
        self.seen.append(self.probe.steps())
        return SimpleNamespace(throttle=throttle)

    def update_from_output(self, step: Any, output: str) -> Any:
        self.seen.append(self.probe.steps())
        return step.throttle, output


def test_a_schedulers_steps_are_counted() -> None:
    scheduler = Scheduler()
    assert scheduler.probe.request_counts() == (3, 4)
    assert scheduler.probe.steps() == (0, 0)
    first, _ = scheduler.schedule(True), scheduler.schedule(throttle=False)
    assert scheduler.update_from_output(first, output="done") == (True, "done")
    # A step counts from its beginning, and is over when its output is there.
    assert scheduler.seen == [(1, 0), (2, 0), (2, 1)]
    # The output of the second never comes; those of later ones do, and steps end in their order.
    third = scheduler.schedule(True)
    scheduler.update_from_output(third, output="done")
    assert scheduler.probe.steps() == (3, 3)


def test_it_is_counted_how_often_a_scheduler_was_told_to_pause() -> None:
    from vllm.v1.core.sched.interface import PauseState

    scheduler = Scheduler()
    assert scheduler.probe.pauses() == 0
    for told, state in enumerate([PauseState.PAUSED_NEW, PauseState.PAUSED_ALL], 1):
        scheduler.set_pause_state(state)
        assert scheduler.pause_state == state
        assert scheduler.probe.pauses() == told
    scheduler.set_pause_state(PauseState.UNPAUSED)
    assert scheduler.probe.pauses() == 0
    scheduler.set_pause_state(PauseState.PAUSED_NEW)
    assert scheduler.probe.pauses() == 3


def config_and_cache() -> tuple[Any, Any]:
    """As far as it is looked at, of an engine that is supported."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_load_failure_policy="recompute", is_kv_consumer=True, kv_role="kv_producer"
        ),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1,
            enable_fault_tolerance=False,
            data_parallel_size=1,
            elastic_ep_max_dp_size=1,
            data_parallel_external_lb=False,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
        model_config=SimpleNamespace(enable_sleep_mode=False),
        scheduler_config=SimpleNamespace(policy="fcfs"),
        cache_config=SimpleNamespace(
            prefix_caching_hash_algo="sha256", prefix_match_unit=None, block_size=32
        ),
        speculative_config=None,
    )
    # Only its kind is looked at.
    group = SimpleNamespace(kv_cache_spec=object.__new__(FullAttentionSpec))
    return config, SimpleNamespace(kv_cache_groups=[group])


def test_an_engine_of_several_that_vllm_tells_it_is_alone_is_refused() -> None:
    """As vLLM does with each engine of a dense model behind one address, the first too."""
    from vllm.config import ParallelConfig

    from kvshuttle.dataplane.vllm_compat import UnsupportedError, check_supported

    config, cache = config_and_cache()
    for rank in range(2):
        config.parallel_config = ParallelConfig(data_parallel_size=2, data_parallel_rank=rank)
        config.parallel_config.reconfigure_for_independent_dp_rank()
        assert config.parallel_config.data_parallel_size == 1
        with pytest.raises(UnsupportedError, match="data_parallel_size: 2"):
            check_supported(config, cache)
    config.parallel_config = ParallelConfig()
    check_supported(config, cache)


def test_what_is_supported_is_not_refused() -> None:
    from kvshuttle.dataplane.vllm_compat import check_supported

    check_supported(*config_and_cache())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kv_transfer_config.is_kv_consumer": False}, "kv_role: 'kv_producer'.*kv_both"),
        ({"parallel_config.enable_fault_tolerance": True}, "enable_fault_tolerance: True"),
        ({"parallel_config.use_ubatching": True}, "enable_dbo: True"),
        ({"parallel_config.data_parallel_size": 2}, "data_parallel_size: 2.*external-lb"),
        (
            {"parallel_config.elastic_ep_max_dp_size": 3},
            "data_parallel_size: 3.*without any --data-parallel",
        ),
        ({"model_config.enable_sleep_mode": True}, "enable_sleep_mode: True"),
        ({"scheduler_config.policy": "priority"}, "scheduling_policy: 'priority'.*fcfs"),
        ({"parallel_config.pipeline_parallel_size": 2}, "pipeline_parallel_size: 2"),
        ({"parallel_config.decode_context_parallel_size": 2}, "decode_context_parallel_size: 2"),
        ({"parallel_config.prefill_context_parallel_size": 4}, "prefill_context_parallel_size: 4"),
        ({"kv_transfer_config.kv_load_failure_policy": "fail"}, "kv_load_failure_policy: 'fail'"),
        ({"speculative_config": object()}, "speculative_config: .*not supported"),
        ({"cache_config.prefix_caching_hash_algo": "xxhash_cbor"}, "'xxhash_cbor'.*PYTHONHASHSEED"),
        ({"cache_config.prefix_match_unit": 16}, "prefix_match_unit: 16 differs .*32"),
    ],
)
def test_what_would_be_wrong_is_refused_at_the_start(
    changes: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvshuttle.dataplane.vllm_compat import UnsupportedError, check_supported

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    config, cache = config_and_cache()
    for path, value in changes.items():
        part, _, name = path.rpartition(".")
        setattr(getattr(config, part) if part else config, name, value)
    with pytest.raises(UnsupportedError, match=said):
        check_supported(config, cache)


def test_caches_of_other_kinds_are_refused_at_the_start() -> None:
    """Of hybrid models, of Mamba, of sliding windows."""
    from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec

    from kvshuttle.dataplane.vllm_compat import UnsupportedError, check_supported

    config, cache = config_and_cache()
    two: Any = SimpleNamespace(kv_cache_groups=cache.kv_cache_groups * 2)
    with pytest.raises(UnsupportedError, match=r"kv_cache_groups: 2;.*hybrid attention, Mamba"):
        check_supported(config, two)
    for kind in (MambaSpec, SlidingWindowSpec):
        cache.kv_cache_groups[0].kv_cache_spec = object.__new__(kind)
        with pytest.raises(UnsupportedError, match=f"kv_cache_spec: {kind.__name__}; only full"):
            check_supported(config, cache)


class Six(Scheduler):
    """Schedules six steps, some with nothing to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = [5, 1, 0, 1, 1, 0]
        self.outputs = 0

    def has_requests(self) -> bool:
        return bool(self.tokens)

    def get_grammar_bitmask(self, _: object) -> None:
        return None

    def schedule(self, throttle: bool) -> Any:
        return SimpleNamespace(
            total_num_scheduled_tokens=self.tokens.pop(0), pending_structured_output_tokens=False
        )

    def update_from_output(self, step: Any, output: str) -> Any:
        self.outputs += 1
        return output


@pytest.mark.parametrize("queued", [False, True])
def test_vllm_asks_for_one_output_of_each_step(queued: bool) -> None:
    """With two steps in flight too; vLLM's own loop."""
    from vllm.v1.engine.core import EngineCore

    def done(*_: object, **__: object) -> Future[str]:
        future: Future[str] = Future()
        future.set_result("output")
        return future

    scheduler = Six()
    core: Any = object.__new__(EngineCore)
    vars(core).update(
        scheduler=scheduler,
        model_executor=SimpleNamespace(execute_model=done, sample_tokens=done),
        batch_queue=deque(),
        batch_queue_size=2,
        is_mm_encoder_only=False,
        is_pooling_model=False,
        check_for_draft_tokens=False,
        _should_throttle_prefills=lambda: False,
        capture_iteration_details=lambda _: nullcontext(),
        log_error_detail=lambda _: nullcontext(),
        _process_aborts_queue=lambda: None,
        _attach_iteration_details=lambda *_: None,
        _attach_weight_version=lambda _: None,
    )
    step = core.step_with_batch_queue if queued else core.step
    while scheduler.has_requests() or core.batch_queue:
        step()
    assert scheduler.outputs == 6
    assert scheduler.probe.steps() == (6, 6)
