"""Ranks that part ways during a save, and what the next save does."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import forebay

#: What a rank heard of a save: "ok", or code and text of the error, and after how long.
Heard = tuple[str, str, float]


def attempt(checkpoints: forebay.Checkpointer, step: Any, state: Any, **more: Any) -> Heard:
    began = time.monotonic()
    try:
        checkpoints.save(step, state, **more).wait(60)
    except forebay.Error as error:
        return error.code, str(error), time.monotonic() - began
    return "ok", "", time.monotonic() - began


def other_meshes(rank: int, directory: str) -> None:
    """The same ranks and placements on meshes of other sides."""
    whole = torch.arange(64.0).reshape(16, 4)
    with forebay.Checkpointer(directory) as checkpoints:
        for step, sides in enumerate(((2, 2), (4, 1), (1, 4), (2, 2))):
            mesh = init_device_mesh("cpu", sides)
            tensor = distribute_tensor(whole + step, mesh, [Shard(0), Replicate()])
            checkpoints.save(step, {"w": tensor}).wait()
        for step in range(4):
            blank = {"w": torch.zeros(16, 4)}
            checkpoints.restore(blank, step)
            assert torch.equal(blank["w"], whole + step), step


def bad_arguments(rank: int, directory: str) -> list[Heard]:
    """Arguments that only rank 0 has wrong, at the first save and later; good saves in between."""
    state, bad = {"w": torch.ones(4)}, {"../up": b""} if rank == 0 else None
    with forebay.Checkpointer(directory) as checkpoints:
        return [
            attempt(checkpoints, 1, state, side_files=bad),
            attempt(checkpoints, 1.5 if rank == 0 else 2, state),
            attempt(checkpoints, 3, state),
            attempt(checkpoints, 4, state, side_files=bad),
            attempt(checkpoints, 5, state),
            attempt(checkpoints, None if rank == 0 else 6, state),
            attempt(checkpoints, 7, state),
        ]


def one_rank_changes(rank: int, directory: str) -> list[Heard]:
    """State that appears late, on rank 1 alone, and goes again."""
    state: dict[str, Any] = {"w": torch.ones(4)}
    with forebay.Checkpointer(directory) as checkpoints:
        told = [attempt(checkpoints, 1, state)]
        if rank == 1:
            state["expert"] = torch.full((3,), 5.0)
        told += [attempt(checkpoints, step, state) for step in (2, 3, 4)]
        state.pop("expert", None)
        told += [attempt(checkpoints, step, state) for step in (5, 6, 7)]
        return told


def all_change_and_one_cannot(rank: int, directory: str) -> list[Heard]:
    """Everyone adds a tensor; that of rank 1 cannot be stored at first."""
    state: dict[str, Any] = {"w": torch.ones(4)}
    with forebay.Checkpointer(directory) as checkpoints:
        told = [attempt(checkpoints, 1, state)]
        state["more"] = torch.ones(3).to_sparse() if rank == 1 else torch.ones(3)
        told.append(attempt(checkpoints, 2, state))
        state["more"] = torch.ones(3)
        told += [attempt(checkpoints, step, state) for step in (3, 4)]
        return told


def parents_that_differ(rank: int, directory: str) -> list[Heard]:
    """A rank that did not hear how a save ended."""
    state = {"w": torch.ones(4)}
    with forebay.Checkpointer(directory) as checkpoints:
        told = [attempt(checkpoints, 1, state)]
        run = checkpoints._run
        assert run is not None
        run.last = None
        run.parent = None if rank else 1
        checkpoints.restore(state, 1)
        return told + [attempt(checkpoints, step, state) for step in (2, 3)]


def withdraws_without_memory(rank: int, directory: str) -> list[Any]:
    """A rank that cannot save, after its memory was given back."""
    state: dict[str, Any] = {"w": torch.ones(4)}
    with forebay.Checkpointer(directory, staging_bytes="64MiB") as checkpoints:
        attempt(checkpoints, 1, state)
        checkpoints.release()
        run = checkpoints._run
        assert run is not None
        if rank == 1:
            state["bad"] = torch.ones(3).to_sparse()
        heard = attempt(checkpoints, 2, state)
        pools = len(run.natives._pools)
        state.pop("bad", None)
        again = attempt(checkpoints, 3, state)

        def broken(*_: Any) -> Any:
            raise ValueError("of a test")

        if rank == 1:
            state["bad"] = torch.ones(3).to_sparse()
            run.natives.witness = broken  # type: ignore[method-assign]
            last = attempt(checkpoints, 4, state)
            checkpoints._run = None
            return [heard, pools, again, last]
        return [heard, pools, again]


def groups_made(rank: int, directory: str) -> int:
    """Groups made by checkpointers that come and go, where the process group has no CPU backend."""
    from forebay._ckpt import ranks

    ranks._has_cpu_backend = lambda _: False  # type: ignore[assignment]
    made = []
    original = torch.distributed.new_group

    def counted(*arguments: Any, **named: Any) -> Any:
        made.append(1)
        return original(*arguments, **named)

    torch.distributed.new_group = counted
    state = {"w": torch.ones(4)}
    for step in range(3):
        with forebay.Checkpointer(directory) as checkpoints:
            checkpoints.save(step, state).wait()
            checkpoints.restore(state, step)
            checkpoints.close()
            checkpoints.save(step + 10, state).wait()
    return len(made)


def folders_of_their_own(rank: int, directory: str) -> Heard:
    """Every rank has a folder of its own, and each has steps, and as many epochs, of an earlier time."""
    import os

    from forebay._ckpt import natives

    natives._LOOK_SECONDS = 0.5
    own = Path(directory) / str(rank)
    records = own / ".forebay" / "epoch"
    with forebay.Checkpointer(directory + f"/{rank}") as checkpoints:
        records.mkdir(parents=True)
        if rank:
            for epoch in range(1, 4):
                (records / f"{epoch:08x}").write_bytes(os.urandom(64))
        return attempt(checkpoints, 1, {"w": torch.ones(1)})
