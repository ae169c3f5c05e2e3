"""Reading from an open checkpoint: regions into memory, and what lies beside the state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from forebay import _native
from forebay._ckpt.nests import leaf_of, put, ways_of
from forebay._ckpt.objects import unpack_all
from forebay._ckpt.settings import Progress
from forebay._options import Options, engine
from forebay._process import remember_session
from forebay._urls import Place


def read_regions(
    checkpoint: _native.Checkpoint,
    wants: Sequence[tuple[int, Sequence[int], Sequence[int]]],
    memory: Sequence[torch.Tensor],
    device: str,
    threads: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Reads regions of entries into contiguous memory of one device, all of it checked; returns the report."""
    options = Options(threads)
    order, session = checkpoint.start(engine(device, options), list(wants), threads=threads)
    remember_session(session)
    try:
        owners = [memory[number] for number in order]
        stream = None
        if device != "host":
            stream = int(torch.cuda.current_stream(memory[0].device).cuda_stream)
        session.provide([owner.data_ptr() for owner in owners], owners, stream)
        return session.finish(progress)
    except BaseException:
        session.cancel()
        raise


def load_rank(
    directory: Place, step: int, rank: int, weights_only: bool, threads: int | None
) -> dict[str, Any]:
    """The own values of any rank of a step, as they were given to `save`; tensors in host memory."""
    lease = _native.read_lease(directory, step)
    checkpoint = _native.Checkpoint(directory, step=step)
    entries = checkpoint.entries
    leaves = [leaf_of(entries, number, way) for number, way in ways_of(entries, rank)]
    wants = [leaf.want for leaf in leaves if leaf.memory is not None and leaf.memory.numel()]
    memory = [leaf.memory for leaf in leaves if leaf.memory is not None and leaf.memory.numel()]
    objects = [(leaf.entry, entries[leaf.entry][0]) for leaf in leaves if leaf.memory is None]
    values = dict(
        zip(
            (number for number, _ in objects),
            unpack_all(checkpoint, objects, weights_only),
            strict=True,
        )
    )
    if wants:
        read_regions(checkpoint, wants, memory, "host", threads)
    del lease
    state: dict[str, Any] = {}
    for leaf in leaves:
        put(state, leaf.path, values[leaf.entry] if leaf.memory is None else leaf.memory)
    return state


def side_files(directory: Place, step: int) -> dict[str, bytes]:
    """The files that were committed with a step."""
    lease = _native.read_lease(directory, step)
    checkpoint = _native.Checkpoint(directory, step=step)
    found = {name: checkpoint.side_file(name) for name in checkpoint.side_files}
    del lease
    return found
