"""Destinations that exist: dicts of tensors, and modules.

A destination is filled where it is when its memory is contiguous and of the dtype of the file; others go through a window
of extra memory. What is on the meta device is made on the device of the call. In a module, names that stand for one
tensor (tied weights) are one destination: any one of its names in the file will do, and all of them show the new tensor.
So are tensors that are not one object but the same memory (`.data` of one another). Memory that two destinations share
in part is refused: both would be filled at once, with different bytes.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from forebay._catalog import Catalog
from forebay._errors import make, quoted, usage
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
    #: Others over the same memory; only the first of them has a list.
    twins: list[_Slot] = field(default_factory=list)


def destinations_of(into: object) -> Destinations:
    """Reads `into=`. Errors: `usage`."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(into, torch.nn.Module):
        return _of_module(into)
    if isinstance(into, MutableMapping):
        slots = [_Slot(tensor, [name], [(into, name)]) for name, tensor in into.items()]
        _check_apart(slots)
        return Destinations(slots, [], [])
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
    return Destinations(*_joined(list(slots.values())), unsaved)


@dataclass(slots=True)
class _Span:
    """The bytes that a tensor reaches over: runs of `width` bytes, one every `step` bytes."""

    slot: _Slot
    #: The device, or on the meta device the storage, which has no address.
    memory: object
    start: int
    end: int
    step: int
    width: int

    def meets(self, other: _Span) -> bool:
        """Whether the two share bytes. In doubt they do."""
        if self.memory != other.memory or other.start >= self.end or self.start >= other.end:
            return False
        if self.step != other.step or not self.step:
            return True
        # Columns of one matrix: their runs lie side by side in each row.
        ahead = (other.start - self.start) % self.step
        return ahead < self.width or ahead + other.width > self.step

    def is_as(self, other: _Span) -> bool:
        """Whether the two are the same bytes, and filling one fills the other."""
        if (self.start, self.end) != (other.start, other.end):
            return False
        one, two = self.slot.tensor, other.slot.tensor
        if (one.shape, one.stride(), one.dtype) == (two.shape, two.stride(), two.dtype):
            return True
        # What has to be made anew can be given to both in the same form only.
        return not one.is_meta and self._is_dense() and other._is_dense()

    def _is_dense(self) -> bool:
        tensor = self.slot.tensor
        return bool(self.end - self.start == tensor.numel() * tensor.element_size())


def _span_of(slot: _Slot) -> _Span | None:
    """The bytes of a tensor; `None` where it has none. Errors: `usage` for what is no tensor."""
    tensor = slot.tensor
    if hasattr(tensor, "untyped_storage"):
        count = int(tensor.numel())
        if not count or tensor.layout is not sys.modules["torch"].strided:
            return None
        size = int(tensor.element_size())
        memory: object = "host" if tensor.is_cpu else tensor.device
        start = int(tensor.data_ptr())
        if tensor.is_meta:
            memory = ("meta", tensor.untyped_storage()._cdata)
            start = tensor.storage_offset() * size
        elif not start:
            # A wrapper around other tensors.
            return None
        if tensor.is_contiguous():
            return _Span(slot, memory, start, start + count * size, 0, count * size)
        steps = [step * size for step in tensor.stride()]
    elif hasattr(tensor, "__array_interface__"):
        if not tensor.size:
            return None
        size, steps, memory = int(tensor.itemsize), list(tensor.strides), "host"
        start = int(tensor.__array_interface__["data"][0])
    else:
        kind = type(tensor).__name__
        raise usage(f"{quoted(slot.names[0])} of into is {kind}, a tensor is needed")
    reaches = [(step, (side - 1) * step) for side, step in zip(tensor.shape, steps, strict=True)]
    start += sum(reach for _, reach in reaches if reach < 0)
    length = sum(abs(reach) for _, reach in reaches) + size
    step, longest = max(((abs(s), abs(r)) for s, r in reaches if r), default=(0, 0))
    return _Span(slot, memory, start, start + length, step, length - longest)


def _spans_of(slots: list[_Slot]) -> list[_Span]:
    """In order of memory, of the same memory the first slot first."""
    spans = [span for span in map(_span_of, slots) if span is not None]
    numbers: dict[object, int] = {}
    order = {id(span): numbers.setdefault(span.memory, len(numbers)) for span in spans}
    return sorted(spans, key=lambda span: (order[id(span)], span.start))


def _meeting(spans: list[_Span]) -> Iterator[tuple[_Span, _Span]]:
    """The pairs that share bytes."""
    near: list[_Span] = []
    for span in spans:
        near = [one for one in near if one.memory == span.memory and one.end > span.start]
        yield from ((one, span) for one in near if one.meets(span))
        near.append(span)


def _check_apart(slots: list[_Slot]) -> None:
    """Two names of a dict must not share memory. Errors: `usage`."""
    for one, other in _meeting(_spans_of(slots)):
        raise _shared(
            one, other, "pass separate tensors, or a module, whose tied weights stay tied"
        )


def _joined(slots: list[_Slot]) -> tuple[list[_Slot], list[tuple[_Span, _Span]]]:
    """The slots of a module, those over the same memory as twins of their first, and the pairs that share a part."""
    first_of: dict[int, _Slot] = {}
    clashes: list[tuple[_Span, _Span]] = []
    for one, other in _meeting(_spans_of(slots)):
        if one.is_as(other):
            first_of.setdefault(id(other.slot), first_of.get(id(one.slot), one.slot))
        else:
            clashes.append((one, other))
    for slot in slots:
        if id(slot) in first_of:
            first_of[id(slot)].twins.append(slot)
    return [slot for slot in slots if id(slot) not in first_of], clashes


def _shared(one: _Span, other: _Span, hint: str) -> Exception:
    names = f"{quoted(one.slot.names[0])} and {quoted(other.slot.names[0])}"
    return usage(f"{names} of into share memory", hint)


class Destinations:
    """What `into=` offers."""

    def __init__(
        self, slots: list[_Slot], clashes: list[tuple[_Span, _Span]], unsaved: list[str]
    ) -> None:
        self.slots = slots
        self.clashes = clashes
        self.unsaved = unsaved
        #: The first slot over a name's memory, and the name's own.
        self._by_name = {
            name: (slot, own) for slot in slots for own in (slot, *slot.twins) for name in own.names
        }

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

        Errors: `no_such_tensor` for names missing on either side, `shape_mismatch`, `dtype_mismatch`;
        `usage` for two that share a part of their memory.
        """
        chosen = range(len(catalog.entries)) if places is None else places
        taken: dict[int, tuple[int, _Slot]] = {}
        unexpected: list[str] = []
        for number in chosen:
            found = self._by_name.get(catalog.entries[number].name)
            if found is None:
                unexpected.append(catalog.entries[number].name)
            else:
                # Of several names of one tensor, the first in the file.
                taken.setdefault(id(found[0]), (number, found[1]))
        missing = [slot.names[0] for slot in self.slots if id(slot) not in taken]
        if strict and (unexpected or (missing and places is None)):
            raise _mismatch(missing if places is None else [], unexpected, catalog)
        for one, other in self.clashes:
            if all(id(self._by_name[span.slot.names[0]][0]) in taken for span in (one, other)):
                raise _shared(one, other, "load one after the other, with names=")
        wanted = sorted(taken.values(), key=lambda take: take[0])
        offers: dict[str, Place] = {}
        return [
            self._job(catalog, number, cut.get(number), slot, place, offers, dtype, raw)
            for number, slot in wanted
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
            raise make("shape_mismatch", what, f"tensor {quoted(entry.name)}")
        wanted = file_dtype
        if casts:
            wanted = own_dtype if dtype == "target" else framework.parse_dtype(dtype)
            if not framework.holds_floats(wanted):
                raise _dtype_mismatch(entry.name, entry.dtype, wanted, own_dtype, is_meta)
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
            first, _ = self._by_name[job.name]
            for slot in (first, *first.twins):
                made = _replace(slot, job.result) if job.target is None else slot.tensor
                for name in slot.names:
                    results[name] = made
        left = [slot.names[0] for slot in self.slots if getattr(slot.tensor, "is_meta", False)]
        left = [name for name in left if name not in results] + self.unsaved
        if left:
            listed = ", ".join(map(quoted, left[:_LISTED]))
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
    return make("dtype_mismatch", what, f"tensor {quoted(name)}", hints)


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
    return ", ".join(quoted(name) for name in names[:_LISTED]) + more
