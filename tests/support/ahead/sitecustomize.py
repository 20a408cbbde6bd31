"""Python imports this when it starts; see the package. It changes two modules of vLLM's."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Event:
    """Of a device that is always done."""

    def __init__(self, *_: object, **__: object) -> None:
        self.record = self.wait = self.synchronize = lambda *_: None

    def query(self) -> bool:
        return True


class _Stream:
    def __init__(self) -> None:
        self.wait_stream = self.wait_event = self.synchronize = lambda *_: None


def _platform(module: ModuleType) -> None:
    """`vllm.platforms.cpu` turns asynchronous scheduling off."""
    check: Callable[..., None] = module.CpuPlatform.check_and_update_config.__func__

    def checked(cls: type, config: Any) -> None:
        check(cls, config)
        config.scheduler_config.async_scheduling = True

    module.CpuPlatform.check_and_update_config = classmethod(checked)


def _runner(_: ModuleType) -> None:
    """`vllm.v1.worker.cpu_model_runner` inherits what copies a step's tokens beside the next."""
    import torch

    cuda: Any = torch.cuda
    cuda.Event = _Event
    cuda.current_stream = lambda *_: _Stream()
    cuda.stream = lambda _: contextlib.nullcontext()


_CHANGES = {"vllm.platforms.cpu": _platform, "vllm.v1.worker.cpu_model_runner": _runner}


class _Finder(importlib.abc.MetaPathFinder):
    """Changes a module as soon as it is there."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _CHANGES:
            return None
        change = _CHANGES.pop(name)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_change(module: ModuleType) -> None:
            run(module)
            change(module)

        spec.loader.exec_module = run_and_change  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())
