"""Reading once per host: ranks that restore together on one host read what several of them need together.

Ranks find those on their own host, tell them what they want, and all come to the same plan (`nodeplan`). In rounds each reads
its share straight into memory between them (`nodememory`), checked on the way, and when all have, every rank copies what it
needs to where it belongs. What one rank needs alone it reads by itself, as does everyone where there is no such memory.

Two halves of the memory take turns. A rank goes on to read into the second half while others still copy from the first;
the exchange after a round's reads says that everyone is done with the round before, so one a round is enough. It carries
errors too: what one rank fails with all of them raise, in that round, and nobody waits for a rank that gave up.

All of it is collective, on the calling thread.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from forebay import _native
from forebay._ckpt import nodememory, nodeplan, noderanks
from forebay._ckpt.kinds import dtype_of
from forebay._ckpt.meshes import Region
from forebay._ckpt.nodememory import NodeMemory
from forebay._ckpt.nodeplan import Part, Placed, outside, overlap
from forebay._ckpt.noderanks import WORTH_BYTES, Node
from forebay._ckpt.optimizers import Entry
from forebay._ckpt.ranks import Ranks
from forebay._ckpt.targets import Piece

#: Memory between the ranks of a host at most, unless the caller says otherwise.
SHARED_BYTES = 1 << 30

#: Less memory than this is not worth its rounds.
_ROOM_BYTES_MIN = 8 << 20

#: The number of an entry, offsets and sizes.
Want = tuple[int, Sequence[int], Sequence[int]]

#: Reads regions into contiguous host memory, all of it checked: wants, memory, bytes so far; returns a report.
Read = Callable[[list[Want], list[torch.Tensor], int], dict[str, Any]]


@dataclass(slots=True)
class Job:
    """What one rank wants, and how it reads."""

    ranks: Ranks
    checkpoint: _native.Checkpoint
    entries: Sequence[Entry]
    pieces: list[Piece]
    limit: int
    read: Read

    def itemsize(self, entry: int) -> int:
        """Bytes of an element."""
        return dtype_of(self.entries[entry][3] or "").itemsize

    def chunks(self, entry: int) -> list[Region]:
        """Regions in which a tensor is stored."""
        stored = self.checkpoint.chunks(self.entries[entry][0])
        return [(tuple(offsets), tuple(sizes)) for offsets, sizes in stored]


@dataclass(slots=True)
class Outcome:
    """What was read together."""

    #: What this rank still has to read by itself.
    left: list[Piece]
    #: Bytes that it took out of the shared memory.
    bytes: int = 0
    #: Of its reads into it.
    reports: list[dict[str, Any]] = field(default_factory=list)


def read_together(job: Job) -> Outcome:
    """Fills what the ranks of this host read together, and says what is left. A collective call of the whole group.

    Errors: those of reading, of any rank of the host, named after it.
    """
    wanted = sum(piece.memory.nbytes for piece in job.pieces)
    node = noderanks.find(job.ranks, wanted)
    if node is None:
        return Outcome(job.pieces)
    wants, room = _tell_wants(node, job)
    if room < _ROOM_BYTES_MIN:
        return Outcome(job.pieces)
    failure: Exception | None = None
    parts: dict[int, list[Part]] = {}
    turns: list[list[Placed]] = []
    made: NodeMemory | None = None
    try:
        parts, turns, size = _plan(job, wants, room)
        if turns and node.ranks.rank == 0:
            made = _create(size)
    except Exception as error:  # noqa: BLE001
        failure = error
    try:
        memory = _attached(node, failure, turns, made)
    finally:
        # All that will ever open it have.
        if made is not None:
            made.unlink()
    if memory is None:
        return Outcome(job.pieces)
    return _read_rounds(node, job, parts, turns, memory)


def _tell_wants(node: Node, job: Job) -> tuple[list[nodeplan.Wants], int]:
    """What each rank of the host wants, and the memory that all of them have room for. A collective call."""
    failure: Exception | None = None
    wants: list[Any] = []
    room = 0
    try:
        for piece in job.pieces:
            offsets, sizes = piece.region
            whole = sizes == tuple(job.entries[piece.entry][4])
            wants.append(piece.entry if whole else (piece.entry, offsets, sizes))
        room = min(job.limit, nodememory.room())
    except Exception as error:  # noqa: BLE001
        failure = error
    answers = node.exchange(failure, wants=wants, room=room)
    told: list[nodeplan.Wants] = [_wants(answer["wants"], job.entries) for answer in answers]
    return told, min(int(answer["room"]) for answer in answers)


def _wants(message: list[Any], entries: Sequence[Entry]) -> dict[int, list[Region]]:
    found: dict[int, list[Region]] = {}
    for one in message:
        if isinstance(one, int):
            shape = tuple(entries[one][4])
            found.setdefault(one, []).append(((0,) * len(shape), shape))
        else:
            entry, offsets, sizes = one
            found.setdefault(entry, []).append((tuple(offsets), tuple(sizes)))
    return found


def _plan(
    job: Job, wants: list[nodeplan.Wants], room: int
) -> tuple[dict[int, list[Part]], list[list[Placed]], int]:
    """What is read together, in rounds, and the bytes of memory that takes."""
    parts = nodeplan.together(wants, job.chunks, job.itemsize)
    total = nodeplan.total_bytes(parts, job.itemsize)
    if total < WORTH_BYTES:
        return {}, [], 0
    half = room // 2 // 4096 * 4096
    turns = nodeplan.rounds(parts, job.itemsize, len(wants), half)
    if len(turns) > 1:
        return parts, turns, 2 * half
    last = turns[0][-1]
    return parts, turns, last.start + last.unit.bytes


def _create(size: int) -> NodeMemory | None:
    try:
        return nodememory.create(size)
    except OSError:
        return None


def _attached(
    node: Node, failure: Exception | None, turns: list[list[Placed]], made: NodeMemory | None
) -> NodeMemory | None:
    """The memory that the host's first rank made; `None` on all ranks if one of them has none. A collective call."""
    digest = zlib.crc32(repr(turns).encode())
    answers = node.exchange(failure, plan=digest, memory=None if made is None else made.place)
    place = answers[0]["memory"]
    # Plans differ if the step was saved anew between two ranks' looks at it.
    if place is None or any(answer["plan"] != digest for answer in answers):
        return None
    memory = made
    if memory is None:
        with contextlib.suppress(OSError):
            memory = nodememory.attach(place)
    answers = node.exchange(None, attached=memory is not None)
    return memory if all(answer["attached"] for answer in answers) else None


def _read_rounds(
    node: Node,
    job: Job,
    parts: Mapping[int, Sequence[Part]],
    turns: list[list[Placed]],
    memory: NodeMemory,
) -> Outcome:
    """Reads and copies, round by round. A collective call."""
    outcome = Outcome(_left(job.pieces, parts))
    pieces: dict[int, list[Piece]] = {}
    for piece in job.pieces:
        if piece.entry in parts:
            pieces.setdefault(piece.entry, []).append(piece)
    half = memory.data.numel() // 2
    failure: Exception | None = None
    for number, turn in enumerate(turns):
        data = memory.data[half:] if number % 2 else memory.data
        try:
            if failure is None:
                _read_share(node, job, turn, data, outcome)
        except Exception as error:  # noqa: BLE001
            failure = error
        node.exchange(failure)
        try:
            outcome.bytes += _scatter(data, turn, pieces, job)
        except Exception as error:  # noqa: BLE001
            # The others learn of it after the next round's reads.
            failure = error
    if failure is not None:
        raise failure
    return outcome


def _read_share(
    node: Node, job: Job, turn: Sequence[Placed], data: torch.Tensor, outcome: Outcome
) -> None:
    """Reads what this rank reads for all in a round."""
    mine = [placed for placed in turn if placed.reader == node.ranks.rank]
    if mine:
        views = [_view(data, placed, job) for placed in mine]
        wants: list[Want] = [(placed.unit.entry, *placed.unit.region) for placed in mine]
        outcome.reports.append(job.read(wants, views, outcome.bytes))


def _view(data: torch.Tensor, placed: Placed, job: Job) -> torch.Tensor:
    """A unit in the shared memory, row-major."""
    unit = placed.unit
    bytes_here = data[placed.start : placed.start + unit.bytes]
    return bytes_here.view(dtype_of(job.entries[unit.entry][3] or "")).view(unit.region[1])


def _scatter(
    data: torch.Tensor, turn: Sequence[Placed], pieces: Mapping[int, list[Piece]], job: Job
) -> int:
    """Copies what this rank wants of a round to where it belongs; returns the bytes."""
    copied = 0
    with torch.no_grad():
        for placed in turn:
            unit = placed.unit
            for piece in pieces.get(unit.entry, ()):
                both = overlap(unit.region, piece.region)
                if both is None:
                    continue
                source = _box(_view(data, placed, job), both, unit.region)
                _box(piece.memory, both, piece.region).copy_(source)
                copied += source.numel() * source.element_size()
    return copied


def _box(tensor: torch.Tensor, inner: Region, outer: Region) -> torch.Tensor:
    """The memory of a region inside of another's."""
    for dim, (low, side, start) in enumerate(zip(*inner, outer[0], strict=True)):
        tensor = tensor.narrow(dim, low - start, side)
    return tensor


def _left(pieces: Sequence[Piece], parts: Mapping[int, Sequence[Part]]) -> list[Piece]:
    """What is not read together. Whatever a piece needs of a chunk lies in one part of it, or in none."""
    left: list[Piece] = []
    for piece in pieces:
        here = [one for one in parts.get(piece.entry, ()) if overlap(one.region, piece.region)]
        rest = outside(piece.region, [one.chunk for one in here])
        if len(rest) == 1 and rest[0] == piece.region:
            left.append(piece)
            continue
        for region in rest:
            left.append(Piece(piece.entry, region, _box(piece.memory, region, piece.region)))
    return left
