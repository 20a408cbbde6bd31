"""No program's log has the variables of a traceback's frames: prompts and tokens are among them."""

from __future__ import annotations

import subprocess
import sys

import pytest

GATEWAY = """
from kvshuttle.gateway.logs import configure
from kvshuttle.gateway.settings import GatewaySettings
import structlog
configure(GatewaySettings(log_format=FORM))
log = structlog.get_logger()
"""
CONTROL_PLANE = """
from kvshuttle.controlplane.logs import set_up
import structlog
set_up(FORM, "info")
log = structlog.get_logger()
"""
AGENT = """
import os
os.environ["KVSHUTTLE_LOG_FORMAT"] = FORM
from kvshuttle.dataplane.log import get_logger
log = get_logger("test")
"""
FAIL = """
def handle(turn_token):
    raise KeyError("what is missing")
try:
    handle("a-" + "secret")
except KeyError:
    log.exception("it_failed")
"""


@pytest.mark.parametrize("form", ["console", "json"])
@pytest.mark.parametrize("program", [GATEWAY, CONTROL_PLANE, AGENT])
def test_a_traceback_names_the_place_and_no_values(program: str, form: str) -> None:
    code = program.replace("FORM", repr(form)) + FAIL
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    said = done.stdout + done.stderr
    assert "it_failed" in said
    assert "what is missing" in said
    assert "handle" in said
    assert "a-secret" not in said
