"""Where settings come from, and which are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from pydantic import ValidationError

from kvshuttle.controlplane.settings import load as load_control_plane
from kvshuttle.gateway.auth import Authenticator, KeyFileError
from kvshuttle.gateway.settings import ConfigFileError, GatewaySettings, load

if TYPE_CHECKING:
    from pathlib import Path


def test_flags_go_before_environment_before_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text("port: 1\nhost: 127.0.0.2\nbegin_turn_timeout_s: 0.25\ndecode_url: [http://f]")
    monkeypatch.setenv("KVSHUTTLE_GW_PORT", "2")
    monkeypatch.setenv("KVSHUTTLE_GW_HOST", "127.0.0.3")
    monkeypatch.setenv("KVSHUTTLE_GW_PREFILL_URL", "http://a, http://b/")
    settings = load(["--config", str(file), "--port", "3"])

    assert (settings.port, settings.host) == (3, "127.0.0.3")
    assert settings.begin_turn_timeout_s == 0.25
    assert settings.prefill_url == ["http://a", "http://b"]
    assert settings.decode_url == ["http://f"]


def test_flags_repeat() -> None:
    settings = load(["--decode-url", "http://a", "--decode-url", "http://b:1/"])
    assert settings.decode_url == ["http://a", "http://b:1"]


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--host", "0.0.0.0"], "api_keys_file"),
        (["--decode-url", "10.0.0.1:8000"], "base URL"),
        (["--decode-url", "http://[::1"], "base URL"),
        (["--prefill-url", "http://x:abc"], "base URL"),
        (["--prefill-url", "http://"], "base URL"),
        (["--begin-turn-timeout-s", "0"], "greater than 0"),
        (["--control-plane", ""], "host:port"),
        (["--control-plane", " "], "host:port"),
    ],
)
def test_refused(argv: list[str], word: str) -> None:
    with pytest.raises(ValidationError, match=word):
        load(argv)


def test_it_looks_for_the_control_plane_where_that_listens() -> None:
    assert load([]).control_plane == load_control_plane(["--insecure"]).api_address


def test_exposed_on_purpose() -> None:
    assert load(["--host", "0.0.0.0", "--insecure-no-auth"]).host == "0.0.0.0"


def test_config_file_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigFileError, match="does not exist"):
        load(["--config", str(tmp_path / "none.yaml")])
    with pytest.raises(ConfigFileError, match="File name too long"):
        load(["--config", str(tmp_path / ("n" * 300))])


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"- port\n- 1\n", "must map"),
        (b"port", "must map"),
        (b"7", "must map"),
        (b"1: 2", "must map"),
        (b"port: [", "neither YAML nor JSON"),
        (b"port: 1\nhost: \xff", "UTF-8"),
        (b"host: \x00", "neither YAML nor JSON"),
        (b"[" * 50_000, "neither YAML nor JSON"),
    ],
)
def test_a_config_file_must_hold_settings(tmp_path: Path, content: bytes, word: str) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigFileError, match=word) as raised:
        load(["--config", str(file)])
    assert str(file) in str(raised.value)


def test_a_config_file_may_hold_nothing(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_bytes(b"# nothing yet\n")
    assert load(["--config", str(file)]).port == 8080


@pytest.mark.parametrize(
    "key", ["a\nb", "a\r\nx-b: c", "a\x00", "\x7f", "a\tb", "a ", " a", "\n", "\udcff", "a\x85b"]
)
def test_a_key_that_no_header_can_carry_is_refused(key: str) -> None:
    with pytest.raises(ValidationError, match="no HTTP header can carry") as raised:
        load(["--engine-api-key", key])
    (problem,) = raised.value.errors()
    assert problem["loc"] == ("engine_api_key",)


@pytest.mark.parametrize("key", ["k-1", "a b", "né", "~!@#$%^&*()", "\u2603"])
def test_other_keys_are_taken(key: str) -> None:
    taken = load(["--engine-api-key", key]).engine_api_key
    assert taken is not None
    assert taken.get_secret_value() == key


def test_help_explains_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        load(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for name, field in GatewaySettings.model_fields.items():
        assert field.description
        assert f"--{name.replace('_', '-')}" in text
    assert "(default: 127.0.0.1)" in text
    assert "None)" not in text
    assert "factory" not in text


@pytest.mark.parametrize(
    "text", ["[]", "plain-key: acme", f"{'a' * 64}: 'not a tenant!'", "{", "x"]
)
def test_key_files_that_cannot_be_used(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(KeyFileError) as raised:
        Authenticator.from_file(file)
    assert "plain-key" not in str(raised.value)
