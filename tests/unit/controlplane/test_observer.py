"""What facts become."""

from __future__ import annotations

from kvshuttle.controlplane.model.effects import Fact
from kvshuttle.controlplane.observer import Metrics


def test_blocks_that_were_given_up_count_for_their_worker() -> None:
    """Names of workers are small letters, and were all counted as one: OTHER."""
    metrics = Metrics()
    metrics.fact(Fact("worker_relieved", {"worker_id": "decode-0", "blocks": 7}))
    value = metrics.registry.get_sample_value
    assert value("kvshuttle_relieved_blocks_total", {"worker_id": "decode-0"}) == 7


def test_an_operators_words_make_no_series() -> None:
    metrics = Metrics()
    for reason in ("host on fire", "HARDEN_TIMEOUT"):
        values: dict[str, object] = {"direction": "RETURN", "state": "REVOKED", "reason": reason}
        metrics.fact(Fact("lease_ended", values))
    value = metrics.registry.get_sample_value
    for word in ("OTHER", "HARDEN_TIMEOUT"):
        labels = {"direction": "RETURN", "state": "REVOKED", "reason": word}
        assert value("kvshuttle_leases_ended_total", labels) == 1


def test_what_should_never_happen_is_counted_from_nought() -> None:
    """Prometheus sees no increase in a series that comes to be with its first event."""
    metrics = Metrics()
    metrics.serve("GetLease")
    metrics.fact(Fact("worker_connected", {"worker_id": "p"}))
    value = metrics.registry.get_sample_value
    assert value("kvshuttle_rpc_errors_total", {"method": "GetLease", "reason": "INTERNAL"}) == 0
    assert value("kvshuttle_workers_lost_total", {"worker_id": "p", "reason": "SILENT"}) == 0
    assert value("kvshuttle_agent_events_dropped_total", {"reason": "MALFORMED"}) == 0
