"""What several ranks do in the tests of `forebay.dcp`."""

from __future__ import annotations

import os
import pickle
import warnings
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from ckpt_cases import meshes
from forebay.dcp import Reader, Stager, Writer


def _world() -> int:
    return torch.distributed.get_world_size()


def save(rank: int, folder: str, layout: str, writer: str) -> None:
    """Saves tensors of a layout with the writer of torch or ours."""
    state = meshes.state_of(_world(), layout, True)
    if writer == "torch":
        dcp.save(state, checkpoint_id=folder)
    else:
        dcp.save(state, storage_writer=pickle.loads(pickle.dumps(Writer(folder, threads=2))))


def load(rank: int, folder: str, layout: str, reader: str) -> None:
    """Loads them into another layout, with the reader of torch or ours."""
    state = meshes.state_of(_world(), layout, False)
    if reader == "torch":
        dcp.load(state, checkpoint_id=folder)
    else:
        dcp.load(state, storage_reader=pickle.loads(pickle.dumps(Reader(folder))))
    meshes.check(state)


def asynchronous(rank: int, folder: str, mode: str) -> int:
    """Three saves by `async_save`, the state changed as soon as that is allowed; returns the blocks of the stager."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    process = mode == "process"
    kind = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
    stager = Stager(share_memory=process, asynchronous=mode == "future")
    futures = []
    state = meshes.state_of(_world(), "rows", True)
    many = {f"t{number}": torch.full((3,), float(number)) for number in range(3000)}
    for step in range(3):
        state["step"] = step
        state["scalar"].fill_(step)
        answer = dcp.async_save(
            {**state, "many": many} if step == 0 else state,
            storage_writer=Writer(f"{folder}/{step}"),
            async_stager=stager,
            async_checkpointer_type=kind,
        )
        if mode == "future":
            answer.staging_completion.result(60)
            futures.append(answer.upload_completion)
        else:
            futures.append(answer)
        state["scalar"].fill_(-5)
        # torch's collectives of two saves at a time would meet each other.
        futures[-1].result(120)
    blocks = len(stager._kept)
    for future in futures:
        future.result(120)
    stager.close()
    for step in range(3):
        blank = {"scalar": torch.tensor(-1.0), "step": -1}
        dcp.load(blank, storage_reader=Reader(f"{folder}/{step}"))
        assert blank["scalar"].item() == step and blank["step"] == step
    if rank == 0:
        blank = {"many": {f"t{number}": torch.zeros(3) for number in range(3000)}}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(blank, checkpoint_id=f"{folder}/0", no_dist=True)
        assert all(one.tolist() == [n] * 3 for n, one in enumerate(blank["many"].values()))
    return blocks


def with_cached_plans(rank: int, folder: str) -> None:
    """Saves whose plans torch takes from its cache: each is an attempt of its own."""
    for step in range(3):
        state: dict[str, Any] = meshes.state_of(_world(), "both", True)
        state["plain"] = torch.full((5, 5), float(step))
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, storage_writer=Writer(f"{folder}/same"), planner=planner)
        for reader in (Reader(f"{folder}/same"), dcp.FileSystemReader(f"{folder}/same")):
            blank = {"plain": torch.zeros(5, 5)}
            dcp.load(blank, storage_reader=reader)
            assert blank["plain"].unique().tolist() == [step]


def with_plans_that_change(rank: int, folder: str) -> None:
    """Saves with cached plans of which one rank's alone changes, and saves without changes after that."""
    state: dict[str, Any] = {"shared": torch.zeros(5, 5), f"of{rank}": torch.zeros(3)}
    for step in range(6):
        state["shared"].fill_(step)
        state[f"of{rank}"].fill_(step + 10 * rank)
        if step in (2, 4) and rank == step // 2 - 1:
            state[f"late{step}"] = torch.full((2,), float(step))
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, storage_writer=Writer(f"{folder}/{step}"), planner=planner)
        for reader in (Reader(f"{folder}/{step}"), dcp.FileSystemReader(f"{folder}/{step}")):
            blank = {"shared": torch.zeros(5, 5), "of0": torch.zeros(3), "of1": torch.zeros(3)}
            if step >= 2:
                blank["late2"] = torch.zeros(2)
            dcp.load(blank, storage_reader=reader)
            assert blank["shared"].unique().tolist() == [step]
            assert [blank[f"of{one}"].unique().tolist() for one in (0, 1)] == [[step], [step + 10]]
            assert step < 2 or blank["late2"].tolist() == [2, 2]


def each_for_itself(rank: int, folder: str, reader: str) -> None:
    """A save and load without collective calls: what ranks hold differs."""
    state = {"own": torch.full((4,), float(rank)), "n": rank}
    dcp.save(state, storage_writer=Writer(folder), use_collectives=False)
    state["own"] += 10
    dcp.save(state, storage_writer=Writer(folder), use_collectives=False)
    torch.distributed.barrier()
    blank = {"own": torch.zeros(4), "n": -1}
    storage = Reader(folder) if reader == "ours" else dcp.FileSystemReader(folder)
    dcp.load(blank, storage_reader=storage)
    assert blank["own"].tolist() == [rank + 10.0] * 4 and blank["n"] == rank


def torch_each_for_itself(rank: int, folder: str) -> None:
    """What torch wrote without collective calls, by our reader."""
    state = {"own": torch.full((4,), float(rank)), "n": rank}
    dcp.save(state, checkpoint_id=folder, use_collectives=False)
    torch.distributed.barrier()
    blank = {"own": torch.zeros(4), "n": -1}
    dcp.load(blank, storage_reader=Reader(folder))
    assert blank["own"].tolist() == [rank] * 4 and blank["n"] == rank


def interrupted(rank: int, folder: str) -> str:
    """Rank 1 fails while it writes over a checkpoint; the old one is still there for every reader."""
    state = meshes.state_of(_world(), "rows", True)
    dcp.save(state, storage_writer=Writer(folder))

    class Planner(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            if rank == 1:
                raise RuntimeError("out of ideas")
            return super().resolve_data(write_item)

    state["plain"] += 1
    error = ""
    try:
        dcp.save(state, storage_writer=Writer(folder), planner=Planner())
    except CheckpointException as raised:
        error = str(raised)
    for reader in ("ours", "torch"):
        load(rank, folder, "columns", reader)
    dcp.save(meshes.state_of(_world(), "rows", True), storage_writer=Writer(folder))
    load(rank, folder, "columns", "ours")
    return error
