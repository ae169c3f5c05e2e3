"""Jobs whose disk gets full, or refuses one of the ranks."""

from __future__ import annotations

import resource
import signal
from multiprocessing.connection import Connection
from time import monotonic
from typing import Any

import torch

import forebay

#: So many tensors share what is too large, so that every rank writes some of it.
PARTS = 8


def small_state(value: float) -> dict[str, Any]:
    """A state that fits."""
    return {"w": torch.full((10_000,), value), "step": int(value)}


def large_state(total_bytes: int) -> dict[str, Any]:
    """A state that does not."""
    return {f"part{number}": torch.ones(total_bytes // 4 // PARTS) for number in range(PARTS)}


def saves(
    rank: int, pipe: Connection, directory: str, total_bytes: int, limited: int | None
) -> None:
    """Step 1 fits, step 2 does not, step 3 fits again. Tells how step 2 ended: code, text, seconds.

    With `limited`, the kernel refuses that rank files of more than 1 MiB in step 2, as a quota does.
    """
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    # Several files, so that room for one of them is there and for all of them is not.
    with forebay.Checkpointer(directory, threads=4) as checkpoints:
        checkpoints.save(1, small_state(1)).wait()
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if rank == limited:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
        began = monotonic()
        handle = checkpoints.save(2, large_state(total_bytes))
        error = handle.exception(60)
        took = monotonic() - began
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        told = None if error is None else (error.code, str(error), list(error.hints), took)
        pipe.send(("step 2", told))
        if torch.distributed.is_initialized():
            # A rank that has ended has removed what it wrote.
            torch.distributed.barrier()
        checkpoints.save(3, small_state(3)).wait()
        pipe.send(("committed", checkpoints.latest()))


def overwrites(rank: int, pipe: Connection, directory: str, total_bytes: int) -> None:
    """Step 1 fits, and is to be replaced by what does not."""
    with forebay.Checkpointer(directory) as checkpoints:
        checkpoints.save(1, small_state(1)).wait()
        error = checkpoints.save(1, large_state(total_bytes)).exception(60)
        pipe.send(("ended", None if error is None else error.code))
