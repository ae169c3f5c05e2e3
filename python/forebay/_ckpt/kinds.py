"""What kind of tensor one is, and the names of dtypes."""

from __future__ import annotations

import sys
from typing import Any

import torch

from forebay._errors import make, quoted

#: Tensors that are plain memory.
OWN_TYPES = (torch.Tensor, torch.nn.Parameter)


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" of torch.bfloat16."""
    name = _DTYPE_NAMES.get(dtype)
    if name is None:
        name = _DTYPE_NAMES[dtype] = str(dtype).removeprefix("torch.")
    return name


_DTYPE_NAMES: dict[torch.dtype, str] = {}


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a name. Errors: `unsupported` where this torch has none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        hint = f"torch {torch.__version__} is too old for it, or the file is damaged"
        raise make("unsupported", f"torch has no dtype {quoted(name)}", None, [hint])
    return dtype


def is_dtensor(tensor: object) -> bool:
    """Whether a tensor is a DTensor. Imports nothing: there is none before its module is."""
    kind = dtensor_type()
    return kind is not None and isinstance(tensor, kind)


def dtensor_type() -> type | None:
    """The class DTensor, if it was imported."""
    # torch 2.4 has it under the second name only.
    for name in ("torch.distributed.tensor", "torch.distributed._tensor"):
        found = getattr(sys.modules.get(name), "DTensor", None)
        if isinstance(found, type):
            return found
    return None


def is_sharded_tensor(tensor: object) -> bool:
    """Whether a tensor is a ShardedTensor (FSDP1's kind)."""
    found = sys.modules.get("torch.distributed._shard.sharded_tensor")
    kind = getattr(found, "ShardedTensor", None)
    return isinstance(kind, type) and isinstance(tensor, kind)


def local_of(tensor: Any) -> Any:
    """The local part of a DTensor, once a collective that makes it is done."""
    local = getattr(tensor, "_local_tensor", None)
    if local is None:
        local = tensor.to_local()
    if type(local) not in OWN_TYPES and hasattr(local, "wait"):
        local = local.wait()
    return local
