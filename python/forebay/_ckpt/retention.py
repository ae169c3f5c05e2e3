"""Removing old steps and leftovers after a commit, beside the training: one thread of rank 0.

Rules are the native part's: only committed steps count, the newest is never removed, and what a reader holds stays
until it lets go.
"""

from __future__ import annotations

import logging
import threading
from time import monotonic
from typing import Any

from forebay import _native
from forebay._ckpt import stall
from forebay._ckpt.background import Background
from forebay._ckpt.settings import Settings, check_count
from forebay._errors import Error, usage

_log = logging.getLogger("forebay")

#: What is unpublished is kept so long for readers that have just opened it.
GRACE_SECONDS = 60.0

#: What an attempt left that did not end is collected once it is so old: far longer than any rank is silent.
LEFTOVER_SECONDS = 900.0

#: How often leftovers are looked for where no rule removes steps.
COLLECT_SECONDS = 900.0


class Retention:
    """Prunes in the background; asks that come while it works are one ask."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._line = Background("forebay-prune")
        self._lock = threading.Lock()
        self._asked = False
        #: When leftovers were last looked for.
        self._collected: float | None = None

    @property
    def wanted(self) -> bool:
        """Whether there is a rule which steps to keep."""
        return self._settings.keep_last is not None or self._settings.keep_every is not None

    def ask(self) -> None:
        """A step was committed. Without rules only leftovers go, and that not after each."""
        if not self.wanted:
            now = monotonic()
            if self._collected is not None and now - self._collected < COLLECT_SECONDS:
                return
            self._collected = now
        with self._lock:
            if self._asked:
                return
            self._asked = True
        self._line.put(self._work)

    def close(self, timeout: float | None) -> None:
        """Waits until what was asked for is done."""
        self._line.close(timeout)

    def _work(self) -> None:
        with self._lock:
            self._asked = False
        try:
            if self.wanted:
                prune(self._settings)
                stall.collect_probes(self._settings.directory, LEFTOVER_SECONDS)
            else:
                collect(self._settings)
        except (Error, OSError) as error:
            # The steps stay; the next commit asks again.
            _log.warning("forebay: old steps could not be removed: %s", error)


def collect(
    settings: Settings, grace_s: float = LEFTOVER_SECONDS, dry_run: bool = False
) -> list[tuple[str, int]]:
    """Removes what saves and measurements left that did not end, and what overwritten steps were made of; returns names
    and bytes."""
    removed = _native.gc(settings.directory, grace_s=grace_s, dry_run=dry_run)
    return removed + stall.collect_probes(settings.directory, grace_s, dry_run)


def prune(
    settings: Settings,
    keep_last: int | None = None,
    keep_every: int | None = None,
    pins: tuple[int, ...] = (),
    grace_s: float = GRACE_SECONDS,
    dry_run: bool = False,
) -> dict[str, Any]:
    """Removes steps that no rule keeps; returns what was unpublished and removed, or would be. Errors: `usage`."""
    check_count("keep_last", keep_last)
    check_count("keep_every", keep_every)
    last = settings.keep_last if keep_last is None else keep_last
    every = settings.keep_every if keep_every is None else keep_every
    if last is None and every is None:
        raise usage("prune needs a rule", "pass keep_last=, keep_every= or both")
    return _native.prune(
        settings.directory,
        # The newest stays in any case.
        keep_last=1 if last is None else last,
        keep_every=every,
        pins=list(pins),
        grace_s=grace_s,
        dry_run=dry_run,
    )
