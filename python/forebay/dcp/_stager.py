"""`Stager`: a copy of a state in host memory that is set aside once.

All tensors of a state are copied into one block, pinned where there is a GPU, cut into views. The block is kept for
the next state; but never used again while anything reads it: a tensor of the state that was handed out, or what somebody
made of one without copying it (a view, `detach()`, a DTensor around it, an array). So what is handed out is a storage of
its own over the block's memory, which is gone when the last of those is. A second block is made meanwhile; more than
`blocks` are not: the next `stage` waits.

With `share_memory` the block is shared memory, so that `async_save` in process mode hands one descriptor to the other
process, not one a tensor.
"""

from __future__ import annotations

import ctypes
import gc
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any

import torch
from torch.distributed.checkpoint.staging import AsyncStager

from forebay._errors import make, usage
from forebay.dcp._staged import Staged, aligned, cut, plan_of

#: How long `stage` waits for a block.
WAIT_SECONDS = 600.0

#: How often it looks whether one is free.
_LOOK_SECONDS = 0.005

#: How long after the garbage collector ran it runs again, at the least: then thrice as long after the start each time.
_COLLECT_SECONDS = 0.5

#: torch types little of it.
_cuda: Any = torch.cuda


@dataclass(slots=True, eq=False)
class _Block:
    """Memory of one staged state."""

    bytes: torch.Tensor
    #: What the storage that was handed out holds.
    lent: weakref.ref[Any] | None = None
    pinned: bool = False

    def lend(self) -> torch.Tensor:
        """The memory, as another tensor with a storage of its own."""
        size = self.bytes.nbytes
        if not size:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        window: Any = (ctypes.c_uint8 * size).from_address(self.bytes.data_ptr())
        # Whoever reads it keeps the memory too.
        window.owner = self.bytes
        self.lent = weakref.ref(window)
        return torch.frombuffer(window, dtype=torch.uint8)

    def is_free(self) -> bool:
        return self.lent is None or self.lent() is None


class Stager(AsyncStager):
    """An AsyncStager that keeps its memory; it works again after `close`.

    Args:
        asynchronous: return a Future: copies of a GPU run beside the caller, who may change the state once the staging
            future of `async_save`'s answer is done.
        share_memory: stage into shared memory, for process mode.
        blocks: states that may be staged at a time.
    """

    _synchronize_after_execute = True

    def __init__(
        self, *, asynchronous: bool = False, share_memory: bool = False, blocks: int = 2
    ) -> None:
        if type(blocks) is not int or blocks < 1:
            raise usage(f"blocks is {blocks!r}, a whole number from 1 is needed")
        self.asynchronous = asynchronous
        self.share_memory = share_memory
        self.blocks = blocks
        self._kept: list[_Block] = []
        self._executor: ThreadPoolExecutor | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._pending: Future[Staged] | None = None

    @property
    def should_synchronize_after_execute(self) -> bool:
        """`async_save` waits for the copies before it returns; an asynchronous one is waited for by its future."""
        return not self.asynchronous

    def stage(self, state_dict: dict[str, Any]) -> Any:
        """A copy of the state in host memory, or a future of it."""
        self.synchronize_staging()
        plan = plan_of(state_dict)
        block = self._take(sum(aligned(tensor.nbytes) for tensor in plan.tensors))
        events = self._copy(plan.tensors, cut(block.bytes, plan.forms))
        built = Staged(plan, block.bytes, cut(block.lend(), plan.forms))
        if not self.asynchronous:
            for event in events:
                event.synchronize()
            return built
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="forebay-stage")
        self._pending = self._executor.submit(_settled, built, events)
        return self._pending

    def _copy(
        self, tensors: list[torch.Tensor], views: list[torch.Tensor]
    ) -> list[torch.cuda.Event]:
        by_device: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        with torch.no_grad():
            for tensor, view in zip(tensors, views, strict=True):
                if tensor.is_cuda:
                    by_device.setdefault(tensor.device, []).append((tensor, view))
                else:
                    view.copy_(tensor)
            events = []
            for device, pairs in by_device.items():
                stream = self._streams.get(device)
                if stream is None:
                    stream = self._streams[device] = _cuda.Stream(device)
                stream.wait_stream(_cuda.current_stream(device))
                with _cuda.stream(stream):
                    for tensor, view in pairs:
                        view.copy_(tensor, non_blocking=True)
                        # The allocator must not hand the memory out while the copy runs.
                        tensor.record_stream(stream)
                    events.append(stream.record_event())
        return events

    def _take(self, size: int) -> _Block:
        began = monotonic()
        collect = began
        while True:
            free = [block for block in self._kept if block.is_free()]
            fitting = [block for block in free if block.bytes.nbytes >= size]
            if fitting:
                return min(fitting, key=lambda block: block.bytes.nbytes)
            if free:
                # Too small for this state, so too small for the next.
                self._drop(free[0])
                continue
            if len(self._kept) < self.blocks:
                block = self._make(size)
                self._kept.append(block)
                return block
            now = monotonic()
            if now - began > WAIT_SECONDS:
                what = (
                    f"{len(self._kept)} staged states are still in use after {WAIT_SECONDS:.0f} s"
                )
                raise make("timeout", what, None, ["wait for the saves before, or pass blocks="])
            if now >= collect:
                # A state that nobody uses may hang in a cycle. A collection takes as long as the process is large, and
                # most waits are for a disk.
                gc.collect()
                collect = now + max(_COLLECT_SECONDS, 2 * (now - began))
            else:
                sleep(_LOOK_SECONDS)

    def _make(self, size: int) -> _Block:
        pin = _cuda.is_available() and _cuda.is_initialized()
        memory: Any
        if not self.share_memory:
            memory = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pin)
            return _Block(memory)
        memory = torch.empty(size, dtype=torch.uint8, device="cpu")
        memory.share_memory_()
        return _Block(memory, pinned=pin and size > 0 and _register(memory))

    def _drop(self, block: _Block) -> None:
        self._kept.remove(block)
        if block.pinned:
            _cuda.cudart().cudaHostUnregister(block.bytes.data_ptr())

    def synchronize_staging(self) -> None:
        """Waits until the last state is staged."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Gives all memory back that no staged state needs. The next `stage` takes some again."""
        self.synchronize_staging()
        if self._executor is not None:
            self._executor.shutdown(wait=True)
            self._executor = None
        for block in list(self._kept):
            if block.is_free():
                self._drop(block)
        self._kept = [block for block in self._kept if not block.is_free()]
        self._streams.clear()


def _settled(built: Staged, events: list[torch.cuda.Event]) -> Staged:
    for event in events:
        event.synchronize()
    return built


def _register(memory: torch.Tensor) -> bool:
    """Pins memory that is there. False if the driver says no: copies are slower then."""
    result = _cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    return int(result) == 0
