"""A first tier that is on the drives of nodes: each node keeps what its own ranks save, records are where all see them.

Each node has one process that moves what is there: whoever has the lock of the node's folder, which the kernel gives
back when that process ends, however it does. So nothing is agreed upon, and a rank that dies is followed by another.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from forebay import _native
from forebay._errors import usage
from forebay._urls import Place, Url, place_of

#: In the node's folder.
_LOCK = (".forebay", "mover")

#: How long nothing of a step may arrive until its nodes count as gone, and at which rate a file counts as under way.
PATIENCE_SECONDS = 60.0
SLOW_BYTES_A_SECOND = 50e6


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
        path.parent.mkdir(exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return False
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
