"""Giving restored states to the objects that they belong to.

A module whose tensors were all filled where they are has nothing to be given: its `load_state_dict` would copy each
tensor onto itself, and goes through all names once for each module inside, which takes seconds for thousands of them. It
is called all the same where something could be waiting for the call: an override, a hook, values that are no tensors,
or tensors that are not the module's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from forebay._ckpt.kinds import is_dtensor, local_of

#: Hooks that want to hear of a load.
_HOOKS = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")

#: What loads a module's own tensors, without doing more if all are there.
_PLAIN_LOADS = (nn.Module._load_from_state_dict, _NormBase._load_from_state_dict)


def hand_over(owner: Any, state: Any) -> None:
    """Gives an object its state, of which all tensors are filled."""
    if not (isinstance(owner, nn.Module) and _is_in_place(owner, state)):
        owner.load_state_dict(state)


def _is_in_place(module: nn.Module, state: Mapping[str, Any]) -> bool:
    """Whether a state is the module's own tensors and nothing else, and nobody wants to hear of it."""
    if "load_state_dict" in vars(module):
        return False
    if type(module).load_state_dict is not nn.Module.load_state_dict:
        return False
    left = len(state)
    for prefix, inner in module.named_modules(remove_duplicate=False):
        kind = type(inner)
        if "_load_from_state_dict" in vars(inner) or kind._load_from_state_dict not in _PLAIN_LOADS:
            return False
        if any(getattr(inner, hooks, None) for hooks in _HOOKS):
            return False
        before = f"{prefix}." if prefix else ""
        for name, own in (*inner._parameters.items(), *inner._buffers.items()):
            if own is None or name in inner._non_persistent_buffers_set:
                continue
            if not _is_one(own, state.get(before + name)):
                return False
            left -= 1
    return left == 0


def _is_one(own: torch.Tensor, other: Any) -> bool:
    """Whether two tensors are the same memory, seen alike."""
    if own is other:
        return True
    if type(other) is not torch.Tensor and not is_dtensor(other):
        return False
    if is_dtensor(own) != is_dtensor(other):
        return False
    if is_dtensor(own):
        own, other = local_of(own), local_of(other)
    return bool(own.is_set_to(other))
