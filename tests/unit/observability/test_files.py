"""What a scrape reads from the disk."""

from __future__ import annotations

import datetime
import shutil
from pathlib import Path

import pytest
import trustme
from prometheus_client.core import Metric
from structlog.testing import capture_logs

from kvshuttle.controlplane.model.effects import PutTerm
from kvshuttle.controlplane.scrape import Files
from kvshuttle.controlplane.store import SqliteStore


def samples(metrics: list[Metric]) -> dict[str, float]:
    """By name and label values."""
    return {
        "/".join([sample.name, *sample.labels.values()]): sample.value
        for metric in metrics
        for sample in metric.samples
    }


def test_the_store_and_the_room_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = SqliteStore(path)
    try:
        store.load()
        found = samples(Files(path, {}).read())
        assert found["kvshuttle_store_size_bytes/database"] == path.stat().st_size > 0
        assert found["kvshuttle_store_size_bytes/log"] == Path(f"{path}-wal").stat().st_size
        assert found["kvshuttle_store_free_bytes"] > 0
    finally:
        store.close()


def test_a_file_with_several_certificates_ends_with_its_first(tmp_path: Path) -> None:
    """Two authorities in `client_ca`, while one takes the other's place."""
    path = tmp_path / "ca.pem"
    now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    ends = [now + datetime.timedelta(days=days) for days in (90, 7, 30)]
    issued = [trustme.CA().issue_cert("cp", not_after=end) for end in ends]
    path.write_bytes(b"".join(one.cert_chain_pems[0].bytes() for one in issued))
    found = samples(Files(None, {"client_ca": path, "server": None}).read())
    name = "kvshuttle_certificate_not_after_timestamp_seconds/client_ca"
    assert found == {name: ends[1].timestamp()}


def test_what_cannot_be_read_has_no_series(tmp_path: Path) -> None:
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")
    files = Files(tmp_path / "none/store.db", {"server": broken, "client_ca": tmp_path / "none"})
    assert samples(files.read()) == {}


@pytest.mark.parametrize("how", ["moved", "replaced", "its directory moved", "deleted"])
def test_a_store_that_is_no_longer_there_is_told_once(tmp_path: Path, how: str) -> None:
    path, away = tmp_path / "in/store.db", tmp_path / "away"
    path.parent.mkdir()
    store = SqliteStore(path)
    try:
        files = Files(path, {}, store.moved)
        with capture_logs() as logs:
            files.read()
            assert logs == []
            if how == "its directory moved":
                path.parent.rename(away)
            elif how == "deleted":
                path.unlink()
            else:
                path.rename(away)
                if how == "replaced":
                    shutil.copy(away, path)
            files.read()
            files.read()
        (told,) = logs
        assert (told["event"], told["log_level"]) == ("store_moved", "critical")
        assert told["path"] == str(path)
        assert "move the file back" in told["remedy"]
        if how in ("moved", "replaced"):
            with capture_logs() as logs:
                away.rename(path)
                files.read()
                assert logs == []
                path.rename(away)
                files.read()
            assert len(logs) == 1
    finally:
        store.close()


def test_what_a_moved_store_acknowledged_is_there_once_it_is_back(tmp_path: Path) -> None:
    path, away = tmp_path / "store.db", tmp_path / "away.db"
    store = SqliteStore(path)
    path.rename(away)
    store.commit([PutTerm(7, "lineage", 0, 0)])
    away.rename(path)
    assert not store.moved()
    store.close()
    store = SqliteStore(path)
    assert store.load().epoch == 7
    store.close()
