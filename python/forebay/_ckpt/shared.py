"""What all ranks hold together, from their descriptions: the structure that a manifest has once.

Names, kinds, dtypes and shapes, and of each DTensor its mesh and placements. A rank's part of a manifest then refers to
values by number, and leaves out the regions that the placements give to it; the native part compares those with what
the rank really holds. Every rank makes the same of the same descriptions, so every rank can commit, and nothing is said
about it between ranks.

A tensor that is cut in several ways (on two pipeline stages with meshes of their own, say), or in none that a mesh says,
has no layout here; ranks name its regions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from forebay import _native
from forebay._ckpt.description import ALIAS, OBJECT, TENSOR, Version
from forebay._ckpt.held import Layout
from forebay._ckpt.meshes import MeshLayout, Shape


@dataclass
class Shared:
    """The lists that `_native.SharedStructure` takes."""

    meshes: list[tuple[Shape, tuple[int, ...]]] = field(default_factory=list)
    layouts: list[tuple[int, Any, bool]] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)

    @cached_property
    def native(self) -> _native.SharedStructure:
        """Made once. Errors: `unsupported` for dtypes and numbers that a manifest does not have."""
        return _native.SharedStructure(self.meshes, self.layouts, self.values)


def share(names: Mapping[str, list[Version]], ties: Mapping[str, bool]) -> Shared:
    """The structure of all ranks; `ties` has the names that are other names of a tensor on every rank."""
    made = Shared()
    numbers = _Numbers(made)
    for name, versions in names.items():
        _, _, entry = versions[0]
        if name in ties:
            made.values.append((name, entry.path, ALIAS, entry.tied, (), None))
        elif entry.kind == OBJECT:
            made.values.append((name, entry.path, OBJECT, None, (), None))
        else:
            layouts = [description.layouts[one.layout] for description, _, one in versions]
            number = numbers.find(layouts)
            made.values.append((name, entry.path, TENSOR, entry.dtype, entry.shape, number))
    return made


class _Numbers:
    """Numbers of layouts. A layout has all ranks of its mesh in it, so it is looked at once and then known by its id:
    descriptions keep it alive."""

    def __init__(self, made: Shared) -> None:
        self._made = made
        self._known: dict[int, int | None] = {}
        self._equal: dict[MeshLayout, int] = {}
        self._meshes: dict[tuple[Shape, tuple[int, ...]], int] = {}

    def find(self, layouts: list[Layout]) -> int | None:
        """The number of a tensor's layout, if it has one, and the same in all versions."""
        found = {self._number(layout) for layout in layouts}
        return found.pop() if len(found) == 1 else None

    def _number(self, layout: Layout) -> int | None:
        if id(layout) not in self._known:
            self._known[id(layout)] = self._new(layout) if isinstance(layout, MeshLayout) else None
        return self._known[id(layout)]

    def _new(self, layout: MeshLayout) -> int:
        number = self._equal.get(layout)
        if number is None:
            number = self._equal[layout] = len(self._made.layouts)
            placements, mirrored = layout.placements, bool(layout.reading)
            self._made.layouts.append((self._mesh(layout), placements, mirrored))
        return number

    def _mesh(self, layout: MeshLayout) -> int:
        key = (layout.sides, layout.ranks)
        if key not in self._meshes:
            self._meshes[key] = len(self._made.meshes)
            self._made.meshes.append(key)
        return self._meshes[key]
