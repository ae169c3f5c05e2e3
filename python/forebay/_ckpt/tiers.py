"""Tiers of a `Checkpointer`: steps that are saved to the first go on to the others by themselves.

The native runner does it, in threads of rank 0: it looks, moves, removes, and never calls Python. Here is what it is
told: where the tiers are, that something was saved, that a save wants room.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forebay import _native
from forebay._ckpt.agents import Agent, damage_in
from forebay._ckpt.nodetier import Lacking, Node
from forebay._errors import make, usage
from forebay._urls import Place, Url, place_of

#: What `Checkpointer(tiers=...)` takes.
TiersLike = str | os.PathLike[str] | Sequence[str | os.PathLike[str] | Mapping[str, Any]]

#: How long a save waits for room on the first tier.
PATIENCE_SECONDS = 600.0

#: What a file without a name is called in errors.
_NO_FILE = "forebay.toml"


class Tiers:
    """The tiers of one checkpointer. `places` are the same on all ranks; only rank 0 starts anything, and where the first
    is on the drives of nodes (`node`) one process of each. Where an agent does the rest they are only looked at."""

    def __init__(
        self,
        tiers: TiersLike,
        directory: Place,
        agent: Agent | None = None,
        records: str | os.PathLike[str] | None = None,
    ) -> None:
        self._moves, self._agent = agent is None, agent
        self._file, self._text = _source(tiers, directory, records)
        places, backlog = _native.Tiers.read(self._file, self._text)
        #: Where the steps are, the nearest first.
        self.places = [place_of(place).absolute() for place in places]
        folder = _native.split_folder(places[0]) if places else None
        if not self.places or (self.places[0] if folder is None else folder) != directory:
            first = self.places[0] if self.places else "nowhere"
            what = f"saves go to {directory}, and the first tier is {first}"
            raise usage(what, "the Checkpointer's directory is the place of the first tier")
        if backlog == "straight":
            what = "a Checkpointer saves to the first tier, and backlog is 'straight'"
            raise usage(what, "say 'wait' or 'skip'")
        if folder is not None and len(self.places) == 1:
            what = "saves to the drives of nodes go nowhere else, and nobody could restore them"
            raise usage(what, "name a tier that all nodes share: tiers=[...]")
        self.node = (
            Node(self.places[0], folder) if isinstance(self.places[0], Url) and folder else None
        )
        self._native: _native.Tiers | None = None
        #: Whether that moves what is on this node's drive.
        self._has_drive = False
        self._starts = threading.RLock()

    def start(self) -> _native.Tiers:
        """The runner of rank 0. Where the first tier is on the drives of nodes it moves what is beyond, and what is on this
        node's drive if nobody else does."""
        with self._starts:
            if self._native is None:
                self._run("beyond")
            assert self._native is not None
            return self._native

    def attend(self, first: bool) -> None:
        """A step was committed, or is to be restored: to be called on every rank where tiers are on the drives of nodes,
        `first` on rank 0. Nothing else is done."""
        if self.node is None or not self._moves or not self.node.takes_charge():
            return
        with self._starts:
            if self._native is not None and not self._has_drive:
                # Whoever was in charge is gone.
                native, self._native = self._native, None
                native.stop()
            if self._native is None:
                self._run("beyond" if first else "drive")
            assert self._native is not None
            self._native.wake()

    def _run(self, reach: str) -> None:
        duties: dict[str, Any] = {} if self._moves else {"moves": False}
        if self.node is not None and self._moves:
            self._has_drive = self.node.takes_charge()
            duties["reach"] = "all" if self._has_drive and reach == "beyond" else reach
        self._native = _native.Tiers(self._file, self._text, **duties)

    def lacking(self, step: int | None) -> Lacking | None:
        """What a step, or the newest, lacks on the next tier, if it is on the drives of nodes only."""
        if self.node is None:
            return None
        found = _native.Tiers.unlanded(self._file, self._text, step)
        return None if found is None else Lacking(found[0], found[1], frozenset(found[2]))

    def damaged(self, step: int) -> str | None:
        """What is known of damage to a step on this node's drive, on the process that has it moved: its files never come.
        """
        if self.node is None or not self.node.takes_charge():
            return None
        if self._agent is not None:
            return self._agent.damaged(step)
        native = self._native
        return None if native is None else damage_in(json.loads(native.status()), step)

    def ranks_here(self, step: int) -> list[int]:
        """The ranks whose data of a step are on this node's drive."""
        return _native.Tiers.ranks_here(self._file, self._text, step)

    def wake(self) -> None:
        """A step was committed."""
        self.start().wake()

    def admit(self) -> bool:
        """Waits until a save has room; False where it is to be left out."""
        return self.start().admit(PATIENCE_SECONDS)

    def nearest(self, step: int | None) -> tuple[Place, int, list[str]]:
        """From where to restore a step, or the newest, and what was passed over for it. Errors: `not_found`; those of the
        nearest copy where none is sound."""
        place, number, older, passed = _native.Tiers.nearest(self._file, self._text, step)
        if older:
            passed = [*passed, f"step {number} is not the newest: no copy of that is sound"]
        return place_of(place).absolute(), number, passed

    def status(self) -> dict[str, Any]:
        """How everything stands, as `forebay tier status --json` has it."""
        found: dict[str, Any] = json.loads(self.start().status())
        return found

    def act(self, action: Mapping[str, Any], who: str) -> dict[str, Any]:
        """Does what is asked for; its outcome."""
        found: dict[str, Any] = json.loads(self.start().act(json.dumps(dict(action)), who))
        return found

    def drain(self, timeout: float, first: bool) -> bool:
        """Waits until every step is where it should be; on other ranks than the `first`, what this one moves."""
        if first:
            return self.start().drain(timeout)
        self.attend(first)
        return self._native is None or self._native.drain(timeout)

    def close(self) -> None:
        """Ends what is under way within one part; another process goes on with it."""
        with self._starts:
            native, self._native = self._native, None
        if native is not None:
            native.stop()
        if self.node is not None:
            self.node.let_go()


def _source(
    tiers: TiersLike, directory: Place, records: str | os.PathLike[str] | None
) -> tuple[str, str | None]:
    """The file of a configuration, or its text."""
    if isinstance(tiers, str | os.PathLike):
        file = os.fspath(tiers)
        if records is not None:
            raise usage(
                "records beside a configuration",
                'say it there: records = "..." in the first [[tier]]',
            )
        if not Path(file).is_file():
            raise make("not_found", "no such configuration of tiers", str(file))
        return str(file), None
    farther = [_table(tier, number + 1) for number, tier in enumerate(tiers)]
    first = {"name": "tier0", "place": str(directory)}
    if records is not None:
        first["records"] = str(place_of(records).absolute())
    return str(Path.cwd() / _NO_FILE), "\n".join(_toml(table) for table in [first, *farther])


def _table(tier: object, number: int) -> dict[str, Any]:
    if isinstance(tier, str | os.PathLike):
        return {"name": f"tier{number}", "place": str(place_of(tier).absolute())}
    if not isinstance(tier, Mapping):
        raise usage(f"a tier is {tier!r}, a place or a dict is needed")
    return {"name": f"tier{number}", **tier}


def _toml(table: Mapping[str, Any]) -> str:
    """A `[[tier]]` table."""
    store = table.get("store", {})
    if not isinstance(store, Mapping):
        raise usage(f"a tier's store is {store!r}, a dict is needed")
    lines = ["[[tier]]", *(_line(key, value) for key, value in table.items() if key != "store")]
    if store:
        lines += ["[tier.store]", *(_line(key, value) for key, value in store.items())]
    return "\n".join(lines)


def _line(key: object, value: object) -> str:
    if not isinstance(key, str) or not (key.isascii() and key.isidentifier()):
        raise usage(f"a key of a tier is {key!r}")
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, bool):
        return f"{key} = {str(value).lower()}"
    if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return f"{key} = {value}"
    if isinstance(value, str):
        return f"{key} = {_text(key, value)}"
    raise usage(f"a tier's {key} is {value!r}, text, a number or a boolean is needed")


def _text(key: str, text: str) -> str:
    """A text as TOML has it: as it is, but for quotes, backslashes and control characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise usage(f"a tier's {key} is {text!r}, which is not UTF-8") from None
    plain = (c if c.isprintable() or ord(c) > 0x9F else f"\\u{ord(c):04x}" for c in text)
    escaped = (f"\\{c}" if c in '"\\' else p for c, p in zip(text, plain, strict=True))
    return f'"{"".join(escaped)}"'
