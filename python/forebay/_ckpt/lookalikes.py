"""Why a restore finds nothing for parts of a state: names that wrappers change.

DistributedDataParallel, `torch.compile` and others hold the model as a member, whose name then stands before those of
its parameters ("module.layer.weight"). FSDP's fully_shard and plain modules have the names as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from forebay._ckpt.flatten import Flat, Path
from forebay._errors import quoted

#: What wrappers call the module that they hold.
_HELD_AS = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")

#: Which wrapper that is, for messages.
_WHOSE = dict.fromkeys(_HELD_AS, "") | {
    "module": " (DistributedDataParallel)",
    "_orig_mod": " (torch.compile)",
}


def unfilled(flat: Flat, missing: Collection[str]) -> list[Path]:
    """Ways of the modules, and of the dicts at the top, that hold tensors of which none is in the checkpoint."""
    lacks = set(missing)
    places = [
        (path, name in lacks)
        for path, name, value in zip(flat.paths, flat.names, flat.values, strict=True)
        if isinstance(value, torch.Tensor)
    ]
    found: list[Path] = []
    for way in dict.fromkeys(_parts(flat)):
        below = [lack for path, lack in places if path[: len(way)] == way]
        if below and all(below):
            found.append(way)
    return [way for way in found if not any(way[:-cut] in found for cut in range(1, len(way)))]


def _parts(flat: Flat) -> Iterator[Path]:
    owned = {path for _, path, _ in flat.owners}
    for owner, path, _ in flat.owners:
        if isinstance(owner, torch.nn.Module):
            yield path
    for path in flat.paths:
        if len(path) > 1 and path[:1] not in owned and () not in owned:
            yield path[:1]


def wrapped(missing: Sequence[str], stored: Collection[str]) -> str | None:
    """A hint, where names that are missing differ from those of the checkpoint by a wrapper's."""
    lacks = set(missing)
    for name in missing:
        for held, bare in _without(name):
            if bare in stored:
                return (
                    f"the state's names have `{held}.` where the checkpoint's do not, as of a module inside of a "
                    f"wrapper{_WHOSE[held]}: give the module inside, `model.{held}`"
                )
    for name in stored:
        for held, bare in _without(name):
            if bare in lacks:
                return (
                    f"the checkpoint's names have `{held}.` where the state's do not: it was saved from a wrapper"
                    f"{_WHOSE[held]}; {{{held!r}: model}} in the module's place has the same names"
                )
    return None


def _without(name: str) -> Iterator[tuple[str, str]]:
    """A name without one of what wrappers put into it, and without all."""
    parts = name.split(".")
    for held in _HELD_AS:
        if held not in parts:
            continue
        at = parts.index(held)
        yield held, ".".join(parts[:at] + parts[at + 1 :])
    few = [part for part in parts if part not in _HELD_AS]
    if len(few) + 1 < len(parts):
        yield next(part for part in parts if part in _HELD_AS), ".".join(few)


def nothing_for(way: Path, title: str, hint: str | None) -> str:
    """What to warn of where a part of the state gets nothing."""
    name = f"the part {quoted('.'.join(map(str, way)))} of the state" if way else "the state"
    line = f"nothing of {name} is in {title}: it goes on as it is. "
    return line + (hint[:1].upper() + hint[1:] if hint else "Is it built as it was saved?")
