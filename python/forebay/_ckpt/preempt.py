"""Agreeing on a last step when the job is told to end.

Signals reach ranks at different times, some ranks not at all. The first rank that asks after its signal proposes a
step a little ahead of its own, by a key of torch's store that can be set once; every rank looks at that key each time
it asks, and stops at the step that is there. No rank waits for another, so no collective of the training loop can be
left half.

A rank that asks at step S and proposes S + `lead` + 1 is early enough for all that are at most `lead` steps ahead of it:
the furthest may have been told at S + `lead` that it goes on, just before, and asks next one step later. Loops that reduce
gradients every step are at most one apart.

Jobs that ask every so many steps only may never be at the step that was proposed: the first step from there on at which
they ask is the last then, which is the same on all ranks if they ask at the same steps. A rank that was further ahead
than `lead` and has gone past that step ends where it is, too late: its save cannot have the others', which is an error of
the save, and said here.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from forebay._errors import usage

_log = logging.getLogger("forebay")

#: How many steps ranks may be apart.
LEAD_STEPS = 1

#: What would end the process before it has saved.
_ENDS = (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler, None)


class Preemption:
    """The signals that are listened to, and what was agreed on."""

    def __init__(self, store: Callable[[], Any], key: str) -> None:
        self._store = store
        self._key = key
        self._before: dict[int, Any] = {}
        self._grace: dict[int, float] = {}
        self._lead = LEAD_STEPS
        #: When the signal came and what time there is, on the monotonic clock.
        self._deadline: float | None = None
        self._target: int | None = None
        #: The last step at which this rank asked and was to go on.
        self._went_on: int | None = None
        #: Whether this rank was told that its step is the last.
        self._answered = False

    def listen(self, number: int, grace_s: float, lead_steps: int) -> None:
        """Takes a signal over; a handler that was there before is called too. Errors: `usage` outside of the main
        thread."""
        if threading.current_thread() is not threading.main_thread():
            raise usage("signals can be listened to from the main thread only")
        if grace_s <= 0 or lead_steps < 1:
            raise usage("grace_s and lead_steps must be positive")
        # Before the handler can be called.
        self._grace[int(number)] = grace_s
        self._lead = lead_steps
        if signal.getsignal(number) != self._on_signal:
            self._before[int(number)] = signal.getsignal(number)
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._deadline is None:
            self._deadline = time.monotonic() + self._grace[number]
        before = self._before.get(number)
        if before not in _ENDS and callable(before):
            before(number, frame)

    def request(self, grace_s: float) -> None:
        """As if a signal had come."""
        self._deadline = self._deadline or time.monotonic() + grace_s

    def asked(self, step: int) -> bool:
        """Whether this step is the last."""
        if self._answered:
            return True
        store = self._store()
        if store is None:
            self._answered = self._deadline is not None
            return self._answered
        if self._target is None:
            self._target = self._agreed(store, step)
        if self._target is None:
            self._went_on = step
            return False
        if step < self._target:
            self._went_on = step
            return False
        if self._went_on is not None and self._went_on >= self._target:
            _log.warning(
                "forebay: the job was to end after step %d, this rank went on after step %d: ranks are further apart "
                "than lead_steps=%d says; pass more to on_signal",
                self._target,
                self._went_on,
                self._lead,
            )
        self._answered = True
        return True

    def _agreed(self, store: Any, step: int) -> int | None:
        if self._deadline is not None:
            # The first proposal stands.
            return int(store.compare_set(self._key, "", str(step + self._lead + 1)))
        if store.check([self._key]):
            return int(store.get(self._key))
        return None

    def left(self) -> float | None:
        """Seconds that are left of the grace time; None before a signal."""
        return None if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)

    def close(self) -> None:
        """Gives signals back."""
        if threading.current_thread() is threading.main_thread():
            for number, before in list(self._before.items()):
                # What was not set from Python cannot be set again.
                if signal.getsignal(number) == self._on_signal and before is not None:
                    signal.signal(number, before)
                    del self._before[number]
        # Somebody who came later calls this handler, which still has to call the one before.
