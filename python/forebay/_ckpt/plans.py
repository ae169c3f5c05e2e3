"""What is kept of a structure from one save to the next, and what each save takes anew.

The first save of a structure describes every value and agrees with the other ranks. A later one only asks whether the
state is still built that way: same keys, same kinds, dtypes, shapes and placements. Addresses are taken anew every
time, so that a tensor that moved is read where it is now; whether tied tensors are still tied is looked at again when
any address changed. If anything else changed, the state is described again, and only a structure that was never agreed
on costs a message to other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from forebay import _native
from forebay._ckpt.agreement import Agreed
from forebay._ckpt.flatten import Path, Shape, States, flatten, gather, is_leaf
from forebay._ckpt.held import (
    PLAIN,
    Describer,
    Held,
    memory_of,
    same_layout,
)
from forebay._ckpt.kinds import OWN_TYPES
from forebay._ckpt.perrank import PER_RANK
from forebay._ckpt.storages import addresses_of
from forebay._ckpt.ties import find_ties
from forebay._errors import Error, quoted, usage


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
    #: (tensor, piece) of what this rank writes, and the objects that it writes.
    writes: list[tuple[int, int]] = field(default_factory=list)
    writes_objects: list[int] = field(default_factory=list)

    @property
    def bytes_here(self) -> int:
        """Bytes of tensors that this rank writes."""
        return self.structure.bytes if self.structure is not None else 0


def describe(state: Any, describer: Describer, states: States) -> tuple[Plan, list[Any]]:
    """A new plan, with the values in its order. Errors: `usage`, `unsupported`, `structure_mismatch`, shared
    tensors."""
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
    plan.seen = _look(plan, pieces)
    plan.ties = find_ties([flat.names[place] for place in tensors], pieces)
    return plan, flat.values


def memory(plan: Plan, values: Sequence[Any]) -> list[list[torch.Tensor]]:
    """The pieces of each tensor that are here, as views of the state's memory."""
    if not plan.cut:
        return [[values[place]] for place in plan.tensors]
    return [
        [values[place]] if one.layout is PLAIN else memory_of(plan.names[place], values[place], one)
        for place, one in zip(plan.tensors, plan.held, strict=True)
    ]


def _look(plan: Plan, pieces: Sequence[Sequence[torch.Tensor]]) -> tuple[list[int], list[bool]]:
    """Where all pieces lie. Errors: `usage` for tensors without their memory."""
    flat, addresses = addresses_of([plan.names[place] for place in plan.tensors], pieces)
    return addresses, list(map(torch.Tensor.is_contiguous, flat))


def fits(
    plan: Plan, state: Any, describer: Describer, states: States
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
        plain = tensors
        if plan.cut:
            both = zip(tensors, plan.held, strict=True)
            plain = [one for one, held in both if held.layout is PLAIN]
        if any(hasattr(one, "global_shape") for one in plain):
            return None
        for at in plan.cut:
            place = plan.tensors[at]
            if not same_layout(plan.held[at].layout, plan.names[place], values[place], describer):
                return None
        for place in plan.elsewhere:
            # Its mesh may have come to include this rank.
            if describer.describe(plan.names[place], values[place]) is not None:
                return None
        pieces = memory(plan, values)
        if not all(_is_whole(pieces[at], plan.held[at]) for at in plan.cut):
            return None
        seen = _look(plan, pieces)
        if seen != plan.seen:
            ties = find_ties([plan.names[place] for place in plan.tensors], pieces)
            if ties != plan.ties:
                return None
            plan.seen = seen
    except (Error, RuntimeError):
        # A tensor without memory to point at (it became sparse, say). Describing it says what is wrong.
        return None
    return values, pieces


def _is_whole(pieces: Sequence[torch.Tensor], held: Held) -> bool:
    """Whether pieces are as large as the regions that they are written as: a local part may be exchanged."""
    if not held.regions:
        return not any(piece.numel() for piece in pieces)
    return [tuple(piece.shape) for piece in pieces] == [sizes for _, sizes in held.regions]


def _same_kinds(plan: Plan, values: Sequence[Any]) -> bool:
    types = list(map(type, values))
    if types != plan.types:
        for before, now, value in zip(plan.types, types, values, strict=True):
            if before is now:
                continue
            if issubclass(before, torch.Tensor) or issubclass(now, torch.Tensor):
                # Classes of tensors lie in memory in ways of their own; only plain ones are alike.
                if before not in OWN_TYPES or now not in OWN_TYPES:
                    return False
            elif not is_leaf(value):
                return False
        plan.types = types
    return all(is_leaf(values[place]) for place in plan.objects)
