"""What saves know of the training loop around them, by the hooks of `Checkpointer.attach` and from save to save.

A hook runs before each step of an optimizer: it waits until the save under way has the memory that the step will
change, and looks how much GPU memory training takes. Hooks hold this and no checkpointer, so that one that is dropped
is freed while its optimizer lives on.

A hook can only answer for what its optimizer changes. `Owned` is that memory: the parameters of optimizers with a hook,
and the state that those keep of them. Anything else (buffers that a forward pass updates, averaged weights, parameters
of an optimizer without a hook) may change before any hook runs, so saves copy it before they return.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import torch

from forebay._ckpt.handle import SaveHandle
from forebay._ckpt.kinds import is_dtensor, local_of
from forebay._ckpt.shadow import Peak


@dataclass(slots=True, eq=False)
class Training:
    """See the module."""

    #: The last save.
    handle: SaveHandle | None = None
    #: Whether a full step is known to have run, so that peaks are those of training.
    stepped: bool = False
    #: Whether a save came before: training ran between it and the next.
    saved: bool = False
    #: GPU memory that training takes, by device.
    peaks: dict[torch.device, Peak] = field(default_factory=dict)

    def peak(self, device: torch.device) -> Peak:
        """The peak of a device, looked at now."""
        found = self.peaks.setdefault(device, Peak(device))
        found.look()
        return found

    def before_step(self, *_: object) -> None:
        """The hook of an optimizer."""
        self.stepped = True
        for peak in self.peaks.values():
            peak.look()
        last = self.handle
        if last is None or last._settled:
            return
        began = monotonic()
        last.settle()
        last._facts["hook_seconds"] = monotonic() - began


class Attached:
    """A hook of an optimizer that can be removed."""

    def __init__(self, home: list[Attached], optimizer: torch.optim.Optimizer, hook: Any) -> None:
        self._home = home
        self.optimizer = optimizer
        self._hook = hook
        home.append(self)

    def remove(self) -> None:
        """Removes the hook; saves wait for their copies again."""
        self._hook.remove()
        if self in self._home:
            self._home.remove(self)


class Owned:
    """Memory that only changes in steps of optimizers that have a hook."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        found: dict[int, int] = {}
        for tensor in _tensors(optimizers):
            try:
                address = tensor.data_ptr()
            except RuntimeError:
                # It has no memory to point at.
                continue
            found[address] = max(tensor.nbytes, found.get(address, 0))
        self._bytes = found
        self._starts: list[int] | None = None

    def __contains__(self, tensor: object) -> bool:
        """Whether all of a contiguous tensor is such memory."""
        if not isinstance(tensor, torch.Tensor):
            return False
        address, size = tensor.data_ptr(), tensor.nbytes
        if self._bytes.get(address, -1) >= size:
            return True
        # Part of one, as pieces of local tensors are.
        if self._starts is None:
            self._starts = sorted(self._bytes)
        place = bisect_right(self._starts, address) - 1
        if place < 0 or not tensor.is_contiguous():
            return False
        start = self._starts[place]
        return address + size <= start + self._bytes[start]


def _tensors(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[torch.Tensor]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from map(_local, group["params"])
        for state in optimizer.state.values():
            if isinstance(state, dict):
                yield from (_local(one) for one in state.values() if isinstance(one, torch.Tensor))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local = local_of(tensor) if is_dtensor(tensor) else tensor
    assert isinstance(local, torch.Tensor)
    return local
