"""Nested state to flat names and paths: the rules of `torch.distributed.checkpoint` since torch 2.4.

- A mapping is always descended; an empty one vanishes.
- A list is descended if it holds a tensor or a mapping, at any depth of lists; otherwise it is one value.
- Anything else is one value, a tuple too.
- Keys become text in the path, places in lists stay numbers; the name is the path joined by dots.

One thing is added: what has `state_dict` and `load_state_dict` (modules, optimizers, schedulers, loaders) is replaced
by its state wherever it stands, not only at the top, where torch does so.

A `Shape` remembers how a state was built. The next state is held against it key by key, without building names, and the
values are gathered on the way: about 0.1 us a value where a mapping holds nothing but values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from forebay._errors import make, quoted, usage

#: A way to a value: keys as text, places in lists as numbers.
Path = tuple[str | int, ...]

#: States of objects by the object's id: each is asked once, because that takes long.
States = dict[int, Any]

#: The state of an object at a way; `None` where the object itself is to be asked.
Ask = Callable[[Any, Path], Any]

#: Deeper nesting is taken for a cycle.
DEPTH_MAX = 100

#: The same of lists that are one value; those of 900 cannot be pickled.
_LIST_DEPTH_MAX = 500

#: Types of most values that are not tensors; none of them holds others or has a state of its own.
_PLAIN = frozenset((int, float, bool, str, bytes, complex, type(None), tuple))


def has_state(value: object) -> bool:
    """Whether a value gives and takes a state of its own."""
    if isinstance(value, torch.Tensor | Mapping | type):
        return False
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


def state_of(value: Any, states: States) -> Any:
    """The state of an object that has one."""
    known = states.get(id(value))
    if known is None:
        known = states[id(value)] = value.state_dict()
    return known


def is_one_value(value: list[Any], depth: int = 0) -> bool:
    """Whether a list is stored as one value. Errors: `RecursionError`."""
    if depth > _LIST_DEPTH_MAX:
        raise RecursionError
    for entry in value:
        kind = type(entry)
        if kind in _PLAIN:
            continue
        if isinstance(entry, torch.Tensor | Mapping) or has_state(entry):
            return False
        if isinstance(entry, list) and not is_one_value(entry, depth + 1):
            return False
    return True


@dataclass(slots=True)
class Shape:
    """How a container was built."""

    #: Its keys; `None` for a list.
    keys: tuple[Any, ...] | None
    #: Its places, of a list.
    length: int = 0
    #: Whether it was the state of an object that has one.
    of_object: bool = False
    #: One for each value in it, `None` where that was no container.
    inner: list[Shape | None] = field(default_factory=list)
    #: Whether none of them is a container.
    plain: bool = True


@dataclass(slots=True)
class Flat:
    """A state in flat form; the lists run in parallel."""

    names: list[str] = field(default_factory=list)
    paths: list[Path] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    #: The container and the key in it, where the value can be replaced.
    homes: list[tuple[Any, Any]] = field(default_factory=list)
    #: Objects that have a state of their own, their way, and the state that they gave.
    owners: list[tuple[Any, Path, Any]] = field(default_factory=list)
    #: Names of mappings that hold nothing: they leave no trace in a checkpoint.
    empty: list[str] = field(default_factory=list)
    #: These mappings, each with its way.
    hollow: list[tuple[Path, Mapping[Any, Any]]] = field(default_factory=list)
    shape: Shape | None = None
    states: States = field(default_factory=dict)
    #: Gives states in place of the objects.
    ask: Ask | None = None


def flatten(state: Any, states: States | None = None, ask: Ask | None = None) -> Flat:
    """Flattens a mapping, or an object that has a state. `states` has states that were asked for before, and is added
    to; `ask` gives states of its own.

    Errors: `usage`.
    """
    flat = Flat(states={} if states is None else states, ask=ask)
    if has_state(state):
        own = _asked(flat, state, ())
        if not isinstance(own, Mapping):
            raise usage(f"the state of {type(state).__name__} is {type(own).__name__}, no dict")
        flat.owners.append((state, (), own))
        flat.shape = _mapping(flat, own, (), 0)
        flat.shape.of_object = True
    elif isinstance(state, Mapping):
        flat.shape = _mapping(flat, state, (), 0)
    else:
        raise usage(f"the state is {type(state).__name__}, a dict is needed")
    if len(set(flat.names)) < len(flat.names):
        raise _twice(flat)
    _check_text(flat.names)
    return flat


def _check_text(names: list[str]) -> None:
    try:
        "".join(names).encode()
    except UnicodeEncodeError:
        for name in names:
            if not name.isascii() and name != name.encode(errors="replace").decode():
                hint = "keys are stored as UTF-8: rename it"
                raise usage(f"the key {ascii(name)} is no Unicode text", hint) from None


def _mapping(flat: Flat, value: Mapping[Any, Any], path: Path, depth: int) -> Shape:
    if not value and path:
        flat.empty.append(".".join(map(str, path)))
        flat.hollow.append((path, value))
    if any(type(key) is not str for key in value):
        _check_keys(value, path)
    shape = Shape(tuple(value))
    for key, entry in value.items():
        _entry(flat, shape, value, key, entry, (*path, str(key)), depth)
    return shape


def _check_keys(value: Mapping[Any, Any], path: Path) -> None:
    """Whether keys are told apart by their text."""
    seen: dict[str, Any] = {}
    for key in value:
        other = seen.setdefault(str(key), key)
        if other is not key:
            kinds = [f"{one!r} ({type(one).__name__})" for one in (other, key)]
            where = quoted(".".join(map(str, path))) if path else "the state"
            what = f"two keys of {where} have the same text: {kinds[0]} and {kinds[1]}"
            raise usage(what, "keys are stored as text: rename one")


def _list(flat: Flat, value: list[Any] | tuple[Any, ...], path: Path, depth: int) -> Shape:
    shape = Shape(None, len(value))
    for place, entry in enumerate(value):
        _entry(flat, shape, value, place, entry, (*path, place), depth)
    return shape


def _entry(
    flat: Flat, shape: Shape, home: Any, key: object, value: Any, path: Path, depth: int
) -> None:
    inner: Shape | None = None
    if type(value) in _PLAIN or isinstance(value, torch.Tensor):
        pass
    elif depth >= DEPTH_MAX:
        raise _too_deep(path, DEPTH_MAX)
    elif isinstance(value, Mapping):
        inner = _mapping(flat, value, path, depth + 1)
    elif isinstance(value, list):
        if not _is_one(value, path):
            inner = _list(flat, value, path, depth + 1)
    elif has_state(value):
        own = _asked(flat, value, path)
        flat.owners.append((value, path, own))
        inner = _state_of(flat, own, path, depth + 1)
    shape.inner.append(inner)
    if inner is not None:
        shape.plain = False
        return
    flat.names.append(".".join(map(str, path)))
    flat.paths.append(path)
    flat.values.append(value)
    flat.homes.append((home, key))


def _is_one(value: list[Any], path: Path) -> bool:
    try:
        return is_one_value(value)
    except RecursionError:
        raise _too_deep(path, _LIST_DEPTH_MAX) from None


def _too_deep(path: Path, most: int) -> Exception:
    where = quoted(".".join(map(str, path[:4])))
    return usage(f"the state is nested deeper than {most}, at {where}...", "is it a cycle?")


def _asked(flat: Flat, value: Any, path: Path) -> Any:
    if flat.ask is not None and id(value) not in flat.states:
        own = flat.ask(value, path)
        if own is not None:
            flat.states[id(value)] = own
    return state_of(value, flat.states)


def _state_of(flat: Flat, own: object, path: Path, depth: int) -> Shape:
    if not isinstance(own, Mapping):
        where = quoted(".".join(map(str, path)))
        raise usage(f"the state of {where} is {type(own).__name__}, a dict is needed")
    shape = _mapping(flat, own, path, depth)
    shape.of_object = True
    return shape


def _twice(flat: Flat) -> Exception:
    seen: dict[str, Path] = {}
    for name, path in zip(flat.names, flat.paths, strict=True):
        if name in seen:
            what = f"two values of the state are both called {quoted(name)}"
            hint = f"their keys are {seen[name]!r} and {path!r}: rename one"
            return make("usage", what, None, [hint])
        seen[name] = path
    return usage("two values of the state have one name")


def gather(shape: Shape, state: Any, states: States) -> list[Any] | None:
    """The values of a state built as `shape` says, in the order of `flatten`; `None` if it is built otherwise.
    `states` as for `flatten`.

    What was a tensor may now be an object and the other way round: callers compare types.
    """
    values: list[Any] = []
    return values if _fits(shape, state, values, states) else None


def _fits(shape: Shape, value: Any, values: list[Any], states: States) -> bool:
    entries: Collection[Any]
    if shape.of_object:
        if not has_state(value):
            return False
        value = state_of(value, states)
    if shape.keys is not None:
        if not isinstance(value, Mapping) or tuple(value) != shape.keys:
            return False
        entries = value.values()
    else:
        if not isinstance(value, list) or len(value) != shape.length:
            return False
        entries = value
    if shape.plain:
        values.extend(entries)
        return True
    for inner, entry in zip(shape.inner, entries, strict=True):
        if inner is None:
            values.append(entry)
        elif not _fits(inner, entry, values, states):
            return False
    return True


def is_leaf(value: object) -> bool:
    """Whether `flatten` would take a value as it is."""
    if type(value) in _PLAIN or isinstance(value, torch.Tensor):
        return True
    if isinstance(value, list):
        try:
            return is_one_value(value)
        except RecursionError:
            return False
    return not isinstance(value, Mapping) and not has_state(value)
