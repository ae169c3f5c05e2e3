"""What a restore reads: the same on all ranks."""

from __future__ import annotations

import os
import re
import warnings
from contextlib import suppress
from dataclasses import dataclass, replace

from forebay import _native
from forebay._ckpt.nodetier import Lacking, Landing
from forebay._ckpt.ranks import Ranks
from forebay._ckpt.settings import parse_step
from forebay._ckpt.tiers import Tiers
from forebay._errors import DataError, Error, make, usage
from forebay._urls import Place, Url, place_of

_STEP_FOLDER = re.compile(r"step-(\d{1,19})\Z")

#: A file that every checkpoint of ours and of torch has.
_METADATA = ".metadata"

#: Leftovers in a message.
_SHOWN = 20


@dataclass(frozen=True)
class Choice:
    """A step of a folder of steps, or a folder that is a checkpoint by itself."""

    folder: Place
    step: int | None
    #: The same, with data from this node's own drive where they are there.
    nearer: Url | None = None

    @property
    def title(self) -> str:
        """For messages."""
        return str(self.folder) if self.step is None else f"step {self.step} in {self.folder}"

    def lease(self) -> _native.ReadLease | None:
        """What a prune of the folder waits for, as long as it is held. Errors: `not_found`, `not_committed`."""
        return None if self.step is None else _native.read_lease(self.folder, self.step)

    def open(self) -> _native.Checkpoint:
        """Opens it. Errors: those of what is damaged."""
        return _native.Checkpoint(self.nearer or self.folder, step=self.step)

    def instead(self) -> list[str]:
        """Hints for who finds it damaged."""
        return [] if self.step is None else _before(self.folder, self.step)


def choose(directory: Place, step: object, ranks: Ranks, tiers: Tiers | None = None) -> Choice:
    """What to restore: the step of a number, the "latest", or a folder that is a checkpoint; the same on all ranks. A
    collective call. Errors: `not_found`, `not_committed`, `usage`, `structure_mismatch`."""
    error: Error | None = None
    choice = Choice(directory, None)
    latest = isinstance(step, str) and step == "latest"
    # A folder that is named is that one, wherever it is.
    among = None if isinstance(step, str | os.PathLike) and not latest else tiers
    _check_kinds(directory, among is None, ranks, tiers)
    lost = None if among is None else _landed(among, None if latest else step, ranks)
    try:
        if among is not None:
            choice = _nearest(among, None if latest else parse_step(step), ranks, lost)
        elif latest:
            choice = Choice(directory, _latest(directory) if ranks.rank == 0 else -1)
        else:
            choice = _named(directory, step)
            if ranks.rank == 0:
                # Refuses what is not committed, with what is there.
                choice.lease()
    except Error as raised:
        error = raised
    if ranks.alone:
        if error is not None:
            raise error
        return _near(choice, among)
    told = [str(choice.folder), choice.step]
    answers = ranks.exchange({"error": None, "choice": told, "named": not latest})
    ranks.raise_first(error)
    folder, number = answers[0]["choice"]
    first = Choice(place_of(folder), None if number is None else int(number))
    for rank, answer in enumerate(answers):
        same = answer["named"] == answers[0]["named"]
        # With tiers only rank 0 knows the place.
        asked_for = slice(None if among is None else 1, None)
        other_one = answer["choice"][asked_for] != answers[0]["choice"][asked_for]
        if not same or (answer["named"] and other_one):
            other = Choice(place_of(answer["choice"][0]), answer["choice"][1])
            asked = other.title if answer["named"] else "the latest step"
            what = f"rank 0 restores {first.title}, rank {rank} asked for {asked}"
            raise make("structure_mismatch", what, str(directory))
    # Where the folder is may differ from rank to rank, for relative paths and mounts.
    if among is not None:
        # What rank 0 chose has been looked at; tiers are in the same places on all ranks.
        return _near(first, among)
    return first if latest is False and first.step is None else Choice(choice.folder, first.step)


def _check_kinds(directory: Place, is_folder: bool, ranks: Ranks, tiers: Tiers | None) -> None:
    """Where those who ask for a step wait for nodes together, all must. A collective call there. Errors:
    `structure_mismatch`."""
    if tiers is None or tiers.node is None or ranks.alone:
        return
    answers = ranks.exchange({"error": None, "folder": is_folder})
    other = next((r for r, one in enumerate(answers) if one["folder"] != answers[0]["folder"]), 0)
    if other:
        named = 0 if answers[0]["folder"] else other
        what = f"rank {named} restores a folder that it names, rank {other - named} a step"
        raise make("structure_mismatch", what, str(directory))


def _landed(tiers: Tiers, step: object, ranks: Ranks) -> str | None:
    """Has the nodes bring a step that is on their drives only; what is wrong if that is not possible, on rank 0. A
    collective call."""
    if tiers.node is None:
        return None

    def look() -> Lacking | None:
        # Of rank 0; what the others ask for is compared later.
        return tiers.lacking(None if step is None else parse_step(step))

    def held(on_drives: int) -> list[int]:
        tiers.attend(ranks.rank == 0)
        return tiers.ranks_here(on_drives)

    return Landing(ranks, look, tiers.damaged).wait(held)


def _nearest(tiers: Tiers, step: int | None, ranks: Ranks, lost: str | None) -> Choice:
    """The nearest copy that is sound. Rank 0 alone looks."""
    if ranks.rank:
        return Choice(tiers.places[0], -1 if step is None else step)
    folder, number, passed = tiers.nearest(step)
    if lost is not None:
        passed.append(lost)
    for line in passed:
        warnings.warn(f"a tier is passed over: {line}", stacklevel=5)
    return Choice(folder, number)


def _near(choice: Choice, tiers: Tiers | None) -> Choice:
    """What is chosen, as it is read from this node."""
    if tiers is None or tiers.node is None or choice.step is None:
        return choice
    return replace(choice, nearer=tiers.node.nearer(choice.folder))


def _named(directory: Place, step: object) -> Choice:
    if not isinstance(step, str | os.PathLike):
        return Choice(directory, parse_step(step))
    folder = place_of(step).absolute()
    if not folder.is_dir():
        what = (
            f"the step is {os.fspath(step)!r}: no number, not 'latest', and no folder that is there"
        )
        raise usage(what)
    found = _STEP_FOLDER.match(folder.name)
    return Choice(folder, None) if found is None else Choice(folder.parent, int(found[1]))


def _latest(directory: Place) -> int:
    try:
        found = _native.latest(directory)
    except DataError as error:
        hints = [*error.hints, *_before(directory, None)]
        raise make(error.code, error.what, error.where, hints, error.causes) from error
    if found is not None:
        return int(found)
    raise make("not_found", "no step is committed", str(directory), [_instead_of_steps(directory)])


def _instead_of_steps(directory: Place) -> str:
    """What a folder without a committed step is."""
    if (directory / _METADATA).is_file():
        found = _STEP_FOLDER.match(directory.name)
        if found is None:
            return (
                f"this folder is a checkpoint itself, not a folder of steps: "
                f"restore(state, step={str(directory)!r}) reads it, whatever the Checkpointer's folder"
            )
        return (
            f"this folder is a step itself: Checkpointer({str(directory.parent)!r})"
            f".restore(state, step={int(found[1])}) reads it"
        )
    steps = _native.steps(directory) if directory.is_dir() else []
    left = ", ".join(f"{one['step']} ({one['state']})" for one in steps[-_SHOWN:])
    return f"there are only leftovers: {left}" if left else "is it the right folder?"


def _before(directory: Place, step: int | None) -> list[str]:
    """Which step to go on from where one, or the newest, is damaged."""
    with suppress(Error):
        # All are read: a listing of a bucket would not see damage.
        found = _native.steps(directory, read=True)
        order = {
            one["step"]: (one["epoch"] or 0, one["step"])
            for one in found
            if one["state"] == "committed" and not one["damage"]
        }
        own = order.pop(step, None) if step is not None else None
        older = [one for one, place in order.items() if own is None or place < own]
        if older:
            newest = max(older, key=order.__getitem__)
            return [
                f"step {newest} is the newest before it: restore(state, step={newest}) goes on from there",
                f"`forebay ckpt verify --all {directory}` tells which steps are whole",
            ]
        return ["no step before it is committed here"]
    return []
