"""What a `Checkpointer` was told, checked."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from forebay._catalog import PathLike
from forebay._ckpt.agents import Agent, AgentLike
from forebay._ckpt.nodetier import node_place
from forebay._ckpt.survival import Survival
from forebay._ckpt.tiers import Tiers, TiersLike
from forebay._errors import usage
from forebay._save import parse_size
from forebay._urls import Place, place_of

OnBusy = Literal["wait", "skip", "supersede"]
Progress = Callable[[int, int], object]

#: Staging memory where the caller names none; touched as it is needed.
STAGING_BYTES = 1 << 30

#: Steps are file names of at most 19 digits.
STEP_MAX = (1 << 63) - 1

_THREADS_MAX = 256


@dataclass(frozen=True, slots=True)
class Settings:
    """How a checkpointer works."""

    directory: Place
    staging_bytes: int | None
    shadow: bool | Literal["auto"]
    process_group: Any
    on_busy: OnBusy
    keep_last: int | None
    keep_every: int | None
    threads: int | None
    overwrite: bool
    progress: Progress | None
    device: str | None
    tiers: Tiers | None = None
    agent: Agent | None = None
    #: The agent that keeps what is staged.
    survival: Survival | None = None


def parse(
    directory: PathLike,
    staging_bytes: int | str | None,
    shadow: bool | str,
    process_group: Any,
    on_busy: str,
    keep_last: int | None,
    keep_every: int | None,
    threads: int | None,
    overwrite: bool,
    progress: Progress | None,
    device: object,
    tiers: TiersLike | None = None,
    agent: AgentLike = False,
    agent_job: str | None = None,
    records: PathLike | None = None,
    survive: bool = False,
) -> Settings:
    """Checks the arguments of `Checkpointer`. Errors: `usage`."""
    if isinstance(directory, bytes) or not isinstance(directory, str | os.PathLike):
        raise usage(f"the directory is {directory!r}, text or a pathlib.Path is needed")
    if not os.fspath(directory):
        raise usage("the directory is empty", 'the current one is "."')
    try:
        os.fsencode(directory)
    except UnicodeEncodeError:
        raise usage(f"the directory {ascii(directory)} is no Unicode text") from None
    if shadow not in (True, False, "auto"):
        raise usage(f"shadow is {shadow!r}, 'auto', True or False is needed")
    if on_busy not in ("wait", "skip", "supersede"):
        raise usage(f"on_busy is {on_busy!r}, 'wait', 'skip' or 'supersede' is needed")
    check_count("keep_last", keep_last)
    check_count("keep_every", keep_every)
    check_count("threads", threads, _THREADS_MAX)
    place = place_of(directory).absolute()
    if not isinstance(agent, bool | str | os.PathLike) or not agent and agent is not False:
        raise usage(f"agent is {agent!r}, True or the path of a socket is needed")
    handed = None if agent is False else Agent(agent, agent_job, place)
    if type(survive) is not bool:
        raise usage(f"survive is {survive!r}, True or False is needed")
    if survive and handed is None:
        what = "survive=True, and there is no agent"
        raise usage(what, "the agent finishes saves whose processes have died: agent=True")
    if records is not None:
        node_place(place, records)
        if tiers is None:
            what = "records are elsewhere, and there are no tiers"
            raise usage(what, "say where steps go from the drives of the nodes: tiers=[...]")
    if (tiers is not None or handed is not None) and (
        keep_last is not None or keep_every is not None
    ):
        what = "keep_last and keep_every beside tiers or an agent"
        raise usage(what, "say in the tiers what stays: nothing must go that was not moved on")
    farther = None if tiers is None else Tiers(tiers, place, handed, records)
    if farther is None or farther.node is None:
        _check_whole(place)
    if farther is not None and farther.node is not None:
        if survive:
            what = "survive=True with records: an agent finishes no saves to the drives of nodes"
            raise usage(what, "leave one of them out")
        place = farther.node.place
    return Settings(
        place,
        None if staging_bytes is None else parse_size(staging_bytes),
        "auto" if shadow == "auto" else bool(shadow),
        process_group,
        on_busy,  # type: ignore[arg-type]
        keep_last,
        keep_every,
        threads,
        bool(overwrite),
        progress,
        None if device is None else _device_name(device),
        farther,
        handed,
        Survival(handed) if survive and handed is not None else None,
    )


def _check_whole(directory: Place) -> None:
    """Refuses the drive of a node, whose records are elsewhere: what is saved there without them is seen by nobody who
    has them."""
    if isinstance(directory, Path) and directory.joinpath(".forebay", "place").is_file():
        what = f"{directory} is the drive of a node, whose records are elsewhere"
        raise usage(what, "say where: records=..., or in the tiers' configuration")


def check_count(name: str, value: object, most: int = STEP_MAX) -> None:
    """Checks a count that may be left out. Errors: `usage`."""
    if value is not None and (type(value) is not int or not 1 <= value <= most):
        raise usage(f"{name} is {value!r}, a whole number from 1 is needed")


def _device_name(device: object) -> str:
    from forebay._places import parse as parse_place

    return parse_place(device).engine


def parse_step(step: object) -> int:
    """A step as a number. Errors: `usage`."""
    # numpy's and torch's whole numbers will do.
    index = getattr(step, "__index__", None)
    if isinstance(step, bool) or index is None:
        raise usage(f"the step is {step!r}, a whole number is needed")
    number = int(index())
    if not 0 <= number <= STEP_MAX:
        raise usage(f"the step is {number}, it must lie between 0 and 2^63 - 1")
    return number
