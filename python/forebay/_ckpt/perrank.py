"""What belongs to one rank alone: generators, data loaders. It lies in the checkpoint under `per_rank/RANK/`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from forebay._ckpt.flatten import Flat, flatten
from forebay._ckpt.held import PLAIN, Describer, Held
from forebay._ckpt.storages import addresses_of
from forebay._ckpt.ties import find_ties
from forebay._errors import quoted, usage

#: What the names of per-rank values start with, before the rank and another slash.
PER_RANK = "per_rank/"


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
    addresses_of(names, tensors)
    if find_ties(names, tensors):
        raise usage("tensors of per_rank share memory", "save one of them, or clones")
    return Own(flat, held)
