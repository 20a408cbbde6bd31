"""Agent frameworks on the demo's engines: their conversations' KV comes back, tool calls and all.

SmolLM2 is too small to ask for a tool, so the agents' own plan does (`--planned`); all else is as
with any model.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING

import pytest

from kvshuttle.demo.cluster import DECODE, MODEL_NAME, PREFILL, DemoCluster
from kvshuttle.localstack import ControlPlaneView, Stack
from kvshuttle.localstack.metrics import EXTERNAL_HITS
from kvshuttle.v1 import session_service_pb2 as session
from tests.e2e.conftest import ROOT
from tests.integration.frameworks.conftest import FRAMEWORKS, PLAIN, needs_frameworks, run_example

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = needs_frameworks()

SMOLLM2 = ROOT / ".models" / "smollm2"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoCluster]:
    """The demo's programs, without its judge. Prefill keeps no cache: what it need not compute was
    returned to it."""
    assert (SMOLLM2 / "config.json").exists(), "no model: run `make model`"
    directory: Path = tmp_path_factory.mktemp("demo")
    with Stack() as stack:
        demo = DemoCluster(stack, SMOLLM2, directory, plant_wrong_kv=False)
        stack.start(demo.control_plane)
        stack.start(demo.prefill, demo.decode)
        stack.wait_registered(demo.control_plane.target, [PREFILL, DECODE])
        stack.start(demo.gateway)
        yield demo


@pytest.mark.parametrize("name", [*FRAMEWORKS, PLAIN])
def test_a_frameworks_turns_come_back(demo: DemoCluster, name: str) -> None:
    before = demo.prefill.metrics().total(EXTERNAL_HITS)
    flags = ("--planned", "--session", name, "--tool-takes", "0.5")
    found = asyncio.run(run_example(name, demo.gateway.url, MODEL_NAME, *flags))
    turns = found["turns"]
    assert [one["turn"] for one in turns] == [1, 2, 3, 4]
    assert turns[0]["cached_tokens"] == 0
    for earlier, later in itertools.pairwise(turns):
        # All of the prompt of the turn before, in full blocks of 32 tokens.
        assert later["cached_tokens"] >= earlier["prompt_tokens"] // 32 * 32
        assert later["mode"] == "lazy"
    # What is shown is what vLLM itself counted as loaded from outside.
    returned = demo.prefill.metrics().total(EXTERNAL_HITS) - before
    assert sum(one["cached_tokens"] for one in turns) == returned > 0
    with ControlPlaneView(demo.control_plane.target) as view:
        assert view.session(name).state == session.SESSION_STATE_ENDED
