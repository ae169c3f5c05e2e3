"""Work beside the training, one job after the other, on a thread that is there only while there is work.

A thread that waits for work would hold what it works for, so that nobody who is dropped without a close would ever be
freed. Here the jobs hold it, and nothing does once they are done. A job that raises is logged; the next one runs.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

_log = logging.getLogger("forebay")

Job = Callable[[], None]


class Background:
    """A line of jobs."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._jobs: deque[Job] = deque()
        self._thread: threading.Thread | None = None

    def put(self, job: Job) -> None:
        """Takes a job; jobs run in the order in which they were taken. Errors: `RuntimeError` where no thread can be
        started; the job is then not taken. After an interrupt it may have been taken or not: the thread may run, for
        `start` waits for it."""
        with self._lock:
            self._jobs.append(job)
            try:
                self._begin()
            except RuntimeError:
                self._jobs.remove(job)
                raise

    def _begin(self) -> None:
        """Sees to it that a thread runs. To be called with the lock."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._thread = None
            raise

    def close(self, timeout: float | None) -> bool:
        """Waits until no job is left; False if one still is after `timeout` seconds."""
        with self._lock:
            if self._jobs:
                # One whose start was interrupted may never have begun.
                self._begin()
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(timeout)
        return not thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._thread is not threading.current_thread():
                    # Another one has taken its place.
                    return
                if not self._jobs:
                    self._thread = None
                    return
                job = self._jobs.popleft()
            try:
                job()
            except Exception:
                _log.exception("forebay: a thread of %s failed, and goes on", self._name)
            # What it holds must not wait for the next one.
            del job
