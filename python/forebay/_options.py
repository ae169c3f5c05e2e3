"""Options of a load, and the engines that loads share."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from forebay import _native
from forebay._errors import usage

_LOAD_KEYS = ("threads", "path", "cache")
_ENGINE_KEYS = (
    "arena_bytes",
    "dma_window_bytes",
    "piece_bytes",
    "slots_ahead",
    "readers_beside_dma",
    "dma_batch_bytes",
    "dma_ahead_bytes",
    "dma_on_tmpfs_threads",
    "direct_depth",
)
_THREADS_MAX = 256
_NUMBER_MAX = 1 << 62


@dataclass(frozen=True, slots=True)
class Options:
    """How one load is done, and how its engine is made."""

    threads: int | None = None
    path: str = "auto"
    cache: str = "auto"
    engine: Mapping[str, Any] = field(default_factory=dict)


def parse(options: Mapping[str, Any] | None, threads: int | None) -> Options:
    """Reads the `options` of a call; `threads` given apart counts more than that in them.

    Errors: `usage`.
    """
    if options is not None and not isinstance(options, Mapping):
        raise usage(f"options are {options!r}, a dict is needed")
    options = dict(options or {})
    for key in options:
        if key not in _LOAD_KEYS and key not in _ENGINE_KEYS:
            known = ", ".join((*_LOAD_KEYS, *_ENGINE_KEYS[:3]))
            raise usage(f"no option is called {key!r}", f"options: {known}")
    if threads is not None:
        options["threads"] = threads
    count = options.get("threads")
    if count is not None and (
        isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= _THREADS_MAX
    ):
        raise usage(f"threads is {count!r}, a whole number from 1 to {_THREADS_MAX} is needed")
    loading = {key: options.pop(key) for key in _LOAD_KEYS if options.get(key) is not None}
    for key in _LOAD_KEYS:
        options.pop(key, None)
    for key in ("path", "cache"):
        if not isinstance(loading.get(key, ""), str):
            raise usage(f"option {key} is {loading[key]!r}, text is needed")
    for key, value in options.items():
        if type(value) is not int or not 0 <= value <= _NUMBER_MAX:
            raise usage(f"option {key} is {value!r}, a whole number is needed")
    return Options(engine=options, **loading)


_lock = threading.Lock()
_engines: dict[tuple[object, ...], _native.Engine] = {}


def engine(device: str, options: Options) -> _native.Engine:
    """The engine of this process for a device and these settings: made once, so that its arena is made once."""
    key = (os.getpid(), device, *sorted(options.engine.items()))
    found = _engines.get(key)
    if found is None:
        with _lock:
            found = _engines.get(key)
            if found is None:
                found = _native.Engine(device, dict(options.engine))
                _engines[key] = found
    return found


#: What else gives memory back.
_releases: list[Callable[[], None]] = []


def on_release(release: Callable[[], None]) -> None:
    """Has a function called whenever memory is to be given back."""
    _releases.append(release)


def release_memory() -> None:
    """Gives back the pinned staging memory (at most `arena_bytes`, by default 1 GiB, a device) that is kept between
    loads, and that of `forebay.dcp.Writer`. Loads that run keep theirs until they end; the next one takes some again.
    A `Checkpointer` has memory of its own: its `release` gives that back."""
    with _lock:
        _engines.clear()
    for release in _releases:
        release()


def _after_fork() -> None:
    """The parent's engines are nothing to a child, and its lock may be held by a thread that is not here."""
    global _lock
    _lock = threading.Lock()
    _engines.clear()


os.register_at_fork(after_in_child=_after_fork)
