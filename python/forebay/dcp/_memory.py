"""Staging memory of `Writer`, kept between saves: pinning it takes longer than most saves stage.

One pool a device is kept, of the size of the largest save so far and never more than a writer's `staging_bytes`, until
`forebay.release_memory()`. A save that finds it lent to another one makes a pool of its own, which goes with it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from forebay import _native
from forebay._options import on_release

_lock = threading.Lock()
#: By device: the pool, and the engine that it was made with.
_kept: dict[str, tuple[_native.Engine, _native.Pool]] = {}


@contextmanager
def lent(device: str, native: _native.Engine, size: int) -> Iterator[_native.Pool]:
    """A pool of at least so many bytes. It is kept when the block ends; one that raises may have left it in use."""
    with _lock:
        own, pool = _kept.pop(device, (None, None))
    if pool is None or own is not native or pool.bytes < size:
        # Given back before the new one is made.
        own = pool = None
        pool = _native.Pool(native, size, prewarm=False)
    yield pool
    with _lock:
        other = _kept.get(device)
        if other is None or other[0] is not native or other[1].bytes < pool.bytes:
            _kept[device] = (native, pool)


def release() -> None:
    """Gives back what is kept."""
    with _lock:
        _kept.clear()


def _after_fork() -> None:
    """The parent's memory is nothing to a child, and its lock may be held by a thread that is not here."""
    global _lock
    _lock = threading.Lock()
    _kept.clear()


on_release(release)
os.register_at_fork(after_in_child=_after_fork)
