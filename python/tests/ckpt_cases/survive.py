"""Trainers that die in a save, and come back."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

import forebay
from forebay import Checkpointer
from forebay._ckpt.stagedmemory import StagedMemory
from forebay._ckpt.survival import Link


def state(seed: int, rank: int = 0, device: str = "cpu") -> dict[str, Any]:
    """A state with tensors of several kinds, of some 9 MB, and values."""
    torch.manual_seed(seed * 100 + rank)
    return {
        "wide": torch.randn(1500, 1000).to(device),
        "turned": torch.randn(300, 1000).t().to(device),
        "half": torch.randn(777).bfloat16().to(device),
        "scalar": torch.tensor(3.5 + seed).to(device),
        "none": torch.zeros(0, 3).to(device),
        "epoch": seed,
    }


def alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether a state has all that another has, bit for bit."""
    tensors = [name for name, value in other.items() if isinstance(value, torch.Tensor)]
    same = all(torch.equal(one[name].cpu(), other[name].cpu()) for name in tensors)
    return same and one["epoch"] == other["epoch"]


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dies_when_staged() -> None:
    """The next save ends the process as soon as it was handed over, before anything is written."""
    hand_over = Link.hand_over

    def hand_over_and_die(self: Link, memory: StagedMemory, bequest: bytes | str) -> None:
        hand_over(self, memory, bequest)
        die()

    Link.hand_over = hand_over_and_die  # type: ignore[method-assign]


def dies_in_the_copy() -> None:
    """The next save ends the process when half of the state is copied."""

    def half(self: StagedMemory, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        self.make(tensors)
        for view, tensor in list(zip(self.views, tensors, strict=True))[: len(tensors) // 2]:
            view.copy_(tensor)
        die()
        raise AssertionError

    StagedMemory.stage = half  # type: ignore[assignment, method-assign]


def trainer(folder: str, agent: str, how: str) -> None:
    """Saves step 1, and dies in step 2: `staged`, `copy`, or after `save` has `returned`, with a state of 200 MB."""
    checkpoints = Checkpointer(folder, agent=agent, survive=True)
    checkpoints.save(1, state(1), side_files={"notes.txt": b"one"}).wait()
    if how == "staged":
        dies_when_staged()
    elif how == "copy":
        dies_in_the_copy()
    more = {"more": torch.full((50_000_000,), 2.5)} if how == "returned" else {}
    own = {"own": torch.arange(9.0)}
    two = {**state(2), **more}
    checkpoints.save(2, two, per_rank=own, side_files={"notes.txt": b"two"})
    die()


def goes_on(folder: str, agent: str) -> None:
    """Restores the latest step, says which, and saves one after the other; says each whose save has returned."""
    with Checkpointer(folder, agent=agent, survive=True) as checkpoints:
        step = checkpoints.latest() or 0
        if step:
            new = state(0)
            checkpoints.restore(new)
            assert alike(new, state(step))
        print(step, flush=True)
        while True:
            step += 1
            now = state(step)
            checkpoints.save(step, now)
            now["wide"].zero_()
            print(step, flush=True)


def rank_dies(rank: int, folder: str, agent: str, staged: bool) -> None:
    """As one of some ranks; rank 1 dies in the copy if not all have `staged`."""
    checkpoints = Checkpointer(Path(folder), agent=agent, survive=True)
    same = state(1)
    checkpoints.save(1, same, per_rank={"own": state(1, rank)["half"]}).wait()
    torch.distributed.barrier()
    same.update(state(2))
    if staged or rank == 0:
        dies_when_staged()
    else:
        dies_in_the_copy()
    checkpoints.save(2, same, per_rank={"own": state(2, rank)["half"]})


def rank_comes_back(rank: int, folder: str, agent: str) -> dict[str, Any]:
    """Restores the latest step, and saves the next."""
    with Checkpointer(Path(folder), agent=agent, survive=True) as checkpoints:
        latest = checkpoints.latest()
        new, own = state(9), {"own": torch.zeros(777).bfloat16()}
        step = checkpoints.restore(new, per_rank=own).step
        equal = alike(new, state(step)) and torch.equal(own["own"], state(step, rank)["half"])
        checkpoints.save(step + 1, new, per_rank=own, blocking=True)
        after = checkpoints.latest()
    return {"latest": latest, "step": step, "equal": equal, "after": after}


def one_rank_dies(rank: int, folder: str, agent: str) -> dict[str, Any] | None:
    """Rank 1 dies when it has staged its part; rank 0 lives, and its save fails."""
    checkpoints = Checkpointer(Path(folder), agent=agent, survive=True)
    same = state(1)
    checkpoints.save(1, same, per_rank={"own": state(1, rank)["half"]}).wait()
    torch.distributed.barrier()
    same.update(state(2))
    if rank == 1:
        dies_when_staged()
    handle = checkpoints.save(2, same, per_rank={"own": state(2, rank)["half"]})
    error = handle.exception()
    return {"error": None if error is None else error.code}


if __name__ == "__main__":
    # As a program: a process of its own that dies.
    if sys.argv[3:] == ["goes on"]:
        goes_on(*sys.argv[1:3])
    trainer(*sys.argv[1:])
    raise forebay.Error("nobody died")
