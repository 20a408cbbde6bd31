"""Where settings come from, and which are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from pydantic import ValidationError

from kvshuttle.controlplane.settings import load as load_control_plane
from kvshuttle.gateway.auth import Authenticator, KeyFileError
from kvshuttle.gateway.settings import GatewaySettings, load

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
        (["--begin-turn-timeout-s", "0"], "greater than 0"),
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
    with pytest.raises(SystemExit, match="does not exist"):
        load(["--config", str(tmp_path / "none.yaml")])


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
