"""Reading tensors of a checkpoint into the memory that waits for them.

What several ranks of a host need is read once for all of them; the rest each reads by itself, straight into its memory.
Memory that the engine cannot fill (strided tensors, other kinds of devices) is filled by way of buffers, a bounded
number of bytes at a time: a state of transposed tensors takes no second one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import torch

from forebay import _native
from forebay._ckpt.nodeshare import Job, Want, read_together
from forebay._ckpt.optimizers import Entry
from forebay._ckpt.ranks import Ranks
from forebay._ckpt.reading import read_regions
from forebay._ckpt.restorereport import RestoreReport
from forebay._ckpt.settings import Progress
from forebay._ckpt.snapshot import HOST
from forebay._ckpt.targets import Piece

#: Bytes of buffers at a time. A rank of eight has as much room beside its state; reads of 4 MiB are many enough in it.
BUFFER_BYTES = 256 << 20

#: How often a reader says that it is alive.
_BEAT_SECONDS = 2.0


@dataclass(slots=True)
class Filling:
    """One restore's reading of tensors."""

    ranks: Ranks
    checkpoint: _native.Checkpoint
    entries: Sequence[Entry]
    report: RestoreReport
    beat: Callable[[], None] | None
    threads: int | None
    progress: Progress | None
    _total: int = 0
    _beaten: float = field(default_factory=monotonic)

    def fill(self, pieces: list[Piece], own: list[Piece], node_bytes: int) -> None:
        """Fills pieces that other ranks may want too, and this rank's own. A collective call."""
        self._total = sum(piece.memory.nbytes for piece in (*pieces, *own))
        left = (self._together(pieces, node_bytes) if not self.ranks.alone else pieces) + own
        by_device: dict[torch.device, list[Piece]] = {}
        for piece in left:
            by_device.setdefault(piece.memory.device, []).append(piece)
        for device, group in by_device.items():
            self._on_device(device, group)
        self.report.read_bytes = sum(int(one["read_bytes"]) for one in self.report.transfers)

    def _together(self, pieces: list[Piece], node_bytes: int) -> list[Piece]:
        """Reads what several ranks of this host need; returns what is left to each. A collective call."""
        told = self._told()

        def read(wants: list[Want], memory: list[torch.Tensor], before: int) -> dict[str, Any]:
            def alive(_: int, __: int) -> None:
                told(before, self._total)

            return read_regions(self.checkpoint, wants, memory, "host", self.threads, alive)

        job = Job(self.ranks, self.checkpoint, self.entries, pieces, node_bytes, read)
        done = read_together(job)
        self.report.transfers += done.reports
        self.report.bytes += done.bytes
        self.report.shared_bytes = done.bytes
        self._told()(0, self._total)
        return done.left

    def _on_device(self, device: torch.device, pieces: list[Piece]) -> None:
        known = device.type in ("cpu", "cuda")
        name = f"cuda:{device.index}" if device.type == "cuda" else "host"
        direct = [piece for piece in pieces if known and _can_be_filled(piece.memory)]
        if direct:
            self._read(name, direct, [piece.memory for piece in direct])
        if len(direct) == len(pieces):
            return
        others = [piece for piece in pieces if not (known and _can_be_filled(piece.memory))]
        for batch in _batches(others):
            kind = device if known else HOST
            buffers = [
                torch.empty(one.memory.shape, dtype=one.memory.dtype, device=kind) for one in batch
            ]
            self._read(name, batch, buffers)
            with torch.no_grad():
                for piece, buffer in zip(batch, buffers, strict=True):
                    piece.memory.copy_(buffer)

    def holds(self, pieces: list[Piece]) -> bool:
        """Whether the memory of pieces holds, bit by bit, what the checkpoint has for them. Not a collective call."""
        for batch in _batches(pieces):
            wants = [(piece.entry, *piece.region) for piece in batch]
            # Not where torch's default device is.
            stored = [
                torch.empty(one.memory.shape, dtype=one.memory.dtype, device=HOST) for one in batch
            ]
            self.report.transfers.append(
                read_regions(self.checkpoint, wants, stored, "host", self.threads, self._alive)
            )
            pairs = zip(batch, stored, strict=True)
            if not all(torch.equal(_bytes(piece.memory), _bytes(one)) for piece, one in pairs):
                return False
        return True

    def _read(self, name: str, pieces: list[Piece], memory: list[torch.Tensor]) -> None:
        wants = [(piece.entry, *piece.region) for piece in pieces]
        report = read_regions(self.checkpoint, wants, memory, name, self.threads, self._told())
        self.report.transfers.append(report)
        self.report.bytes += sum(piece.memory.nbytes for piece in pieces)

    def _alive(self, _: int, __: int) -> None:
        """Keeps the lease while something is read."""
        if self.beat is not None and monotonic() - self._beaten > _BEAT_SECONDS:
            self._beaten = monotonic()
            self.beat()

    def _told(self) -> Progress:
        progress, before = self.progress, self.report.bytes

        def told(done: int, total: int) -> None:
            self._alive(done, total)
            if progress is not None:
                progress(before + done, self._total)

        return told


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor's elements, on the host."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8)


def _can_be_filled(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def _batches(pieces: list[Piece]) -> Iterator[list[Piece]]:
    """Pieces in groups of `BUFFER_BYTES`, large ones in parts."""
    batch: list[Piece] = []
    room = BUFFER_BYTES
    for piece in pieces:
        for part in _parts(piece):
            if batch and part.memory.nbytes > room:
                yield batch
                batch, room = [], BUFFER_BYTES
            batch.append(part)
            room -= part.memory.nbytes
    if batch:
        yield batch


def _parts(piece: Piece) -> Iterator[Piece]:
    """A piece cut along its longest side into what fits into a buffer."""
    memory = piece.memory
    if memory.nbytes <= BUFFER_BYTES:
        yield piece
        return
    side = max(range(memory.dim()), key=lambda dim: memory.shape[dim])
    length = memory.shape[side]
    count = max(length * BUFFER_BYTES // memory.nbytes, 1)
    offsets, sizes = piece.region
    for start in range(0, length, count):
        taken = min(count, length - start)
        moved = _with(offsets, side, offsets[side] + start), _with(sizes, side, taken)
        yield from _parts(Piece(piece.entry, moved, memory.narrow(side, start, taken)))


def _with(sides: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*sides[:dim], value, *sides[dim + 1 :])
