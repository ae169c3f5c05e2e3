"""Which tensors, and which part of each."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping
from operator import index as as_int
from types import EllipsisType

from forebay._catalog import Catalog, no_such_tensor
from forebay._errors import make, quoted, usage
from forebay._frameworks import Shape

#: Offsets and sizes of a box inside of a tensor; `None` is all of it.
Region = tuple[list[int], list[int]] | None
#: What a caller may name: names, globs, or a function that says yes or no.
Names = str | Iterable[str] | Callable[[str], bool]
#: A slice for each dimension.
Slices = slice | EllipsisType | tuple[slice | EllipsisType, ...]
#: Dimension, rank, world.
Shard = tuple[int, int, int]
ShardChoice = Shard | Callable[[str, Shape], Shard | Slices | None]

_GLOB = re.compile(r"[*?\[]")


def places_of(catalog: Catalog, names: Names | None) -> list[int] | None:
    """Places in the catalog, ascending; `None` for all.

    Errors: `no_such_tensor` for a name that is not there or a glob that matches nothing.
    """
    if names is None:
        return None
    if isinstance(names, str):
        names = [names]
    if callable(names):
        return [place for place, entry in enumerate(catalog.entries) if names(entry.name)]
    chosen: set[int] = set()
    for name in names:
        if not isinstance(name, str):
            raise usage(f"a tensor's name is {name!r}, text is needed")
        place = catalog.places.get(name)
        if place is not None:
            chosen.add(place)
            continue
        found: list[int] = []
        if _GLOB.search(name):
            match = re.compile(fnmatch.translate(name)).match
            found = [place for known, place in catalog.places.items() if match(known)]
        if not found:
            raise no_such_tensor(name, catalog.places)
        chosen.update(found)
    return sorted(chosen)


def regions_of(
    catalog: Catalog,
    places: Iterable[int],
    regions: Mapping[str, Slices] | None,
    shard: ShardChoice | None,
) -> dict[int, Region]:
    """The regions of those tensors that are not wanted whole. `regions` counts before `shard`."""
    cut: dict[int, Region] = {}
    if shard is not None:
        for place in places:
            entry = catalog.entries[place]
            choice = shard(entry.name, entry.shape) if callable(shard) else shard
            if choice is None:
                continue
            region = _shard_or_slices(choice, entry.shape, entry.name, strict=callable(shard))
            if region is not None:
                cut[place] = region
    for name, slices in (regions or {}).items():
        place = catalog.find(name)
        cut[place] = region_of(slices, catalog.entries[place].shape, name)
    return cut


def _shard_or_slices(choice: object, shape: Shape, name: str, strict: bool) -> Region:
    if isinstance(choice, tuple) and len(choice) == 3 and all(type(n) is int for n in choice):
        dim, rank, world = choice
        return shard_of(dim, rank, world, shape, name, strict)
    if isinstance(choice, slice | EllipsisType | tuple):
        return region_of(choice, shape, name)
    what = f"a shard is {choice!r}, (dim, rank, world) is needed"
    raise usage(what, where=f"tensor {quoted(name)}")


def shard_of(dim: int, rank: int, world: int, shape: Shape, name: str, strict: bool) -> Region:
    """A rank's part as `torch.chunk` and DTensor's `Shard` cut it: ceil(n / world) rows each, later ranks fewer.

    A tensor that does not have the dimension is everybody's, unless `strict`.
    """
    if world < 1 or not 0 <= rank < world:
        raise usage(f"rank {rank} of {world} ranks: the rank counts from 0 and is below the ranks")
    at = dim + len(shape) if dim < 0 else dim
    if not 0 <= at < len(shape):
        if not strict:
            return None
        what = f"shape {list(shape)} has no dimension {dim}"
        raise make("bad_slice", what, f"tensor {quoted(name)}")
    rows = -(-shape[at] // world)
    start = min(rank * rows, shape[at])
    offsets, sizes = [0] * len(shape), list(shape)
    offsets[at], sizes[at] = start, min(rows, shape[at] - start)
    return offsets, sizes


def region_of(slices: object, shape: Shape, name: str) -> Region:
    """The box that slices describe; they count as in Python, negative ones from the end, and end at the shape.

    Errors: `bad_slice`.
    """
    items = list(slices) if isinstance(slices, tuple) else [slices]
    where = f"tensor {quoted(name)}"
    if items.count(...) > 1:
        raise make("bad_slice", "a region has more than one ellipsis", where)
    if ... in items:
        at = items.index(...)
        items[at : at + 1] = [slice(None)] * (len(shape) - len(items) + 1)
    if len(items) > len(shape):
        what = f"a region has {len(items)} slices, shape {list(shape)} has {len(shape)} dimensions"
        raise make("bad_slice", what, where)
    offsets, sizes = [0] * len(shape), list(shape)
    for dim, item in enumerate(items):
        if not isinstance(item, slice):
            hint = "load it whole, or index with safe_open(...).get_slice(name)"
            what = f"a region has {item!r} in dimension {dim}, a slice is needed"
            raise make("bad_slice", what, where, [hint])
        try:
            start, stop, step = item.indices(shape[dim])
            simple = as_int(step) == 1
        except (TypeError, ValueError) as error:
            raise make("bad_slice", f"bad slice in dimension {dim}: {error}", where) from error
        if not simple:
            hint = "safe_open(...).get_slice(name) takes steps"
            raise make("bad_slice", f"a region has step {step} in dimension {dim}", where, [hint])
        offsets[dim], sizes[dim] = start, max(stop - start, 0)
    return offsets, sizes
