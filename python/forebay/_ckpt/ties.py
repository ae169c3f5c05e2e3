"""Tensors that are the same memory.

Values of one dtype and shape over the same bytes (tied weights) are stored once, under every name. Any other overlap is
refused: both would be written, and a restore could bring back only one of them. Tensors side by side in one buffer are
neither, nor are columns of one matrix: their extents overlap, their bytes do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from forebay._errors import SharedTensorsError, quoted

#: Extents that overlap are compared one by one up to so many in a group.
_COMPARED = 2000


@dataclass(slots=True)
class _Span:
    """Bytes of one piece: runs of `width`, one every `step` (0: one run)."""

    start: int
    end: int
    step: int
    width: int
    leaf: int

    def meets(self, other: _Span) -> bool:
        """Whether bytes are shared. In doubt they are."""
        if self.start >= other.end or other.start >= self.end:
            return False
        if self.step != other.step or not self.step:
            return True
        ahead = (other.start - self.start) % self.step
        return ahead < self.width or ahead + other.width > self.step


def find_ties(names: Sequence[str], memory: Sequence[Sequence[torch.Tensor]]) -> dict[int, int]:
    """The leaves that are another one's memory, each with the first of that memory. `memory` has the pieces of each
    leaf.

    Errors: `SharedTensorsError` for tensors that share memory in part.
    """
    if _plainly_apart(memory):
        return {}
    spans: list[_Span] = []
    empty: list[int] = []
    for leaf, pieces in enumerate(memory):
        for piece in pieces:
            bytes_ = piece.nbytes
            if not bytes_:
                empty.append(leaf)
                continue
            start = piece.data_ptr()
            if piece.is_contiguous():
                spans.append(_Span(start, start + bytes_, 0, bytes_, leaf))
            else:
                spans.append(_strided(piece, start, leaf))
    first: dict[object, int] = {}
    ties: dict[int, int] = {}
    for group in _overlapping(spans):
        for leaf in sorted({span.leaf for span in group}):
            kept = first.setdefault(_identity(memory[leaf]), leaf)
            if kept != leaf:
                ties[leaf] = kept
        _check(names, [span for span in group if span.leaf not in ties])
    for leaf in empty:
        # Nothing of it is here, but elsewhere the others may be tied: the storage tells.
        if not any(piece.nbytes for piece in memory[leaf]):
            kept = first.setdefault(_identity(memory[leaf]), leaf)
            if kept != leaf:
                ties[leaf] = kept
    return ties


def _plainly_apart(memory: Sequence[Sequence[torch.Tensor]]) -> bool:
    """Whether all pieces are contiguous, hold something and lie apart: as they do nearly always."""
    flat = [piece for pieces in memory for piece in pieces]
    starts = [piece.data_ptr() for piece in flat]
    sizes = [piece.nbytes for piece in flat]
    if len(flat) < len(memory) or not all(sizes) or not all(one.is_contiguous() for one in flat):
        return False
    order = sorted(range(len(flat)), key=starts.__getitem__)
    return all(starts[one] + sizes[one] <= starts[other] for one, other in pairwise(order))


def _strided(piece: torch.Tensor, start: int, leaf: int) -> _Span:
    size = piece.element_size()
    sides = zip(piece.shape, piece.stride(), strict=True)
    reaches = [(stride * size, (side - 1) * stride * size) for side, stride in sides]
    length = sum(reach for _, reach in reaches) + size
    step, longest = max((one for one in reaches if one[1]), default=(0, 0))
    return _Span(start, start + length, step, length - longest, leaf)


def _identity(pieces: Sequence[torch.Tensor]) -> object:
    return tuple(
        (
            piece.untyped_storage()._cdata,
            piece.storage_offset(),
            piece.dtype,
            tuple(piece.shape),
            piece.stride(),
        )
        for piece in pieces
    )


def _overlapping(spans: list[_Span]) -> Iterator[list[_Span]]:
    """Groups of spans that overlap, directly or by others; single ones are left out."""
    spans.sort(key=lambda span: span.start)
    group: list[_Span] = []
    end = -1
    for span in spans:
        if span.start >= end:
            if len(group) > 1:
                yield group
            group = []
        group.append(span)
        end = max(end, span.end)
    if len(group) > 1:
        yield group


def _check(names: Sequence[str], group: list[_Span]) -> None:
    for place, span in enumerate(group[:_COMPARED]):
        for other in group[place + 1 : _COMPARED]:
            if other.start >= span.end:
                break
            if span.leaf != other.leaf and span.meets(other):
                what = (
                    "tensors share part of their memory: "
                    f"{quoted(names[span.leaf])} and {quoted(names[other.leaf])}"
                )
                hints = [
                    "tied weights have one shape and dtype and are stored once; of views save one",
                    "or save clones (.clone())",
                ]
                raise SharedTensorsError("usage", what, None, hints)
