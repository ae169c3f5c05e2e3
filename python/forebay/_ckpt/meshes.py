"""Which regions of a tensor each rank of a mesh holds, from the mesh and the placements alone.

A dimension is followed as the rows that a rank holds of it, kept as runs (start, end) in local order. A `Shard` takes
the rank's share of those rows as `torch.chunk` cuts them; a `_StridedShard` cuts the rows into `split_factor` parts
first and takes the rank's share of each, so that its rows may be several runs: then the rank holds several regions.

FSDP2 over tensor parallelism says `[_StridedShard(0, tp), Shard(0)]` for what tensor parallelism cut first. Read from
left to right that is exact only where everything divides evenly: of 9 rows over dp = 4, tp = 2 the rank at (3, 1)
really holds row 8, which the placements give to (3, 0). So a layout with strided placements has two readings
(`reading`): 0 from left to right, 1 with each strided cut made after the mesh dimensions to its right that its factor
stands for. The local shapes of all ranks tell which is right (`agreement`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

from forebay._errors import make, usage

Shape = tuple[int, ...]
#: Offsets and sizes.
Region = tuple[Shape, Shape]
Runs = list[tuple[int, int]]

#: Pieces of one tensor on one rank; more is taken for nonsense.
PIECES_MAX = 1 << 16

#: A placement: kind ("R", "S" or "_S"), dimension of the tensor, split factor.
Placement = tuple[str, int, int]

REPLICATE: Placement = ("R", 0, 1)


@dataclass(frozen=True)
class MeshLayout:
    """Placements on a mesh of ranks (of the saving group)."""

    #: The ranks in row-major order, and the sides of the mesh.
    ranks: tuple[int, ...]
    sides: Shape
    placements: tuple[Placement, ...]
    reading: int = 0

    def __post_init__(self) -> None:
        if len(self.placements) != len(self.sides) or prod(self.sides) != len(self.ranks):
            what = f"mesh of {self.sides} has {len(self.ranks)} ranks, {len(self.placements)} placements"
            raise make("structure_mismatch", what)

    @property
    def is_strided(self) -> bool:
        """Whether there are two readings."""
        return any(kind == "_S" for kind, _, _ in self.placements)

    @cached_property
    def cuts(self) -> tuple[tuple[int, int, int], ...] | None:
        """(mesh dimension, dimension of the tensor, split factor) in the order in which they cut; `None` where no
        choice of mesh dimensions makes up a split factor."""
        plain = [
            (at, dim, factor)
            for at, (kind, dim, factor) in enumerate(self.placements)
            if kind != "R"
        ]
        if not self.reading:
            return tuple(plain)
        by_dim: dict[int, list[int]] = {}
        for at, dim, factor in reversed(plain):
            cutters = by_dim.setdefault(dim, [])
            before = self._count_that_make(cutters, factor)
            if before is None:
                return None
            cutters.insert(before, at)
        return tuple((at, dim, 1) for dim, cutters in by_dim.items() for at in cutters)

    def _count_that_make(self, cutters: list[int], factor: int) -> int | None:
        made = 1
        for count, at in enumerate(cutters):
            if made == factor:
                return count
            made *= self.sides[at]
        return len(cutters) if made == factor else None

    def coordinate(self, rank: int) -> Shape | None:
        """Where a rank stands in the mesh."""
        at = self._places.get(rank)
        if at is None:
            return None
        coordinate = []
        for side in reversed(self.sides):
            coordinate.append(at % side)
            at //= side
        return tuple(reversed(coordinate))

    @cached_property
    def _places(self) -> dict[int, int]:
        return {rank: place for place, rank in enumerate(self.ranks)}

    def runs(self, shape: Shape, rank: int) -> list[Runs] | None:
        """The rows of each dimension that a rank holds; `None` for a rank outside the mesh, or a reading that cannot
        be."""
        where = self.coordinate(rank)
        if where is None or self.cuts is None:
            return None
        rows: list[Runs] = [[(0, side)] for side in shape]
        for at, dim, factor in self.cuts:
            if dim >= len(shape):
                raise usage(f"a placement cuts dimension {dim} of a tensor of {len(shape)}")
            rows[dim] = _cut(rows[dim], self.sides[at], where[at], factor)
        return [_joined(runs) for runs in rows]

    def local_shape(self, shape: Shape, rank: int) -> Shape | None:
        """The sides of what a rank holds."""
        rows = self.runs(shape, rank)
        return None if rows is None else tuple(_count(runs) for runs in rows)

    def regions(self, shape: Shape, rank: int) -> list[Region]:
        """What a rank holds, in the row-major order of its local tensor; none for a rank outside the mesh."""
        rows = self.runs(shape, rank)
        if rows is None:
            return []
        return [region for region, _ in _boxes(shape, rows)]

    def pieces(self, shape: Shape, rank: int) -> list[tuple[Region, Shape]]:
        """The regions, each with where it starts in the local tensor."""
        rows = self.runs(shape, rank)
        return [] if rows is None else _boxes(shape, rows)


def _count(runs: Runs) -> int:
    return sum(end - start for start, end in runs)


def _cut(runs: Runs, parts: int, part: int, factor: int) -> Runs:
    """The share of one of `parts` ranks of the rows in `runs`, cut into `factor` pieces before."""
    count = _count(runs)
    taken: Runs = []
    for piece in range(factor):
        start, end = _chunk(count, factor, piece)
        low, high = _chunk(end - start, parts, part)
        taken += _slice(runs, start + low, start + high)
    return taken


def _chunk(count: int, parts: int, part: int) -> tuple[int, int]:
    """What `torch.chunk` gives to a part; parts that get nothing are empty."""
    side = -(-count // parts)
    return min(count, part * side), min(count, (part + 1) * side)


def _slice(runs: Runs, low: int, high: int) -> Runs:
    """Rows `low` to `high` of the rows that the runs hold, one after another."""
    taken: Runs = []
    for start, end in runs:
        side = end - start
        if low < side and high > 0:
            taken.append((start + max(low, 0), start + min(high, side)))
        low -= side
        high -= side
    return [(start, end) for start, end in taken if end > start]


def _joined(runs: Runs) -> Runs:
    joined: Runs = []
    for start, end in runs:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined


def _boxes(shape: Shape, rows: list[Runs]) -> list[tuple[Region, Shape]]:
    if any(not _count(runs) for runs in rows):
        # Nothing is held; torch lets such a shard start at the end.
        empty = [
            (side, 0) if not _count(runs) else (runs[0][0], _count(runs))
            for side, runs in zip(shape, rows, strict=True)
        ]
        region = (tuple(start for start, _ in empty), tuple(side for _, side in empty))
        return [(region, tuple(0 for _ in shape))]
    if prod(len(runs) for runs in rows) > PIECES_MAX:
        raise make("unsupported", f"a shard is in more than {PIECES_MAX} pieces")
    along: list[list[tuple[int, int, int]]] = []
    for runs in rows:
        local = 0
        placed = []
        for start, end in runs:
            placed.append((start, end - start, local))
            local += end - start
        along.append(placed)
    return [
        (
            (tuple(start for start, _, _ in box), tuple(side for _, side, _ in box)),
            tuple(local for _, _, local in box),
        )
        for box in product(*along)
    ]
