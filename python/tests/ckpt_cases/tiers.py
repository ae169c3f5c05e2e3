"""What ranks do with tiers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

import forebay


def saves_and_comes_back(rank: int, folder: str, agent: str | None = None) -> dict[str, Any]:
    """Saves two steps, loses the first tier, restores from the second, goes on. An agent copies to below `shared`."""
    near = Path(folder) / "near"
    far = Path(folder) / "far" if agent is None else Path(folder) / "shared" / "near"
    how: dict[str, Any] = {"tiers": [far], "agent": agent or False}
    state = {"rank": torch.full((1000,), float(rank)), "same": torch.arange(5000.0)}
    barrier = torch.distributed.barrier
    with forebay.Checkpointer(near, **how) as checkpoints:
        for step in (1, 2):
            checkpoints.save(
                step, {"same": state["same"]}, per_rank={"own": state["rank"]}, blocking=True
            )
        drained = checkpoints.drain(60) if rank == 0 else True
    # Both have let go of the folder, which is where their records are.
    barrier()
    if rank == 0:
        shutil.rmtree(near)
    barrier()
    with forebay.Checkpointer(near, **how) as checkpoints:
        new, own = {"same": torch.zeros(5000)}, {"own": torch.zeros(1000)}
        report = checkpoints.restore(new, per_rank=own)
        equal = torch.equal(new["same"], state["same"]) and torch.equal(own["own"], state["rank"])
        checkpoints.save(3, new, per_rank=own, blocking=True)
        again = checkpoints.drain(60) if rank == 0 else True
        barrier()
        latest = checkpoints.latest()
    return {
        "step": report.step,
        "equal": equal,
        "drained": drained and again,
        "latest": latest,
        "far": [one["step"] for one in forebay.Checkpointer(far).steps()],
    }
