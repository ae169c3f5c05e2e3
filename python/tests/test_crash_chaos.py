"""`ckpt-chaos` kills a training job at each change that it makes to its folder, and starts it again.

The tool hears of changes through Python's audit hooks, which the native part raises for what it writes. It is installed by
`pip install ckpt-chaos==0.1.8`, which `cargo xtask test` does; where it is not there these tests are skipped. Each point
is a job that is killed and one that goes on, with an import of torch each: every run of the tests tries a few, all of them
take `FOREBAY_FULL=1`.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

JOB = Path(__file__).parent / "crash" / "chaos_train.py"

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ckpt_chaos") is None, reason="ckpt-chaos is not installed"
)

#: How a kill shows: resumes that fail, other weights in the end, work lost that was committed, a job that fails unharmed.
FAULTS = "HARD_FAIL,SILENT_DIVERGENCE,LOST_WORK,CONTROL_FAIL"


def run(work: Path, *options: str, crash_rank: int = 0) -> str:
    """Runs the tool; returns its table."""
    command = [sys.executable, "-m", "ckpt_chaos", "run", "--work", str(work), "--jobs", "2"]
    command += ["--checkpoint-glob", "{out}/steps/step-*", "--ckpt-ignore-size"]
    command += ["--step-regex", r"resumed from step (\d+)", "--result-file", "{out}/final.pt"]
    command += ["--fail-on", FAULTS, "--crash-rank", str(crash_rank), *options]
    command += ["--", sys.executable, str(JOB), "--output_dir", "{out}"]
    # The tool's own option alone kills rank 0.
    more = {"CKPT_CHAOS_CRASH_RANK": str(crash_rank), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | more, check=False, timeout=3000
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def events(table: str) -> int:
    found = re.search(r"(\d+) file events", table)
    assert found is not None, table
    return int(found[1])


def killed(table: str) -> int:
    """Points at which the job was really killed."""
    lines = [line for line in table.splitlines() if line.startswith("#") and " PASS" in line]
    return len([line for line in lines if "DID NOT CRASH" not in line])


def test_a_job_killed_before_some_changes_loses_nothing(tmp_path: Path) -> None:
    table = run(tmp_path / "work", "--modes", "before", "--max-points", "6")
    assert killed(table) == 6, table


@pytest.mark.slow
def test_a_job_killed_before_each_change_loses_nothing(tmp_path: Path) -> None:
    table = run(tmp_path / "work", "--modes", "before", "--max-points", "100")
    # An epoch, ten changes a save, the final weights: all of them are points.
    assert killed(table) == events(table) >= 1 + 5 * 8 + 1, table


@pytest.mark.slow
def test_a_job_that_is_told_to_end_during_a_save_resumes_from_its_last_step(tmp_path: Path) -> None:
    table = run(tmp_path / "work", "--modes", "term", "--max-points", "12")
    # The last events come when all steps are done: there is nothing to preempt any more.
    assert killed(table) >= 8, table


@pytest.mark.slow
@pytest.mark.parametrize("crash_rank", [0, 1])
def test_one_of_two_ranks_that_is_killed_loses_nothing(tmp_path: Path, crash_rank: int) -> None:
    options = ("--modes", "before", "--max-points", "12", "--ranks", "2")
    table = run(tmp_path / "work", *options, crash_rank=crash_rank)
    assert killed(table) == 12, table
