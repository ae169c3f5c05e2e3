"""Values that are made new by what a checkpoint says of them: what a rank saved as its own, where nothing waits for it.

Everything else that is restored has a place of its own already. These are few and small: generators of random numbers,
positions of data loaders.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from forebay._ckpt.flatten import Path
from forebay._ckpt.kinds import dtype_of
from forebay._ckpt.meshes import Region
from forebay._ckpt.optimizers import Entry
from forebay._ckpt.perrank import PER_RANK
from forebay._errors import make, quoted

#: Places of a list that is made; more is taken for damage.
_PLACES_MAX = 1 << 20


@dataclass(slots=True, eq=False)
class Leaf:
    """A value inside of one that is made."""

    entry: int
    #: From the one that is made; empty for that one itself.
    path: Path
    region: Region
    #: Of a tensor.
    memory: torch.Tensor | None

    @property
    def want(self) -> tuple[int, Sequence[int], Sequence[int]]:
        """What to read."""
        return (self.entry, *self.region)


def ways_of(entries: Sequence[Entry], rank: int) -> Iterator[tuple[int, Path]]:
    """The entries that a rank saved as its own: number, and way in what was given to `save`."""
    prefix = f"{PER_RANK}{rank}/"
    for number, (name, path, *_) in enumerate(entries):
        if name.startswith(prefix):
            first = str(path[0]) if path else name
            yield number, (first[len(prefix) :], *path[1:])


def leaf_of(entries: Sequence[Entry], number: int, path: Path) -> Leaf:
    """A leaf, with memory on the host if it is a tensor."""
    _, _, kind, dtype, shape = entries[number]
    sides = tuple(shape)
    memory = torch.empty(sides, dtype=dtype_of(dtype or ""), device="cpu") if kind == 0 else None
    return Leaf(number, path, ((0,) * len(sides), sides), memory)


def put(state: Any, path: Path, value: Any) -> None:
    """Puts a value into nested dicts and lists, making those that are missing. Errors: `invalid_metadata` for a way
    that cannot be."""
    home: Any = state
    for key, following in zip(path, path[1:], strict=False):
        inner: Any = [] if isinstance(following, int) else {}
        if isinstance(home, list):
            place = _place(home, key)
            if home[place] is None:
                home[place] = inner
            home = home[place]
        else:
            home = _mapping(home, path).setdefault(key, inner)
    last = path[-1]
    if isinstance(home, list):
        home[_place(home, last)] = value
    else:
        _mapping(home, path)[last] = value


def _place(home: list[Any], key: str | int) -> int:
    if not isinstance(key, int) or not 0 <= key < _PLACES_MAX:
        raise make("invalid_metadata", f"{quoted(key)} is no place in a list")
    home.extend([None] * (key + 1 - len(home)))
    return key


def _mapping(home: Any, path: Path) -> MutableMapping[Any, Any]:
    if not isinstance(home, MutableMapping):
        what = f"{quoted('.'.join(map(str, path)))} lies inside of a value that holds none"
        raise make("invalid_metadata", what)
    return home
