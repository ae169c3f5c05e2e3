"""What ranks do with a bucket."""

from __future__ import annotations

import os
from typing import Any

import torch

import forebay


def _state(rank: int, filled: bool) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    whole = torch.arange(64 * 1024, dtype=torch.float32).reshape(64, 1024)
    rows = whole.chunk(mesh.size())[rank].clone()
    same = torch.arange(300_000, dtype=torch.float32)
    if not filled:
        rows.zero_()
        same = torch.zeros_like(same)
    return {
        "rows": DTensor.from_local(rows, mesh, [Shard(0)]),
        "same": DTensor.from_local(same, mesh, [Replicate()]),
        "step": 3 if filled else 0,
    }


def save_and_restore(rank: int, url: str, environment: dict[str, str]) -> dict[str, Any]:
    """Saves twice, restores the latest; what came back, and what was read."""
    os.environ.update(environment)
    with forebay.Checkpointer(url) as checkpoints:
        assert checkpoints.latest() is None
        for step in (1, 2):
            checkpoints.save(step, _state(rank, True), per_rank={"rank": rank}, blocking=True)
        new, own = _state(rank, False), {}
        report = checkpoints.restore(new, per_rank=own)
        wanted = _state(rank, True)
        equal = all(
            torch.equal(new[name].to_local(), wanted[name].to_local()) for name in ("rows", "same")
        )
        return {
            "step": report.step,
            "equal": equal and new["step"] == 3,
            "own": own["rank"],
            "shared": report.shared_bytes,
            "steps": [one["step"] for one in checkpoints.steps()],
        }
