"""The way back for what belongs to one rank alone.

What the caller gives says which values are wanted, and in which form: tensors are filled where they are, other values
replaced, objects with `load_state_dict` given their state. Where it says less, it gets all: an empty dict (the whole, or
one inside) is filled with what was saved there, and a value that is no container, `None` say, is replaced by whatever
was saved under its name, be that a tensor or nested dicts of them. Then what was saved is compared with what has a
place now, as for the state itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch

from forebay._ckpt.flatten import Ask, Flat, Path, flatten
from forebay._ckpt.held import Describer
from forebay._ckpt.meshes import Region
from forebay._ckpt.nests import Leaf, leaf_of, put, ways_of
from forebay._ckpt.perrank import PER_RANK
from forebay._ckpt.targets import TENSOR, Contents, Piece, Targets, match
from forebay._errors import usage


@dataclass(slots=True, eq=False)
class _Made:
    """A value that is made new, and where it goes: under a key of `home`; with none, its parts go into `home`."""

    home: Any
    key: Any
    whole: bool
    leaves: list[Leaf]

    def giver(self, values: Mapping[int, Any]) -> Callable[[], None]:
        """What puts it there. `values` has objects by entry."""

        def give() -> None:
            nest: Any = [None] if self.whole else self.home
            for leaf in self.leaves:
                value = values[leaf.entry] if leaf.memory is None else leaf.memory
                put(nest, (0, *leaf.path) if self.whole else leaf.path, value)
            if self.whole:
                self.home[self.key] = nest[0]

        return give


@dataclass(slots=True, eq=False)
class OwnTargets:
    """What is restored of this rank's own values."""

    flat: Flat
    targets: Targets
    made: list[_Made] = field(default_factory=list)
    #: Names that this rank saved and the caller has no place for.
    unexpected: list[str] = field(default_factory=list)

    @property
    def pieces(self) -> list[Piece]:
        """All that is read into memory."""
        return [*self.targets.pieces, *_pieces(self.leaves())]

    @property
    def objects(self) -> list[int]:
        """Entries of objects inside of values that are made."""
        return [leaf.entry for leaf in self.leaves() if leaf.memory is None]

    def leaves(self) -> Iterator[Leaf]:
        """All parts of values that are made."""
        for one in self.made:
            yield from one.leaves


def _pieces(leaves: Iterator[Leaf]) -> Iterator[Piece]:
    for leaf in leaves:
        if leaf.memory is not None and leaf.memory.numel():
            region: Region = leaf.region
            yield Piece(leaf.entry, region, leaf.memory)


class _Saved:
    """What this rank saved, by its way in what was given to `save`."""

    def __init__(self, contents: Contents, rank: int) -> None:
        self.contents = contents
        self.ways = {way: number for number, way in ways_of(contents.entries, rank)}
        #: For each way that something lies below: what.
        self._below: dict[Path, list[Path]] = {}
        for way in self.ways:
            for cut in range(1, len(way) + 1):
                self._below.setdefault(way[:cut], []).append(way)

    def is_tensor(self, way: Path) -> bool:
        return self.contents.entries[self.ways[way]][2] == TENSOR

    def leaves(self, top: Path) -> list[Leaf]:
        """All that lies at a way or below it."""
        ways = self._below.get(top, []) if top else list(self.ways)
        entries = self.contents.entries
        return [leaf_of(entries, self.ways[way], way[len(top) :]) for way in ways]


def match_own(
    wanted: object, rank: int, contents: Contents, describer: Describer, ask: Ask
) -> OwnTargets:
    """Holds what a rank wants to have back against what it saved. Errors: `usage`; those of `match`."""
    if not isinstance(wanted, MutableMapping):
        raise usage(f"per_rank is {type(wanted).__name__}, a dict is needed")
    prefix = f"{PER_RANK}{rank}/"
    saved = _Saved(contents, rank)
    flat = flatten(wanted, ask=lambda value, path: ask(value, _named(prefix, path)))
    contents.index()
    made = [] if wanted else [_Made(wanted, None, False, saved.leaves(()))]
    for path, mapping in flat.hollow:
        leaves = saved.leaves(path)
        if leaves and isinstance(mapping, MutableMapping):
            made.append(_Made(mapping, None, False, leaves))
    kept = []
    for place, (path, value) in enumerate(zip(flat.paths, flat.values, strict=True)):
        alike = path in saved.ways and saved.is_tensor(path) == isinstance(value, torch.Tensor)
        leaves = [] if alike else saved.leaves(path)
        # A tensor that dicts were saved for is no mistake of form alone.
        if leaves and (path in saved.ways or not isinstance(value, torch.Tensor)):
            made.append(_Made(*flat.homes[place], True, leaves))
        else:
            kept.append(place)
    flat = _reduced(flat, kept, prefix)
    found = OwnTargets(flat, match(flat, contents, describer), made)
    used = found.targets.used | {leaf.entry for leaf in found.leaves()}
    found.unexpected = [
        contents.entries[number][0] for number in saved.ways.values() if number not in used
    ]
    return found


def _named(prefix: str, path: Path) -> Path:
    """A way as the checkpoint has it."""
    return (f"{prefix}{path[0]}", *path[1:]) if path else (prefix,)


def _reduced(flat: Flat, kept: list[int], prefix: str) -> Flat:
    """Some places of a flat state, named as the checkpoint has them."""
    return Flat(
        [prefix + flat.names[place] for place in kept],
        [_named(prefix, flat.paths[place]) for place in kept],
        [flat.values[place] for place in kept],
        [flat.homes[place] for place in kept],
        flat.owners,
    )
