"""A first tier that is on the drives of nodes: each node keeps what its own ranks save, records are where all see them.

Each node has one process that moves what is there: whoever has the lock of the node's folder, which the kernel gives
back when that process ends, however it does (a record lock: the children of a fork do not keep it). So nothing is agreed
upon, and a rank that dies is followed by another.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import platform
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from forebay import _native
from forebay._ckpt.ranks import Ranks
from forebay._errors import Error, usage
from forebay._urls import Place, Url, place_of

_log = logging.getLogger("forebay")

#: In the node's folder.
_LOCK = (".forebay", "mover")

#: How long a step may not change that all of its nodes are there to bring.
PATIENCE_SECONDS = 1800.0

#: And if a file of it is damaged on its drive: copies of it may come from other nodes.
DAMAGE_SECONDS = 10.0

#: How often rank 0 looks whether it has come, while the others wait for what it says.
_LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class Lacking:
    """What a step that is on the drives of nodes lacks on the next tier."""

    step: int
    bytes: int
    #: Whose data.
    ranks: frozenset[int]


class Landing:
    """Waits, on all ranks together, until a step has been brought from the drives to the next tier."""

    def __init__(
        self,
        ranks: Ranks,
        look: Callable[[], Lacking | None],
        damaged: Callable[[int], str | None] = lambda step: None,
    ) -> None:
        self._ranks = ranks
        #: What is known here of damage to a step.
        self._damaged = damaged
        #: Of rank 0.
        self._look = look
        self._least: int | None = None
        self._since = monotonic()

    def wait(self, held: Callable[[int], Iterable[int]]) -> str | None:
        """A collective call. `held`: whose data of a step are on this node's drive, asked once. What is wrong, if it does not
        come. Errors: those of any rank, on all."""
        known: int | None = None
        while True:
            answers = self._exchange(lambda known=known: (self._seen(), self._damage(known)))
            told = answers[0][0]
            if told is None:
                return None
            step, ranks, is_stuck, still = told
            if step != known:
                known = step
                gone = set(ranks).difference(*self._exchange(lambda step=step: sorted(held(step))))
                if gone:
                    return (
                        f"step {step} was saved to the drives of nodes, and those with the data of {len(gone)} ranks "
                        f"({_few(gone)}) are not here"
                    )
            damage = next((damage for _, damage in answers if damage is not None), None)
            if damage is not None and still > DAMAGE_SECONDS:
                return f"step {step} is damaged on the drive of a node, and comes from nowhere: {damage}"
            if is_stuck:
                return (
                    f"step {step} is on the drives of nodes, and nothing of it has come from there for "
                    f"{PATIENCE_SECONDS:.0f} s: `tier_status` says why"
                )
            sleep(_LOOK_SECONDS)

    def _damage(self, step: int | None) -> str | None:
        found = None if step is None else self._damaged(step)
        return None if found is None else f"{found} (on {platform.node()})"

    def _seen(self) -> tuple[int, list[int], bool, float] | None:
        """What rank 0 sees: the step, whose data it lacks, whether nothing has come for too long, and for how long. None on
        others, and where nothing is lacking."""
        lacking = self._look() if self._ranks.rank == 0 else None
        if lacking is None:
            return None
        if self._least is None or lacking.bytes < self._least:
            self._least, self._since = lacking.bytes, monotonic()
            _log.info(
                "forebay: step %d comes from its nodes: %d bytes left", lacking.step, lacking.bytes
            )
        still = monotonic() - self._since
        return lacking.step, sorted(lacking.ranks), still > PATIENCE_SECONDS, still

    def _exchange(self, what: Callable[[], Any]) -> list[Any]:
        error: Error | None = None
        found = None
        try:
            found = what()
        except Error as raised:
            error = raised
        if self._ranks.alone:
            if error is not None:
                raise error
            return [found]
        answers = self._ranks.exchange({"error": None, "found": found})
        self._ranks.raise_first(error)
        return [answer["found"] for answer in answers]


def _few(ranks: set[int]) -> str:
    shown = ", ".join(map(str, sorted(ranks)[:8]))
    return shown if len(ranks) <= 8 else f"{shown}, ..."


def node_place(directory: Place, records: str | os.PathLike[str]) -> Url:
    """The place of a folder of this node with records elsewhere. Errors: `usage`."""
    if isinstance(directory, Url):
        raise usage(f"records beside {str(directory)!r}", "the directory is a folder of each node")
    whole = place_of(records).absolute()
    if isinstance(whole, Path) and whole == directory:
        raise usage("records are in the directory", "they need a place that all nodes share")
    return Url(_native.split_place(str(whole), str(directory), False))


class Node:
    """This node's part of a first tier."""

    def __init__(self, place: Url, folder: Path) -> None:
        self.place = place
        self.folder = folder
        self._lock: int | None = None
        self._pid = os.getpid()
        _native.make_node_place(str(place))

    def takes_charge(self) -> bool:
        """Whether this process moves what is on this node; it does until it lets go or ends."""
        if self._lock is not None and self._pid == os.getpid():
            return True
        path = self.folder.joinpath(*_LOCK)
        try:
            path.parent.mkdir(exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            _log.warning("forebay: nothing is moved by this process: %s", error)
            return False
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            # A file system without locks: the first rank of a host, as its launcher counts.
            return os.environ.get("LOCAL_RANK", "0") == "0"
        self._lock, self._pid = descriptor, os.getpid()
        return True

    def let_go(self) -> None:
        """Another process of the node may move."""
        lock, self._lock = self._lock, None
        if lock is not None and self._pid == os.getpid():
            with suppress(OSError):
                os.close(lock)

    def nearer(self, place: Place) -> Url:
        """A place as it is read from this node: data that its own drive has come from there."""
        return Url(_native.split_place(str(place), str(self.folder), True))
