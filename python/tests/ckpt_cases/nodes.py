"""What ranks do whose first tier is on the drives of nodes: two ranks a node, a folder for each node's drive."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import forebay

RANKS_A_NODE = 2
ROWS = 4096


def state_of(world: int, seed: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world,))
    whole = torch.arange(ROWS * 64, dtype=torch.float32).reshape(ROWS, 64) + seed
    return {"w": distribute_tensor(whole if seed else whole * 0, mesh, [Shard(0)]), "seed": seed}


def is_whole(state: dict[str, Any], seed: int) -> bool:
    whole = torch.arange(ROWS * 64, dtype=torch.float32).reshape(ROWS, 64) + seed
    return bool(torch.equal(state["w"].full_tensor(), whole)) and state["seed"] == seed


def made(rank: int, folder: str, **tier: Any) -> forebay.Checkpointer:
    root = Path(folder)
    return forebay.Checkpointer(
        root / f"drive{rank // RANKS_A_NODE}",
        records=root / "shared",
        tiers=[{"place": str(root / "shared"), **tier}],
    )


def handed(rank: int, folder: str) -> forebay.Checkpointer:
    """The same, moved by the agent of each node."""
    root, node = Path(folder), rank // RANKS_A_NODE
    return forebay.Checkpointer(
        root / f"drive{node}",
        records=root / "shared" / "run7",
        tiers=[root / "shared" / "run7"],
        agent=root / f"agent{node}.sock",
        agent_job="run7",
    )


def hands_over_and_dies(rank: int, world: int, folder: str) -> None:
    """Saves a step that agents are to bring, and ends as by a kill."""
    checkpoints = handed(rank, folder)
    checkpoints.save(1, state_of(world, 1), blocking=True, per_rank={"rank": rank})
    torch.distributed.barrier()


def finds_agents(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Restores what they brought, and saves the next."""
    with warnings.catch_warnings(record=True) as caught, handed(rank, folder) as checkpoints:
        warnings.simplefilter("always")
        state, own = state_of(world, 0), {"rank": -1}
        step = checkpoints.restore(state, per_rank=own).step
        whole = is_whole(state, state["seed"]) and own["rank"] == rank
        checkpoints.save(2, state, blocking=True, per_rank=own)
        drained = checkpoints.drain(60)
        torch.distributed.barrier()
        status = checkpoints.tier_status()
    return {
        "step": step,
        "whole": whole,
        "drained": drained,
        "status": status,
        "told": [str(one.message) for one in caught if "forebay" in str(one.message)],
    }


def saves_and_drains(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Two steps, on the drives and from there to the shared tier."""
    with made(rank, folder) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state_of(world, step), blocking=True, per_rank={"rank": rank})
        drained = checkpoints.drain(60)
        status = checkpoints.tier_status() if rank == 0 else None
    return {"drained": drained, "status": status, "latest": checkpoints.latest()}


def saves_and_dies(rank: int, world: int, folder: str) -> None:
    """Saves a step that cannot be moved in time, and ends as by a kill."""
    checkpoints = made(rank, folder, write_limit=1000)
    checkpoints.save(3, state_of(world, 3), blocking=True, per_rank={"rank": rank})
    torch.distributed.barrier()
    assert not (Path(folder) / "shared/step-3/.metadata").exists()


def comes_back(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Restores the newest step, and saves the next."""
    with warnings.catch_warnings(record=True) as caught, made(rank, folder) as checkpoints:
        warnings.simplefilter("always")
        state, own = state_of(world, 0), {"rank": -1}
        report = checkpoints.restore(state, per_rank=own)
        whole = is_whole(state, state["seed"])
        checkpoints.save(report.step + 10, state, blocking=True, per_rank=own)
        drained = checkpoints.drain(60)
        status = checkpoints.tier_status() if rank == 0 else None
    told = [str(one.message) for one in caught if "passed over" in str(one.message)]
    return {
        "step": report.step,
        "whole": whole,
        "own": own["rank"],
        "told": told,
        "drained": drained,
        "status": status,
    }


def asks_for_another_kind(rank: int, world: int, folder: str) -> str:
    """Rank 1 names a folder, the others the newest step."""
    with made(rank, folder) as checkpoints:
        step: Any = Path(folder) / "shared" / "step-2" if rank == 1 else "latest"
        try:
            checkpoints.restore(state_of(world, 0), step)
        except forebay.Error as error:
            return f"{error.code}: {error.what}"
    return "restored"


def restores_elsewhere(rank: int, world: int, folder: str) -> bool:
    """On other ranks, in one place."""
    with forebay.Checkpointer(Path(folder) / "shared") as checkpoints:
        state = state_of(world, 0)
        report = checkpoints.restore(state, strict=False)
        return is_whole(state, report.step)


def refuses(rank: int, folder: str) -> str:
    """Ranks whose places of records are not one place."""
    root = Path(folder)
    os.makedirs(root / f"records{rank}", exist_ok=True)
    checkpoints = forebay.Checkpointer(
        root / f"drive{rank}", records=root / f"records{rank}", tiers=[str(root / "shared")]
    )
    try:
        checkpoints.save(1, {"w": torch.zeros(3)}, blocking=True)
    except forebay.Error as error:
        return error.code
    return "saved"
