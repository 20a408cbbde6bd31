"""vLLM's hooks: what goes wrong inside the agent stays there, since it would end the engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvshuttle.v1 import agent_service_pb2 as agent_pb2
from kvshuttle.v1 import types_pb2

pytest.importorskip("vllm", reason="vLLM is installed with the engines", exc_type=ImportError)
pytestmark = [
    pytest.mark.engines,
    # torch and vLLM warn of themselves when they are imported.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


class Broken:
    """An agent, or a link, of which every method fails."""

    def __getattr__(self, name: str) -> Any:
        def fail(*_: object, **__: object) -> Any:
            raise RuntimeError(f"{name} failed")

        return fail


class HalfBroken(Broken):
    """One that only cannot say when it wants to be called next."""

    def heed_pause(self, _told: int) -> None:
        pass

    def drain(self) -> None:
        pass

    def make_room(self, _wanted: int) -> None:
        pass

    def look(self, *_: object) -> int:
        return 0

    def allocated(self, *_: object) -> None:
        pass

    def finished(self, *_: object) -> None:
        pass

    def refuse_load(self, *_: object) -> None:
        pass

    def reset(self) -> None:
        pass


PARAMS = {"kvshuttle": {"turn_token": "t", "leg": "decode"}}


class BrokenButForRefusing(Broken):
    """The one call that is made because another has failed."""

    def refuse_load(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("agent", [BrokenButForRefusing(), HalfBroken()])
def test_no_hook_of_the_scheduler_raises(agent: Any) -> None:
    from kvshuttle.dataplane.connector import KVShuttleConnector

    connector: Any = object.__new__(KVShuttleConnector)
    connector._agent = agent
    connector._link = Broken()
    connector._mover = None
    connector._block_size = 32
    connector._step_blocks, connector._batch_blocks = 8, 5
    connector._alone = True
    connector._probe = SimpleNamespace(pauses=lambda: 0)
    request: Any = SimpleNamespace(request_id="r", kv_transfer_params=PARAMS, num_tokens=64)
    blocks: Any = SimpleNamespace(get_block_ids=lambda: ([1, 2],))
    failed: Any = SimpleNamespace(failed_recving={"r"})

    connector.on_new_request(request)
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    connector.update_state_after_alloc(request, blocks, 32)
    connector.build_connector_meta(SimpleNamespace(num_scheduled_tokens={"r": 1}))
    connector.build_connector_meta(SimpleNamespace(num_scheduled_tokens={}))
    assert connector.has_pending_push_work() is False
    connector.update_connector_output(failed)
    assert connector.request_finished_all_groups(request, ([1, 2],)) == (False, None)
    assert connector.reset_cache() is True


@pytest.mark.parametrize("settling", [True, False])
def test_a_pause_waits_while_something_moves(settling: bool) -> None:
    """vLLM pauses when no step is left to do, and this is what it asks."""
    from kvshuttle.dataplane.connector import KVShuttleConnector

    heard: list[int] = []
    agent = HalfBroken()
    vars(agent).update(heed_pause=heard.append, settling=lambda: settling)
    connector: Any = object.__new__(KVShuttleConnector)
    connector._agent, connector._link = agent, Broken()
    connector._probe = SimpleNamespace(pauses=lambda: 3)
    assert connector.has_pending_push_work() is settling
    assert heard == [3]


def test_room_is_made_before_vllm_looks_for_blocks() -> None:
    """Else it would preempt a request that runs, or let one wait, for want of blocks that replicas
    hold: before it places a request, and before the steps of those that run."""
    from kvshuttle.dataplane.connector import KVShuttleConnector

    calls: list[tuple[str, int]] = []

    def look(*_: object) -> int:
        calls.append(("look", 0))
        return 0

    agent = HalfBroken()
    vars(agent).update(
        heed_pause=lambda _told: None,
        make_room=lambda wanted: calls.append(("room", wanted)),
        look=look,
        computing=lambda: None,
        next_deadline=lambda: None,
    )
    connector: Any = object.__new__(KVShuttleConnector)
    connector._agent, connector._link = agent, Broken()
    connector._probe = SimpleNamespace(pauses=lambda: 0)
    connector._block_size, connector._step_blocks, connector._batch_blocks = 32, 8, 5
    connector._tails = SimpleNamespace(of=lambda _: None)
    request: Any = SimpleNamespace(
        request_id="r", kv_transfer_params=PARAMS, num_tokens=100, block_hashes=[]
    )
    # 68 tokens need three blocks, and a step of those that run may take eight more.
    connector.get_num_new_matched_tokens(request, 32)
    assert calls == [("room", 11), ("look", 0)]
    # So for one that kvshuttle has nothing to do with.
    calls.clear()
    foreign: Any = SimpleNamespace(request_id="f", kv_transfer_params=None, num_tokens=32)
    connector.get_num_new_matched_tokens(foreign, 0)
    assert calls == [("room", 9)]
    # Those that run may fill a batch in the next step, and each may begin a block more.
    calls.clear()
    connector._tend(2)
    connector._tend(30)
    assert calls == [("room", 7), ("room", 8)]


@pytest.mark.parametrize("stepping", [True, False])
def test_each_layer_is_told_when_it_is_filled_and_not_at_the_steps_end(stepping: bool) -> None:
    """vLLM calls these hooks between layers, on the thread of the forward pass."""
    from kvshuttle.dataplane.connector import KVShuttleConnector

    told: list[tuple[str, object]] = []
    marks = iter(range(10))
    connector: Any = object.__new__(KVShuttleConnector)
    connector._mark = lambda: next(marks)
    connector._mover = SimpleNamespace(
        stepping=stepping,
        layer_final=lambda layer, mark: told.append((layer, mark)),
        end_step=lambda mark: told.append(("end", mark)),
    )
    for layer in ("layers.0", "layers.1"):
        connector.save_kv_layer(layer, None, None)
    assert told == ([("layers.0", 0), ("layers.1", 1)] if stepping else [])
    connector.wait_for_save()
    assert told[2:] == ([("end", 2)] if stepping else [])


@pytest.mark.parametrize("caching", [True, False])
def test_an_engine_without_a_prefix_cache_says_so_at_registration(caching: bool) -> None:
    from kvshuttle.dataplane.connector import KVShuttleConnector

    connector: Any = object.__new__(KVShuttleConnector)
    connector._handshakes = [
        SimpleNamespace(
            num_blocks=4,
            fingerprint=(("model", "m"),),
            endpoint=SimpleNamespace(regions=[SimpleNamespace(block_bytes=64)]),
            describe=agent_pb2.RankEndpoint,
        )
    ]
    connector._config = SimpleNamespace(
        worker_id="p", role=types_pb2.WORKER_ROLE_PREFILL, url="http://p", nixl_backend="UCX"
    )
    connector._boot_id, connector._block_size = "boot", 32
    connector._vllm_config = SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=caching)
    )
    connector._agent = SimpleNamespace(
        highest_epoch=0,
        lineage="",
        incarnations=[],
        lease_inventory=list,
        source=SimpleNamespace(inventory=list),
    )
    hello = connector._hello()
    assert hello.prefix_caching is caching
    assert (hello.worker_id, hello.num_blocks, hello.bytes_per_block) == ("p", 4, 64)
