"""What a restore fills: the values of a state, each with what a checkpoint has for it.

Everything is compared before a byte is read: names, kinds, dtypes, global shapes. What does not fit is one error that
names the keys, both sides, and the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from forebay._ckpt.flatten import Flat, Path
from forebay._ckpt.held import Describer, Held, memory_of
from forebay._ckpt.meshes import Region
from forebay._ckpt.optimizers import Entry
from forebay._ckpt.perrank import PER_RANK
from forebay._ckpt.storages import addresses_of, check_writable
from forebay._ckpt.ties import find_ties
from forebay._errors import Error, make, quoted

TENSOR, OBJECT = 0, 1

#: Names in a message.
_SHOWN = 8


@dataclass(slots=True, eq=False)
class Piece:
    """A region to be read, and the memory it belongs into."""

    entry: int
    region: Region
    memory: torch.Tensor


@dataclass(slots=True, eq=False)
class Tie:
    """Two names of one memory that a checkpoint may have two values for: the first one's goes there."""

    first: str
    other: str
    #: Entries of both.
    entries: tuple[int, int]
    #: What would be read for the other.
    pieces: list[Piece]


@dataclass(slots=True)
class Targets:
    """The values of a state that a checkpoint can fill."""

    pieces: list[Piece] = field(default_factory=list)
    #: Place in the flat state, and the entry whose value goes there.
    objects: list[tuple[int, int]] = field(default_factory=list)
    #: Place in the flat state, and the entry and keys inside of its value (checkpoints of torch 2.3 and before).
    nested: list[tuple[int, int, Path]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    ties: list[Tie] = field(default_factory=list)
    #: Entries that something of the state stands for.
    used: set[int] = field(default_factory=set)


class Contents:
    """The entries of a checkpoint, by name."""

    def __init__(self, entries: Sequence[Entry], title: str) -> None:
        #: As they are stored, and as the state sees them.
        self.stored = entries
        self.entries = list(entries)
        self.title = title
        self.index()

    def index(self) -> None:
        """Makes names known, again after entries were renamed."""
        self.by_name = {entry[0]: number for number, entry in enumerate(self.entries)}

    def saved_by(self) -> dict[int, tuple[str, ...]]:
        """Ranks that saved values of their own, and the names of those."""
        found: dict[int, list[str]] = {}
        for name in self.by_name:
            if name.startswith(PER_RANK):
                rank, _, rest = name[len(PER_RANK) :].partition("/")
                if rank.isdigit() and rest:
                    found.setdefault(int(rank), []).append(rest)
        return {rank: tuple(sorted(names)) for rank, names in sorted(found.items())}


def match(flat: Flat, contents: Contents, describer: Describer) -> Targets:
    """Holds a state against a checkpoint. Errors: `structure_mismatch`, and those of describing tensors."""
    targets = Targets()
    wrong: list[str] = []
    tensors: list[tuple[int, Held]] = []
    absent: list[tuple[int, Held]] = []
    for place, (name, value) in enumerate(zip(flat.names, flat.values, strict=True)):
        number = contents.by_name.get(name)
        if not isinstance(value, torch.Tensor):
            _match_object(targets, wrong, contents, flat, place, number)
            continue
        held = describer.describe(name, value)
        if number is not None:
            targets.used.add(number)
            if held is not None:
                line = _differs(name, held, contents.entries[number])
                if line is None:
                    tensors.append((place, held))
                else:
                    wrong.append(line)
        elif held is not None:
            absent.append((place, held))
        else:
            targets.missing.append(name)
    if wrong:
        raise _mismatch(wrong, contents)
    _add_tensors(targets, flat, contents, tensors, absent)
    return targets


def _match_object(
    targets: Targets,
    wrong: list[str],
    contents: Contents,
    flat: Flat,
    place: int,
    number: int | None,
) -> None:
    name = flat.names[place]
    if number is None:
        found = _inside(contents, flat.paths[place])
        if found is None:
            targets.missing.append(name)
        else:
            targets.nested.append((place, *found))
            targets.used.add(found[0])
        return
    targets.used.add(number)
    if contents.entries[number][2] == TENSOR:
        wrong.append(f"{quoted(name)} is an object in the state, a tensor in the checkpoint")
    else:
        targets.objects.append((place, number))


def _inside(contents: Contents, path: Path) -> tuple[int, Path] | None:
    """An object of the checkpoint that may hold the value at a path: torch 2.3 and before stored dicts without tensors
    as one value."""
    for cut in range(len(path) - 1, 0, -1):
        number = contents.by_name.get(".".join(map(str, path[:cut])))
        if number is not None and contents.entries[number][2] == OBJECT:
            return number, path[cut:]
    return None


def _differs(name: str, held: Held, entry: Entry) -> str | None:
    if entry[2] != TENSOR:
        return f"{quoted(name)} is a tensor in the state, an object in the checkpoint"
    if held.shape == tuple(entry[4]) and held.dtype == entry[3]:
        return None
    return (
        f"{quoted(name)} is {list(held.shape)} of {held.dtype} in the state, "
        f"{list(entry[4])} of {entry[3]} in the checkpoint"
    )


def _mismatch(wrong: list[str], contents: Contents) -> Error:
    more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    what = "; ".join(wrong[:_SHOWN]) + more
    hint = "build the state as it was saved, or leave these keys out of it"
    return make("structure_mismatch", what, contents.title, [hint])


def _add_tensors(
    targets: Targets,
    flat: Flat,
    contents: Contents,
    tensors: list[tuple[int, Held]],
    absent: list[tuple[int, Held]],
) -> None:
    """Pieces of all tensors; each memory is filled once, and a tied name fills the others. What the checkpoint has for
    those is kept aside, to be compared."""
    both = tensors + absent
    names = [flat.names[place] for place, _ in both]
    memory = [memory_of(flat.names[place], flat.values[place], held) for place, held in both]
    pieces, _ = addresses_of(names, memory)
    check_writable([name for name, group in zip(names, memory, strict=True) for _ in group], pieces)
    ties = find_ties(names, memory)
    #: By the first name of a memory, the one whose value goes there.
    filled: dict[int, int] = {}
    for at, (place, held) in enumerate(tensors):
        number = contents.by_name[flat.names[place]]
        regions = zip(held.regions, memory[at], strict=True)
        wanted = [Piece(number, region, piece) for region, piece in regions if 0 not in region[1]]
        kept = filled.setdefault(ties.get(at, at), at) if ties else at
        if kept == at:
            targets.pieces += wanted
        elif wanted:
            own = contents.by_name[names[kept]]
            targets.ties.append(Tie(names[kept], names[at], (own, number), wanted))
    for at in range(len(tensors), len(both)):
        if not ties or ties.get(at, at) not in filled:
            targets.missing.append(names[at])


def unexpected(flat: Flat, contents: Contents, used: set[int]) -> tuple[list[str], list[str]]:
    """Names of the checkpoint that the state has nothing for: those under its own top-level keys, and others. Per-rank
    values are neither."""
    whole = any(not path for _, path, _ in flat.owners)
    tops = {path[0] for path in flat.paths}
    tops |= {path[0] for _, path, _ in flat.owners if path}
    tops |= {name.partition(".")[0] for name in flat.empty}
    inside: list[str] = []
    outside: list[str] = []
    for number, (name, path, *_) in enumerate(contents.entries):
        if number in used or name.startswith(PER_RANK):
            continue
        ours = whole or (path[0] in tops if path else _under(name, tops))
        (inside if ours else outside).append(contents.stored[number][0])
    return inside, outside


def _under(name: str, tops: set[Any]) -> bool:
    return any(name == top or name.startswith(f"{top}.") for top in tops)


def nested_value(name: str, value: Any, keys: Path) -> Any:
    """The value at a path inside of another. Errors: `structure_mismatch`."""
    for key in keys:
        if isinstance(value, Mapping):
            by_text = {str(own): own for own in value}
            if str(key) in by_text:
                value = value[by_text[str(key)]]
                continue
        elif isinstance(value, list) and isinstance(key, int) and key < len(value):
            value = value[key]
            continue
        what = f"{quoted(name)} is not in the checkpoint, and not in the value stored above it"
        raise make("structure_mismatch", what)
    return value
