"""Forks and the exit of the interpreter, while native threads are at work.

A fork waits for calls that hold locks of the whole process, which the child would find locked for ever. The exit ends
loads that still run, and waits for the threads of those that have ended, because the driver takes itself apart next.
Both waits are bounded: a hung file system holds up neither for long.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from time import monotonic

from forebay import _native

#: Calls take microseconds; one that writes or opens a device takes longer, and is safe to fork beside.
_FORK_WAIT_MS = 200

_EXIT_WAIT_SECONDS = 2.0

_lock = threading.Lock()
_sessions: weakref.WeakSet[_native.Session] = weakref.WeakSet()


def remember_session(session: _native.Session) -> None:
    """Makes a load known to the exit."""
    with _lock:
        _sessions.add(session)


def _before_fork() -> None:
    _native.wait_for_calls(_FORK_WAIT_MS)


def _after_fork() -> None:
    """The parent's loads are nothing to a child, and its lock may be held by a thread that is not here."""
    global _lock, _sessions
    _lock = threading.Lock()
    _sessions = weakref.WeakSet()
    _native.forget_parent()


def _at_exit() -> None:
    deadline = monotonic() + _EXIT_WAIT_SECONDS
    with _lock:
        sessions = list(_sessions)
    for session in sessions:
        if monotonic() < deadline:
            # Takes at most 0.8 s; a load that has ended is only waited for.
            session.cancel()
    del sessions
    _native.wait_for_engines(max(int((deadline - monotonic()) * 1000), 0))


os.register_at_fork(
    before=_before_fork, after_in_parent=_native.resume_calls, after_in_child=_after_fork
)
atexit.register(_at_exit)
