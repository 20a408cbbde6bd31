"""Runs a child and stops it at its system calls: what a process leaves on disk changes nowhere
else, so killing it before each of them is killing it at any instruction."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import struct
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Call", "supported", "traced"]

_TRACEME, _SYSCALL, _PEEKUSER, _SETOPTIONS = 0, 24, 3, 0x4200
_SYSGOOD, _EXITKILL = 1, 0x100000
# <sys/reg.h> and <asm/unistd_64.h> of x86-64.
_ORIG_RAX, _RAX, _RDI, _RSI, _RDX, _R10 = 15, 10, 14, 13, 12, 7
_CALLS = {1: "write", 18: "pwrite64", 74: "fsync", 75: "fdatasync", 77: "ftruncate", 87: "unlink"}
_WORD = struct.calcsize("P")


@dataclass(frozen=True)
class Call:
    """One that changes files. `data` is what is written, `offset` where, or the new length."""

    name: str
    path: str
    offset: int = 0
    data: bytes = b""


def _ptrace(request: int, pid: int, address: int = 0, data: int = 0) -> int:
    ctypes.set_errno(0)
    found: int = _libc.ptrace(request, pid, ctypes.c_void_p(address), ctypes.c_void_p(data))
    if found == -1 and ctypes.get_errno():
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found


_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long


def supported() -> bool:
    """Whether this machine lets a process trace its child, and is of the known kind."""
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        return False
    try:
        return traced(lambda: None, lambda _: True) == 0
    except OSError:
        return False


def _register(pid: int, number: int) -> int:
    return _ptrace(_PEEKUSER, pid, number * _WORD) & 0xFFFFFFFFFFFFFFFF


def _read(pid: int, address: int, length: int) -> bytes:
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        return memory.read(length)


def _call(pid: int) -> Call | None:
    name = _CALLS.get(_register(pid, _ORIG_RAX))
    if name is None:
        return None
    first = _register(pid, _RDI)
    if name == "unlink":
        path = _read(pid, first, 4_096).split(b"\0")[0].decode()
        return Call(name, path)
    path = os.readlink(f"/proc/{pid}/fd/{first}")
    if not path.startswith("/"):
        return Call(name, path)  # a pipe
    if name in ("write", "pwrite64"):
        data = _read(pid, _register(pid, _RSI), _register(pid, _RDX))
        offset = _register(pid, _R10) if name == "pwrite64" else -1
        return Call(name, path, offset, data)
    return Call(name, path, _register(pid, _RSI) if name == "ftruncate" else 0)


def traced(work: Callable[[], None], allow: Callable[[Call], bool]) -> int:
    """Runs `work` in a child. Before each call that changes files, `allow` is asked; where it says
    no, the child is killed instead. Returns the exit status, or minus the signal."""
    pid = os.fork()
    if not pid:
        status = 70
        try:
            _ptrace(_TRACEME, 0)
            os.kill(os.getpid(), signal.SIGSTOP)
            work()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    if not os.WIFSTOPPED(status):
        return os.waitstatus_to_exitcode(status)
    _ptrace(_SETOPTIONS, pid, 0, _SYSGOOD | _EXITKILL)
    entering = True
    deliver = 0
    while True:
        _ptrace(_SYSCALL, pid, 0, deliver)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSTOPPED(status):
            return os.waitstatus_to_exitcode(status)
        deliver = 0
        if os.WSTOPSIG(status) != signal.SIGTRAP | 0x80:
            deliver = os.WSTOPSIG(status)
            continue
        if entering:
            call = _call(pid)
            if call is not None and not allow(call):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return -signal.SIGKILL
        entering = not entering
