"""A copy of the state in the memory of the device it is on, made on the framework's current stream.

The copy is ordered like any other work of that stream: what the caller does to its tensors afterwards comes after it,
so training goes on at once, and the bytes leave the device later. It is one buffer of torch's allocator, sized once,
cut into views that are kept from save to save; `torch._foreach_copy_` fills them in a few launches.

How much memory there is for it is known once a full step has run: the peak of torch's allocator counts activations and
gradients. Programs reset that peak, so `Peak` keeps a maximum of its own; `headroom` says what is left above it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

#: Views start at multiples of this, as the allocator's own blocks do: copies then go by wide words.
ALIGN_BYTES = 512

#: What is left free above the peak: a sixteenth of the device, 1 GiB at least. Fragments of the allocator take as much.
MARGIN_SHARE = 16
MARGIN_BYTES = 1 << 30


@dataclass(slots=True, eq=False)
class Shadow:
    """Kept copies of tensors of one device."""

    device: torch.device
    buffer: torch.Tensor | None = None
    views: list[torch.Tensor] = field(default_factory=list)
    #: The (dtype, shape) of each view.
    form: list[tuple[torch.dtype, torch.Size]] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Memory that it takes."""
        return 0 if self.buffer is None else self.buffer.nbytes

    def copy(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies tensors; returns the copies, contiguous. The copies of the call before must not be in use any more.

        Raises torch.cuda.OutOfMemoryError where there is no memory for them.
        """
        self.make(tensors)
        groups: dict[tuple[torch.dtype, bool], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for view, tensor in zip(self.views, tensors, strict=True):
            # One kernel takes tensors of one dtype that lie alike.
            key = (tensor.dtype, tensor.is_contiguous())
            targets, sources = groups.setdefault(key, ([], []))
            targets.append(view)
            sources.append(tensor)
        with torch.no_grad():
            for targets, sources in groups.values():
                torch._foreach_copy_(targets, sources)
        return list(self.views)

    def make(self, tensors: Sequence[torch.Tensor]) -> None:
        """Takes the memory for copies of such tensors, where it is not there yet: 8 GB take 15 ms.

        Raises torch.cuda.OutOfMemoryError where there is none."""
        form = [(tensor.dtype, tensor.shape) for tensor in tensors]
        if form != self.form or self.buffer is None:
            self._make(form)

    def _make(self, form: list[tuple[torch.dtype, torch.Size]]) -> None:
        places = []
        total = 0
        for dtype, shape in form:
            places.append(total)
            size = shape.numel() * dtype.itemsize
            total += -(-size // ALIGN_BYTES) * ALIGN_BYTES
        self.views, self.form = [], []
        if self.buffer is None or self.buffer.nbytes < total:
            # The old buffer goes first: both at once may not fit.
            self.buffer = None
            self.buffer = self._take(total)
        buffer = self.buffer
        self.views = [
            buffer[place : place + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            for place, (dtype, shape) in zip(places, form, strict=True)
        ]
        self.form = form

    def _take(self, size: int) -> torch.Tensor:
        """Memory for all views."""
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def release(self) -> None:
        """Gives the memory back to the allocator."""
        self.buffer = None
        self.views, self.form = [], []


def size_of(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes that a shadow of these tensors takes."""
    return sum(-(-tensor.nbytes // ALIGN_BYTES) * ALIGN_BYTES for tensor in tensors)


@dataclass(slots=True, eq=False)
class Peak:
    """The most memory of a GPU that tensors of this process took at one time, without shadows."""

    device: torch.device
    #: In bytes, as far as it was seen.
    bytes: int = 0
    #: Memory that the shadow takes now.
    shadow_bytes: int = 0
    #: A reading of torch's peak that may have a shadow in it which is no more.
    _stale: int = -1

    def look(self) -> None:
        """Takes in torch's peak, which goes back to what is in use when the program resets it. A reading from before
        the shadow was made must have been taken in before."""
        reading = _torch_peak(self.device)
        if reading != self._stale:
            self.bytes = max(self.bytes, reading - self.shadow_bytes)

    def shadow_is(self, size: int) -> None:
        """The shadow takes so many bytes from now on."""
        if size < self.shadow_bytes:
            self._stale = _torch_peak(self.device)
        self.shadow_bytes = size


def _torch_peak(device: torch.device) -> int:
    return int(torch.cuda.max_memory_allocated(device))


def headroom(device: torch.device, peak: int) -> int:
    """Bytes that a shadow may take on a GPU where training takes `peak` bytes: what other processes left, less that,
    less a margin. May be negative."""
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    return int(free + reserved - peak - max(total // MARGIN_SHARE, MARGIN_BYTES))
