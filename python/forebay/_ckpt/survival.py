"""Staged saves that outlive this process: the agent of its node has the memory, and finishes what this does not.

Each rank talks to the agent of its own node. Before a save starts, its memory and its bequest (what is to be written, and
where it lies) go over a connection that stays open until the save has ended. If it ends without a word, the process has
died. What the agent answers is read at the end of the save: nobody waits for it.

Where the agent does not answer, or refuses, saves are as without; a warning says why, once.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import warnings
import weakref
from time import monotonic, sleep
from typing import Any

from forebay._ckpt.agents import Agent, frame_of, read_answer, unreachable
from forebay._ckpt.stagedmemory import StagedMemory
from forebay._errors import Error, make

#: For the agent to take a connection, and at the end of a save to say what became of it.
_CONNECT_SECONDS = 1.0
_ANSWER_SECONDS = 5.0

#: After a refusal saves are as without for so long.
_AGAIN_SECONDS = 60.0

#: How long a start waits for what the agent finishes without that a byte is written, and how often it looks.
STILL_SECONDS = 60.0
_LOOK_SECONDS = 0.3

#: A save that misses other ranks for so long after the death of this node's will not be finished: those were never staged.
MISSING_SECONDS = 10.0

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL

#: Codes of saves that failed because another rank is gone: what is staged here may be finished by the agents all the same.
_OF_OTHERS = ("timeout", "not_shared")

_log = logging.getLogger("forebay")

_open: weakref.WeakSet[Link] = weakref.WeakSet()


class Survival:
    """The agent of this node, as it keeps this process's staged saves."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._told: str | None = None
        self._refused = -_AGAIN_SECONDS

    def connect(self) -> Link | None:
        """A connection for a save; None, and once a warning, where the agent cannot be had."""
        if monotonic() - self._refused < _AGAIN_SECONDS:
            return None
        path = self._agent.path()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # Before it connects: the child of a fork closes what is a link's.
        link = Link(connection, self)
        try:
            connection.settimeout(_CONNECT_SECONDS)
            connection.connect(path)
        except OSError as error:
            link.close()
            self.degrade(str(unreachable(error, path)))
            return None
        return link

    def degrade(self, why: str) -> None:
        """Saves are as without for a while."""
        self._refused = monotonic()
        if why != self._told:
            self._told = why
            what = "what is staged does not survive this process"
            warnings.warn(f"{what}, until that is mended: {why}", stacklevel=2)

    def kept(self) -> None:
        """The agent has kept a save: what is wrong next is told again."""
        self._told = None

    def open_folder(self) -> int:
        """The checkpoint folder. Errors: `OSError`."""
        return os.open(self._agent.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    @property
    def job(self) -> str:
        """What the agent calls the job."""
        return self._agent.job

    def wait(self) -> None:
        """Waits until the agent finishes no save of this folder any more that can be finished: before the latest step is
        asked for, or the folder claimed. Not a collective call."""
        seen, since, told = None, monotonic(), False
        while True:
            under_way = self._under_way()
            if not under_way:
                return
            now = [(one["attempt"], one["rank"], one["written"], one["begun"]) for one in under_way]
            if now != seen:
                seen, since = now, monotonic()
            if monotonic() - since > STILL_SECONDS:
                _log.warning(
                    "forebay: step %s is not finished, and not waited for", steps(under_way)
                )
                return
            if not told:
                told = True
                _log.warning(
                    "forebay: the agent finishes step %s, whose processes have died: it is waited for",
                    steps(under_way),
                )
            sleep(_LOOK_SECONDS)

    def _under_way(self) -> list[dict[str, Any]]:
        """Saves of this folder that the agent finishes, without those that miss ranks for good."""
        try:
            folder = self.open_folder()
        except OSError:
            return []
        try:
            told = self._agent.ask({"request": "staged"}, folder)
        except Error as error:
            _log.info("forebay: the agent does not say what it finishes: %s", error)
            return []
        finally:
            os.close(folder)
        found = told if isinstance(told, list) else []
        return [one for one in found if one["finishing"] and not _misses_ranks(one)]


def _misses_ranks(one: dict[str, Any]) -> bool:
    return bool(one["begun"] < one["world"] and one["seconds"] > MISSING_SECONDS)


def steps(saves: list[dict[str, Any]]) -> str:
    """Their steps, for people."""
    return ", ".join(sorted({str(one["step"]) for one in saves}))


class Link:
    """The connection of one save."""

    def __init__(self, connection: socket.socket, survival: Survival) -> None:
        self._connection = connection
        self._survival = survival
        self._memory: StagedMemory | None = None
        _open.add(self)

    def hand_over(self, memory: StagedMemory, bequest: bytes | str) -> None:
        """Gives a save to the agent, or says why there is nothing to give. Nothing is raised."""
        if isinstance(bequest, str):
            self._survival.degrade(bequest)
            self.close()
            return
        files: list[int] = []
        try:
            files = [self._survival.open_folder(), memory.file, _sealed(bequest)]
            frame = frame_of({"request": "stage", "job": self._survival.job})
            sent = socket.send_fds(self._connection, [frame], files)
            self._connection.sendall(frame[sent:])
        except OSError as error:
            self._survival.degrade(f"cannot hand a save over: {error}")
            self.close()
            return
        finally:
            for file in files[:1] + files[2:]:
                os.close(file)
        self._memory = memory

    def end(self, error: Error | None) -> None:
        """The save has ended. Nothing is raised."""
        memory, self._memory = self._memory, None
        if memory is None:
            self.close()
            return
        if error is not None and error.code in _OF_OTHERS:
            # The agent goes on with the memory, so the next save takes another.
            memory.release()
            self.close()
            return
        let_go = False
        try:
            # Who refused a connection has answered, and is gone.
            with contextlib.suppress(BrokenPipeError):
                self._connection.sendall(frame_of({"request": "let_go"}))
            until = monotonic() + _ANSWER_SECONDS
            for _ in ("stage", "let_go"):
                read_answer(self._connection, "the agent", until)
            let_go = True
            self._survival.kept()
        except Error as refusal:
            self._survival.degrade(str(refusal))
        except OSError as broken:
            self._survival.degrade(f"the agent did not answer at the end of a save: {broken}")
        finally:
            if not let_go:
                # It may have the memory, and read it for a save that it takes for a dead process's.
                memory.release()
            self.close()

    def abandon(self) -> None:
        """The save has not even started."""
        self.end(make("cancelled", "the save did not start"))

    def close(self) -> None:
        """Ends the connection."""
        self._connection.close()


def _sealed(content: bytes) -> int:
    """Memory that nobody can change."""
    file = os.memfd_create("forebay-bequest", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    try:
        left = memoryview(content)
        while left:
            left = left[os.write(file, left) :]
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(file)
        raise
    return file


def _after_fork() -> None:
    """A child must not seem to be its parent that lives."""
    for link in list(_open):
        link.close()
    _open.clear()


os.register_at_fork(after_in_child=_after_fork)
