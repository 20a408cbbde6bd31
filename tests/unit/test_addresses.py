"""Addresses: one rule for whoever listens, asks, or is told."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from kvshuttle.addresses import is_loopback, split_address, wrong_in_target
from kvshuttle.dataplane.config import AgentConfig, ConfigError
from kvshuttle.gateway.settings import load


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:1", True),
        ("127.9.9.9:1", True),
        ("[::1]:1", True),
        ("localhost:1", True),
        ("unix:/tmp/x", True),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("10.0.0.1:1", False),
        ("example.org:1", False),
        ("dns:///127.0.0.1.example.com:1", False),
    ],
)
def test_loopback(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("host:1", ("host", 1)),
        ("a_b.c-d.:65535", ("a_b.c-d.", 65_535)),
        ("[::1]:7400", ("::1", 7_400)),
    ],
)
def test_the_parts_of_an_address(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts
    assert wrong_in_target(address) == ""


WRONG = [
    ("", "it is empty"),
    (" ", "it is empty"),
    ("host", "no port"),
    ("[::1]", "no port"),
    ("host:", "ports are"),
    ("host:port", "ports are"),
    ("host:99999", "ports are"),
    ("host:0", "ports are"),
    ("host:1²", "ports are"),
    (":1", "its host must be"),
    ("::1:7400", "in brackets"),
    ("[::1:7400", "in brackets"),
    ("[host]:7400", "in brackets"),
    ("a b:7400", "its host must be"),
    ("http://127.0.0.1:7400", "leave http:// out"),
    ("https://cp", "leave https:// out"),
]


@pytest.mark.parametrize(("address", "said"), WRONG)
def test_what_is_none(address: str, said: str) -> None:
    with pytest.raises(ValueError, match="is not host:port: ") as raised:
        split_address(address)
    assert said in str(raised.value)
    assert repr(address) in wrong_in_target(address)
    # Whoever is told one says so at the start, with its name for it.
    with pytest.raises(ValidationError, match=r"control.plane") as at_gateway:
        load(["--insecure-no-auth", "--decode-url", "http://d", "--control-plane", address])
    assert said in str(at_gateway.value)
    worker = {"worker_id": "w", "role": "decode", "url": "http://h:8000", "insecure": True}
    with pytest.raises(ConfigError, match=r"kv_connector_extra_config\.control_plane"):
        AgentConfig.parse({**worker, "control_plane": address})


def test_only_who_listens_may_leave_the_port_open() -> None:
    assert split_address("127.0.0.1:0", any_port=True) == ("127.0.0.1", 0)


@pytest.mark.parametrize("target", ["dns:///cp:7400", "unix:/run/cp", "ipv4:10.0.0.1:7400"])
def test_grpcs_own_ways_to_write_a_target(target: str) -> None:
    assert wrong_in_target(target) == ""
