"""Disks that are full: one clear error on every rank, soon, and everything that was committed stays."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from crash import disk, launch

import forebay
from forebay import _native

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

DISK_BYTES = 24 << 20
TOO_LARGE = 40 << 20

#: A rank is heard of by polling the folder, at most a second apart, on a busy machine.
SOON_SECONDS = 15.0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def check_small(directory: Path, step: int, value: float) -> None:
    """A step holds what fits, for stock torch and for Forebay."""
    blank = disk.small_state(0)
    dcp.load(blank, checkpoint_id=str(directory / f"step-{step}"), no_dist=True)
    ours = disk.small_state(0)
    forebay.Checkpointer(directory).restore(ours, step)
    for state in (blank, ours):
        assert bool((state["w"] == value).all()) and state["step"] == int(value)


def used(folder: Path) -> int:
    found = os.statvfs(folder)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


@pytest.mark.parametrize("world", [1, 4])
def test_a_full_disk_is_one_clear_error_on_every_rank(small_disk: Path, world: int) -> None:
    job = launch.run(disk.saves, world, str(small_disk), TOO_LARGE, None)
    told = job.told("step 2")
    assert len(told) == world
    for code, text, _, seconds in told:
        assert code == "no_space", text
        assert seconds < SOON_SECONDS
    # All of them heard of the same rank's failure; only that rank knows what the kernel said.
    assert len({text.splitlines()[0] for _, text, _, _ in told}) == 1, told
    assert job.told("committed") == [3] * world
    check_small(small_disk, 1, 1.0)
    check_small(small_disk, 3, 3.0)
    # What the failed save had set aside is given back.
    assert used(small_disk) < 2 << 20
    assert [one["step"] for one in _native.steps(small_disk) if one["state"] == "committed"] == [
        1,
        3,
    ]


def test_an_overwrite_that_does_not_fit_leaves_the_step(small_disk: Path) -> None:
    job = launch.run(disk.overwrites, 2, str(small_disk), TOO_LARGE)
    assert job.told("ended") == ["no_space"] * 2
    check_small(small_disk, 1, 1.0)


@pytest.mark.parametrize("limited", [0, 2])
def test_a_limit_of_one_rank_is_the_error_of_all(tmp_path: Path, limited: int) -> None:
    job = launch.run(disk.saves, 4, str(tmp_path), TOO_LARGE, limited)
    told = job.told("step 2")
    assert len(told) == 4
    for code, text, _, seconds in told:
        assert code in ("io", "no_space") and f"rank {limited}" in text, text
        assert seconds < SOON_SECONDS
    assert job.told("committed") == [3] * 4
    check_small(tmp_path, 1, 1.0)
    check_small(tmp_path, 3, 3.0)
    blank = {name: torch.zeros_like(one) for name, one in disk.large_state(TOO_LARGE).items()}
    with pytest.raises(forebay.Error) as caught:
        forebay.Checkpointer(tmp_path).restore(blank, 2)
    assert caught.value.code in ("not_found", "not_committed")
