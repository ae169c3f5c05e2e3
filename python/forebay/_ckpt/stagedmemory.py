"""Memory that a state is copied into and that outlives the process, because somebody else has it too.

It is a memfd: a file in memory without a name, which lives as long as anybody has it open or mapped. It is sealed against
changing its size, so that whoever reads it is never left without pages. Views of it are kept from save to save, as those
of any `Shadow`. For a GPU it is registered with CUDA, so that copies run at the rate of the link; pages are touched and
pinned once, when it is made.

Children of a fork do not have it: neither its pages nor, once they have run (`forget`), its descriptor. Where its pages
were they may have others, so what they inherit of the mapping is never unmapped.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from forebay import _native
from forebay._ckpt.shadow import Shadow

#: What a thread copies at a time, and how many threads do: these reach what memory gives to copies.
_PIECE_BYTES = 32 << 20
_COPIERS_MAX = 4

#: Of what is free, how much the ranks of a node take at the most.
_SHARE = 0.75

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

#: Those that a fork takes from its child.
_made: weakref.WeakSet[StagedMemory] = weakref.WeakSet()

#: And what they are mapped by, as long as a tensor of it is left.
_mapped: weakref.WeakSet[_Mapping] = weakref.WeakSet()


class _Mapping(mmap.mmap):
    """The mapping; goes with the last tensor of it."""

    registered: int = 0

    def __del__(self) -> None:
        if self.registered:
            with contextlib.suppress(Exception):
                _cudart().cudaHostUnregister(self.registered)


@dataclass(slots=True, eq=False, weakref_slot=True)
class StagedMemory(Shadow):
    """See the module. `device` is the host's."""

    #: The memfd; -1 before there is one.
    file: int = -1
    #: Whether copies from a GPU go there.
    pinned: bool = False

    def stage(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies tensors; returns the copies when all bytes are there. Errors: `OSError` where the memory cannot be had."""
        cuda = {tensor.device for tensor in tensors if tensor.is_cuda}
        if cuda and not self.pinned:
            self.release()
            self.pinned = True
        self.make(tensors)
        pairs = list(zip(self.views, tensors, strict=True))
        plain = [pair for pair in pairs if _is_plain(pair[1])]
        with torch.no_grad():
            for view, tensor in pairs:
                if not _is_plain(tensor):
                    view.copy_(tensor, non_blocking=True)
        _copy(plain)
        for device in cuda:
            torch.cuda.current_stream(device).synchronize()
        return list(self.views)

    def warm(self, size: int, pinned: bool) -> None:
        """Makes the memory now that copies of so many bytes take. Errors: `OSError`."""
        if pinned and not self.pinned:
            self.release()
            self.pinned = True
        if self.bytes < size:
            Shadow.release(self)
            self.buffer = self._take(size)

    def offsets(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Where copies lie in the memory."""
        assert self.buffer is not None
        start = self.buffer.data_ptr()
        # What has no bytes lies nowhere.
        return [tensor.data_ptr() - start if tensor.nbytes else 0 for tensor in tensors]

    def _take(self, size: int) -> torch.Tensor:
        self._close()
        # A file without bytes cannot be mapped.
        size = -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        _check_room(size)
        file = os.memfd_create("forebay-staged", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        try:
            # All of its pages: one that is missing later would be a SIGBUS.
            os.posix_fallocate(file, 0, size)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
            mapping = _Mapping(file, size)
            _mapped.add(mapping)
            with contextlib.suppress(OSError):
                mapping.madvise(mmap.MADV_DONTFORK)
            memory = torch.frombuffer(mapping, dtype=torch.uint8)
            if self.pinned:
                _register(mapping, memory)
        except BaseException:
            os.close(file)
            raise
        self.file = file
        _made.add(self)
        return memory

    def release(self) -> None:
        """Gives the memory back, but for what others have of it."""
        # Not `super()`: a class with slots is made twice.
        Shadow.release(self)
        self._close()

    def forget(self) -> None:
        """For the child of a fork: it has none of this."""
        self._close()

    def _close(self) -> None:
        file, self.file = self.file, -1
        if file >= 0:
            os.close(file)

    def __del__(self) -> None:
        self._close()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it lies in host memory as it is written."""
    lazy = tensor.is_conj() or tensor.is_neg()
    return tensor.is_cpu and tensor.is_contiguous() and not lazy


def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copies bytes, with few threads: torch's own meet after every tensor, and wait for the CPU that another has."""
    pieces = [
        (view.data_ptr() + at, tensor.data_ptr() + at, min(_PIECE_BYTES, tensor.nbytes - at))
        for view, tensor in pairs
        for at in range(0, tensor.nbytes, _PIECE_BYTES)
    ]
    total = sum(size for _, _, size in pieces)
    threads = min(_COPIERS_MAX, len(os.sched_getaffinity(0)), -(-total // _PIECE_BYTES))
    if threads <= 1:
        for piece in pieces:
            ctypes.memmove(*piece)
        return
    with ThreadPoolExecutor(threads, "forebay-stage") as copiers:
        shares = [pieces[number::threads] for number in range(threads)]
        for done in [copiers.submit(_move, share) for share in shares]:
            done.result()


def _move(pieces: Sequence[tuple[int, int, int]]) -> None:
    for piece in pieces:
        # Without the GIL.
        ctypes.memmove(*piece)


def _check_room(size: int) -> None:
    """Errors: `OSError` where the ranks of this node would take too much of what is free: the kernel would end one."""
    free = _native.memory_headroom()
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    wanted = size * (int(ranks) if ranks.isdecimal() else 1)
    if free is not None and wanted > free * _SHARE:
        text = f"{wanted} bytes are needed by the ranks of this node, {free} are free"
        raise OSError(errno.ENOMEM, text)


def _register(mapping: _Mapping, memory: torch.Tensor) -> None:
    address = memory.data_ptr()
    code = int(_cudart().cudaHostRegister(address, memory.nbytes, 0))
    if code != 0:
        with contextlib.suppress(RuntimeError):
            # The next launch would find the error, and raise it where nobody expects it.
            torch.ones(1, device="cuda")
        raise OSError(errno.ENOMEM, f"CUDA does not register {memory.nbytes} bytes: error {code}")
    mapping.registered = address


def _cudart() -> Any:
    cuda: Any = torch.cuda
    return cuda.cudart()


def _after_fork() -> None:
    for memory in list(_made):
        memory.forget()
    _made.clear()
    for mapping in list(_mapped):
        # Not even at the end of the interpreter: it would unmap what the child has mapped since where there is nothing
        # now, and take from CUDA what the parent has registered.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapping))
    _mapped.clear()


os.register_at_fork(after_in_child=_after_fork)
