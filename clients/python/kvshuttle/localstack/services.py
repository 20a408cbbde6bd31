"""kvshuttle's control plane and gateway as child processes."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from kvshuttle.localstack.ports import free_port
from kvshuttle.localstack.process import ManagedProcess

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

READY_TIMEOUT_S = 60.0


class _Service(ManagedProcess):
    """A program of ours that writes a ready file with its address once it serves."""

    def __init__(self, name: str, argv: Sequence[str], *, directory: Path) -> None:
        self.ready_path = directory / f"{name}.ready.json"
        super().__init__(
            name,
            [sys.executable, "-m", *argv, "--ready-file", str(self.ready_path)],
            log_path=directory / f"{name}.log",
            ready_timeout_s=READY_TIMEOUT_S,
        )

    def prepare(self) -> None:
        self.ready_path.unlink(missing_ok=True)

    def is_ready(self) -> bool:
        return self.ready_path.exists()

    def ready(self) -> dict[str, Any]:
        """What it wrote when it was ready."""
        found: dict[str, Any] = json.loads(self.ready_path.read_text())
        return found


class ControlPlane(_Service):
    """`python -m kvshuttle.controlplane`, insecure, on one loopback port that it keeps.

    It forgets everything at its end, unless `extra_args` name another `--store`. They may be
    changed between two starts.
    """

    def __init__(
        self, *, directory: Path, name: str = "controlplane", extra_args: Sequence[str] = ()
    ) -> None:
        self.target = f"127.0.0.1:{free_port()}"
        store = [] if "--store" in extra_args else ["--store", "memory"]
        super().__init__(
            name,
            [
                "kvshuttle.controlplane",
                "--listen",
                self.target,
                "--insecure",
                *store,
            ],
            directory=directory,
        )
        self.extra_args = list(extra_args)

    def argv(self) -> list[str]:
        """With the present `extra_args`."""
        return [*super().argv(), *self.extra_args]


class Gateway(_Service):
    """`python -m kvshuttle.gateway`, without API keys, on one loopback port that it keeps."""

    def __init__(
        self,
        *,
        directory: Path,
        control_plane: str,
        prefill_urls: Sequence[str] = (),
        decode_urls: Sequence[str] = (),
        name: str = "gateway",
        extra_args: Sequence[str] = (),
    ) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        argv = ["kvshuttle.gateway", "--host", "127.0.0.1", "--port", str(port)]
        argv += ["--control-plane", control_plane]
        for url in prefill_urls:
            argv += ["--prefill-url", url]
        for url in decode_urls:
            argv += ["--decode-url", url]
        super().__init__(name, [*argv, *extra_args], directory=directory)
