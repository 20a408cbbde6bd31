"""What an engine's own part of the configuration may say."""

from __future__ import annotations

import pytest

from kvshuttle.dataplane.config import AgentConfig, ConfigError

GOOD = {
    "control_plane": "127.0.0.1:7400",
    "worker_id": "w",
    "role": "decode",
    "url": "http://h:8000",
    "insecure": True,
}


@pytest.mark.parametrize(
    "url", ["http://h:8000", "https://h", "http://10.0.0.1:1/engine", "http://[::1]:8000/"]
)
def test_a_url_that_requests_can_be_sent_to(url: str) -> None:
    assert AgentConfig.parse(GOOD | {"url": url}).url == url.rstrip("/")


@pytest.mark.parametrize(
    "url",
    [
        *("h:8000", "ftp://h", "http://", "http://:8000", "http://[::1", "http://h:99999"),
        *("http://h:0", "http://u:p@h", "http://h?x", "http://h#x", "http://a b"),
    ],
)
def test_another_is_refused_at_the_start_and_not_by_the_control_plane(url: str) -> None:
    with pytest.raises(ConfigError, match=r"config\.url: .*use http://host:port"):
        AgentConfig.parse(GOOD | {"url": url})
