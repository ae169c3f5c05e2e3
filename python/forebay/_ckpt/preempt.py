"""Agreeing on a last step when the job is told to end.

Signals reach ranks at different times, some ranks not at all. The first rank that asks after its signal proposes a
step a little ahead of its own, by a key of torch's store that can be set once; every rank looks at that key each time
it asks, and stops at the step that is there. No rank waits for another, so no collective of the training loop can be
left half.

A step `lead` ahead is far enough if no rank is more than `lead` steps ahead of another when it asks: loops that reduce
gradients every step are at most one apart.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from forebay._errors import make, usage

#: Steps between the rank that proposes and the step that it proposes.
LEAD_STEPS = 2


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
        #: Whether this rank was told that its step is the last.
        self._answered = False

    def listen(self, number: int, grace_s: float, lead_steps: int) -> None:
        """Takes a signal over. Errors: `usage` outside of the main thread."""
        if threading.current_thread() is not threading.main_thread():
            raise usage("signals can be listened to from the main thread only")
        if grace_s <= 0 or lead_steps < 1:
            raise usage("grace_s and lead_steps must be positive")
        before = signal.signal(number, self._on_signal)
        self._before.setdefault(int(number), before)
        self._grace[int(number)] = grace_s
        self._lead = lead_steps

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._deadline is None:
            self._deadline = time.monotonic() + self._grace[number]

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
            return False
        if step > self._target:
            what = f"the job was to end after step {self._target}, this rank is at step {step}"
            hint = "ranks drift apart: pass a larger lead_steps to on_signal"
            raise make("structure_mismatch", what, None, [hint])
        self._answered = step == self._target
        return self._answered

    def _agreed(self, store: Any, step: int) -> int | None:
        if self._deadline is not None:
            # The first proposal stands.
            return int(store.compare_set(self._key, "", str(step + self._lead)))
        if store.check([self._key]):
            return int(store.get(self._key))
        return None

    def left(self) -> float | None:
        """Seconds that are left of the grace time; None before a signal."""
        return None if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)

    def close(self) -> None:
        """Gives signals back."""
        if threading.current_thread() is threading.main_thread():
            for number, before in self._before.items():
                # What was not set from Python cannot be set again.
                if signal.getsignal(number) == self._on_signal and before is not None:
                    signal.signal(number, before)
        self._before.clear()
