"""The training part of the quickstart: its launcher, its comparisons, and with FOREBAY_FULL=1 an interrupted job."""

from __future__ import annotations

import math
import multiprocessing
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "xtask/quickstart"))

import interrupted  # noqa: E402
import ranks  # noqa: E402


def _one_dies(folder: Path) -> None:
    """The others wait for it in a collective call, and fail because of it."""
    from torch import distributed

    (folder / f"started-{distributed.get_rank()}").touch()
    if distributed.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    distributed.barrier()


def _one_raises(folder: Path) -> None:
    from torch import distributed

    if distributed.get_rank() == 2:
        raise ValueError("of no use")
    time.sleep(60)


def _all_hang(folder: Path) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(120)


def test_a_killed_rank_is_named_and_none_is_left(tmp_path: Path) -> None:
    with pytest.raises(ranks.RanksFailed, match="rank 1 was ended by SIGKILL") as raised:
        ranks.run(3, tmp_path / "logs", _one_dies, tmp_path)
    assert (raised.value.rank, raised.value.signal_number) == (1, signal.SIGKILL)
    assert (tmp_path / "started-1").exists()
    assert not multiprocessing.active_children()


def test_an_error_of_a_rank_comes_with_its_log(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(ranks.RanksFailed, match="rank 2 ended with status 1") as raised:
        ranks.run(3, tmp_path / "logs", _one_raises, tmp_path)
    assert "ValueError: of no use" in str(raised.value)
    assert str(tmp_path / "logs") in str(raised.value)
    assert raised.value.signal_number is None
    assert time.monotonic() - began < 50, "the others slept to their end"
    assert not multiprocessing.active_children()


def test_ranks_that_hang_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "END_SECONDS", 0.5)
    with pytest.raises(ranks.RanksFailed, match="rank 0, rank 1 did not end in time"):
        ranks.run(2, tmp_path / "logs", _all_hang, tmp_path, seconds=10.0)
    assert not multiprocessing.active_children()


def test_losses_are_compared_step_by_step() -> None:
    reference = {1: 3.0, 2: 2.5, 3: 2.0}
    assert interrupted.compare_losses({2: 2.5, 3: 2.0}, reference, 1, 0.0) == 0.0
    assert interrupted.compare_losses({2: 2.5, 3: 2.25}, reference, 1, 0.5) == 0.25
    last_place = math.nextafter(2.0, 3.0)
    for wrong in (
        {2: 2.5, 3: last_place},
        {2: 2.5, 3: math.nan},
        {3: 2.0},
        {1: 3.0, 2: 2.5, 3: 2.0},
    ):
        with pytest.raises(interrupted.Failed):
            interrupted.compare_losses(wrong, reference, 1, 0.0)
    with pytest.raises(interrupted.Failed):
        interrupted.compare_losses({}, reference, 3, 0.0)


def test_states_are_compared_tensor_by_tensor() -> None:
    assert interrupted.compare_states({"a": "1", "b": "2"}, {"b": "2", "a": "1"}) == 2
    for wrong in ({}, {"a": "1"}, {"a": "1", "b": "3"}, {"a": "1", "b": "2", "c": "4"}):
        with pytest.raises(interrupted.Failed):
            interrupted.compare_states(wrong, {"a": "1", "b": "2"})
    with pytest.raises(interrupted.Failed):
        interrupted.compare_states({}, {})


@pytest.mark.slow
def test_a_job_that_lost_a_rank_in_a_save_goes_on_as_if_it_had_not(tmp_path: Path) -> None:
    story = interrupted.Story(Path("no command"), ROOT / "README.md", tmp_path, {})
    reference = story.run("reference", interrupted.WORLD, story.undisturbed)
    newest = interrupted.interrupt(story)
    shutil.copytree(story.checkpoints, story.copied)
    straight = interrupted.losses(reference)
    same = story.run("same", interrupted.WORLD, story.checkpoints)
    assert interrupted.compare_losses(interrupted.losses(same), straight, newest, 0.0) == 0.0
    assert interrupted.compare_states(same[-1]["digests"], reference[-1]["digests"]) == 159
    fewer = interrupted.losses(story.run("fewer", interrupted.SMALLER_WORLD, story.copied))
    interrupted.compare_losses(fewer, straight, newest, interrupted.TOLERANCE)
