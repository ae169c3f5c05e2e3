"""What must be true of a folder of steps, whatever happened to the job that wrote it."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

import forebay
from crash import job
from forebay import _native

#: How names of files start that become visible under another name.
TEMPORARY = ".forebay-tmp-"


def committed(directory: Path) -> list[int]:
    """Steps that are listed as committed."""
    return [one["step"] for one in _native.steps(directory) if one["state"] == "committed"]


def check(directory: Path, begun: set[int], reported: set[int], world: int | None) -> int | None:
    """Every committed step holds one save, whole; the latest is the last that was told, or newer. Returns its save.

    `begun` and `reported` are the numbers of saves that were begun and told committed. `world` is the number of ranks of
    all of them, `None` where it changed.
    """
    # Listed before it is looked at: nobody writes any more.
    listed = committed(directory)
    with forebay.Checkpointer(directory) as checkpoints:
        latest = checkpoints.latest()
    found: dict[int, int] = {}
    for step in listed:
        found[step] = check_step(directory, step, world)
        assert found[step] in begun, f"step {step} holds save {found[step]}, never begun"
        newest = max((save for save in reported if job.step_of(save) == step), default=0)
        assert found[step] >= newest, f"step {step} went back from save {newest} to {found[step]}"
    if latest is None:
        assert not listed and not reported, f"{reported} were told committed, nothing is there"
        return None
    assert latest == max(listed)
    assert found[latest] >= max(reported, default=0), f"save {max(reported)} is lost"
    return found[latest]


def check_step(directory: Path, step: int, world: int | None = None) -> int:
    """A step is whole, for stock torch and for Forebay; returns its save."""
    save = _check_stock(directory / f"step-{step}")
    with forebay.Checkpointer(directory) as checkpoints:
        state = job.empty_state(False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            report = checkpoints.restore(state, step)
        assert not report.missing
        job.check(state, save)
        saved_by = sorted(report.per_rank_saved_by)
        assert world is None or saved_by == list(range(world))
        for rank in saved_by:
            own = checkpoints.per_rank(step, rank)
            wanted = job.own_values(rank, save)
            assert torch.equal(own["random"], wanted["random"]) and own["place"] == wanted["place"]
    _read_all(directory, step, save)
    return save


def _check_stock(folder: Path) -> int:
    state = job.empty_state(False)
    with warnings.catch_warnings():
        # It says that it is not distributed.
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=str(folder), no_dist=True)
    save = int(state["save"])
    job.check(state, save)
    return save


def _read_all(directory: Path, step: int, save: int) -> None:
    """Every object and side file, compared with its checksum; tensors were read by the restore."""
    checkpoint = _native.Checkpoint(directory, step=step)
    assert checkpoint.origin == "forebay"
    # What an overwrite has replaced, or a dead attempt has left.
    assert all(line.endswith("belongs to nothing; it is not read") for line in checkpoint.warnings)
    for name, _, kind, _, _ in checkpoint.entries:
        if kind == 1:
            checkpoint.object(name)
    assert [name.endswith(job.SIDE_FILE) for name in checkpoint.side_files] == [True]
    assert checkpoint.side_file(checkpoint.side_files[0]) == job.side_file(save)


def collect(directory: Path) -> None:
    """A collection without a grace time leaves commits and what explains them, and nothing else."""
    before = committed(directory)
    _native.gc(directory, grace_s=0)
    assert _native.gc(directory, grace_s=0) == [], "a collection leaves work for the next"
    steps = _native.steps(directory)
    assert [one["step"] for one in steps] == before, f"left over after a collection: {steps}"
    attempts = {f"step-{one['step']}": str(one["attempt"]) for one in steps}
    left = [path for path in directory.glob("step-*/**/*") if not path.is_dir()]
    foreign = [path for path in left if not _explained(path.relative_to(directory), attempts)]
    assert not foreign, f"left over after a collection: {foreign}"


def _explained(path: Path, attempts: dict[str, str]) -> bool:
    step, *inside = path.parts
    if path.name.startswith(TEMPORARY) or inside == [".forebay", "lock"]:
        # A record that a killed writer was just about to make known stays for an hour, and until then the lock.
        return True
    own = attempts.get(step)
    if own is None:
        return False
    if inside[:2] == [".forebay", own]:
        return True
    # Data files, side files and the manifest carry the attempt's name.
    return inside == [".metadata"] or (len(inside) == 1 and own in inside[0])
