"""What several ranks do in the tests of `Checkpointer`."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import forebay
from ckpt_cases.harness import recorded
from forebay._errors import make

#: Every collective call of torch that there is.
COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "new_group",
    "reduce",
    "reduce_scatter",
    "scatter",
    "scatter_object_list",
)


def watched() -> list[str]:
    """Lets every collective call be counted, with the thread that made it."""
    calls: list[str] = []
    for name in COLLECTIVES:
        original = getattr(torch.distributed, name)

        def counted(*arguments: Any, _name: str = name, _call: Any = original, **named: Any) -> Any:
            calls.append(f"{threading.current_thread().name}:{_name}")
            return _call(*arguments, **named)

        setattr(torch.distributed, name, counted)
    return calls


def rows(whole: torch.Tensor) -> DTensor:
    """A tensor whose rows the ranks share."""
    return distribute_tensor(whole, init_device_mesh("cpu", (_size(),)), [Shard(0)])


def _size() -> int:
    return torch.distributed.get_world_size()


def saves_without_collectives(rank: int, directory: str) -> list[list[str]]:
    """The collective calls of each of four saves, and of the close."""
    state: dict[str, Any] = {"w": rows(torch.arange(64.0)), "plain": torch.ones(8), "step": 0}
    calls = watched()
    told = []
    checkpoints = forebay.Checkpointer(directory, keep_last=2)
    for step in range(4):
        state["step"] = step
        checkpoints.save(step, state, per_rank={"rank": rank, f"s{step}": torch.ones(step)}).wait()
        told.append(list(calls))
        calls.clear()
    checkpoints.close()
    return [*told, list(calls)]


def replicas_are_written_once(rank: int, directory: str) -> tuple[int, list[str]]:
    """Bytes that this rank wrote of a replicated model, and its files with data."""
    torch.manual_seed(0)
    big = {f"layer{number}": torch.randn(300, 300) for number in range(16)}
    small = {f"norm{number}": torch.randn(8) for number in range(40)}
    mesh = init_device_mesh("cpu", (2, _size() // 2))
    hybrid = distribute_tensor(torch.randn(256, 256), mesh, [Replicate(), Shard(0)])
    with forebay.Checkpointer(directory) as checkpoints:
        report = checkpoints.save(1, {"big": big, "small": small, "h": hybrid, "n": 1}).result()
        blank = {
            "big": {name: torch.zeros_like(one) for name, one in big.items()},
            "small": {name: torch.zeros_like(one) for name, one in small.items()},
            "h": distribute_tensor(torch.zeros(256, 256), mesh, [Shard(1), Shard(0)]),
            "n": 0,
        }
        checkpoints.restore(blank)
    assert all(torch.equal(blank["big"][name], big[name]) for name in big)
    assert all(torch.equal(blank["small"][name], small[name]) for name in small)
    assert torch.equal(blank["h"].full_tensor(), hybrid.full_tensor()) and blank["n"] == 1
    return int(report["tensor_bytes"]), sorted(os.listdir(Path(directory) / "step-1"))


def values_that_differ(rank: int, directory: str) -> list[str]:
    """Warnings of a save whose ranks hold different values under one key."""
    state = {
        "rng": torch.full((16,), rank, dtype=torch.uint8),
        "counter": rank % 2,
        "same": torch.ones(16),
        "model": rows(torch.arange(8.0)),
    }
    with forebay.Checkpointer(directory) as checkpoints, recorded() as texts:
        checkpoints.save(1, state).wait()
        checkpoints.save(2, state).wait()
    return texts


def own_values(rank: int, directory: str, restore: bool) -> Any:
    """Saves, or restores, a counter of each rank beside a shared tensor."""
    state = {"w": rows(torch.arange(12.0))}
    with forebay.Checkpointer(directory) as checkpoints:
        if not restore:
            own = {"rng": torch.full((4,), rank), "loader": {"at": 100 + rank}}
            return checkpoints.save(1, state, per_rank=own).wait()
        blank = {"rng": torch.full((4,), -1), "loader": {"at": -1}}
        with recorded() as texts:
            report = checkpoints.restore(state, per_rank=blank)
        others = [checkpoints.per_rank(1, one)["loader"]["at"] for one in report.per_rank_saved_by]
        return {
            "at": blank["loader"]["at"],
            "rng": blank["rng"].tolist(),
            "saved_by": sorted(report.per_rank_saved_by),
            "left": report.per_rank_left,
            "missing": report.missing,
            "warnings": texts,
            "others": others,
        }


def one_rank_builds_otherwise(rank: int, directory: str) -> tuple[str, str, float]:
    """Rank 1 alone adds a tensor after the first save; what each rank hears of it, and after how long."""
    from forebay._ckpt import structures

    structures.PATIENCE_SECONDS = 2.0
    state = {"w": torch.ones(4)}
    checkpoints = forebay.Checkpointer(directory)
    checkpoints.save(1, state).wait()
    if rank == 1:
        state["extra"] = torch.ones(2)
    began = time.monotonic()
    try:
        handle = checkpoints.save(2, state)
    except forebay.Error as error:
        return error.code, str(error), time.monotonic() - began
    error_ = handle.exception(60)
    assert error_ is not None
    return error_.code, str(error_), time.monotonic() - began


def structures_that_ranks_know(rank: int, directory: str) -> list[str]:
    """Saves of two structures in turn, in other orders of keys: agreements are made twice, by everyone together."""
    calls = watched()
    model, optim = {"a": torch.ones(4), "b": torch.ones(3)}, {"m": torch.ones(4)}
    told = []
    with forebay.Checkpointer(directory) as checkpoints:
        for step in range(6):
            state: dict[str, Any] = {"model": model}
            if step % 2:
                state["optim"] = optim
            if step > 3 and rank == 0:
                # The same keys in another order are the same structure.
                state["model"] = dict(reversed(list(model.items())))
            checkpoints.save(step, state).wait()
            told.append("talked" if calls else "silent")
            calls.clear()
    return told


def first_save_at_different_times(rank: int, directory: str) -> bool:
    """Ranks that come to the first save seconds apart, and whose states were made in different orders."""
    time.sleep(0.7 * rank)
    items = [("a", torch.ones(4)), ("b", rows_alone(rank)), ("c", 1)]
    state = dict(items if rank % 2 else reversed(items))
    with forebay.Checkpointer(directory) as checkpoints:
        return checkpoints.save(1, state).wait()


def rows_alone(rank: int) -> torch.Tensor:
    """Two rows of a tensor that is as long as there are ranks, by the checkpointable-tensor protocol."""
    part = torch.full((2, 3), float(rank))
    part.global_shape = (2 * _size(), 3)  # type: ignore[attr-defined]
    part.global_offsets = ((2 * rank, 0),)  # type: ignore[attr-defined]
    part.local_offsets = ((0, 0),)  # type: ignore[attr-defined]
    part.local_sizes = ((2, 3),)  # type: ignore[attr-defined]
    return part


def failing_rank(rank: int, directory: str, how: str) -> tuple[str, str, float]:
    """Rank 1 fails in some way during a save or restore; what each rank hears, and after how long."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    state: dict[str, Any] = {"w": rows(torch.ones(1 << 18)), "epoch": 1}
    checkpoints = forebay.Checkpointer(directory)
    if how != "first":
        checkpoints.save(1, state).wait()
    began = time.monotonic()
    try:
        if how == "first":
            if rank == 1:
                state["bad"] = torch.ones(3).to_sparse()
            checkpoints.save(1, state)
        elif how == "disk":
            if rank == 1:
                limit = (4 << 10, resource.RLIM_INFINITY)
                resource.setrlimit(resource.RLIMIT_FSIZE, limit)
            checkpoints.save(2, state).wait(60)
        elif how == "plan":
            if rank == 1:
                state["epoch"] = torch.ones(1)
            checkpoints.restore(state, 1)
        elif how == "read":
            if rank == 1:
                torch.distributed.barrier()
                _forbid_reading()
            else:
                torch.distributed.barrier()
            checkpoints.restore(state, 1)
    except forebay.Error as error:
        took = time.monotonic() - began
        if how == "disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        if how != "first":
            # The step before is whole, and the next save works.
            checkpoints.restore({"w": state["w"]}, 1)
            assert checkpoints.save(3, {"w": rows(torch.ones(1 << 18)), "epoch": 1}).wait(60)
        return error.code, str(error), took
    return "", "", 0.0


def _forbid_reading() -> None:
    from forebay._ckpt import filling

    original = filling.read_regions

    def failing(*arguments: Any, **named: Any) -> Any:
        filling.read_regions = original
        raise make("io", "the disk of this node is gone")

    filling.read_regions = failing


def different_steps(rank: int, directory: str) -> str:
    """Ranks that pass different steps."""
    with forebay.Checkpointer(directory) as checkpoints:
        try:
            checkpoints.save(rank, {"w": torch.ones(1)})
        except forebay.StructureMismatchError as error:
            return str(error)
    return ""


def storage_that_is_not_shared(rank: int, directory: str) -> str:
    """Every rank has a folder of its own."""
    from forebay._ckpt import natives

    natives._LOOK_SECONDS = 0.5
    with forebay.Checkpointer(f"{directory}/{rank}") as checkpoints:
        try:
            checkpoints.save(1, {"w": torch.ones(1)})
        except forebay.Error as error:
            return str(error)
    return ""


def restore_latest_while_it_moves(rank: int, directory: str) -> int:
    """Rank 1 looks later than rank 0, when a newer step was committed: both restore what rank 0 saw."""
    checkpoints = forebay.Checkpointer(directory)
    blank = {"w": torch.zeros(4)}
    if rank == 0:
        report = checkpoints.restore(blank)
    else:
        with forebay.Checkpointer(directory, process_group=None) as seen:
            assert seen.latest() is not None
        time.sleep(0.5)
        report = checkpoints.restore(blank)
    assert blank["w"].tolist() == [report.step] * 4
    return report.step


def skipping(rank: int, directory: str) -> list[int]:
    """Saves that come faster than they are written; rank 1 is slower in seeing that one has ended."""
    state = {"w": rows(torch.ones(1 << 16))}
    ran = []
    with forebay.Checkpointer(directory, on_busy="skip") as checkpoints:
        for step in range(12):
            if rank == 1:
                time.sleep(0.02)
            handle = checkpoints.save(step, state)
            if not handle.skipped:
                ran.append(step)
        checkpoints.wait()
    return ran


def signalled(rank: int, directory: str) -> tuple[int, bool]:
    """Rank 2 gets a signal in the middle of training; the step at which each rank stops, and whether it was saved."""
    checkpoints = forebay.Checkpointer(directory)
    checkpoints.on_signal(signal.SIGUSR1, grace_s=30)
    for step in range(100):
        # The reduction of a training step.
        torch.distributed.all_reduce(torch.ones(1))
        if rank == 2 and step == 5:
            os.kill(os.getpid(), signal.SIGUSR1)
        if checkpoints.preempted(step):
            left = checkpoints.grace_left()
            assert (left is not None) == (rank == 2)
            handle = checkpoints.save(step, {"w": torch.ones(2)}, blocking=True)
            checkpoints.close()
            return step, handle.done()
    return -1, False


def subgroup(rank: int, directory: str) -> Any:
    """Ranks 1 and 3 of four save together, with a mesh of their own."""
    group = torch.distributed.new_group([1, 3])
    mesh = init_device_mesh("cpu", (2, 2))
    if rank not in (1, 3):
        try:
            forebay.Checkpointer(directory, process_group=group).save(1, {"w": torch.ones(1)})
        except forebay.UsageError as error:
            return str(error)
        return None
    # Column 1 of the mesh is ranks 1 and 3.
    del mesh
    sub = torch.distributed.device_mesh.DeviceMesh("cpu", [1, 3], _init_backend=False)
    local = torch.full((2,), float(rank))
    tensor = DTensor.from_local(local, sub, [Shard(0)], run_check=False)
    with forebay.Checkpointer(directory, process_group=group) as checkpoints:
        checkpoints.save(1, {"w": tensor, "x": torch.ones(3)}).wait()
        blank = {"w": torch.zeros(4), "x": torch.zeros(3)}
        checkpoints.restore(blank)
        return blank["w"].tolist()


def fsdp_with_tied_weights(rank: int, directory: str, restore: bool) -> list[float]:
    """A model under FSDP2 with tied weights: saved after two steps, or restored and trained one more."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 6)
            self.body = nn.Linear(6, 6)
            self.head = nn.Linear(6, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(torch.tanh(self.body(self.embed(ids))))

    net = Net()
    fully_shard(net, mesh=init_device_mesh("cpu", (_size(),)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    checkpoints = forebay.Checkpointer(directory)
    state = {"model": net, "optim": optimizer}

    def step(number: int) -> float:
        generator = torch.Generator().manual_seed(number)
        loss = net(torch.randint(0, 11, (8,), generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    losses = []
    if restore:
        report = checkpoints.restore(state)
        assert report.missing == [] and report.unexpected == []
        losses.append(step(2))
    else:
        losses += [step(0), step(1)]
        report_ = checkpoints.save(2, state).result()
        # Every rank writes its share of the tied weight once.
        assert report_["tensor_bytes"] < (11 * 6 + 6 * 6 + 6) * 4 * 3 // _size() + 1024
        losses.append(step(2))
    checkpoints.close()
    return losses


def fsdp_over_tp(rank: int, directory: str, restore: bool) -> int:
    """Rows that FSDP2 cuts after tensor parallelism, where nothing divides: from left to right placements are wrong."""
    from torch.distributed.tensor.placement_types import _StridedShard

    dp, tp = 2, 2
    outer, inner = rank // tp, rank % tp
    whole = torch.arange(7.0 * 3).reshape(7, 3)
    if restore:
        with forebay.Checkpointer(directory) as checkpoints:
            blank = {"w": torch.zeros(7, 3)}
            checkpoints.restore(blank)
            assert torch.equal(blank["w"], whole)
        return 0
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    # Tensor parallelism: rows 0-3 and 4-6; FSDP cuts each of them in two.
    own = whole.chunk(tp)[inner].chunk(dp)
    local = own[outer] if outer < len(own) else whole[:0]
    tensor = DTensor.from_local(
        local.clone(),
        mesh,
        [_StridedShard(0, split_factor=tp), Shard(0)],
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
    with forebay.Checkpointer(directory) as checkpoints:
        return int(checkpoints.save(1, {"w": tensor}).result()["tensor_bytes"])


def ragged(rank: int, directory: str, hole: bool) -> str:
    """A flat buffer with padding, whose shards are ragged; with a hole that nobody holds the save must fail."""
    sizes = [5, 2, 0, 3]
    start = sum(sizes[:rank])
    buffer = torch.full((8,), -1.0)
    count = sizes[rank] - (1 if hole and rank == 3 else 0)
    buffer[1 : 1 + count] = torch.arange(float(start), start + count)
    buffer.global_shape = (sum(sizes),)  # type: ignore[attr-defined]
    buffer.global_offsets = ((start,),)  # type: ignore[attr-defined]
    buffer.local_offsets = ((1,),)  # type: ignore[attr-defined]
    buffer.local_sizes = ((count,),)  # type: ignore[attr-defined]
    with forebay.Checkpointer(directory) as checkpoints:
        error = checkpoints.save(1, {"flat": buffer}).exception(60)
        if error is not None:
            return error.code
        blank = {"flat": torch.zeros(10)}
        checkpoints.restore(blank)
        assert blank["flat"].tolist() == list(range(10))
    return ""


def disagreeing_shapes(rank: int, directory: str) -> str:
    """Ranks whose tensors of one name have different shapes."""
    with forebay.Checkpointer(directory) as checkpoints:
        try:
            checkpoints.save(1, {"w": torch.zeros(2 + rank), "v": torch.zeros(3)})
        except forebay.StructureMismatchError as error:
            return str(error)
    return ""


def pipeline(rank: int, directory: str) -> tuple[int, list[str]]:
    """Stages of a pipeline: each pair of ranks holds other layers; one is on both stages."""
    stage = rank // 2
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))["dp"]
    state: dict[str, Any] = {
        f"layer{stage}": distribute_tensor(torch.full((6, 2), float(stage)), mesh, [Shard(0)]),
        "embed": torch.arange(5.0),
        f"stage{stage}": stage,
    }
    with forebay.Checkpointer(directory) as checkpoints:
        report = checkpoints.save(1, state).result()
        whole: dict[str, Any] = {
            "layer0": torch.ones(6, 2),
            "layer1": torch.zeros(6, 2),
            "embed": torch.zeros(5),
            "stage0": -1,
            "stage1": -1,
        }
        checkpoints.restore(whole)
    assert [float(whole[name].mean()) for name in ("layer0", "layer1")] == [0, 1]
    assert (whole["stage0"], whole["stage1"]) == (0, 1)
    return int(report["tensor_bytes"]), sorted(whole)


def made_before_the_group(rank: int, port: int, world: int, directory: str) -> Any:
    """A checkpointer that is older than the process group: it saves with all ranks all the same."""
    checkpoints = forebay.Checkpointer(directory, staging_bytes="8MiB")
    store = torch.distributed.TCPStore("127.0.0.1", port, None, False)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)
    checkpoints.save(1, {"w": rows(torch.arange(8.0))}).wait()
    ranks = checkpoints.steps()[0]["ranks"]
    checkpoints.close()
    torch.distributed.destroy_process_group()
    return ranks
