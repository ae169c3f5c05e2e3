"""Restoring into optimizers: those that have not stepped yet, and states that name parameters.

The state of a fresh optimizer is made by its first step, so its `state_dict` names nothing that could be filled. What
the checkpoint has for it says which tensors it will need: those as large as their parameter are made like it (sharded
where it is), others on the host; `load_state_dict` then moves them as the optimizer wants them.

`torch.distributed.checkpoint.state_dict.get_state_dict` names parameters as the model does ("layer.weight") where an
optimizer counts them. Where the state to be restored has the model too, it tells which is which, and the entries of the
checkpoint are seen under the optimizer's own names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from forebay._ckpt.flatten import DEPTH_MAX, Path
from forebay._ckpt.kinds import dtype_of

#: Name, path, kind (0 tensor, 1 object), dtype, shape: entries of a checkpoint.
Entry = tuple[str, Path, int, str | None, Sequence[int]]

#: What wrappers put into the names of parameters, and `get_state_dict` takes out.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def is_fresh(value: object) -> bool:
    """Whether a value is an optimizer without state."""
    return isinstance(value, torch.optim.Optimizer) and not value.state


class Optimizers:
    """The optimizers of a state, against the entries of a checkpoint."""

    def __init__(self, state: Any, entries: list[Entry]) -> None:
        self._state = state
        #: Those of the checkpoint; entries that name parameters are renamed in it.
        self.entries = entries
        #: By entry: the names of the parameters that a group should have.
        self.groups: dict[int, list[str]] = {}
        #: Ways of optimizers whose state the checkpoint has by names that nothing here tells.
        self.unknown: list[Path] = []

    @cached_property
    def _by_home(self) -> dict[Path, list[int]]:
        """Entries of one value of one parameter, by the way to their optimizer."""
        found: dict[Path, list[int]] = {}
        for number, (_, way, *_) in enumerate(self.entries):
            # HOME, "state", parameter, name.
            if len(way) >= 3 and way[-3] == "state":
                found.setdefault(way[:-3], []).append(number)
        return found

    def ask(self, value: Any, path: Path) -> Any:
        """The state of a fresh optimizer at a way, with memory for what the checkpoint has; `None` for all else. To be
        called for each optimizer once."""
        if not isinstance(value, torch.optim.Optimizer):
            return None
        numbers = self._by_home.get(path, [])
        self._translate(value, path, numbers)
        return self._state_for(value, path, numbers) if is_fresh(value) else None

    def dropped(self, path: Path, used: set[int]) -> bool:
        """Whether the checkpoint has a state for the optimizer at a way, in whatever form, of which nothing is used."""
        depth = len(path)
        own = [
            number
            for number, (_, way, *_) in enumerate(self.entries)
            if len(way) > depth and way[:depth] == path and str(way[depth]).startswith("state")
        ]
        return bool(own) and used.isdisjoint(own)

    def _state_for(
        self, optimizer: torch.optim.Optimizer, path: Path, numbers: list[int]
    ) -> dict[str, Any]:
        made = optimizer.state_dict()
        parameters = _parameters(optimizer)
        state: dict[int, dict[str, Any]] = {}
        for number in numbers:
            _, way, kind, dtype, shape = self.entries[number]
            parameter, name = str(way[-2]), str(way[-1])
            if not parameter.isdigit() or int(parameter) >= len(parameters):
                continue
            place = state.setdefault(int(parameter), {})
            if kind == 0 and dtype is not None:
                like = parameters[int(parameter)]
                place[name] = _memory(like, dtype_of(dtype), tuple(shape))
            else:
                place[name] = None
        made["state"] = state
        return made

    def _translate(self, optimizer: torch.optim.Optimizer, path: Path, numbers: list[int]) -> None:
        """Lets the entries of an optimizer that name parameters be seen by the parameters' numbers."""
        named = {str(self.entries[number][1][-2]) for number in numbers}
        if all(name.isdigit() for name in named):
            return
        parameters = _parameters(optimizer)
        known = self._numbers_of(parameters)
        if not named <= known.keys():
            self.unknown.append(path)
            return
        for number in numbers:
            _, way, *rest = self.entries[number]
            seen: Path = (*way[:-2], str(known[str(way[-2])]), way[-1])
            self.entries[number] = (".".join(map(str, seen)), seen, *rest)  # type: ignore[assignment]
        names = {place: name for name, place in known.items()}
        own, first = [], 0
        for group in optimizer.param_groups:
            after = first + len(group["params"])
            own.append([names.get(place, "") for place in range(first, after)])
            first = after
        before = (*path, "param_groups")
        for number, (_, way, *_) in enumerate(self.entries):
            if len(way) == len(before) + 2 and way[:-2] == before and way[-1] == "params":
                place = int(way[-2]) if str(way[-2]).isdigit() else len(own)
                self.groups[number] = own[place] if place < len(own) else []

    def _numbers_of(self, parameters: list[torch.Tensor]) -> dict[str, int]:
        """An optimizer's parameters by the names that modules of the state give them; names that mean several are left
        out."""
        numbers = {id(one): place for place, one in enumerate(parameters)}
        found: dict[str, int | None] = {}
        for module in _modules(self._state, 0):
            for name, parameter in module.named_parameters(remove_duplicate=False):
                place = numbers.get(id(parameter))
                if place is not None:
                    name = _bare(module, name)
                    found[name] = place if found.get(name, place) == place else None
        return {name: place for name, place in found.items() if place is not None}


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [one for group in optimizer.param_groups for one in group["params"]]


def _modules(value: Any, depth: int) -> Iterator[torch.nn.Module]:
    """The modules of a state, wherever they stand."""
    if isinstance(value, torch.nn.Module):
        yield value
    elif isinstance(value, Mapping | list) and depth < DEPTH_MAX:
        for entry in value.values() if isinstance(value, Mapping) else value:
            yield from _modules(entry, depth + 1)


def _bare(module: torch.nn.Module, name: str) -> str:
    """The name of a parameter without wrappers."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    if isinstance(module, torch.nn.parallel.DistributedDataParallel):
        name = name.removeprefix("module.")
    return name


def _memory(parameter: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if shape == tuple(parameter.shape):
        return torch.zeros_like(parameter.detach(), dtype=dtype)
    return torch.zeros(shape, dtype=dtype, device="cpu")
