"""Reading from an open checkpoint: regions into memory, and what lies beside the state."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from forebay import _native
from forebay._ckpt.kinds import dtype_of
from forebay._ckpt.objects import unpack
from forebay._ckpt.perrank import PER_RANK
from forebay._ckpt.settings import Progress
from forebay._options import Options, engine
from forebay._process import remember_session


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
    directory: Path, step: int, rank: int, weights_only: bool, threads: int | None
) -> dict[str, Any]:
    """The own values of any rank of a step, as they were given to `save`; tensors in host memory."""
    lease = _native.read_lease(directory, step)
    checkpoint = _native.Checkpoint(directory, step=step)
    prefix = f"{PER_RANK}{rank}/"
    state: dict[str, Any] = {}
    wants: list[tuple[int, Sequence[int], Sequence[int]]] = []
    memory: list[torch.Tensor] = []
    for number, (name, path, kind, dtype, shape) in enumerate(checkpoint.entries):
        if not name.startswith(prefix):
            continue
        value: Any
        if kind == 0:
            value = torch.empty(tuple(shape), dtype=dtype_of(dtype or ""))
            if value.numel():
                wants.append((number, (0,) * len(shape), tuple(shape)))
                memory.append(value)
        else:
            value = unpack(checkpoint, name, weights_only)
        way = (str(path[0])[len(prefix) :], *path[1:]) if path else (name[len(prefix) :],)
        _put(state, way, value)
    if wants:
        read_regions(checkpoint, wants, memory, "host", threads)
    del lease
    return state


def side_files(directory: Path, step: int) -> dict[str, bytes]:
    """The files that were committed with a step."""
    lease = _native.read_lease(directory, step)
    checkpoint = _native.Checkpoint(directory, step=step)
    found = {name: checkpoint.side_file(name) for name in checkpoint.side_files}
    del lease
    return found


def _put(state: dict[str, Any], path: Sequence[str | int], value: Any) -> None:
    """Puts a value into nested dicts and lists, making those that are missing."""
    home: Any = state
    for key, following in zip(path, path[1:], strict=False):
        inner: Any = [] if isinstance(following, int) else {}
        if isinstance(home, list):
            home.extend([None] * (int(key) + 1 - len(home)))
            if home[int(key)] is None:
                home[int(key)] = inner
            home = home[int(key)]
        else:
            home = home.setdefault(key, inner)
    last = path[-1]
    if isinstance(home, list):
        home.extend([None] * (int(last) + 1 - len(home)))
        home[int(last)] = value
    else:
        home[last] = value
