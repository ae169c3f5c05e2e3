"""From the tensors of a state to addresses that the native part may read while training goes on.

- `shadow`: tensors of the GPU are copied on their own stream, those of the host into memory kept for that; the caller
  may go on at once.
- `pool`, `stream`: nothing is copied here. The native part copies into its staging pool, and says when it has
  everything; `stream` is its name where the pool is smaller than the state, so that the copies wait for the disk.
- `staged`: everything is copied into memory of the host that the agent has too, when the copies are there (`survival`).
- `in place`: the caller waits for the end of the save. A folder in memory is written from the tensors themselves; to
  a disk the bytes go through the staging pool, because that is quicker.

Where a hook waits for the copies (`training`), what no hook answers for is copied here, into host memory.

A shadow that nobody asked for by name takes memory only when it is known what training takes: after a full step. The
first save of a process may come before it, and then does without.

What cannot be read as it lies is made so first, on the current stream: views that are not contiguous, lazily
conjugated or negated values, and tensors of devices that no engine knows, which go through host memory.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from forebay._ckpt.shadow import ALIGN_BYTES, Shadow, headroom, size_of
from forebay._ckpt.stagedmemory import StagedMemory
from forebay._ckpt.survival import Link, Survival
from forebay._ckpt.training import Owned, Training

_log = logging.getLogger("forebay")

#: Host tensors are copied by one thread into the host's part of a shadow: so many bytes take a tenth of a second.
HOST_SHADOW_BYTES = 1 << 30

HOST = torch.device("cpu")


@dataclass(slots=True, eq=False)
class Snapshot:
    """Memory to be written, in the order of the items."""

    mode: str
    addresses: list[int]
    #: One byte a tensor: 1 device memory, 0 host memory.
    places: bytes
    #: What must live until the memory has been read.
    keep: list[torch.Tensor]
    #: The stream that device memory was last written on.
    stream: int | None
    #: Whether the caller may change its tensors now.
    settled: bool
    #: Whether the caller may change what no hook answers for.
    rest_settled: bool = False
    #: The memory of all tensors, where it outlives the process, and the connection to who gets it.
    memory: StagedMemory | None = None
    link: Link | None = None


@dataclass(slots=True, eq=False)
class Snapshots:
    """Makes snapshots; keeps the memory of shadows from one to the next."""

    shadow: bool | Literal["auto"]
    training: Training = field(default_factory=Training)
    #: Of the engine: "host" or "cuda:N".
    device: str = "host"
    staging_bytes: int = 0
    device_shadow: Shadow | None = None
    host_shadow: Shadow = field(default_factory=lambda: Shadow(HOST))
    #: Why there is no shadow, once that was told.
    told: str | None = None
    #: The agent that keeps what is staged, and the memory that it keeps.
    survival: Survival | None = None
    staged: StagedMemory = field(default_factory=lambda: StagedMemory(HOST))

    def take(
        self, tensors: Sequence[torch.Tensor], blocking: bool, owned: Owned | None = None
    ) -> Snapshot:
        """Prepares tensors for reading. With `owned` all others are copied before it returns, unless they are too
        many: see `Snapshot.rest_settled`."""
        ready = [tensor.detach() for tensor in tensors]
        on_device = [self._is_here(tensor) for tensor in ready]
        if blocking:
            return self._plain("in place", ready, on_device)
        staged = self._staged(ready)
        if staged is not None:
            return staged
        may = any(on_device) and self._may_shadow(ready[on_device.index(True)].device)
        self.training.saved = True
        if may:
            taken = self._shadowed(ready, on_device)
            if taken is not None:
                return taken
        total = sum(tensor.nbytes for tensor in ready)
        rest_settled = owned is not None and self._set_aside(ready, on_device, owned)
        mode = "stream" if total > self.staging_bytes else "pool"
        snapshot = self._plain(mode, ready, on_device)
        snapshot.rest_settled = rest_settled
        return snapshot

    def _staged(self, ready: list[torch.Tensor]) -> Snapshot | None:
        """Copies everything into memory that outlives this process; None where that is not asked for, or not possible
        now."""
        link = None if self.survival is None else self.survival.connect()
        if link is None:
            return None
        assert self.survival is not None
        try:
            copies = self.staged.stage(ready)
        except OSError as error:
            self.staged.release()
            link.close()
            self.survival.degrade(f"no memory to stage in: {error}")
            return None
        except BaseException:
            link.close()
            raise
        snapshot = self._plain("staged", copies, [False] * len(copies))
        snapshot.settled = snapshot.rest_settled = True
        snapshot.memory, snapshot.link = self.staged, link
        return snapshot

    def _may_shadow(self, device: torch.device) -> bool:
        """Whether there may be a shadow, as far as the caller and the time go."""
        if self.shadow != "auto":
            return self.shadow
        self.training.peak(device)
        if self.training.stepped or self.training.saved:
            return True
        _log.info(
            "forebay: no shadow of the state for the first save: what training takes of GPU memory is known after a "
            "step; Checkpointer.prepare(state) says that one has run"
        )
        return False

    def _set_aside(self, ready: list[torch.Tensor], on_device: list[bool], owned: Owned) -> bool:
        """Copies what is not owned into host memory, and puts the copies into the lists. False if that is too much."""
        places = [place for place, tensor in enumerate(ready) if tensor not in owned]
        rest = [ready[place] for place in places]
        if size_of(rest) > HOST_SHADOW_BYTES:
            return False
        for place, copy in zip(places, self.host_shadow.copy(_on_host(rest)), strict=True):
            ready[place], on_device[place] = copy, False
        return True

    def mode_for(self, tensors: Sequence[torch.Tensor], size: int) -> str:
        """The kind of snapshot that a state will get, as far as can be known without taking it."""
        if self.survival is not None:
            return "staged"
        here = [tensor for tensor in tensors if self._is_here(tensor)]
        rest = size_of([tensor for tensor in tensors if not self._is_here(tensor)])
        if here and self.shadow is not False and rest <= HOST_SHADOW_BYTES:
            device = here[0].device
            if self.shadow is True or self._left(device) >= size_of(here):
                return "shadow"
        return "stream" if size > self.staging_bytes else "pool"

    def prepare(self, tensors: Sequence[torch.Tensor]) -> None:
        """Makes the shadow of a state whose kind of snapshot is `shadow`; the first save does otherwise, which then
        takes 25 ms more: for the memory, and for the kernels that CUDA loads at their first launch. Where there is no
        memory now, the first save says so."""
        here = [tensor.detach() for tensor in tensors if self._is_here(tensor)]
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            self._copy(self._shadow_on(here[0].device), here)

    def prepare_staged(self, size: int, tensors: Sequence[torch.Tensor]) -> None:
        """Makes the memory that `size` bytes of such tensors are staged in. Where there is none, the first save says so."""
        room = size + len(tensors) * ALIGN_BYTES
        with contextlib.suppress(OSError):
            self.staged.warm(room, any(tensor.is_cuda for tensor in tensors))

    def release(self) -> None:
        """Gives back the memory of shadows."""
        self._release_device()
        self.host_shadow.release()
        self.staged.release()

    def _release_device(self) -> None:
        if self.device_shadow is not None:
            self.device_shadow.release()
            self._count(self.device_shadow)

    def _copy(self, shadow: Shadow, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Copies into the shadow of a device; training's own peak is seen before it grows."""
        self.training.peak(shadow.device)
        try:
            return shadow.copy(tensors)
        finally:
            self._count(shadow)

    def _count(self, shadow: Shadow) -> None:
        self.training.peak(shadow.device).shadow_is(shadow.bytes)

    def _left(self, device: torch.device) -> int:
        return headroom(device, self.training.peak(device).bytes)

    def _is_here(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda and self.device == f"cuda:{tensor.device.index}"

    def _shadowed(self, ready: list[torch.Tensor], on_device: list[bool]) -> Snapshot | None:
        here = [tensor for tensor, is_here in zip(ready, on_device, strict=True) if is_here]
        rest = [tensor for tensor, is_here in zip(ready, on_device, strict=True) if not is_here]
        host_bytes = size_of(rest)
        if host_bytes > HOST_SHADOW_BYTES:
            self._degrade(f"{host_bytes} bytes of the state are in host memory")
            return None
        device = here[0].device
        shadow = self._shadow_on(device)
        needed = size_of(here)
        if self.shadow == "auto":
            left = self._left(device)
            if left < needed:
                self._release_device()
                self._degrade(f"it takes {needed} bytes of GPU memory, {max(left, 0)} are to spare")
                return None
        try:
            copies = iter(self._copy(shadow, here))
        except torch.cuda.OutOfMemoryError:
            self._release_device()
            self._degrade(f"{needed} bytes of GPU memory could not be had")
            return None
        host = iter(self.host_shadow.copy(_on_host(rest)))
        merged = [next(copies) if is_here else next(host) for is_here in on_device]
        snapshot = self._plain("shadow", merged, on_device)
        snapshot.settled = snapshot.rest_settled = True
        return snapshot

    def _shadow_on(self, device: torch.device) -> Shadow:
        shadow = self.device_shadow
        if shadow is None or shadow.device != device:
            self._release_device()
            shadow = self.device_shadow = Shadow(device)
        return shadow

    def _plain(self, mode: str, tensors: list[torch.Tensor], on_device: list[bool]) -> Snapshot:
        readable = _readable(tensors)
        if not all(tensor.is_cpu or here for tensor, here in zip(readable, on_device, strict=True)):
            readable = [
                tensor if here else tensor.cpu()
                for tensor, here in zip(readable, on_device, strict=True)
            ]
        stream = None
        if any(on_device):
            device = readable[on_device.index(True)].device
            stream = _stream_of(device)
        addresses = [tensor.data_ptr() for tensor in readable]
        return Snapshot(mode, addresses, bytes(on_device), readable, stream, False)

    def _degrade(self, why: str) -> None:
        if why != self.told:
            self.told = why
            _log.warning(
                "forebay: no shadow of the state: %s; saves go through the staging pool, "
                "and training waits until it has taken everything",
                why,
            )


def _stream_of(device: torch.device) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


def _readable(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same values in memory that can be read as it lies; copies only what must be."""
    if not all(map(torch.Tensor.is_contiguous, tensors)):
        tensors = [tensor.contiguous() for tensor in tensors]
    if any(map(torch.Tensor.is_neg, tensors)) or any(map(torch.Tensor.is_conj, tensors)):
        tensors = [tensor.resolve_conj().resolve_neg().contiguous() for tensor in tensors]
    return tensors


def _on_host(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor if tensor.is_cpu else tensor.cpu() for tensor in tensors]


def device_of(tensors: Sequence[Any]) -> str:
    """The engine that a state needs: that of its first GPU, or the host's."""
    for tensor in tensors:
        if tensor.is_cuda:
            return f"cuda:{tensor.device.index}"
    return "host"


def current_device() -> str | None:
    """The engine that tensors of this process will need; None where a GPU may still be chosen."""
    cuda: Any = torch.cuda
    if not cuda.is_available():
        return "host"
    return f"cuda:{cuda.current_device()}" if cuda.is_initialized() else None
