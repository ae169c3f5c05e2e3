"""From the descriptions of all ranks to who writes what: the same on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from forebay._ckpt.description import OBJECT, Entry, Version
from forebay._ckpt.held import Layout, Plain
from forebay._ckpt.meshes import MeshLayout, Region, Shape
from forebay._ckpt.share import assign
from forebay._errors import make, quoted


def writers(
    rank: int, names: dict[str, list[Version]], ties: dict[str, bool], size_of: Callable[[str], int]
) -> dict[tuple[str, Region | None], bool]:
    tables = _Tables()
    several: list[_Table] = []
    shared: list[tuple[int, tuple[int, ...]]] = []
    keys: list[tuple[str, Region | None]] = []
    for name, versions in names.items():
        if name in ties:
            continue
        _check_alike(name, versions)
        entry = versions[0][2]
        if entry.kind == OBJECT:
            holders = tuple(sorted(member for _, ranks, _ in versions for member in ranks))
            shared.append((0, holders))
            keys.append((name, None))
            continue
        item = size_of(entry.dtype or "")
        table = _table_of(tables, versions, entry.shape)
        table.element_bytes += item
        if len(versions) > 1:
            several.append(table)
        for region, holders, count in table.shared:
            shared.append((count * item, holders))
            keys.append((name, region))
    loads: dict[int, int] = {}
    for table in [*tables.kept.values(), *several]:
        for holder, count in table.alone.items():
            loads[holder] = loads.get(holder, 0) + count * table.element_bytes
    assigned = zip(keys, assign(shared, loads), strict=True)
    return {key: writer == rank for key, writer in assigned}


@dataclass(slots=True)
class _Table:
    """Which ranks hold which regions of one layout and shape; shared by all tensors that have both."""

    holders: dict[Region, tuple[int, ...]]
    #: Regions that several ranks hold, and elements of each.
    shared: list[tuple[Region, tuple[int, ...], int]]
    #: Elements that one rank alone holds, by rank.
    alone: dict[int, int]
    #: Bytes of one element of each tensor that has the layout and shape, added up.
    element_bytes: int = 0


class _Tables:
    def __init__(self) -> None:
        self.kept: dict[tuple[int, Shape], _Table] = {}

    def find(self, layout: Layout, shape: Shape, members: tuple[int, ...]) -> _Table:
        """`members` are the ranks of the description that has the layout, which lives as long as this."""
        kept = self.kept.get((id(layout), shape))
        if kept is None:
            kept = self.kept[id(layout), shape] = _table(_holders(layout, shape, members))
        return kept


def _table(holders: dict[Region, tuple[int, ...]]) -> _Table:
    whole = [(region, ranks, prod(region[1])) for region, ranks in holders.items()]
    # Shards of nothing are not written, unless there is nothing else: then the tensor is nothing.
    if any(count for _, _, count in whole):
        whole = [one for one in whole if one[2]]
    alone: dict[int, int] = {}
    for _, ranks, count in whole:
        if len(ranks) == 1:
            alone[ranks[0]] = alone.get(ranks[0], 0) + count
    return _Table(holders, [one for one in whole if len(one[1]) > 1], alone)


def _holders(
    layout: Layout, shape: Shape, members: tuple[int, ...]
) -> dict[Region, tuple[int, ...]]:
    if isinstance(layout, Plain):
        return {((0,) * len(shape), shape): members}
    found: dict[Region, list[int]] = {}
    if isinstance(layout, MeshLayout):
        for rank in layout.ranks:
            for region in layout.regions(shape, rank):
                found.setdefault(region, []).append(rank)
    else:
        for region in layout.regions:
            found.setdefault(region, []).extend(members)
    return {region: tuple(sorted(ranks)) for region, ranks in found.items()}


def _table_of(tables: _Tables, versions: list[Version], shape: Shape) -> _Table:
    found = [
        tables.find(description.layouts[entry.layout], shape, ranks)
        for description, ranks, entry in versions
    ]
    if len(found) == 1:
        return found[0]
    merged: dict[Region, set[int]] = {}
    for one in found:
        for region, holders in one.holders.items():
            merged.setdefault(region, set()).update(holders)
    return _table({region: tuple(sorted(holders)) for region, holders in merged.items()})


def _check_alike(name: str, versions: list[Version]) -> None:
    _, ranks, entry = versions[0]
    what = (entry.kind == OBJECT, entry.dtype, entry.shape)
    for _, others, other in versions[1:]:
        if (other.kind == OBJECT, other.dtype, other.shape) != what:
            line = (
                f"{quoted(name)} is {_words(entry)} on rank {ranks[0]} "
                f"and {_words(other)} on rank {others[0]}"
            )
            hint = "what differs from rank to rank belongs into per_rank="
            raise make("structure_mismatch", line, None, [hint])


def _words(entry: Entry) -> str:
    if entry.kind == OBJECT:
        return "an object"
    return f"a tensor {list(entry.shape)} of {entry.dtype}"
