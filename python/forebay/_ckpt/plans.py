"""What is kept of a structure from one save to the next, and what each save takes anew.

The first save of a structure describes every value and agrees with the other ranks. A later one only asks whether the state
is still built that way: same keys, same kinds, dtypes, shapes and placements. Addresses are taken anew every time, so that
a tensor that moved is read where it is now; whether tied tensors are still tied is looked at again when any address
changed. If anything else changed, the state is described again, and only a structure that was never agreed on costs a
message to other ranks.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from forebay import _native
from forebay._ckpt.agreement import ALIAS, OBJECT, TENSOR, Agreed, Description, Entry
from forebay._ckpt.flatten import Flat, Path, Shape, flatten, gather, has_state, is_leaf
from forebay._ckpt.held import (
    PLAIN,
    Describer,
    Held,
    dtype_of,
    memory_of,
    same_layout,
)
from forebay._ckpt.meshes import MeshLayout, Region
from forebay._ckpt.objects import Stored, pack
from forebay._ckpt.ties import find_ties
from forebay._errors import quoted, usage

#: What the names of per-rank values start with, before the rank and another slash.
PER_RANK = "per_rank/"

#: Replicated tensors up to so many bytes are compared between ranks at the first save, and in all so many.
COMPARED_BYTES = 4 << 10
COMPARED_TOTAL_BYTES = 16 << 20

#: An item as the native part takes it: name, path, kind, dtype, shape, offsets, sizes, writes.
Item = tuple[str, Path, int, str | None, Any, Any, Any, bool]


@dataclass(slots=True, eq=False)
class Own:
    """The per-rank values of this rank, flat, with all that is needed to write them."""

    flat: Flat
    #: By place in `flat`: what is held of a tensor, `None` for an object.
    held: list[Held | None]

    def signature(self) -> list[Any]:
        """Equal for values that are stored alike."""
        kinds = [None if held is None else (held.dtype, held.shape) for held in self.held]
        return [self.flat.names, kinds]


@dataclass(slots=True, eq=False)
class Plan:
    """A structure, as this rank has it."""

    shape: Shape
    names: list[str]
    paths: list[Path]
    #: Types of the values, to see at once that nothing changed.
    types: list[type]
    tensors: list[int]
    objects: list[int]
    #: Of each tensor.
    held: list[Held]
    shapes: list[torch.Size]
    dtypes: list[torch.dtype]
    #: Places in `tensors` of those that are cut over ranks.
    cut: list[int]
    #: Places in `tensors`, each with the tensor that it is tied to.
    ties: dict[int, int]
    #: Tensors of meshes that this rank is not in.
    elsewhere: list[int]
    #: Mappings that hold nothing.
    empty: list[str]
    #: Addresses and contiguity of all pieces at the last save.
    seen: tuple[list[int], list[bool]] = ([], [])
    agreed: Agreed | None = None
    structure: _native.Structure | None = None
    #: Of the per-rank values that `structure` was made for.
    own_signature: list[Any] | None = None
    own: Own | None = None
    #: (tensor, piece) of what this rank writes, and the objects that it writes.
    writes: list[tuple[int, int]] = field(default_factory=list)
    writes_objects: list[int] = field(default_factory=list)

    @property
    def bytes_here(self) -> int:
        """Bytes of tensors that this rank writes."""
        return self.structure.bytes if self.structure is not None else 0


def resolve(state: Any) -> dict[int, Any]:
    """The states of all objects in a state that have one, by the object's id: each is asked once a save."""
    found: dict[int, Any] = {}
    if has_state(state):
        found[id(state)] = state.state_dict()
    elif isinstance(state, Mapping):
        for value in state.values():
            if has_state(value):
                found[id(value)] = value.state_dict()
    return found


def describe(state: Any, describer: Describer, states: Mapping[int, Any]) -> tuple[Plan, list[Any]]:
    """A new plan, with the values in its order. Errors: `usage`, `unsupported`, `structure_mismatch`, shared tensors."""
    flat = flatten(state, states)
    for name in flat.names:
        if name.startswith(PER_RANK):
            raise usage(f"{quoted(name)} in the state: names of that form are kept for per_rank=")
    tensors: list[int] = []
    objects: list[int] = []
    elsewhere: list[int] = []
    held: list[Held] = []
    for place, value in enumerate(flat.values):
        if not isinstance(value, torch.Tensor):
            objects.append(place)
            continue
        here = describer.describe(flat.names[place], value)
        if here is None:
            elsewhere.append(place)
        else:
            tensors.append(place)
            held.append(here)
    assert flat.shape is not None
    plan = Plan(
        shape=flat.shape,
        names=flat.names,
        paths=flat.paths,
        types=list(map(type, flat.values)),
        tensors=tensors,
        objects=objects,
        held=held,
        shapes=[flat.values[place].shape for place in tensors],
        dtypes=[flat.values[place].dtype for place in tensors],
        cut=[at for at, one in enumerate(held) if one.layout is not PLAIN],
        ties={},
        elsewhere=elsewhere,
        empty=flat.empty,
    )
    pieces = memory(plan, flat.values)
    plan.ties = find_ties([flat.names[place] for place in tensors], pieces)
    plan.seen = _look(pieces)
    return plan, flat.values


def memory(plan: Plan, values: Sequence[Any]) -> list[list[torch.Tensor]]:
    """The pieces of each tensor that are here, as views of the state's memory."""
    if not plan.cut:
        return [[values[place]] for place in plan.tensors]
    return [
        [values[place]] if one.layout is PLAIN else memory_of(plan.names[place], values[place], one)
        for place, one in zip(plan.tensors, plan.held, strict=True)
    ]


def _look(pieces: Sequence[Sequence[torch.Tensor]]) -> tuple[list[int], list[bool]]:
    flat = [piece for group in pieces for piece in group]
    return [piece.data_ptr() for piece in flat], [piece.is_contiguous() for piece in flat]


def fits(
    plan: Plan, state: Any, describer: Describer, states: Mapping[int, Any]
) -> tuple[list[Any], list[list[torch.Tensor]]] | None:
    """The values of a state and the pieces of its tensors, if it is built as the plan says; `None` if not."""
    values = gather(plan.shape, state, states)
    if values is None or not _same_kinds(plan, values):
        return None
    tensors = [values[place] for place in plan.tensors]
    try:
        if [one.shape for one in tensors] != plan.shapes:
            return None
        if [one.dtype for one in tensors] != plan.dtypes:
            return None
        if any(hasattr(one, "global_shape") for one in tensors) and not plan.cut:
            return None
        for at in plan.cut:
            place = plan.tensors[at]
            if not same_layout(plan.held[at].layout, plan.names[place], values[place], describer):
                return None
        pieces = memory(plan, values)
        seen = _look(pieces)
        if seen != plan.seen:
            ties = find_ties([plan.names[place] for place in plan.tensors], pieces)
            if ties != plan.ties:
                return None
            plan.seen = seen
    except RuntimeError:
        # A tensor without memory to point at (it became sparse, say). Describing it says what is wrong.
        return None
    return values, pieces


def _same_kinds(plan: Plan, values: Sequence[Any]) -> bool:
    types = list(map(type, values))
    if types != plan.types:
        for before, now, value in zip(plan.types, types, values, strict=True):
            if before is now:
                continue
            if issubclass(before, torch.Tensor) != issubclass(now, torch.Tensor):
                return False
            if not is_leaf(value):
                return False
        plan.types = types
    return all(is_leaf(values[place]) for place in plan.objects)


def description(plan: Plan) -> Description:
    """The structure as other ranks need to know it."""
    made = Description()
    numbers: dict[Any, int] = {}

    def number(layout: Any) -> int:
        found = numbers.get(layout)
        if found is None:
            found = numbers[layout] = len(made.layouts)
            made.layouts.append(layout)
        return found

    for at, (place, held) in enumerate(zip(plan.tensors, plan.held, strict=True)):
        tied = plan.ties.get(at)
        made.entries[plan.names[place]] = Entry(
            TENSOR if tied is None else ALIAS,
            held.dtype,
            held.shape,
            number(held.layout),
            None if tied is None else plan.names[plan.tensors[tied]],
        )
    plain = number(PLAIN) if plan.objects else 0
    for place in plan.objects:
        made.entries[plan.names[place]] = Entry(OBJECT, None, (), plain)
    return made


def reread(plan: Plan, describer: Describer, readings: Mapping[str, int]) -> Description:
    """The description once the readings of strided layouts are settled."""
    for place, held in zip(plan.tensors, plan.held, strict=True):
        if not isinstance(held.layout, MeshLayout) or not held.layout.is_strided:
            continue
        wanted = readings.get(plan.names[place], 0)
        if held.layout.reading == wanted:
            continue
        if wanted:
            describer.second_reading(held)
        else:
            layout = held.layout
            held.layout = MeshLayout(layout.ranks, layout.sides, layout.placements, 0)
            describer.with_layout(held)
    return description(plan)


def readings(plan: Plan) -> dict[str, int]:
    """For each tensor whose strided layout has two readings that differ somewhere, those that fit here."""
    found: dict[str, int] = {}
    known: dict[Any, bool] = {}
    for place, held in zip(plan.tensors, plan.held, strict=True):
        layout = held.layout
        if not isinstance(layout, MeshLayout) or not layout.is_strided:
            continue
        key = (layout, held.shape)
        if key not in known:
            both = [
                MeshLayout(layout.ranks, layout.sides, layout.placements, one) for one in (0, 1)
            ]
            known[key] = any(
                both[0].regions(held.shape, rank) != both[1].regions(held.shape, rank)
                for rank in layout.ranks
            )
        if known[key]:
            found[plan.names[place]] = held.fits
    return found


def describe_own(rank: int, per_rank: Any, describer: Describer) -> Own:
    """The per-rank values of this rank. Errors: as `describe`."""
    if not isinstance(per_rank, Mapping):
        raise usage(f"per_rank is {type(per_rank).__name__}, a dict is needed")
    flat = flatten({f"{PER_RANK}{rank}/{key}": value for key, value in per_rank.items()})
    held: list[Held | None] = []
    for name, value in zip(flat.names, flat.values, strict=True):
        if not isinstance(value, torch.Tensor):
            held.append(None)
            continue
        one = describer.describe(name, value)
        if one is None or one.layout is not PLAIN:
            hint = "tensors that are cut over ranks belong into the state itself"
            raise usage(f"{quoted(name)} in per_rank is sharded", hint)
        held.append(one)
    tensors = [[value] for value, one in zip(flat.values, held, strict=True) if one is not None]
    names = [name for name, one in zip(flat.names, held, strict=True) if one is not None]
    if find_ties(names, tensors):
        raise usage("tensors of per_rank share memory", "save one of them, or clones")
    return Own(flat, held)


def lay_out(plan: Plan, own: Own | None, rank: int, world: int, files: int | None) -> None:
    """Makes the native structure: what this rank holds, and which of it it writes."""
    agreed = plan.agreed
    assert agreed is not None
    items: list[Item] = []
    writes: list[tuple[int, int]] = []
    kept = agreed.writes
    for at, (place, held) in enumerate(zip(plan.tensors, plan.held, strict=True)):
        name, path = plan.names[place], plan.paths[place]
        tied = plan.ties.get(at)
        if tied is not None and name in agreed.ties:
            target = plan.names[plan.tensors[tied]]
            items.append((name, path, ALIAS, target, held.shape, (), (), agreed.ties[name]))
            continue
        whole = prod(held.shape)
        for number, (offsets, sizes) in enumerate(held.regions):
            mine = _writes(kept, name, (offsets, sizes), whole)
            items.append((name, path, TENSOR, held.dtype, held.shape, offsets, sizes, mine))
            if mine:
                writes.append((at, number))
    objects = []
    for place in plan.objects:
        mine = kept.get((plan.names[place], None), True)
        items.append((plan.names[place], plan.paths[place], OBJECT, None, (), (), (), mine))
        if mine:
            objects.append(place)
    if own is not None:
        for name, path, held_ in zip(own.flat.names, own.flat.paths, own.held, strict=True):
            if held_ is None:
                items.append((name, path, OBJECT, None, (), (), (), True))
            else:
                ((offsets, sizes),) = held_.regions
                items.append((name, path, TENSOR, held_.dtype, held_.shape, offsets, sizes, True))
    plan.structure = _native.Structure(items, rank=rank, world=world, files_per_rank=files)
    plan.own_signature = None if own is None else own.signature()
    plan.writes, plan.writes_objects = writes, objects


def _writes(
    kept: Mapping[tuple[str, Region | None], bool], name: str, region: Region, whole: int
) -> bool:
    if whole and not prod(region[1]):
        return False
    return kept.get((name, region), True)


def checksums(plan: Plan, values: Sequence[Any], packed: Mapping[int, Stored]) -> dict[str, int]:
    """A checksum of each object and of each small tensor that all ranks should have alike, by name."""
    found: dict[str, int] = {}
    for place, stored in packed.items():
        found[plan.names[place]] = zlib.crc32(stored if isinstance(stored, bytes) else stored[0])
    host: list[tuple[str, torch.Tensor]] = []
    device: list[tuple[str, torch.Tensor]] = []
    left = COMPARED_TOTAL_BYTES
    for place, held in zip(plan.tensors, plan.held, strict=True):
        value = values[place]
        if held.layout is not PLAIN or not 0 < value.nbytes <= COMPARED_BYTES:
            continue
        left -= value.nbytes
        if left < 0:
            break
        (host if value.is_cpu else device).append((plan.names[place], value.detach()))
    if device:
        host += _fetched(device)
    for name, value in host:
        value = value.contiguous()
        found[name] = zlib.crc32(ctypes.string_at(value.data_ptr(), value.nbytes))
    return found


def _fetched(tensors: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """Small tensors of devices, brought to the host by one copy a device."""
    fetched: list[tuple[str, torch.Tensor]] = []
    by_device: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in tensors:
        by_device.setdefault(tensor.device, []).append((name, tensor))
    for group in by_device.values():
        raw = [one.contiguous().reshape(-1).view(torch.uint8) for _, one in group]
        whole = torch.cat(raw).cpu()
        parts = torch.split(whole, [one.numel() for one in raw])
        fetched += [(name, part) for (name, _), part in zip(group, parts, strict=True)]
    return fetched


def element_bytes(dtype: str) -> int:
    """Bytes of one element. Errors: `unsupported`."""
    return int(dtype_of(dtype).itemsize)


def pack_objects(plan: Plan, values: Sequence[Any], places: Sequence[int]) -> dict[int, Stored]:
    """The bytes of objects, by place."""
    return {place: pack(plan.names[place], values[place]) for place in places}
