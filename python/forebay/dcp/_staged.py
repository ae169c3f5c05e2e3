"""A staged state: the same nesting as the original, with tensors that are views of one block of memory.

It travels to another process as the block and a plan of how to cut it: one descriptor, whatever the number of tensors.
(Left to torch, several DTensors whose local parts share memory crash the sender, as seen with torch 2.11.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch

from forebay._ckpt.kinds import dtensor_type, is_dtensor, is_sharded_tensor, local_of
from forebay._errors import make, usage

#: Tensors start at multiples of this.
ALIGN_BYTES = 512

_DEPTH_MAX = 100

#: What a tensor of torch's checkpointable-tensor protocol says of itself.
_FIELDS = ("global_shape", "global_offsets", "local_offsets", "local_sizes")

#: Dtype and shape of each tensor of a block.
Forms = list[tuple[torch.dtype, torch.Size]]


@dataclass(frozen=True)
class _Slot:
    """Stands for the tensor of a number."""

    number: int
    fields: dict[str, Any]


@dataclass(frozen=True)
class _Sharded:
    """Stands for a DTensor whose local part has a number."""

    local: _Slot
    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]


@dataclass(slots=True, eq=False)
class Plan:
    """What a state consists of."""

    #: The state with stand-ins for tensors.
    template: dict[Any, Any]
    #: Each memory once: tied tensors stay tied.
    tensors: list[torch.Tensor] = field(default_factory=list)

    @property
    def forms(self) -> Forms:
        """How a block is cut for it."""
        return [(tensor.dtype, tensor.shape) for tensor in self.tensors]


class Staged(dict[Any, Any]):
    """The staged state."""

    def __init__(self, plan: Plan, block: torch.Tensor, views: Sequence[torch.Tensor]) -> None:
        super().__init__(_build(plan.template, views))
        self._template = plan.template
        self._forms = plan.forms
        self._block = block

    def __reduce__(self) -> Any:
        # What was added to the state since goes as it is; what was removed does not.
        template = {key: value for key, value in self._template.items() if key in self}
        added = {key: value for key, value in self.items() if key not in self._template}
        return _rebuild, (self._block, self._forms, template, added)


def _rebuild(
    block: torch.Tensor, forms: Forms, template: dict[Any, Any], added: dict[Any, Any]
) -> dict[Any, Any]:
    state: dict[Any, Any] = _build(template, cut(block, forms))
    return {**state, **added}


def aligned(size: int) -> int:
    """Bytes that a tensor takes in a block."""
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES


def cut(block: torch.Tensor, forms: Forms) -> list[torch.Tensor]:
    """The tensors of a block."""
    views = []
    at = 0
    for dtype, shape in forms:
        size = shape.numel() * dtype.itemsize
        views.append(block[at : at + size].view(dtype).view(shape))
        at += aligned(size)
    return views


def plan_of(state: Mapping[Any, Any]) -> Plan:
    """Goes through a state. Errors: `usage`, `unsupported`."""
    plan = Plan({})
    seen: dict[Any, int] = {}
    plan.template = {key: _stand_in(plan, seen, value, 0) for key, value in state.items()}
    return plan


def _stand_in(plan: Plan, seen: dict[Any, int], value: Any, depth: int) -> Any:
    if depth > _DEPTH_MAX:
        raise usage(f"the state is nested deeper than {_DEPTH_MAX}", "is it a cycle?")
    if is_dtensor(value):
        local = _slot(plan, seen, local_of(value))
        placements, stride = tuple(value.placements), tuple(value.stride())
        return _Sharded(local, value.device_mesh, placements, value.shape, stride)
    if is_sharded_tensor(value):
        hint = "use DTensor state dicts, or torch's own stager"
        raise make("unsupported", "a ShardedTensor is not staged", None, [hint])
    if isinstance(value, torch.Tensor):
        return _slot(plan, seen, value)
    if isinstance(value, Mapping):
        return {key: _stand_in(plan, seen, one, depth + 1) for key, one in value.items()}
    if isinstance(value, list | tuple):
        row = [_stand_in(plan, seen, one, depth + 1) for one in value]
        if isinstance(value, list):
            return row
        return type(value)(*row) if hasattr(value, "_fields") else tuple(row)
    return deepcopy(value)


def _slot(plan: Plan, seen: dict[Any, int], value: torch.Tensor) -> _Slot:
    if value.layout is not torch.strided or value.is_quantized or value.is_meta:
        kind = "meta" if value.is_meta else "quantized" if value.is_quantized else "sparse"
        raise make("unsupported", f"a {kind} tensor is not staged")
    plain = value.detach()
    storage = plain.untyped_storage()._cdata
    key = (storage, plain.storage_offset(), plain.dtype, plain.shape, plain.stride())
    number = seen.setdefault(key, len(plan.tensors))
    if number == len(plan.tensors):
        plan.tensors.append(plain)
    return _Slot(number, {name: getattr(value, name) for name in _FIELDS if hasattr(value, name)})


def _build(template: Any, views: Sequence[torch.Tensor]) -> Any:
    if isinstance(template, _Slot):
        view = views[template.number]
        for name, value in template.fields.items():
            setattr(view, name, value)
        return view
    if isinstance(template, _Sharded):
        import torch.distributed.tensor  # noqa: F401

        kind: Any = dtensor_type()
        return kind.from_local(
            _build(template.local, views),
            template.mesh,
            template.placements,
            run_check=False,
            shape=template.shape,
            stride=template.stride,
        )
    if isinstance(template, dict):
        return {key: _build(one, views) for key, one in template.items()}
    if isinstance(template, list | tuple):
        row = [_build(one, views) for one in template]
        if isinstance(template, list):
            return row
        return type(template)(*row) if hasattr(template, "_fields") else tuple(row)
    return template
