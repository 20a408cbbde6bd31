"""The programs that the demo runs: a kvshuttle of two engines, and one plain engine beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvshuttle.localstack import (
    ControlPlane,
    Engine,
    EngineSpec,
    Gateway,
    ManagedProcess,
    Stack,
    engine_cpus,
    kvshuttle_transfer,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MODEL_NAME = "smollm2"
PREFILL, DECODE, PLAIN = "prefill-0", "decode-0", "plain"


class DemoCluster:
    """Control plane, prefill, decode, gateway; and the plain engine that knows what is right.

    Prefill keeps no prefix cache: every turn finds it as after an eviction, or as another prefill
    worker than the turn before.
    """

    def __init__(self, stack: Stack, model: Path, directory: Path, *, plant_wrong_kv: bool) -> None:
        self._stack = stack
        cpus = engine_cpus()
        # Short turns would run at decode alone, where their KV is. Here it is to be seen moving, in
        # a chat of the user's own too.
        self.control_plane = ControlPlane(directory=directory, extra_args=["--direct-tokens", "0"])
        faults = {"fault_corrupt_returned_block": True} if plant_wrong_kv else {}
        target = self.control_plane.target
        self.prefill = Engine(
            EngineSpec(
                PREFILL,
                model,
                served_name=MODEL_NAME,
                cpu=cpus[0],
                prefix_caching=False,
                kv_transfer=kvshuttle_transfer(
                    control_plane=target, worker_id=PREFILL, role="prefill", extra=faults
                ),
            ),
            log_dir=directory,
        )
        self.decode = Engine(
            EngineSpec(
                DECODE,
                model,
                served_name=MODEL_NAME,
                cpu=cpus[1],
                kv_transfer=kvshuttle_transfer(
                    control_plane=target, worker_id=DECODE, role="decode"
                ),
            ),
            log_dir=directory,
        )
        # Asked only while the other two have nothing to do.
        self.plain = Engine(
            EngineSpec(PLAIN, model, served_name=MODEL_NAME, cpu=cpus[1]), log_dir=directory
        )
        self.gateway = Gateway(
            directory=directory,
            control_plane=target,
            prefill_urls=[self.prefill.url],
            decode_urls=[self.decode.url],
        )

    @property
    def processes(self) -> list[ManagedProcess]:
        """In the order in which they are shown."""
        return [self.control_plane, self.prefill, self.decode, self.plain, self.gateway]

    def start(self, on_registering: Callable[[], None]) -> None:
        """Starts all and waits until they serve. Raises ProcessError."""
        self._stack.start(self.control_plane)
        self._stack.start(self.prefill, self.decode, self.plain)
        on_registering()
        self._stack.wait_registered(self.control_plane.target, [PREFILL, DECODE])
        self._stack.start(self.gateway)
