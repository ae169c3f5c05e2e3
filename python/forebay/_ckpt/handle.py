"""A save under way, as the caller sees it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from forebay._ckpt.background import Background
from forebay._errors import Error, make

Report = dict[str, Any]

#: How long a save that is given up may go on reading the caller's memory: a hung disk must not hold an interrupt.
_ABANDON_SECONDS = 10.0


class Running(Protocol):
    """What a handle asks of a save of the native part."""

    def staged(self, timeout_s: float | None = None) -> bool: ...
    def wait(self, timeout_s: float | None = None) -> bool: ...
    def cancel(self) -> None: ...
    def report(self) -> Report: ...


class Kept(Protocol):
    """Who finishes the save if this process dies."""

    def end(self, error: Error | None) -> None: ...


class SaveHandle:
    """A save of one step. Made by `Checkpointer.save`."""

    def __init__(
        self,
        step: int,
        running: Running | None,
        facts: Report,
        settled: bool = False,
        skipped: bool = False,
        rank: int | None = None,
        link: Kept | None = None,
    ) -> None:
        #: The step, as it was when `save` was called.
        self.step = step
        #: Whether the save was left out because the one before was still under way (`on_busy="skip"`).
        self.skipped = skipped
        self._running = running
        self._link = link
        self._facts = facts
        #: This rank, where there are others.
        self._rank = rank
        #: Whether the copies are ordered before all that the caller does next.
        self._settled = settled
        self._over = threading.Event()
        self._lock = threading.Lock()
        #: Whether a thread sees to the end.
        self._watched = False
        self._error: Error | None = None
        self._report: Report | None = None
        #: Whether somebody has seen the error.
        self._seen = False
        #: Whether this rank gave the save up.
        self.cancelled = False
        if skipped:
            self._report = {"step": step, "skipped": True}
            self._over.set()

    def staged(self, timeout: float | None = None) -> bool:
        """Waits until the tensors of the state may be changed; False if that took longer than `timeout` seconds.

        Raises the error of the save, if it failed before that.
        """
        # Once: another thread sets it to None when the save ends.
        running = self._running
        if self._settled or running is None:
            return True
        try:
            return running.staged(timeout)
        except Error as error:
            self._seen = True
            raise self._named(error) from error

    def _named(self, error: Error) -> Error:
        """An error of this rank as the others hear of it."""
        if self._rank is None or "rank " in error.what:
            return error
        what = f"the save failed on rank {self._rank}: {error.what}"
        return make(error.code, what, error.where, error.hints, error.causes)

    def settle(self) -> None:
        """Waits until the state may be changed, however the save goes: whoever waits for the save gets its error. An
        interrupt gives the save up, and is raised when the memory is no longer read."""
        seen = self._seen
        try:
            self.staged()
        except Error:
            self._seen = seen
        except BaseException:
            self.abandon()
            raise
        self._settled = True

    def abandon(self) -> None:
        """Gives the save up for a caller who is interrupted while its memory is read; returns when that is over."""
        self.cancel()
        self._ended(_ABANDON_SECONDS)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the step is committed: whole, durable, and what `latest` names. False after `timeout` seconds,
        and for a save that was skipped.

        Raises the error of the save; every rank raises the same one, with the rank that had it first in its text.
        """
        if not self._ended(timeout):
            return False
        if self._error is not None:
            self._seen = True
            raise self._error
        return not self.skipped

    def _ended(self, timeout: float | None = None) -> bool:
        """Waits for the end; False if that took longer than `timeout` seconds. Where no thread sees to it (an interrupt
        came before one did) the caller does."""
        running = self._running
        if self._watched or self._over.is_set() or running is None:
            return self._over.wait(timeout)
        try:
            if not running.wait(timeout):
                return False
        except Error:
            # Kept below.
            pass
        settle(self)
        return True

    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self._over.is_set()

    def result(self, timeout: float | None = None) -> Report:
        """The report of this rank, once the step is committed; `{"step", "skipped"}` of a save that was skipped. Raises the
        error of the save, or DeadlineError.

        What was written: `step`; `attempt`, the name of the save in the step's folder; `bytes` and `files` of this rank,
        `tensor_bytes` of them tensors; `path`, how it was written; `durable`, whether the store makes what it is given
        durable.

        How long the caller was held up, in seconds: `stall_seconds` in all, of which `busy_seconds` waiting for the save
        before, `plan_seconds` describing the state (and agreeing on it, if `agreed`), `start_seconds` starting the
        copies; `hook_seconds`, where a hook of `attach` waited later. `snapshot` is how the state was copied: "shadow"
        within GPU memory, "pool" into staging memory that has room for it, "stream" through staging memory as that
        empties, "staged" into memory that the agent has too, "in place" not at all. `predicted_stall_s` is what was expected of it, None where rates are not known.

        When things were done, in seconds since the save began: `staged_seconds` all copied, `write_seconds` all written,
        `durable_seconds` durable on this rank, `commit_seconds` committed on all. `cpu_seconds` is what its threads took.

        What is worth knowing: `warnings` that ranks agreed on, `empty`: names of parts of the state that hold nothing.
        """
        if not self.wait(timeout) and not self.skipped:
            raise make("timeout", f"the save of step {self.step} takes longer than {timeout} s")
        assert self._report is not None
        return {**self._report, **self._facts}

    def exception(self, timeout: float | None = None) -> Error | None:
        """The error of the save, None if it is committed. Raises DeadlineError."""
        if not self._ended(timeout):
            raise make("timeout", f"the save of step {self.step} takes longer than {timeout} s")
        self._seen = True
        return self._error

    def cancel(self) -> None:
        """Gives the save up, unless it is committed already. Other ranks see it fail."""
        running = self._running
        if running is not None and not self.done():
            self.cancelled = True
            running.cancel()

    def __repr__(self) -> str:
        if self.skipped:
            state = "skipped"
        elif not self.done():
            state = "running"
        else:
            state = "committed" if self._error is None else f"failed: {self._error.code}"
        return f"<SaveHandle step {self.step}, {state}>"


class Watcher:
    """Waits for saves and settles what comes after each, on a thread of its own: it makes no collective calls. It holds
    what `after` needs as long as a save is under way, and no longer."""

    def __init__(self) -> None:
        self._line = Background("forebay-saves")

    def watch(self, handle: SaveHandle, after: Callable[[SaveHandle], None]) -> None:
        """Takes a save; they end in the order in which they were taken. Errors: `RuntimeError` where no thread can be
        started."""

        def job() -> None:
            handle._watched = True
            settle(handle)
            after(handle)

        self._line.put(job)

    def close(self, timeout: float | None) -> None:
        """Waits until all saves have ended and what comes after them is done."""
        self._line.close(timeout)


def settle(handle: SaveHandle) -> None:
    """Waits for the end of a save and keeps how it ended: once, whoever else does."""
    running = handle._running
    if handle._over.is_set() or running is None:
        return
    report, failure = None, None
    try:
        while not running.wait(None):
            pass
        report = {**running.report(), "step": handle.step}
    except Error as error:
        failure = handle._named(error)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001
        failure = make("internal", f"waiting for the save failed: {error!r}")
    with handle._lock:
        if handle._over.is_set():
            return
        link, handle._link = handle._link, None
        if link is not None:
            # Before anybody may use the memory again.
            link.end(failure)
        handle._report, handle._error = report, failure
        # Nothing of the caller's is kept beyond the end; after an error `staged` still tells it.
        handle._running = None if failure is None else running
        handle._over.set()
