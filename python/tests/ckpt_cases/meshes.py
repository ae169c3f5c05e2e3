"""DTensors on many meshes: values that say where they belong, saved by some ranks and restored by others."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import forebay

#: Rows that no number of ranks divides, fewer rows than ranks, nothing at all.
SHAPES = {"even": (16, 8), "uneven": (13, 7), "few": (3, 5), "none": (0, 4), "one": (1,)}


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    """Each element is its own number."""
    count = torch.Size(shape).numel()
    return torch.arange(count, dtype=torch.float32).reshape(shape)


def layouts(world: int) -> dict[str, tuple[tuple[int, ...], list[Any]]]:
    """Mesh and placements by name."""
    found = {
        "rows": ((world,), [Shard(0)]),
        "columns": ((world,), [Shard(1)]),
        "all": ((world,), [Replicate()]),
    }
    if world % 2 == 0:
        half = (2, world // 2)
        found |= {
            "both": (half, [Shard(0), Shard(1)]),
            "hybrid": (half, [Replicate(), Shard(0)]),
            "twice": (half, [Shard(0), Shard(0)]),
        }
    return found


def state_of(world: int, layout: str, filled: bool) -> dict[str, Any]:
    """Tensors of all shapes in one layout, and two plain ones."""
    sides, placements = layouts(world)[layout]
    mesh = init_device_mesh("cpu", sides)
    state: dict[str, Any] = {}
    for name, shape in SHAPES.items():
        whole = numbered(shape) if filled else torch.full(shape, -1.0)
        cuts = [one for one in placements if not (one.is_shard() and one.dim >= len(shape))]
        if len(cuts) < len(placements):
            cuts = [Replicate()] * len(placements)
        state[name] = distribute_tensor(whole, mesh, cuts)
    state["plain"] = numbered((5, 5)) if filled else torch.full((5, 5), -1.0)
    state["scalar"] = torch.tensor(7.0 if filled else -1.0)
    state["epoch"] = 3 if filled else 0
    return state


def save(rank: int, directory: str, layout: str) -> int:
    """Saves step 1; returns the bytes that this rank wrote."""
    world = torch.distributed.get_world_size()
    with forebay.Checkpointer(directory) as checkpoints:
        handle = checkpoints.save(1, state_of(world, layout, True))
        return int(handle.result(60)["tensor_bytes"])


def restore(rank: int, directory: str, layout: str) -> tuple[int, int]:
    """Restores step 1 and compares every element; returns bytes wanted and read."""
    world = torch.distributed.get_world_size()
    with forebay.Checkpointer(directory) as checkpoints:
        state = state_of(world, layout, False)
        report = checkpoints.restore(state, 1)
    assert report.missing == [] and report.unexpected == []
    check(state)
    return report.bytes, sum(one["read_bytes"] for one in report.transfers)


def check(state: dict[str, Any]) -> None:
    """Every element that is here has its own number."""
    for name, shape in SHAPES.items():
        value = state[name]
        assert isinstance(value, DTensor)
        assert torch.equal(value.full_tensor(), numbered(shape)), name
    assert torch.equal(state["plain"], numbered((5, 5)))
    assert state["scalar"].item() == 7.0 and state["epoch"] == 3
