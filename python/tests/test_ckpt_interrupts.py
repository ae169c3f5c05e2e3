"""Ctrl-C at the worst places of a save: it is given up, and later saves work."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import forebay
from forebay import Checkpointer
from forebay._ckpt import background, handle


def state(seed: float) -> dict[str, Any]:
    return {"w": torch.full((1000,), seed)}


def finish(checkpoints: Checkpointer, root: Path) -> None:
    """Saves, closes and looks, in a time that no hang would keep."""
    done: list[list[int]] = []

    def work() -> None:
        checkpoints.save(9, state(9.0), blocking=True)
        checkpoints.close()
        done.append([one["step"] for one in Checkpointer(root).steps() if one["state"] == "committed"])

    # On a thread of its own, so that a hang is a failure.
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60)
    assert done and done[0][-1] == 9, done


@pytest.mark.parametrize("blocking", [True, False])
def test_an_interrupt_before_anybody_watches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocking: bool
) -> None:
    checkpoints = Checkpointer(tmp_path)
    checkpoints.save(1, state(1.0), blocking=True)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(handle.Watcher, "watch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save(2, state(2.0), blocking=blocking)
    finish(checkpoints, tmp_path)


@pytest.mark.parametrize("started", [True, False])
def test_an_interrupt_while_the_watching_thread_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: bool
) -> None:
    checkpoints = Checkpointer(tmp_path)
    checkpoints.save(1, state(1.0), blocking=True)

    # The thread of the first save is to be gone, so that the second starts one.
    checkpoints._run.watcher.close(30)

    class Interrupted(threading.Thread):
        def start(self) -> None:
            if started or self.name != "forebay-saves":
                super().start()
            if self.name == "forebay-saves":
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(background.threading, "Thread", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save(2, state(2.0))
    finish(checkpoints, tmp_path)


def test_jobs_run_once_and_in_order_whatever_interrupts_their_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line, ran = background.Background("line"), []

    class Interrupted(threading.Thread):
        def start(self) -> None:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(background.threading, "Thread", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            line.put(lambda: ran.append(0))
    for number in range(1, 20):
        line.put(lambda number=number: ran.append(number))
    assert line.close(30)
    assert ran == list(range(20))


def test_threads_that_make_the_first_save_at_once_save_one_after_the_other(tmp_path: Path) -> None:
    failures: list[forebay.Error] = []
    with Checkpointer(tmp_path) as checkpoints:

        def save(step: int) -> None:
            try:
                checkpoints.save(step, state(float(step)), blocking=True)
            except forebay.Error as error:
                failures.append(error)

        threads = [threading.Thread(target=save, args=(step,)) for step in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not failures, failures
        assert sorted(one["step"] for one in checkpoints.steps()) == list(range(6))
