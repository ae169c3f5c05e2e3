"""What the ranks of one host read together, and who reads which of it.

Checksums are of whole blocks of 1 MiB, so a rank that needs a few columns of a stored chunk reads nearly all of it, and so
does every other rank of its host; what all ranks hold alike each of them reads again. Here such parts are found: ranges of
a chunk's rows that several ranks need elements of, where reading them once is less than what the ranks would read one by
one. They are cut into units, the units go to rounds that fit the memory between the ranks, and in each round every rank
gets neighbouring units of about the same bytes.

All of it is arithmetic on what every rank of the host knows, so that all come to the same plan without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

from forebay._ckpt.meshes import Region, Shape

#: Bytes under one checksum, counted from a chunk's first byte.
BLOCK_BYTES = 1 << 20

#: A part is read together if that saves one byte in so many: what is read apart goes to its place without another copy.
_SAVES_ONE_IN = 20

#: Units are larger than the first where rounds have room for that, so that blocks at cuts count little, and never larger
#: than the second, so that ranks share the work.
_UNIT_BYTES_MIN = 16 << 20
_UNIT_BYTES_MAX = 64 << 20

#: Where units start in memory: those of the first size on pages, others where any dtype may start.
_PAGED_BYTES = 64 << 10
_PAGE, _ALIGN = 4096, 64


@dataclass(frozen=True, slots=True)
class Unit:
    """A region of an entry that one rank reads for all."""

    entry: int
    region: Region
    bytes: int


@dataclass(frozen=True, slots=True)
class Placed:
    """A unit in a round: where it starts in the shared memory, and the place among the host's ranks of who reads it."""

    unit: Unit
    start: int
    reader: int


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a stored chunk that are read together. A want's share of the chunk lies in one part or in none."""

    chunk: Region
    region: Region


Wants = Mapping[int, Sequence[Region]]


def overlap(one: Region, two: Region) -> Region | None:
    """What two regions have in common; `None` if nothing."""
    offsets: list[int] = []
    sizes: list[int] = []
    for low, side, other, width in zip(*one, *two, strict=True):
        start = max(low, other)
        length = min(low + side, other + width) - start
        if length <= 0:
            return None
        offsets.append(start)
        sizes.append(length)
    return tuple(offsets), tuple(sizes)


def outside(region: Region, holes: Sequence[Region]) -> list[Region]:
    """A region without others, as regions."""
    rest = [region]
    for hole in holes:
        rest = [part for one in rest for part in _without(one, hole)]
    return [one for one in rest if prod(one[1])]


def _without(region: Region, hole: Region) -> list[Region]:
    both = overlap(region, hole)
    if both is None:
        return [region]
    found: list[Region] = []
    offsets, sizes = list(region[0]), list(region[1])
    for dim, (low, side) in enumerate(zip(*both, strict=True)):
        before, after = low - offsets[dim], offsets[dim] + sizes[dim] - low - side
        for start, length in ((offsets[dim], before), (low + side, after)):
            if length:
                found.append(
                    (
                        (*offsets[:dim], start, *offsets[dim + 1 :]),
                        (*sizes[:dim], length, *sizes[dim + 1 :]),
                    )
                )
        offsets[dim], sizes[dim] = low, side
    return found


def parts(chunks: Sequence[Region], itemsize: int, wants: Sequence[Sequence[Region]]) -> list[Part]:
    """What of one tensor is read together; `wants` are those of each rank. Nothing where chunks leave a wanted element
    out: reading it apart says what is wrong."""
    missing = sum(_count(want) for regions in wants for want in regions)
    found: list[Part] = []
    for chunk in chunks:
        needs: list[tuple[int, Region]] = []
        for rank, regions in enumerate(wants):
            for want in regions:
                both = overlap(chunk, want)
                if both is not None:
                    needs.append((rank, both))
                    missing -= _count(both)
        if len({rank for rank, _ in needs}) < 2:
            continue
        for low, high, inside in _clusters(chunk, itemsize, needs):
            if len({rank for rank, _ in inside}) < 2:
                continue
            rows = _rows(chunk, low, high)
            apart = sum(_read_bytes(chunk, need, itemsize) for _, need in inside)
            saved = apart - _read_bytes(chunk, rows, itemsize)
            if saved * _SAVES_ONE_IN >= apart:
                found.append(Part(chunk, rows))
    return found if not missing else []


def _count(region: Region) -> int:
    return prod(region[1])


def _cut_dim(sizes: Shape) -> int | None:
    """The first dimension with more than one row; `None` for a single element."""
    return next((dim for dim, side in enumerate(sizes) if side > 1), None)


def _rows(region: Region, low: int, high: int) -> Region:
    """Rows `low` to `high` of a region along its first dimension with more than one, counted in the whole tensor."""
    offsets, sizes = region
    dim = _cut_dim(sizes)
    if dim is None:
        return region
    return (
        (*offsets[:dim], low, *offsets[dim + 1 :]),
        (*sizes[:dim], high - low, *sizes[dim + 1 :]),
    )


def _clusters(
    chunk: Region, itemsize: int, needs: Sequence[tuple[int, Region]]
) -> Iterator[tuple[int, int, list[tuple[int, Region]]]]:
    """Ranges of rows that needs lie in, with those needs: apart by more than a block, or one range."""
    dim = _cut_dim(chunk[1])
    if dim is None:
        yield 0, 0, list(needs)
        return
    gap = BLOCK_BYTES // (prod(chunk[1][dim + 1 :]) * itemsize)
    inside: list[tuple[int, Region]] = []
    low = high = 0
    for need in sorted(needs, key=lambda one: one[1][0][dim]):
        start = need[1][0][dim]
        if inside and start > high + gap:
            yield low, high, inside
            inside = []
        if not inside:
            low = high = start
        high = max(high, start + need[1][1][dim])
        inside.append(need)
    yield low, high, inside


def _read_bytes(chunk: Region, need: Region, itemsize: int) -> int:
    """Bytes of the blocks that hold a part of a chunk: exact for rows, at most so many for columns."""
    (offsets, sizes), (starts, sides) = chunk, need
    run = itemsize
    dim = len(sizes) - 1
    # From the last dimension on, as long as they are whole.
    while dim >= 0 and sides[dim] == sizes[dim]:
        run *= sizes[dim]
        dim -= 1
    runs = 1
    if dim >= 0:
        run *= sides[dim]
        runs = prod(sides[:dim])
    first = last = 0
    for low, side, start, width in zip(offsets, sizes, starts, sides, strict=True):
        first = first * side + start - low
        last = last * side + start - low + width - 1
    begin = first * itemsize // BLOCK_BYTES
    end = -(-(last + 1) * itemsize // BLOCK_BYTES)
    blocks = min(end - begin, runs * (-(-run // BLOCK_BYTES) + 1))
    return min(blocks * BLOCK_BYTES, prod(sizes) * itemsize)


def units(entry: int, part: Part, itemsize: int, limit: int) -> Iterator[Unit]:
    """A part in units of at most `limit` bytes, cut where a row and a block end together if there are such rows."""
    for region in _cut(part.region, part.chunk[0], itemsize, limit):
        yield Unit(entry, region, _count(region) * itemsize)


def _cut(region: Region, origin: Shape, itemsize: int, limit: int) -> Iterator[Region]:
    offsets, sizes = region
    dim = _cut_dim(sizes)
    if dim is None or _count(region) * itemsize <= limit:
        yield region
        return
    row = prod(sizes[dim + 1 :]) * itemsize
    step = max(limit // row, 1)
    together = BLOCK_BYTES // gcd(row, BLOCK_BYTES)
    if together <= step:
        step -= step % together
    low, end = offsets[dim], offsets[dim] + sizes[dim]
    while low < end:
        # Blocks are counted from the chunk's first row.
        high = min(low + step - (low - origin[dim]) % step, end)
        if row > limit:
            yield from _cut(_rows(region, low, high), origin, itemsize, limit)
        else:
            yield _rows(region, low, high)
        low = high


def together(
    wants: Sequence[Wants],
    chunks_of: Callable[[int], Sequence[Region]],
    itemsize_of: Callable[[int], int],
) -> dict[int, list[Part]]:
    """All that a host's ranks read together, by entry; `wants` are those of each of them."""
    seen: set[int] = set()
    several: set[int] = set()
    for one in wants:
        several |= seen & one.keys()
        seen |= one.keys()
    found: dict[int, list[Part]] = {}
    # Layers repeat: thousands of tensors are a few dozen cases.
    known: dict[Any, list[Part]] = {}
    for entry in sorted(several):
        chunks, itemsize = tuple(chunks_of(entry)), itemsize_of(entry)
        regions = tuple(tuple(one.get(entry, ())) for one in wants)
        key = (chunks, itemsize, regions)
        here = known.get(key)
        if here is None:
            here = known[key] = parts(chunks, itemsize, regions)
        if here:
            found[entry] = here
    return found


def total_bytes(found: Mapping[int, Sequence[Part]], itemsize_of: Callable[[int], int]) -> int:
    """Bytes of memory that all parts take, side by side."""
    return sum(
        _room(_count(part.region) * itemsize_of(entry))
        for entry, here in found.items()
        for part in here
    )


def _room(size: int) -> int:
    """Bytes that a unit takes in the memory: the next one starts where it may."""
    align = _PAGE if size >= _PAGED_BYTES else _ALIGN
    return -(-size // align) * align + (_PAGE if align == _PAGE else 0)


def rounds(
    found: Mapping[int, Sequence[Part]],
    itemsize_of: Callable[[int], int],
    readers: int,
    capacity: int,
) -> list[list[Placed]]:
    """The parts in rounds of at most `capacity` bytes, each with its place and its reader."""
    share = total_bytes(found, itemsize_of) // (2 * readers)
    fair = max(min(share, capacity // readers), _UNIT_BYTES_MIN)
    limit = min(_UNIT_BYTES_MAX, capacity // 2, fair)
    made: list[list[Placed]] = []
    units_here: list[Unit] = []
    used = 0
    for entry, here in found.items():
        for part in here:
            for unit in units(entry, part, itemsize_of(entry), limit):
                if used + _room(unit.bytes) > capacity:
                    made.append(_place(units_here, readers))
                    units_here, used = [], 0
                units_here.append(unit)
                used += _room(unit.bytes)
    if units_here:
        made.append(_place(units_here, readers))
    return made


def _place(these: Sequence[Unit], readers: int) -> list[Placed]:
    total = sum(unit.bytes for unit in these)
    placed: list[Placed] = []
    at = before = 0
    for unit in these:
        if unit.bytes >= _PAGED_BYTES:
            at = -(-at // _PAGE) * _PAGE
        reader = min((2 * before + unit.bytes) * readers // (2 * total), readers - 1)
        placed.append(Placed(unit, at, reader))
        at += -(-unit.bytes // _ALIGN) * _ALIGN
        before += unit.bytes
    return placed
