"""The ends of things: the exit of the interpreter, and forks."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from time import monotonic
from typing import Protocol

_log = logging.getLogger("forebay")

#: An exit waits so long for saves under way: a hung file system must not hold it for ever.
EXIT_WAIT_SECONDS = 600.0


class Closes(Protocol):
    """What the exit closes."""

    def _exit(self, timeout: float) -> None: ...


_lock = threading.Lock()
_made: dict[str, int] = {}
_open: weakref.WeakSet[Closes] = weakref.WeakSet()


def remember(checkpointer: Closes) -> None:
    """Makes it known to the exit."""
    _open.add(checkpointer)


def next_key(directory: str) -> str:
    """A key of torch's store for a checkpointer: ranks make theirs in the same order."""
    with _lock:
        number = _made[directory] = _made.get(directory, 0) + 1
    return f"forebay/preempt/{directory}/{number}"


def _after_fork() -> None:
    """The parent's checkpointers are nothing to a child, and its lock may be held by a thread that is not here."""
    global _lock
    _lock = threading.Lock()
    _open.clear()


def _at_exit() -> None:
    deadline = monotonic() + EXIT_WAIT_SECONDS
    for checkpointer in list(_open):
        try:
            checkpointer._exit(max(deadline - monotonic(), 0.0))
        except Exception:
            # The others have saves under way too.
            _log.exception("forebay: %r could not be closed", checkpointer)


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
