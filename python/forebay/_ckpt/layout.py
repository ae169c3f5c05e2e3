"""From a plan to what other ranks, and the native part, need to know of it."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from forebay import _native
from forebay._ckpt.description import ALIAS, OBJECT, TENSOR, Description, Entry
from forebay._ckpt.flatten import Path
from forebay._ckpt.held import PLAIN, Describer
from forebay._ckpt.kinds import dtype_of
from forebay._ckpt.meshes import MeshLayout, Region
from forebay._ckpt.objects import Stored, pack
from forebay._ckpt.perrank import Own
from forebay._ckpt.plans import Plan

#: Replicated tensors up to so many bytes are compared between ranks at the first save, and in all so many.
COMPARED_BYTES = 4 << 10


COMPARED_TOTAL_BYTES = 16 << 20


#: An item as the native part takes it: name, path, kind, dtype, shape, offsets, sizes, writes.
Item = tuple[str, Path, int, str | None, Any, Any, Any, bool]


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
            plan.paths[place],
        )
    plain = number(PLAIN) if plan.objects else 0
    for place in plan.objects:
        entry = Entry(OBJECT, None, (), plain, path=plan.paths[place])
        made.entries[plan.names[place]] = entry
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
    plan.structure = _native.Structure(
        items, rank=rank, world=world, files_per_rank=files, shared=agreed.shared.native
    )
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
