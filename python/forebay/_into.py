"""Destinations that exist: dicts of tensors, and modules.

A destination is filled where it is when its memory is contiguous and of the dtype of the file; others go through a window
of extra memory. What is on the meta device is made on the device of the call. In a module, names that stand for one
tensor (tied weights) are one destination: any one of its names in the file will do, and all of them show the new tensor.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

from forebay._catalog import Catalog
from forebay._errors import make, usage
from forebay._frameworks import FLOATING, Tensor
from forebay._places import Place
from forebay._places import parse as parse_place
from forebay._select import Region
from forebay._transfer import Layout

_LISTED = 20


@dataclass
class IntoJob:
    """One tensor of the file and where it goes."""

    index: int
    region: Region
    name: str
    bytes: int
    place: Place
    #: The existing tensor; `None` for one to be made.
    target: Tensor
    #: Its memory, where it can be filled as it is.
    address: int | None
    #: The dtype it needs, where it goes through other memory.
    cast: Any
    result: Tensor = None

    def store(self, made: Tensor) -> None:
        """Takes a tensor of the right dtype from elsewhere."""
        if self.target is None:
            self.result = made
            return
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(self.target, torch.Tensor):
            with torch.no_grad():
                self.target.copy_(made)
        else:
            self.target[...] = made
        self.result = self.target


@dataclass
class _Slot:
    """One tensor of a module or dict, and everywhere it is found."""

    tensor: Tensor
    names: list[str] = field(default_factory=list)
    #: (dict that holds it, key) for each; setting a key of a module's own dict replaces it.
    homes: list[tuple[MutableMapping[str, Any], str]] = field(default_factory=list)
    is_parameter: bool = False


def destinations_of(into: object) -> Destinations:
    """Reads `into=`. Errors: `usage`."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(into, torch.nn.Module):
        return _of_module(into)
    if isinstance(into, MutableMapping):
        slots = [_Slot(tensor, [name], [(into, name)]) for name, tensor in into.items()]
        _check_apart(slots)
        return Destinations(slots, [])
    raise usage(f"into is {type(into).__name__}, a dict of tensors or a torch module is needed")


def _of_module(module: Any) -> Destinations:
    slots: dict[int, _Slot] = {}
    unsaved: list[str] = []
    for prefix, part in module.named_modules(remove_duplicate=False):
        before = f"{prefix}." if prefix else ""
        for held, is_parameter in ((part._parameters, True), (part._buffers, False)):
            for key, tensor in held.items():
                if tensor is None:
                    continue
                if not is_parameter and key in part._non_persistent_buffers_set:
                    if tensor.is_meta:
                        unsaved.append(before + key)
                    continue
                slot = slots.setdefault(id(tensor), _Slot(tensor, is_parameter=is_parameter))
                slot.names.append(before + key)
                slot.homes.append((held, key))
    return Destinations(list(slots.values()), unsaved)


def _check_apart(slots: list[_Slot]) -> None:
    """Two names of a dict must not share memory: both would be filled at once, with different bytes."""
    spans = []
    for slot in slots:
        tensor = slot.tensor
        if hasattr(tensor, "untyped_storage"):
            if tensor.is_meta or not tensor.numel():
                continue
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            reach = sum((side - 1) * stride for side, stride in steps) + 1
            start, device = tensor.data_ptr(), str(tensor.device)
            spans.append((device, start, start + reach * tensor.element_size(), slot.names[0]))
        elif hasattr(tensor, "__array_interface__") and tensor.size:
            low = tensor.__array_interface__["data"][0]
            steps = zip(tensor.shape, tensor.strides, strict=True)
            reach = sum((side - 1) * max(stride, 0) for side, stride in steps) + tensor.itemsize
            spans.append(("cpu", low, low + reach, slot.names[0]))
        else:
            kind = type(tensor).__name__
            if not hasattr(tensor, "__array_interface__"):
                raise usage(f"`{slot.names[0]}` of into is {kind}, a tensor is needed")
    spans.sort()
    for one, other in zip(spans, spans[1:], strict=False):
        if one[0] == other[0] and other[1] < one[2]:
            hint = "pass separate tensors, or a module, whose tied weights stay tied"
            raise usage(f"`{one[3]}` and `{other[3]}` of into share memory", hint)


class Destinations:
    """What `into=` offers."""

    def __init__(self, slots: list[_Slot], unsaved: list[str]) -> None:
        self.slots = slots
        self.unsaved = unsaved
        self._by_name = {name: slot for slot in slots for name in slot.names}

    def jobs(
        self,
        catalog: Catalog,
        place: Place,
        places: list[int] | None,
        cut: dict[int, Region],
        dtype: object,
        strict: bool,
        raw: bool,
    ) -> list[IntoJob]:
        """One job for each destination that the file has something for, ascending by place.

        Errors: `no_such_tensor` for names missing on either side, `shape_mismatch`, `dtype_mismatch`.
        """
        chosen = range(len(catalog.entries)) if places is None else places
        taken: dict[int, int] = {}
        unexpected: list[str] = []
        for number in chosen:
            slot = self._by_name.get(catalog.entries[number].name)
            if slot is None:
                unexpected.append(catalog.entries[number].name)
            else:
                # Of several names of one tensor, the first in the file.
                taken.setdefault(id(slot), number)
        missing = [slot.names[0] for slot in self.slots if id(slot) not in taken]
        if strict and (unexpected or (missing and places is None)):
            raise _mismatch(missing if places is None else [], unexpected, catalog)
        slots = {id(slot): slot for slot in self.slots}
        found = sorted((number, key) for key, number in taken.items())
        offers: dict[str, Place] = {}
        return [
            self._job(catalog, number, cut.get(number), slots[key], place, offers, dtype, raw)
            for number, key in found
        ]

    def _job(
        self,
        catalog: Catalog,
        number: int,
        region: Region,
        slot: _Slot,
        place: Place,
        offers: dict[str, Place],
        dtype: object,
        raw: bool,
    ) -> IntoJob:
        entry = catalog.entries[number]
        target = slot.tensor
        is_torch = hasattr(target, "is_meta")
        is_meta = is_torch and bool(target.is_meta)
        if not is_meta:
            place = _place_of(target, offers)
        elif place.framework.name != "torch":
            raise usage("meta tensors can be made by torch only", "say device='cpu'")
        framework = place.framework
        own_dtype = target.dtype
        casts = dtype is not None and entry.dtype in FLOATING
        keeps = raw or (framework.name == "numpy" and casts)
        layout = Layout(catalog, framework, [(number, region)], keeps)
        file_dtype, shape = layout.dtypes[0], layout.shapes[0]
        if tuple(target.shape) != shape:
            what = f"the tensor has shape {list(shape)}, its destination {list(target.shape)}"
            raise make("shape_mismatch", what, f"tensor `{entry.name}`")
        wanted = file_dtype
        if casts:
            wanted = own_dtype if dtype == "target" else framework.parse_dtype(dtype)
        if wanted != own_dtype and not (is_meta and casts):
            raise _dtype_mismatch(entry.name, entry.dtype, wanted, own_dtype, is_meta)
        job = IntoJob(number, region, entry.name, layout.bytes[0], place, target, None, None)
        if is_meta:
            job.target = None
        elif wanted == file_dtype and _can_fill(target, is_torch):
            job.address = framework.address(target)
            return job
        if wanted != file_dtype or not is_meta:
            job.cast = wanted
        return job

    def finish(self, jobs: list[IntoJob]) -> dict[str, Tensor]:
        """Puts new tensors where the old ones were; returns everything by every name."""
        results: dict[str, Tensor] = {}
        for job in jobs:
            slot = self._by_name[job.name]
            made = job.result
            if job.target is None:
                made = _replace(slot, made)
            for name in slot.names:
                results[name] = made
        left = [slot.names[0] for slot in self.slots if getattr(slot.tensor, "is_meta", False)]
        left = [name for name in left if name not in results] + self.unsaved
        if left:
            listed = ", ".join(left[:_LISTED])
            text = f"{len(left)} tensors are still on the meta device, no file has them: {listed}"
            warnings.warn(text, stacklevel=4)
        return results


def _replace(slot: _Slot, made: Tensor) -> Tensor:
    old = slot.tensor
    if slot.is_parameter:
        torch: Any = sys.modules["torch"]
        new = torch.nn.Parameter(made, requires_grad=old.requires_grad)
        # What frameworks hang on parameters (weight loaders and the like).
        new.__dict__.update(old.__dict__)
        made = new
    for home, key in slot.homes:
        home[key] = made
    return made


def _can_fill(target: Tensor, is_torch: bool) -> bool:
    if is_torch:
        plain = not (target.is_conj() or target.is_neg())
        return plain and str(target.layout) == "torch.strided" and bool(target.is_contiguous())
    flags = target.flags
    return bool(flags.c_contiguous and flags.writeable and target.dtype.isnative)


def _place_of(target: Tensor, offers: dict[str, Place]) -> Place:
    """The place of an existing tensor, one object a device."""
    name = str(target.device) if hasattr(target, "is_meta") else "host"
    found = offers.get(name)
    if found is None:
        found = offers[name] = parse_place(name)
    return found


def _dtype_mismatch(name: str, dtype: str, wanted: object, own: object, is_meta: bool) -> Exception:
    what = f"the tensor would be {wanted} ({dtype} in the file), its destination is {own}"
    hints = ["pass dtype='target' to cast to the dtypes of the destinations"]
    if is_meta:
        hints.append("or make the module in the dtype of the file, or name the dtype to load it in")
    return make("dtype_mismatch", what, f"tensor `{name}`", hints)


def _mismatch(missing: list[str], unexpected: list[str], catalog: Catalog) -> Exception:
    parts = []
    if missing:
        parts.append(f"the files lack {len(missing)} tensors of into: {_some(missing)}")
    if unexpected:
        parts.append(f"into lacks {len(unexpected)} tensors of the files: {_some(unexpected)}")
    hint = "pass strict=False to load what both have, or names= to choose"
    return make("no_such_tensor", "; ".join(parts), catalog.title(), [hint])


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(f"`{name}`" for name in names[:_LISTED]) + more
