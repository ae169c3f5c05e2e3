"""Memory between the ranks of a host, for as long as one restore needs it.

It is a file in /dev/shm that only its user may open: made by one rank under a name that nobody can know before, opened by
the others, and unlinked as soon as they have it; from then on it goes when the last process that has it ends, however that
ends. Its maker holds a lock on it. A file of that name without a lock is what a maker left that was killed in between, and
the next restore of the same user removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

FOLDER = Path("/dev/shm")

_PREFIX = "forebay-restore-"
_NAME = re.compile(re.escape(_PREFIX) + r"(\d+)-[0-9a-f]{32}")

#: Names that a look at the folder goes through at most.
_LOOK_AT = 10_000


@dataclass(slots=True)
class NodeMemory:
    """Shared memory, as one rank has it."""

    #: Its bytes. The mapping lives as long as a tensor of it.
    data: torch.Tensor
    #: Where it is, as other ranks are told: name, device, inode, size.
    place: list[Any]
    _lock: int = -1

    def unlink(self) -> None:
        """Takes the name away, and the lock with it; the memory stays with those who have it. For its maker."""
        if self._lock >= 0:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(FOLDER / self.place[0])
            os.close(self._lock)
            self._lock = -1


def room() -> int:
    """Bytes that may be taken at most: a quarter of what is free. 0 where there is no such memory."""
    try:
        found = os.statvfs(FOLDER)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize // 4


def create(size: int) -> NodeMemory:
    """New memory, all of it there. Errors: `OSError` where there is not enough."""
    _remove_left()
    name = f"{_PREFIX}{os.geteuid()}-{secrets.token_hex(16)}"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.open(FOLDER / name, flags, 0o600)
    try:
        # Whoever removes leftovers may have had the lock first, and the file.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(file).st_nlink == 0:
            raise FileNotFoundError(f"{name} was removed by another restore")
        # Pages that are missing later would be a SIGBUS.
        os.posix_fallocate(file, 0, size)
        info = os.fstat(file)
        return NodeMemory(_map(file, size), [name, info.st_dev, info.st_ino, size], file)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(FOLDER / name)
        os.close(file)
        raise


def attach(place: list[Any]) -> NodeMemory:
    """Memory that another rank made. Errors: `OSError` where it is not here, or not what was made."""
    name, device, inode, size = place
    match = _NAME.fullmatch(str(name))
    if match is None:
        raise OSError(f"{name!r} is not shared memory of a restore")
    file = os.open(FOLDER / match.group(), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        info = os.fstat(file)
        if (info.st_dev, info.st_ino, info.st_size) != (device, inode, size):
            raise OSError(f"{name} is another file here")
        if info.st_uid != os.geteuid():
            raise OSError(f"{name} belongs to another user")
        return NodeMemory(_map(file, size), place)
    finally:
        os.close(file)


def _map(file: int, size: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)


def _remove_left() -> None:
    """Removes what makers left that are gone. What cannot be removed stays."""
    with contextlib.suppress(OSError), os.scandir(FOLDER) as listing:
        for entry, _ in zip(listing, range(_LOOK_AT), strict=False):
            match = _NAME.fullmatch(entry.name)
            if match is not None and int(match.group(1)) == os.geteuid():
                with contextlib.suppress(OSError):
                    _remove_if_left(entry.path)


def _remove_if_left(path: str) -> None:
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        info = os.fstat(file)
        if stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid():
            # Refused while its maker lives.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
    finally:
        os.close(file)
