"""Agreeing on a last step: ranks that are apart, that ask seldom, and handlers that were there before."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from forebay import Checkpointer
from forebay._ckpt.preempt import Preemption


class Store:
    """A store as torch's, in this process."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}

    def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
        return self.kept.setdefault(key, wanted.encode())

    def check(self, keys: list[str]) -> bool:
        return all(key in self.kept for key in keys)

    def get(self, key: str) -> bytes:
        return self.kept[key]


@pytest.fixture
def free_signal() -> Iterator[Callable[[], None]]:
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda: os.kill(os.getpid(), signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)


def job(orders: list[int], signalled: tuple[int, int], lead: int, stride: int) -> list[int]:
    """Runs two ranks whose steps come in an order: the step at which each stops. The signal comes to a rank just
    before it asks at a step."""
    store = Store()
    ranks = [Preemption(lambda: store, "key") for _ in range(2)]
    for one in ranks:
        one._lead = lead
    at, stopped = [0, 0], [-1, -1]
    for rank in orders:
        if stopped[rank] >= 0:
            continue
        at[rank] += stride
        if (rank, at[rank]) == signalled:
            ranks[rank].request(30)
        if ranks[rank].asked(at[rank]):
            stopped[rank] = at[rank]
    return stopped


@pytest.mark.parametrize("lead", [1, 2, 3])
def test_ranks_that_are_as_far_apart_as_is_allowed_end_at_one_step(lead: int) -> None:
    """Every order in which two ranks ask, none at a step when the other has asked `lead` + 1 steps further."""
    count = 0
    for choices in itertools.product((0, 1), repeat=9):
        at = [0, 0]
        apart = 0
        for rank in choices:
            at[rank] += 1
            # The other is about to ask at its next step.
            apart = max(apart, at[rank] - at[1 - rank] - 1)
        if apart > lead:
            continue
        # Then in turn, the one behind first.
        rest = [at.index(min(at))] * abs(at[0] - at[1]) + [0, 1] * 12
        for rank, step in itertools.product((0, 1), (1, 2, 3, 4)):
            stopped = job([*choices, *rest], (rank, step), lead, 1)
            assert stopped[0] == stopped[1] >= step, (choices, rank, step, stopped)
            assert stopped[0] <= step + 2 * lead + 1
            count += 1
    assert count > 100


def test_a_job_that_asks_seldom_ends_at_one_step_too() -> None:
    for stride in (2, 5, 50):
        for orders in ([0, 1] * 8, [1, 0] * 8):
            stopped = job(orders, (0, 2 * stride), 1, stride)
            assert stopped == [3 * stride] * 2


def test_a_rank_that_went_past_ends_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    # Rank 1 is five steps ahead when rank 0 proposes.
    stopped = job([1] * 8 + [0] * 9 + [1, 1], (0, 3), 1, 1)
    assert stopped == [5, 9]
    assert "ranks are further apart than lead_steps=1" in caplog.text


def test_handlers_that_were_there_are_called(
    tmp_path: Path, free_signal: Callable[[], None]
) -> None:
    heard: list[Any] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    first = signal.getsignal(signal.SIGUSR1)
    with Checkpointer(tmp_path / "a") as one, Checkpointer(tmp_path / "b") as two:
        one.on_signal(signal.SIGUSR1)
        two.on_signal(signal.SIGUSR1)
        two.on_signal(signal.SIGUSR1, grace_s=5)
        free_signal()
        assert heard == [signal.SIGUSR1]
        assert one.preempted(1) and two.preempted(1)
        assert two.grace_left() is not None and two.grace_left() <= 5  # type: ignore[operator]
    assert signal.getsignal(signal.SIGUSR1) is first
    # Whoever took the signal later calls ours, which calls the one before, also after the end.
    heard.clear()
    checkpoints = Checkpointer(tmp_path / "c")
    checkpoints.on_signal(signal.SIGUSR1)
    ours = signal.getsignal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, lambda number, frame: ours(number, frame))  # type: ignore
    checkpoints.close()
    free_signal()
    assert heard == [signal.SIGUSR1]


def test_the_last_step_is_saved_once_more(tmp_path: Path, free_signal: Callable[[], None]) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.on_signal(signal.SIGUSR1)
        for step in range(0, 100, 10):
            if step == 30:
                free_signal()
            if checkpoints.preempted(step):
                checkpoints.save(step, {"w": torch.ones(1)}, blocking=True)
                break
        assert checkpoints.latest() == 30
