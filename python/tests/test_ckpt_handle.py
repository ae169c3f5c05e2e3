"""The order of things around a save: waiting, failing, cancelling, agreeing on an end. The save itself is a stand-in
here."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch

import forebay
from forebay._ckpt.handle import SaveHandle, Watcher
from forebay._ckpt.preempt import Preemption
from forebay._errors import make


class Running:
    """A save that ends when it is told to."""

    def __init__(self) -> None:
        self.copied = threading.Event()
        self.ended = threading.Event()
        self.error: forebay.Error | None = None

    def staged(self, timeout_s: float | None = None) -> bool:
        there = self.copied.wait(timeout_s)
        if self.error is not None:
            raise self.error
        return there

    def wait(self, timeout_s: float | None = None) -> bool:
        there = self.ended.wait(timeout_s)
        if there and self.error is not None:
            raise self.error
        return there

    def cancel(self) -> None:
        self.fail("cancelled")

    def report(self) -> dict[str, Any]:
        return {"bytes": 7}

    def succeed(self) -> None:
        self.copied.set()
        self.ended.set()

    def fail(self, code: str) -> None:
        self.error = make(code, f"rank 3: {code}")
        self.succeed()


def started() -> tuple[Running, SaveHandle, list[SaveHandle], Watcher]:
    running, after = Running(), []
    handle = SaveHandle(5, running, {"snapshot": "pool"})
    watcher = Watcher()
    watcher.watch(handle, after.append)
    return running, handle, after, watcher


def test_a_handle_waits_for_copies_then_for_the_commit() -> None:
    running, handle, after, watcher = started()
    assert not handle.staged(0.01) and not handle.wait(0.01) and not handle.done()
    running.copied.set()
    assert handle.staged() and not handle.wait(0.01)
    with pytest.raises(forebay.DeadlineError, match="step 5"):
        handle.result(0.01)
    with pytest.raises(forebay.DeadlineError):
        handle.exception(0.01)
    assert "running" in repr(handle)
    running.succeed()
    assert handle.wait(10) and handle.done() and handle.exception() is None
    assert handle.result() == {"bytes": 7, "step": 5, "snapshot": "pool"}
    watcher.close(10)
    assert after == [handle] and "committed" in repr(handle)


def test_every_way_of_asking_gives_the_error() -> None:
    running, handle, _, watcher = started()
    running.fail("no_space")
    for ask in (handle.wait, handle.result, handle.staged):
        with pytest.raises(forebay.NoSpaceError, match="rank 3"):
            ask(10)
    error = handle.exception(10)
    assert error is not None and error.code == "no_space" and "no_space" in repr(handle)
    watcher.close(10)


def test_a_training_loop_goes_on_when_a_save_fails_while_it_copies() -> None:
    running, handle, _, watcher = started()
    running.fail("io")
    handle.settle()
    assert handle.staged() and not handle._seen
    watcher.close(10)


def test_cancelling_ends_a_save_once() -> None:
    running, handle, _, watcher = started()
    handle.cancel()
    error = handle.exception(10)
    assert error is not None and error.code == "cancelled"
    running.error = None
    handle.cancel()
    assert running.error is None
    watcher.close(10)


def test_ctrl_c_ends_a_wait_not_the_save() -> None:
    running, handle, _, watcher = started()
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    began = time.monotonic()
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        handle.wait(20)
    assert time.monotonic() - began < 5
    running.succeed()
    assert handle.wait(10)
    watcher.close(10)


def test_saves_are_settled_in_the_order_of_their_calls() -> None:
    after: list[SaveHandle] = []
    watcher = Watcher()
    running = [Running() for _ in range(5)]
    handles = [SaveHandle(step, one, {}) for step, one in enumerate(running)]
    for handle in handles:
        watcher.watch(handle, after.append)
    for one in reversed(running):
        one.succeed()
    watcher.close(10)
    assert after == handles


def test_a_step_is_agreed_on_once_when_signals_come_at_different_times() -> None:
    store = torch.distributed.HashStore()
    ranks = [Preemption(lambda: store, "key") for _ in range(3)]
    # Rank 1 is signalled at step 4, when rank 2 is a step ahead; rank 0 never is.
    assert not any(rank.asked(step) for rank in ranks for step in (1, 2, 3))
    assert not ranks[2].asked(4) and not ranks[0].asked(4)
    ranks[1].request(30)
    assert not ranks[1].asked(4)
    assert not ranks[2].asked(5)
    ranks[2].request(30)
    assert not ranks[0].asked(5) and not ranks[1].asked(5)
    assert all(rank.asked(6) for rank in ranks)
    # Whoever asks again gets the same answer.
    assert ranks[0].asked(7)
    left = ranks[1].left()
    assert ranks[0].left() is None and left is not None and 0 < left <= 30


def test_a_rank_that_is_past_the_step_ends_too_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = torch.distributed.HashStore()
    first, second = (Preemption(lambda: store, "key") for _ in range(2))
    assert not second.asked(8)
    first.request(30)
    assert not first.asked(1)
    assert second.asked(9)
    assert "after step 3" in caplog.text and "lead_steps" in caplog.text


def test_one_process_stops_at_the_step_it_is_at() -> None:
    alone = Preemption(lambda: None, "key")
    before = signal.getsignal(signal.SIGUSR1)
    alone.listen(signal.SIGUSR1, 30, 2)
    assert not alone.asked(1)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert alone.asked(2)
    alone.close()
    assert signal.getsignal(signal.SIGUSR1) == before
