"""States of many tensors on several ranks, for the tests of what a manifest says of them."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import forebay
from ckpt_cases.meshes import numbered
from forebay._ckpt.meshes import MeshLayout

#: Tensors of a state.
TENSORS = 200

#: Sides of the mesh, placements, and how our own layout says the same.
LAYOUTS: dict[str, tuple[tuple[int, ...], list[Any], list[tuple[str, int, int]]]] = {
    "rows": ((4,), [Shard(0)], [("S", 0, 1)]),
    "blocks": ((2, 2), [Shard(1), Shard(0)], [("S", 1, 1), ("S", 0, 1)]),
    "hybrid": ((2, 2), [Replicate(), Shard(0)], [("R", 0, 1), ("S", 0, 1)]),
    # What FSDP2 over tensor parallelism makes.
    "strided": (
        (2, 2),
        [_StridedShard(0, split_factor=2), Shard(0)],
        [("_S", 0, 2), ("S", 0, 1)],
    ),
}


def cut(
    whole: torch.Tensor, mesh: DeviceMesh, layout: MeshLayout, placements: list[Any], rank: int
) -> DTensor:
    """This rank's part of a tensor."""
    shape = tuple(whole.shape)
    local = torch.empty(layout.local_shape(shape, rank) or ())
    for (offsets, sizes), start in layout.pieces(shape, rank):
        into, source = local, whole
        for dim, (low, at, side) in enumerate(zip(offsets, start, sizes, strict=True)):
            source, into = source.narrow(dim, low, side), into.narrow(dim, at, side)
        into.copy_(source)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def state_of(rank: int, name: str, filled: bool) -> dict[str, Any]:
    """Tensors with as many rows as no number of ranks divides."""
    sides, placements, told = LAYOUTS[name]
    layout = MeshLayout(tuple(range(4)), sides, tuple(told), int(name == "strided"))
    mesh = init_device_mesh("cpu", sides)
    tensors = {}
    for number in range(TENSORS):
        whole = numbered((9 + number % 4, 6)) + number
        one = cut(whole if filled else torch.zeros_like(whole), mesh, layout, placements, rank)
        tensors[f"layers.{number}.weight"] = one
    return {"model": tensors, "step": 7 if filled else 0}


def save_and_restore(rank: int, directory: str, name: str) -> None:
    """Saves step 1, and restores it on the same ranks."""
    with forebay.Checkpointer(directory, threads=1) as checkpoints:
        checkpoints.save(1, state_of(rank, name, True), blocking=True)
        state = state_of(rank, name, False)
        checkpoints.restore(state, 1)
    wanted = state_of(rank, name, True)
    assert state["step"] == 7
    for key, one in wanted["model"].items():
        assert torch.equal(one.to_local(), state["model"][key].to_local()), key


def stages_of(rank: int, filled: bool) -> dict[str, Any]:
    """Two pipeline stages of two ranks, each with tensors of its own and one that both have, on meshes of their own."""
    meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
    stage = rank // 2
    ranks = (2 * stage, 2 * stage + 1)
    layout = MeshLayout(ranks, (2,), (("S", 0, 1),))

    def rows(shape: tuple[int, ...]) -> DTensor:
        whole = numbered(shape) if filled else torch.zeros(shape)
        return cut(whole, meshes[stage], layout, [Shard(0)], rank)

    layers = {f"{stage}.{number}": rows((5 + number, 3)) for number in range(4)}
    # The way to it has a number in it, which the other stage cannot know from the name.
    groups = [{"lr": 0.5 + stage if filled else 0.0}]
    return {"model": {"embedding": rows((9, 2)), **layers}, f"stage{stage}": groups}


def save_stages(rank: int, directory: str) -> None:
    """Saves step 1."""
    with forebay.Checkpointer(directory, threads=1) as checkpoints:
        checkpoints.save(1, stages_of(rank, True), blocking=True)


def restore_stages(rank: int, directory: str) -> None:
    """Restores step 1 and compares it."""
    with forebay.Checkpointer(directory, threads=1) as checkpoints:
        state = stages_of(rank, False)
        # What the other stage has this one does not want.
        assert checkpoints.restore(state, 1, strict=False).missing == []
    wanted = stages_of(rank, True)
    stage = f"stage{rank // 2}"
    assert state[stage] == wanted[stage]
    for key, one in wanted["model"].items():
        assert torch.equal(one.to_local(), state["model"][key].to_local()), key
