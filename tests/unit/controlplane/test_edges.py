"""The small parts around the core: terms, errors, tokens, settings, time."""

from __future__ import annotations

import hashlib
import inspect
from enum import IntEnum
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from kvshuttle.controlplane import clock, settings
from kvshuttle.controlplane.auth import Role, Tokens, may
from kvshuttle.controlplane.model import errors, terms
from kvshuttle.controlplane.model.errors import DomainError, InvalidFieldError
from kvshuttle.controlplane.model.limits import SECOND, Limits
from kvshuttle.controlplane.model.terms import Hints, SessionValue
from kvshuttle.controlplane.observer import _word
from kvshuttle.controlplane.services.checks import Checks
from kvshuttle.controlplane.services.errors import TABLE, status_of
from kvshuttle.controlplane.settings import SettingsError
from kvshuttle.v1 import (
    agent_service_pb2,
    cluster_service_pb2,
    lease_service_pb2,
    session_service_pb2,
    types_pb2,
)

WIRE = (
    types_pb2,
    session_service_pb2,
    lease_service_pb2,
    cluster_service_pb2,
    agent_service_pb2,
)


def wire_enum(name: str) -> Any:
    return next(getattr(module, name) for module in WIRE if hasattr(module, name))


@pytest.mark.parametrize(
    "kind",
    [k for _, k in inspect.getmembers(terms, inspect.isclass) if issubclass(k, IntEnum)][:],
)
def test_terms_have_the_wires_values(kind: type[IntEnum]) -> None:
    if kind is IntEnum:
        return
    prefix = "".join(f"_{x}" if x.isupper() else x.upper() for x in kind.__name__)[1:]
    wire = dict(wire_enum(kind.__name__).items())
    ours = {f"{prefix}_{member.name}": int(member) for member in kind}
    assert {name: value for name, value in wire.items() if value} == {
        name: value for name, value in ours.items() if value
    }


@pytest.mark.parametrize(
    "kind",
    [
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, DomainError) and kind is not DomainError
    ],
)
def test_every_domain_error_has_its_code(kind: type[DomainError]) -> None:
    assert kind in TABLE
    assert kind.__doc__


def test_what_is_not_in_the_table_is_internal_and_silent() -> None:
    code, message, status = status_of(RuntimeError("secret"))
    assert code is grpc.StatusCode.INTERNAL
    assert "secret" not in message + str(status)


def test_a_long_value_is_cut_in_the_message() -> None:
    assert len(str(InvalidFieldError("f", "x" * 1_000, "shorten it"))) < 200


# -- access --------------------------------------------------------------------------------------


def test_policy_by_role() -> None:
    assert may(Role.WORKER, "AgentService", "Connect")
    for service in ("SessionService", "LeaseService", "ClusterService", "Channelz"):
        assert not may(Role.WORKER, service, "X")
        assert may(Role.OPERATOR, service, "X")
    assert may(Role.GATEWAY, "SessionService", "BeginTurn")
    assert not may(Role.GATEWAY, "AgentService", "Connect")
    assert may(Role.CLIENT, "LeaseService", "GetLease")
    assert not may(Role.CLIENT, "LeaseService", "RevokeLease")


def test_tokens_are_known_by_digest(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"secret").hexdigest()
    path = tmp_path / "t.yaml"
    path.write_text(f"- {{sha256: {digest}, role: client, tenant: acme, name: n}}")
    found = Tokens.load(path).find("secret")
    assert found is not None
    assert (found.role, found.tenant, found.name) == (Role.CLIENT, "acme", "n")
    assert Tokens.load(path).find("other") is None


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{}", "a list"),
        ("- 5", "token 1 is not a mapping"),
        ("- {sha256: abc, role: client}", "64 hexadecimal"),
        (f"- {{sha256: {'a' * 64}, role: worker}}", "role must be"),
        (f"- {{sha256: {'a' * 64}, role: client}}", "names its tenant"),
        (f"- {{sha256: {'a' * 64}, role: gateway, tenant: t}}", "names its tenant"),
    ],
)
def test_a_wrong_tokens_file_is_explained(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=complaint):
        Tokens.load(path)


# -- settings ------------------------------------------------------------------------------------


def test_flags_over_environment_over_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("insecure: true\nstore: from-file\nlease_ttl: 11\nguard: 3\nmin_tokens: 7\n")
    monkeypatch.setenv("KVSHUTTLE_CP_LEASE_TTL", "12")
    monkeypatch.setenv("KVSHUTTLE_CP_GUARD", "4")
    found = settings.load([f"--config={path}", "--guard=2"])
    assert (found.store, found.lease_ttl, found.guard) == ("from-file", 12, 2)
    assert found.limits().lease_ttl_ns == 12 * SECOND
    assert found.limits().min_tokens == 7
    assert found.limits().silence_ns == Limits().silence_ns


def test_toml_and_the_environments_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c.toml"
    path.write_text('insecure = true\nlisten = "127.0.0.1:1"\n')
    monkeypatch.setenv("KVSHUTTLE_CP_CONFIG", str(path))
    found = settings.load([])
    assert found.listeners() == ("127.0.0.1:1",)
    assert found.metrics() == "127.0.0.1:0"
    assert found.store_file() is None
    assert settings.load(["--store=x.db"]).store_file() == Path("x.db")


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        ([], "tls_cert is not set"),
        (["--insecure", "--api-address=nowhere"], "not host:port"),
        (["--insecure", "--api-address=0.0.0.0:1"], "loopback only"),
        (["--insecure", "--listen=10.0.0.1:1"], "loopback only"),
        (["--insecure", "--heartbeat=9"], "silence must be longer"),
        (["--insecure", "--lease-ttl=-1"], "lease_ttl"),
        (["--insecure", "--ready-file=/nowhere/r"], "ready_file: /nowhere/r: .* make it first"),
        (["--insecure", "--ready-file=/dev/null/r"], "ready_file: /dev/null/r: .* not a directory"),
        (["--insecure", "--ready-file=/"], "ready_file: / is a directory: name a file"),
        (["--insecure", f"--ready-file=/{'r' * 300}"], "ready_file: /r+: File name too long"),
        (["--insecure", "--store=:memory:"], "store: ':memory:' is no path: .* say memory"),
        (["--insecure", "--store=Memory"], "store: 'Memory' is no path: .* ./Memory"),
        (["--insecure", "--store=file:x?mode=memory"], "store: 'file:x.mode=memory' is no path"),
        (["--config=/nowhere.yaml"], "no file"),
        (["--config=/nowhere.ini"], "must end with"),
        (
            ["--listen=0.0.0.0:1", "--tokens-file=t"],
            "everybody needs a certificate",
        ),
    ],
)
def test_wrong_settings_are_explained(argv: list[str], complaint: str) -> None:
    with pytest.raises(SettingsError, match=complaint):
        settings.load(argv)


def test_an_unknown_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("insecure: true\nlease_tll: 5\n")
    with pytest.raises(SettingsError, match="lease_tll"):
        settings.load([f"--config={path}"])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("c.yaml", b"- insecure\n"),
        ("c.yaml", b"[]"),
        ("c.yaml", b"insecure"),
        ("c.yaml", b"1: 2"),
        ("c.yaml", b"insecure: \xff\n"),
        ("c.yaml", b"insecure: [\n"),
        ("c.yaml", b"[" * 50_000),
        ("c.yml", b"a\x00b"),
        ("c.toml", b"insecure\n"),
        ("c.toml", b"insecure = '\xff'\n"),
    ],
)
def test_a_file_that_has_no_settings_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(SettingsError, match=f"^config: {path} .+$"):
        settings.load([f"--config={path}", "--insecure"])


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    for name in ("c.yaml", "c.toml"):
        path = tmp_path / name
        path.write_text("# nothing yet\n")
        assert settings.load([f"--config={path}", "--insecure"]).insecure


def test_a_store_may_have_any_name_by_its_path() -> None:
    for name in ("./:memory:", "./memory", "memory.db"):
        assert settings.load(["--insecure", f"--store={name}"]).store_file() == Path(name)


def test_an_unknown_flag_exits(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings.load(["--lease-tll=5"])
    assert "lease-tll" in capsys.readouterr().err


# -- time and retention --------------------------------------------------------------------------


def test_the_time_line_goes_on_from_what_was_stored() -> None:
    line = clock.Timeline()
    ahead = line.now_ns() + 3_600 * SECOND
    line.not_before(ahead)
    assert ahead < line.now_ns() < ahead + SECOND
    line.not_before(5)
    assert line.now_ns() > ahead


def test_masks_say_which_hints_are_set() -> None:
    checks = Checks(Limits())
    before = Hints(5, SessionValue.LOW)
    message = types_pb2.SessionHints(value=types_pb2.SESSION_VALUE_HIGH)
    assert checks.hints_masked(before, message, []) == Hints(5, SessionValue.HIGH)
    assert checks.hints_masked(before, message, ["expected_idle"]) == Hints(None, SessionValue.LOW)
    assert checks.hints_masked(before, message, ["hints.value"]) == Hints(5, SessionValue.HIGH)
    with pytest.raises(InvalidFieldError):
        checks.hints_masked(before, message, ["nonsense"])


@pytest.mark.parametrize("seconds", [-1, 10**12])
def test_durations_are_bounded(seconds: int) -> None:
    with pytest.raises(InvalidFieldError):
        Checks(Limits()).duration("f", Duration(seconds=seconds))


def test_free_text_does_not_become_a_label() -> None:
    assert _word("TURN_ENDED") == "TURN_ENDED"
    assert _word("the operator said so") == "OTHER"
    assert _word("") == ""
