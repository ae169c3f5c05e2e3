"""Which regions the ranks of a mesh hold."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from forebay._ckpt.meshes import MeshLayout, Placement, Region

_sides = st.lists(st.integers(1, 4), min_size=1, max_size=3)
_shapes = st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)


def _placements(dims: int, count: int) -> Any:
    cut = st.tuples(st.just("S"), st.integers(0, dims - 1), st.just(1))
    return st.lists(st.one_of(st.just(("R", 0, 1)), cut), min_size=count, max_size=count)


def _torch(placement: Placement) -> Any:
    kind, dim, factor = placement
    if kind == "R":
        return Replicate()
    return Shard(dim) if kind == "S" else _StridedShard(dim, split_factor=factor)


def _layout(sides: list[int], placements: list[Placement], reading: int = 0) -> MeshLayout:
    count = torch.Size(sides).numel()
    return MeshLayout(tuple(range(count)), tuple(sides), tuple(placements), reading)


def _covered(layout: MeshLayout, shape: tuple[int, ...]) -> torch.Tensor:
    """How many different regions cover each element."""
    counts = torch.zeros(shape, dtype=torch.int64)
    regions: set[Region] = set()
    for rank in layout.ranks:
        regions |= set(layout.regions(shape, rank))
    for offsets, sizes in regions:
        box = tuple(slice(low, low + side) for low, side in zip(offsets, sizes, strict=True))
        counts[box] += 1
    return counts


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_regions_are_those_of_dtensor(data: st.DataObject) -> None:
    sides, shape = data.draw(_sides), data.draw(_shapes)
    placements = data.draw(_placements(len(shape), len(sides)))
    layout = _layout(sides, placements)
    theirs = [_torch(placement) for placement in placements]
    for rank, where in enumerate(itertools.product(*map(range, sides))):
        assert layout.coordinate(rank) == where
        sizes, offsets = _compute_local_shape_and_global_offset(
            shape, tuple(sides), list(where), theirs
        )
        ((found_offsets, found_sizes),) = layout.regions(shape, rank)
        assert found_sizes == tuple(sizes)
        if 0 not in sizes:
            assert found_offsets == tuple(offsets)
    assert bool((_covered(layout, shape) == 1).all())


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_strided_shards_cover_everything_once(data: st.DataObject) -> None:
    shape = data.draw(_shapes)
    rows = st.sampled_from([("S", 0, 1), ("_S", 0, 2), ("_S", 0, 3)])
    sides = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    placements = data.draw(st.lists(rows, min_size=len(sides), max_size=len(sides)))
    layout = _layout(sides, placements)
    assert bool((_covered(layout, shape) == 1).all())
    for rank in layout.ranks:
        local = layout.local_shape(shape, rank)
        assert local is not None
        held = sum(torch.Size(sizes).numel() for _, sizes in layout.regions(shape, rank))
        assert held == torch.Size(local).numel()


@pytest.mark.parametrize(
    ("rows", "dp", "tp"), [(8, 2, 2), (9, 4, 2), (7, 2, 3), (5, 4, 4), (24, 3, 2)]
)
def test_fsdp_over_tensor_parallelism_is_what_each_rank_really_holds(
    rows: int, dp: int, tp: int
) -> None:
    layout = _layout([dp, tp], [("_S", 0, tp), ("S", 0, 1)], reading=1)
    numbers = torch.arange(rows)
    for at, (outer, inner) in enumerate(itertools.product(range(dp), range(tp))):
        # Tensor parallelism cuts first, then FSDP cuts what each of its ranks has.
        own = _chunk(_chunk(numbers, tp, inner), dp, outer)
        found = [numbers[low : low + side] for (low,), (side,) in layout.regions((rows,), at)]
        assert torch.cat(found).tolist() == own.tolist()


def _chunk(tensor: torch.Tensor, parts: int, part: int) -> torch.Tensor:
    chunks = tensor.chunk(parts)
    return chunks[part] if part < len(chunks) else tensor[:0]


def test_the_two_readings_agree_where_everything_divides() -> None:
    placements: list[Placement] = [("_S", 0, 2), ("S", 0, 1)]
    first, second = _layout([4, 2], placements), _layout([4, 2], placements, 1)
    for rank in first.ranks:
        assert first.regions((16, 3), rank) == second.regions((16, 3), rank)
    assert first.regions((9,), 7) != second.regions((9,), 7)


def test_a_strided_shard_without_its_partner_is_several_regions() -> None:
    layout = _layout([2], [("_S", 0, 2)])
    assert layout.regions((8,), 0) == [((0,), (2,)), ((4,), (2,))]
    assert [start for _, start in layout.pieces((8,), 0)] == [(0,), (2,)]
