"""Restoring into an optimizer that has not stepped yet.

Its state is made by its first step, so its `state_dict` names nothing that could be filled. What the checkpoint has
for it says which tensors it will need: those as large as their parameter are made like it (sharded where it is),
others on the host; `load_state_dict` then moves them as the optimizer wants them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from forebay._ckpt.flatten import Path
from forebay._ckpt.kinds import dtype_of

#: Name, path, kind (0 tensor, 1 object), dtype, shape: entries of a checkpoint.
Entry = tuple[str, Path, int, str | None, Sequence[int]]


def is_fresh(value: object) -> bool:
    """Whether a value is an optimizer without state."""
    return isinstance(value, torch.optim.Optimizer) and not value.state


def state_for(optimizer: torch.optim.Optimizer, path: Path, entries: Sequence[Entry]) -> Any:
    """The optimizer's `state_dict`, with memory for the state that the checkpoint has at `path`."""
    made = optimizer.state_dict()
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    before = (*path, "state")
    depth = len(before)
    state: dict[int, dict[str, Any]] = {}
    for _, way, kind, dtype, shape in entries:
        # One value of one parameter: ("state", number, name).
        if len(way) != depth + 2 or way[:depth] != before:
            continue
        number, name = way[depth], str(way[depth + 1])
        if not str(number).isdigit() or int(number) >= len(parameters):
            continue
        place = state.setdefault(int(number), {})
        if kind == 0 and dtype is not None:
            place[name] = _memory(parameters[int(number)], dtype_of(dtype), tuple(shape))
        else:
            place[name] = None
    made["state"] = state
    return made


def _memory(parameter: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if shape == tuple(parameter.shape):
        return torch.zeros_like(parameter.detach(), dtype=dtype)
    return torch.zeros(shape, dtype=dtype, device="cpu")
