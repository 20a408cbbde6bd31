"""Kills what a dead process left running.

A stack's programs live in sessions of their own, so a Ctrl-C, a closed terminal or a SIGKILL of
the process that started them would leave engines behind, gigabytes each. One helper process per
starter holds the other end of a pipe; when the pipe closes, because the starter is gone however
it went, the helper kills every session that it was told of and not told to forget.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import threading

_lock = threading.Lock()
_helper: subprocess.Popen[bytes] | None = None
_helper_owner = 0


def watch(session: int) -> None:
    """Kill this session when the calling process is gone."""
    _tell(f"+{session}\n")


def forget(session: int) -> None:
    """The session has ended."""
    _tell(f"-{session}\n")


def _tell(line: str) -> None:
    global _helper, _helper_owner
    with _lock:
        if _helper is None or _helper.poll() is not None or _helper_owner != os.getpid():
            _helper = subprocess.Popen(
                # Isolated and by path: it starts at once and imports nothing of ours.
                [sys.executable, "-I", "-S", __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
            _helper_owner = os.getpid()
            atexit.register(close)
        assert _helper.stdin is not None
        _helper.stdin.write(line.encode())
        _helper.stdin.flush()


def close() -> None:
    """Ends the helper, which kills what is still watched."""
    global _helper
    with _lock:
        if _helper is not None and _helper_owner == os.getpid():
            assert _helper.stdin is not None
            _helper.stdin.close()
            _helper.wait(30)
        _helper = None


def main() -> None:
    """The helper: reads `+session` and `-session` lines until the pipe closes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sessions: set[int] = set()
    for line in sys.stdin:
        session = int(line[1:])
        if line[0] == "+":
            sessions.add(session)
        else:
            sessions.discard(session)
    for session in sessions:
        for pid in session_pids(session):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def session_pids(session: int) -> list[int]:
    """The live processes of a session, read from /proc."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as stat:
                # After the command's name in parentheses: state, parent, group, session.
                fields = stat.read().rpartition(b")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == session and fields[0] not in (b"Z", b"X"):
            found.append(int(entry))
    return found


if __name__ == "__main__":
    main()
