"""What one rank holds, in a form that can be told to others: names, kinds, dtypes, shapes, and how tensors are cut.

Ranks that hold alike describe alike: meshes and placements are in it once, not once a rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from forebay._ckpt.flatten import Path
from forebay._ckpt.held import Explicit, Layout, Plain
from forebay._ckpt.meshes import MeshLayout, Shape

#: Kinds of values; the third is another name of one.
TENSOR, OBJECT, ALIAS = 0, 1, 2


@dataclass(slots=True)
class Entry:
    """One value of a description."""

    kind: int
    dtype: str | None
    shape: Shape
    #: The place in the description's layouts.
    layout: int
    #: The name that it is tied to, for an alias.
    tied: str | None = None
    #: The way to it in the state.
    path: Path = ()


@dataclass(slots=True)
class Description:
    """What one rank holds, or several that hold alike."""

    entries: dict[str, Entry] = field(default_factory=dict)
    layouts: list[Layout] = field(default_factory=list)

    def message(self) -> dict[str, Any]:
        """The description as text and numbers, the same for the same contents."""
        names = sorted(self.entries)
        # Layouts in the order of their first use, so that numbering tells nothing new.
        order: dict[int, int] = {}
        rows = []
        for name in names:
            entry = self.entries[name]
            at = order.setdefault(entry.layout, len(order))
            rows.append([name, entry.kind, entry.dtype, entry.shape, at, entry.tied, entry.path])
        return {"rows": rows, "layouts": [_told(self.layouts[at]) for at in order]}


#: A description, the ranks that have it, and what it says of one name.
Version = tuple[Description, tuple[int, ...], Entry]


def read(message: dict[str, Any]) -> Description:
    """A description that another rank told."""
    description = Description(layouts=[_layout(told) for told in message["layouts"]])
    for name, kind, dtype, shape, layout, tied, path in message["rows"]:
        entry = Entry(kind, dtype, tuple(shape), layout, tied, tuple(path))
        description.entries[name] = entry
    return description


def _told(layout: Layout) -> list[Any]:
    if isinstance(layout, Plain):
        return ["plain"]
    if isinstance(layout, MeshLayout):
        return ["mesh", layout.ranks, layout.sides, layout.placements, layout.reading]
    return ["regions", layout.regions]


def _layout(told: list[Any]) -> Layout:
    if told[0] == "plain":
        return Plain()
    if told[0] == "mesh":
        placements = tuple((str(kind), int(dim), int(factor)) for kind, dim, factor in told[3])
        return MeshLayout(tuple(told[1]), tuple(told[2]), placements, int(told[4]))
    return Explicit(tuple((tuple(offsets), tuple(sizes)) for offsets, sizes in told[1]))
