"""Hints between ranks: deaths are noticed in seconds, the living are waited for, and nothing that is said is believed.

Ranks are processes with gloo and torch's store between them, killed and stopped for real. Bounds on times are wide enough
for a machine that is busy with other things; without hints a death takes one or two minutes to be noticed.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from ckpt_cases import harness, hinted

from forebay import Checkpointer

SLOW = [pytest.param(how, marks=pytest.mark.slow) for how in ("drops", "fails")]

#: Suspected after 5 s, certain after 5 more.
SOON_SECONDS = 15.0


@pytest.mark.parametrize(
    ("dead", "within"),
    [
        pytest.param(1, False, id="before"),
        pytest.param(0, True, id="committer-within"),
        pytest.param(0, False, id="committer-before", marks=pytest.mark.slow),
        pytest.param(1, True, id="within", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_killed_is_named_on_all_others(
    tmp_path: Path, dead: int, within: bool
) -> None:
    results = harness.run(hinted.killed, 3, str(tmp_path), within, dead)
    assert results.pop(dead) is None
    for (code, text, seconds), latest, held in results:
        print(f"{seconds:.1f} s: {text}")
        assert code == "timeout" and f"rank {dead} (rank {dead} on " in text, text
        assert "has died" in text and "restart the job" in text
        assert 5 < seconds < SOON_SECONDS
        # The step that was there, also where it was to be overwritten.
        assert latest == 1 and held == 1.0


@pytest.mark.parametrize("within", [False, True], ids=["before", "within"])
def test_a_rank_that_stands_still_for_four_seconds_is_waited_for(
    tmp_path: Path, within: bool
) -> None:
    results = harness.run(hinted.stopped, 3, str(tmp_path), within, 4)
    assert [code for code, _, _ in results] == ["", "", ""], results
    assert results[0][2] > 3.5
    assert Checkpointer(tmp_path).latest() == 2


def test_a_rank_that_holds_the_gil_for_longer_than_others_are_patient_is_waited_for(
    tmp_path: Path,
) -> None:
    results = harness.run(hinted.gil_held, 3, str(tmp_path), 17)
    assert [code for code, _, _ in results] == ["", "", ""], results
    assert results[0][2] > 15


def test_a_rank_that_has_closed_is_not_waited_for(tmp_path: Path) -> None:
    first, _, third = harness.run(hinted.closed, 3, str(tmp_path))
    for code, text, seconds in (first, third):
        assert code == "timeout" and "rank 1 (rank 1 on " in text and "closed" in text, text
        assert seconds < SOON_SECONDS


def test_what_carries_hints_ends_with_the_run_and_leaves_nothing(tmp_path: Path) -> None:
    for during, after in harness.run(hinted.threads_end, 2, str(tmp_path)):
        assert during == ["forebay-hints"] and after == []
    assert not (tmp_path / ".forebay" / "alive").exists()


def test_ranks_without_a_store_of_torch_save_as_ever(tmp_path: Path) -> None:
    path, home = str(tmp_path / "store"), str(tmp_path / "steps")
    for ended, log in harness.run(hinted.without_a_store, 2, path, 2, home, store=False):
        assert [code for code, _, _ in ended] == ["", ""], ended
        assert log.count("no hints between ranks") == 1, log
    assert Checkpointer(home).latest() == 2


@pytest.mark.parametrize("how", [*SLOW, "garbles", "stale"])
def test_whatever_the_store_says_the_outcome_is_right(tmp_path: Path, how: str) -> None:
    results = harness.run(hinted.lied_to, 3, str(tmp_path), how)
    for ended, (code, text, seconds) in results:
        assert not ended[0], ended
        assert code == "permission_denied" and "rank 1" in text, text
        assert seconds < SOON_SECONDS
    assert Checkpointer(tmp_path).latest() == 2
