"""Whether tensors have the memory that they say they have.

A storage can be freed or shortened under a tensor (`tensor.untyped_storage().resize_(0)`, as FSDP and compilers do), and
fake tensors have none at all. Reading such a tensor ends the process, or stores what lies behind its memory; filling it
overwrites that. So every tensor is looked at before each save and restore: 0.8 us a tensor.

Memory that may only be read (tensors over a mapped file, or over bytes) is no place to restore into: what the process
has mapped is looked at once a restore, where the system says it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import add, le, mul

import torch

from forebay._errors import make, quoted, usage

_MAPS = "/proc/self/maps"

#: Places of a tensor with odd strides that are looked at one by one, at the most.
_LOOKED_AT = 1 << 26

_HINT = (
    "its memory was freed or shortened (FSDP, resize_), or it is a fake tensor: save and restore it when it has its "
    "memory again, or leave it out"
)


def addresses_of(
    names: Sequence[str], memory: Sequence[Sequence[torch.Tensor]]
) -> tuple[list[torch.Tensor], list[int]]:
    """All pieces of memory (those of each name) in one list, and their addresses. Errors: `usage` for one whose memory
    is not there, or is shorter than it."""
    pieces = list(chain.from_iterable(memory))
    addresses = list(map(torch.Tensor.data_ptr, pieces))
    offsets = map(torch.Tensor.storage_offset, pieces)
    widths = map(torch.Tensor.element_size, pieces)
    lengths = map(torch.UntypedStorage.nbytes, map(torch.Tensor.untyped_storage, pieces))
    ends = map(mul, map(add, offsets, map(torch.Tensor.numel, pieces)), widths)
    # Of contiguous tensors, which most are, the elements are the extent.
    plain = all(map(le, ends, lengths)) and all(map(torch.Tensor.is_contiguous, pieces))
    if not plain or not all(addresses):
        _check_each(names, memory, pieces)
    return pieces, addresses


def _check_each(
    names: Sequence[str], memory: Sequence[Sequence[torch.Tensor]], pieces: list[torch.Tensor]
) -> None:
    for at, piece in enumerate(pieces):
        address, needed = piece.data_ptr(), _extent(piece)
        room = piece.untyped_storage().nbytes() - piece.storage_offset() * piece.element_size()
        lacks = room < needed or (not address and (piece.is_cpu or piece.is_cuda))
        if needed and lacks:
            raise _short(_name_of(names, memory, at), needed, room if address else 0)


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first to after its last."""
    if tensor.is_contiguous():
        return tensor.nbytes
    if not tensor.numel():
        return 0
    sides = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((side - 1) * stride for side, stride in sides)) * tensor.element_size()


def _name_of(names: Sequence[str], memory: Sequence[Sequence[torch.Tensor]], at: int) -> str:
    for name, pieces in zip(names, memory, strict=True):
        if at < len(pieces):
            return name
        at -= len(pieces)
    return ""


def _short(name: str, needed: int, room: int) -> Exception:
    what = f"a tensor of {needed} bytes has {max(room, 0)} bytes of memory"
    return usage(what, _HINT, where=f"tensor {quoted(name)}")


def check_writable(names: Sequence[str], memory: Sequence[torch.Tensor]) -> None:
    """Whether tensors can be filled: each element has its place, and host memory may be written, as far as the system
    says so. Errors: `usage`."""
    fixed = list(_read_only())
    starts = [start for start, _ in fixed]
    for name, tensor in zip(names, memory, strict=True):
        if not tensor.is_contiguous() and _folded(tensor):
            what = "several elements of a tensor lie in one place, so they cannot be filled apart"
            hint = (
                "restore into a copy of it (.clone()), or into the tensor that it was expanded from"
            )
            raise make("usage", what, f"tensor {quoted(name)}", [hint])
        if not tensor.is_cpu or not tensor.numel():
            continue
        start = tensor.data_ptr()
        last = start + _extent(tensor) - 1
        at = bisect_right(starts, last) - 1
        if at >= 0 and fixed[at][1] > start:
            hint = "restore into a copy of it (.clone()): it lies over a file or bytes that may only be read"
            what = "the memory of a tensor cannot be written"
            raise make("usage", what, f"tensor {quoted(name)}", [hint])


def _folded(tensor: torch.Tensor) -> bool:
    """Whether elements of a tensor share a place: it was expanded, or its rows overlap (`as_strided`, `unfold`)."""
    if tensor.numel() < 2:
        return False
    sides = [(stride, side) for side, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    reach = 0
    nested = True
    for stride, side in sorted((stride, side) for stride, side in sides if side > 1):
        nested = nested and stride > reach
        reach += (side - 1) * stride
    if nested:
        return False
    if reach + 1 < tensor.numel() or reach > _LOOKED_AT:
        return True
    # Strides that do not nest, as (2, 3) of sides (3, 2), may keep elements apart all the same.
    taken = torch.zeros(reach + 1, dtype=torch.bool)
    torch.as_strided(taken, tensor.shape, tensor.stride()).fill_(True)
    return int(taken.sum()) < tensor.numel()


def _read_only() -> Iterator[tuple[int, int]]:
    """Mappings of this process that may not be written, in their order; none where the system does not say."""
    try:
        with open(_MAPS, encoding="ascii", errors="replace") as maps:
            for line in maps:
                span, rights, _ = line.split(maxsplit=2)
                if "w" not in rights:
                    start, _, end = span.partition("-")
                    yield int(start, 16), int(end, 16)
    except OSError:
        return
