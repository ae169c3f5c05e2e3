"""A job that saves all the time, until it is killed.

Save number n writes step n // 2, so that every step is saved once and then overwritten. Every element of every tensor says
which save it belongs to: a step in which two saves are mixed cannot pass for whole. What happens is told through a pipe, so
that the one who kills knows what was committed without asking the disk.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from time import monotonic
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import forebay

#: Name to shape; the first three are sharded where there are several ranks: rows that no number of ranks divides, fewer
#: rows than ranks, and enough bytes for several blocks of checksums.
SHARDED = {"odd": (1021, 129), "few": (3, 5), "large": (1030, 1024)}
WHOLE = {"bias": (1000,), "scalar": (), **{f"layer.{number}": (16,) for number in range(40)}}
SHAPES = SHARDED | WHOLE

#: A float32 holds whole numbers up to 2^24: so many saves can be told apart.
_SPREAD = 1000
SAVES_MAX = (1 << 24) // _SPREAD - 1

#: A file that is committed with each step.
SIDE_FILE = "tokenizer.txt"


@dataclass(frozen=True)
class Life:
    """One life of the job: from its start to its end, or to its kill."""

    directory: str
    #: Saves until it ends by itself.
    saves: int = SAVES_MAX
    keep_last: int = 3
    #: After so many saves what is to go is removed at once, without time for readers; 0: as the defaults say.
    prune_every: int = 0


def step_of(save: int) -> int:
    """The step that a save writes."""
    return save // 2


def values(name: str, save: int) -> torch.Tensor:
    """What a tensor holds in a save."""
    shape = SHAPES[name]
    count = torch.Size(shape).numel()
    return ((torch.arange(count) % _SPREAD) + save * _SPREAD).float().reshape(shape)


def side_file(save: int) -> bytes:
    """What the side file holds in a save."""
    return f"save {save}\n".encode() * 300


def own_values(rank: int, save: int) -> dict[str, Any]:
    """What a rank saves as its own."""
    return {"random": torch.tensor([rank, save]), "place": save * 100 + rank}


def empty_state(sharded: bool) -> dict[str, Any]:
    """A state to restore into, or to fill."""
    state: dict[str, Any] = {name: torch.full(shape, -1.0) for name, shape in SHAPES.items()}
    if sharded:
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for name in SHARDED:
            state[name] = distribute_tensor(state[name], mesh, [Shard(0)])
    return {"model": state, "save": -1, "words": ["none"]}


def fill(state: dict[str, Any], save: int) -> None:
    """Gives a state the values of a save."""
    for name, tensor in state["model"].items():
        if isinstance(tensor, DTensor):
            whole = distribute_tensor(values(name, save), tensor.device_mesh, tensor.placements)
            tensor.to_local().copy_(whole.to_local())
        else:
            tensor.copy_(values(name, save))
    state["save"] = save
    state["words"] = [f"save {save}"]


def check(state: dict[str, Any], save: int) -> None:
    """Every value is that of the save."""
    assert state["save"] == save and state["words"] == [f"save {save}"]
    for name, tensor in state["model"].items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(whole, values(name, save)), f"{name} does not hold save {save}"


class _Reporter:
    """Tells of commits as soon as they are made, from a thread of its own."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()
        self._handles: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def tell(self, what: str, number: int) -> None:
        with self._lock:
            self._pipe.send((what, number))

    def watch(self, save: int, handle: forebay.SaveHandle) -> None:
        self._handles.put((save, handle))

    def close(self) -> None:
        self._handles.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (found := self._handles.get()) is not None:
            save, handle = found
            error = handle.exception()
            if error is None:
                self.tell("committed", save)
            else:
                with self._lock:
                    self._pipe.send(("failed", f"save {save}: {error}"))


def live(rank: int, pipe: Connection, life: Life) -> None:
    """Resumes from the newest commit, if there is one, and saves until it has saved enough."""
    distributed = torch.distributed.is_initialized()
    reporter = _Reporter(pipe)
    with forebay.Checkpointer(life.directory, keep_last=life.keep_last) as checkpoints:
        state = empty_state(distributed)
        before = 0
        if _is_committed(checkpoints, distributed):
            checkpoints.restore(state)
            before = int(state["save"])
            check(state, before)
            reporter.tell("restored", before)
        for save in range(before + 1, before + 1 + life.saves):
            fill(state, save)
            reporter.tell("began", save)
            handle = checkpoints.save(
                step_of(save),
                state,
                per_rank=own_values(rank, save),
                side_files={SIDE_FILE: side_file(save)},
            )
            reporter.watch(save, handle)
            if life.prune_every and save % life.prune_every == 0:
                _prune(rank, checkpoints, handle, reporter, save, distributed)
        checkpoints.wait()
    reporter.close()


def _is_committed(checkpoints: forebay.Checkpointer, distributed: bool) -> bool:
    """Whether to restore: rank 0 says so, as ranks that look at different times may see different things."""
    answer = [checkpoints.latest() is not None]
    if distributed:
        torch.distributed.broadcast_object_list(answer, 0)
    return bool(answer[0])


def _prune(
    rank: int,
    checkpoints: forebay.Checkpointer,
    handle: forebay.SaveHandle,
    reporter: _Reporter,
    save: int,
    distributed: bool,
) -> None:
    """Without a grace time it must not meet a save under way, so all ranks wait."""
    handle.wait()
    if distributed:
        torch.distributed.barrier()
    reporter.tell("pruning", save)
    if rank == 0:
        checkpoints.prune(keep_last=1, grace_s=0)
    if distributed:
        torch.distributed.barrier()


def bereave(rank: int, pipe: Connection, directory: str) -> None:
    """Saves twice; rank 1 is killed when the second save begins, and no launcher ends the others. They tell how it ended:
    code, text, seconds."""
    with forebay.Checkpointer(directory) as checkpoints:
        state = empty_state(True)
        fill(state, 2)
        checkpoints.save(1, state, side_files={SIDE_FILE: side_file(2)}).wait()
        fill(state, 4)
        torch.distributed.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        began = monotonic()
        handle = checkpoints.save(2, state, side_files={SIDE_FILE: side_file(4)})
        error = handle.exception(150)
        assert error is not None
        pipe.send(("ended", (error.code, str(error), monotonic() - began)))
        # Nothing collective is left to do.
        os._exit(0)
