"""Tensors of several checksum blocks, saved by some ranks and restored by others of the same host."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import forebay
from forebay._ckpt import filling, nodememory, nodeplan, noderanks, nodeshare

#: Sides that no number of ranks divides; rows that end inside of blocks, and rows that end with them.
SHAPES = {
    "rows": (1501, 1031),
    "columns": (1031, 1501),
    "both": (1201, 1103),
    "same": (1103, 1009),
    "even": (2048, 512),
    "plain": (701, 1024),
    "bias": (77,),
}


def numbered(name: str) -> torch.Tensor:
    """Each element is its own number, another one in each tensor."""
    shape = SHAPES[name]
    first = list(SHAPES).index(name) << 24
    return torch.arange(first, first + torch.Size(shape).numel(), dtype=torch.int32).reshape(shape)


def state_of(world: int, filled: bool) -> dict[str, Any]:
    """The tensors, cut for so many ranks."""
    line = init_device_mesh("cpu", (world,))
    plane = init_device_mesh("cpu", (2, world // 2) if world % 2 == 0 else (1, world))
    cuts: dict[str, tuple[Any, list[Any]]] = {
        "rows": (line, [Shard(0)]),
        "columns": (line, [Shard(1)]),
        "both": (plane, [Shard(0), Shard(1)]),
        "same": (line, [Replicate()]),
        "even": (line, [Shard(0)]),
    }
    state: dict[str, Any] = {"scalar": torch.tensor(7.0 if filled else -1.0), "epoch": 3}
    for name in SHAPES:
        whole = numbered(name) if filled else torch.full(SHAPES[name], -1, dtype=torch.int32)
        state[name] = distribute_tensor(whole, *cuts[name]) if name in cuts else whole
    return state


def needed_bytes() -> int:
    """Bytes that all ranks together need, each counted once."""
    return 4 + sum(4 * torch.Size(shape).numel() for shape in SHAPES.values())


def equal(state: dict[str, Any], right: dict[str, Any]) -> bool:
    """Whether what is here is bit for bit the same."""
    for name in SHAPES:
        one, two = state[name], right[name]
        if isinstance(one, DTensor):
            one, two = one.to_local(), two.to_local()
        if not torch.equal(one, two):
            return False
    return bool(state["scalar"] == right["scalar"]) and state["epoch"] == right["epoch"]


def save(rank: int, directory: str) -> int:
    """Saves step 1; returns the bytes that this rank wrote."""
    world = torch.distributed.get_world_size()
    with forebay.Checkpointer(directory) as checkpoints:
        handle = checkpoints.save(1, state_of(world, True))
        return int(handle.result(60)["tensor_bytes"])


def restore(
    rank: int,
    directory: str,
    step: int = 1,
    again: int | None = None,
    hosts: int = 1,
    room: int = 0,
) -> dict[str, int]:
    """Restores a step and compares it; saves it `again` as another step; returns what was read."""
    world = torch.distributed.get_world_size()
    if hosts > 1:
        noderanks.host_identity = lambda: f"host {rank % hosts}"  # type: ignore[assignment]
    if room:
        nodememory.room = lambda: room  # type: ignore[assignment]
    read = filling.read_regions
    filling.read_regions = lambda one, *rest: read(_Counted(one), *rest)  # type: ignore
    plan, rounds = nodeplan.rounds, [0]

    def planned(*arguments: Any) -> Any:
        made = plan(*arguments)
        rounds[0] = len(made)
        return made

    nodeplan.rounds = planned
    state, right = state_of(world, False), state_of(world, True)
    with forebay.Checkpointer(directory) as checkpoints:
        before = _read_chars()
        report = checkpoints.restore(state, step)
        chars = _read_chars() - before
        assert report.missing == [] and report.unexpected == []
        assert equal(state, right)
        if again is not None:
            checkpoints.save(again, state).wait()
    here = sum(_local_bytes(state[name]) for name in (*SHAPES, "scalar"))
    assert report.bytes == here
    return {
        "read": report.read_bytes,
        "shared": report.shared_bytes,
        "chars": chars,
        "rounds": rounds[0],
    }


class _Counted:
    """A checkpoint that is read by read calls alone: io_uring's reads are in no counter of the process."""

    def __init__(self, checkpoint: Any) -> None:
        self.checkpoint = checkpoint

    def start(self, *arguments: Any, **named: Any) -> Any:
        """Starts to load."""
        return self.checkpoint.start(*arguments, **named, path="fallback")


class Part(torch.Tensor):
    """Some columns of a tensor, by the checkpointable-tensor protocol."""


def columns(name: str, first: int, count: int, device: str) -> torch.Tensor:
    """Blank memory for columns of a tensor, itself column by column."""
    rows, width = SHAPES[name]
    blank = torch.zeros(count, rows, dtype=torch.int32, device=device).t().as_subclass(Part)
    blank.global_shape, blank.local_sizes = (rows, width), ((rows, count),)  # type: ignore[attr-defined]
    blank.global_offsets, blank.local_offsets = ((0, first),), ((0, 0),)  # type: ignore[attr-defined]
    return blank


def on_device(rank: int, directory: str, device: str) -> int:
    """Columns and whole tensors on a device, in odd memory layouts; returns the bytes that were shared."""
    world = torch.distributed.get_world_size()
    each = SHAPES["columns"][1] // world
    state = {
        "columns": columns("columns", rank * each, each, device),
        "same": torch.zeros(SHAPES["same"][::-1], dtype=torch.int32, device=device).t(),
        "plain": torch.nn.Parameter(
            torch.zeros(SHAPES["plain"], dtype=torch.int32, device=device), requires_grad=False
        ),
    }
    with forebay.Checkpointer(directory) as checkpoints:
        report = checkpoints.restore(state, 1)
    right = numbered("columns")[:, rank * each : (rank + 1) * each]
    assert torch.equal(state["columns"].as_subclass(torch.Tensor).cpu(), right)
    for name in ("same", "plain"):
        assert torch.equal(state[name].cpu(), numbered(name))
    return report.shared_bytes


def _local_bytes(tensor: Any) -> int:
    return int(tensor.to_local().nbytes if isinstance(tensor, DTensor) else tensor.nbytes)


def _read_chars() -> int:
    """Bytes that this process had from read calls, as the kernel counts them."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar:")).split()[1])


def fail(rank: int, directory: str, bad: int, nth: int) -> tuple[str, str, float]:
    """Restores through little memory; one rank's read fails, the `nth` of its reads for all. Returns the error."""
    world = torch.distributed.get_world_size()
    nodememory.room = lambda: 8 << 20  # type: ignore[assignment]
    read, calls = filling.read_regions, [0]

    def broken(*arguments: Any) -> Any:
        calls[0] += 1
        if rank == bad and calls[0] == nth:
            raise forebay._errors.make("checksum", "the disk is broken", "block 7")
        return read(*arguments)

    filling.read_regions = broken  # type: ignore[assignment]
    state = state_of(world, False)
    with forebay.Checkpointer(directory) as checkpoints:
        torch.distributed.barrier()
        began = time.monotonic()
        try:
            checkpoints.restore(state, 1)
        except forebay.Error as error:
            return error.code, error.what, time.monotonic() - began
    raise AssertionError("nothing was raised")


def fail_to_copy(rank: int, directory: str, bad: int) -> str:
    """One rank cannot copy out of the first of several rounds."""
    world = torch.distributed.get_world_size()
    nodememory.room = lambda: 8 << 20  # type: ignore[assignment]
    if rank == bad:

        def broken(*_: Any) -> int:
            raise MemoryError("no memory on the device")

        nodeshare._scatter = broken  # type: ignore[assignment]
    state = state_of(world, False)
    with forebay.Checkpointer(directory) as checkpoints:
        try:
            checkpoints.restore(state, 1)
        except forebay.Error as error:
            return error.what
        except MemoryError as error:
            return f"own: {error}"
    raise AssertionError("nothing was raised")


def without_memory(rank: int, directory: str, bad: int) -> dict[str, int]:
    """One rank cannot have the memory between the ranks: all read apart."""

    def broken(*_: Any) -> Any:
        raise OSError("not here")

    if rank == bad:
        nodememory.create = broken  # type: ignore[assignment]
        nodememory.attach = broken  # type: ignore[assignment]
    return restore(rank, directory)


def die_making(rank: int) -> None:
    """Ends by SIGKILL between making memory and unlinking it."""
    nodememory.create(1 << 20)
    os.kill(os.getpid(), signal.SIGKILL)


def small(rank: int, directory: str) -> tuple[int, int]:
    """Less than is worth agreeing on."""
    state = {"w": torch.arange(1000.0)}
    with forebay.Checkpointer(directory) as checkpoints:
        checkpoints.save(1, state).wait()
        report = checkpoints.restore({"w": torch.zeros(1000)}, 1)
    return report.shared_bytes, report.read_bytes
