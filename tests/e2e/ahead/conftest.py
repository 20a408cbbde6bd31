"""A cluster of its own, for as long as the tests of this folder run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from kvshuttle.localstack import Engine, Stack
from tests.e2e.conftest import Cluster, check_history, control_plane_of, open_cluster, workers
from tests.support.ahead import schedules_ahead
from tests.support.otlp import Collector

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["cluster"]


@pytest.fixture(scope="package")
def cluster(
    plain: Engine, collector: Collector, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """Instead of the other tests' one, on the same plain engine."""
    assert plain.url
    logs: Path = tmp_path_factory.mktemp("ahead")
    with Stack() as stack:
        control_plane = control_plane_of(logs)
        stack.start(control_plane)
        env = schedules_ahead() | {"VLLM_LOGGING_LEVEL": "DEBUG"}
        prefill, decode = workers(logs, control_plane, collector.url, env)
        stack.start(prefill, decode)
        with open_cluster(stack, control_plane, prefill, decode, logs) as cluster:
            yield cluster
    check_history(control_plane, prefill, decode)
