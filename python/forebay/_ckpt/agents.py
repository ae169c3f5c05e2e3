"""The agent of this machine (`forebay agent`): who saves hands its folder over, and may die.

A client of its socket, over which go frames: the length of a text as 4 bytes, little endian, and the text, which is
JSON; see docs/AGENT.md. The folder goes as an open descriptor. Each request has a connection of its own, so that an
agent that was started again is found again, and nothing of this is held between saves.

That no agent answers is no reason to stop training: it is a warning, `Checkpointer.tier_status` says it, and every save
that is committed tries again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import struct
import threading
import warnings
from collections.abc import Mapping
from time import monotonic, sleep
from typing import Any

from forebay import _native
from forebay._errors import Error, make, usage
from forebay._urls import Place, home_of, place_of

#: What `Checkpointer(agent=...)` takes: whether, or the path of the socket.
AgentLike = bool | str | os.PathLike[str]

#: For an answer: nobody's save waits longer for an agent that hangs.
_PATIENCE_SECONDS = 5.0

#: Bytes of an answer that are read.
_ANSWER_BYTES_MAX = 64 << 20

#: How often `drain` asks.
_LOOK_SECONDS = 0.1

#: What a job may be called: it becomes a folder of each tier.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

#: States of a copy that is not where it should be yet.
_UNDER_WAY = ("waiting", "moving", "partial")

#: And of one on the first tier that is whole there, or on the drives of its nodes.
_SAVED = ("committed", "on_nodes", "copied")

#: Where an agent listens that is a service, unless it is told otherwise.
_SERVICE_SOCKET = "/run/forebay/agent.sock"

#: Healths of a tier of which nobody knows what it needs.
_UNSEEN = ("unknown", "down")

_log = logging.getLogger("forebay")


class Agent:
    """The agent that moves what one checkpointer saves. Rank 0 hands the folder over; on the drives of nodes, one process of
    each does to its own."""

    def __init__(self, agent: AgentLike, job: str | None, directory: Place) -> None:
        #: The folder that is handed over.
        self.folder = home_of(directory, "handing over to an agent")
        self._socket = None if isinstance(agent, bool) else os.fspath(agent)
        self.job = self.folder.name if job is None else job
        if not isinstance(self.job, str) or not _NAME.fullmatch(self.job):
            what = f"a job's name is {self.job!r}"
            raise usage(what, "agent_job: up to 64 letters, digits, '.', '-' and '_'")
        self._lock = threading.Lock()
        self._places: list[str] = []
        self._error: Error | None = None

    def introduce(self) -> None:
        """Hands the folder over before anything is saved there; a warning if nobody takes it."""
        with contextlib.suppress(OSError):
            # What it is that cannot be made is told by who opens it.
            self.folder.mkdir(parents=True, exist_ok=True)
        error = self.hand_over()
        if error is not None:
            what = "what is saved stays there until an agent takes it"
            warnings.warn(f"{self.folder} is not handed over, {what}: {error}", stacklevel=4)

    def tell_elsewhere(self) -> None:
        """A warning where the folder has no step, and a place where copies go has: restores would not find it."""
        with self._lock:
            places = self._places[1:]
        for place in places:
            with contextlib.suppress(Error):
                if _native.latest(self.folder) is not None:
                    return
                found = _native.latest(place_of(place))
                if found is not None:
                    what = f"{self.folder} has no step, and {place} has step {found}"
                    hint = f"tiers=[{place!r}] has restores look there"
                    warnings.warn(f"{what}: {hint}", stacklevel=4)
                    return

    def damaged(self, step: int) -> str | None:
        """See `Tiers.damaged`."""
        with contextlib.suppress(Error):
            return damage_in(self.ask({"request": "status", "job": self.job}), step)
        return None

    def hand_over(self) -> Error | None:
        """Hands the folder over, or says that something was saved. The error of it is returned, and logged if it is new."""
        error, places = None, []
        try:
            places = self._track()
        except Error as raised:
            error = raised
        with self._lock:
            before, self._error = self._error, error
            first, self._places = not self._places, places
        if error is not None and (before is None or before.what != error.what):
            _log.warning("forebay: %s is not handed over: %s", self.folder, error)
        if error is None and first:
            _log.info("forebay: job %s: %s", self.job, " -> ".join(places))
        return error

    def _track(self) -> list[str]:
        try:
            folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise make("io", f"cannot open the folder: {error}", str(self.folder)) from error
        try:
            told = self.ask({"request": "track", "job": self.job}, folder)
        finally:
            os.close(folder)
        told = told if isinstance(told, Mapping) else {}
        # The configured job's own folder is known by that name.
        self.job = str(told.get("job", self.job))
        places = told.get("places")
        return [str(place) for place in places] if isinstance(places, list) else []

    def status(self) -> dict[str, Any]:
        """How the job stands, as the agent has it: what `forebay tier status --json` says, and with `agent` how far it
        was handed over: `socket`, `job`, `places`, and `error` where it was not, or nobody answers: then all else is
        empty."""
        error, status = None, {}
        try:
            status = self.ask({"request": "status", "job": self.job})
        except Error as raised:
            error = raised
        with self._lock:
            # Why it was not handed over says more than that there is no such job.
            error = self._error or error
            places = list(self._places)
        about = {"socket": self.path(), "job": self.job, "places": places}
        if not isinstance(status, dict) or not status:
            status = {"tiers": [], "steps": [], "transfers": [], "waiting": 0, "errors": []}
        return {**status, "agent": {**about, "error": None if error is None else str(error)}}

    def act(self, action: Mapping[str, Any]) -> dict[str, Any]:
        """Has something done; its outcome. Errors: the agent's; nobody answers."""
        asked = {"request": "act", "job": self.job, "action": dict(action)}
        found: dict[str, Any] = self.ask(asked)
        return found

    def drain(self, newest: int | None, timeout: float) -> bool:
        """Waits until every step up to the newest is where it should be. Errors: it is not handed over, or nobody
        answers."""
        error = self.hand_over()
        if error is not None:
            raise error
        until = monotonic() + timeout
        while True:
            status = self.ask({"request": "status", "job": self.job})
            if _is_done(status, newest):
                return True
            if monotonic() >= until:
                return False
            sleep(_LOOK_SECONDS)

    def path(self) -> str:
        """The socket: the one given, else that of the configuration."""
        if self._socket is None:
            self._socket = os.fspath(_native.Tiers.agent_socket())
        return self._socket

    def ask(self, request: Mapping[str, Any], folder: int | None = None) -> Any:
        """A question, with a folder's descriptor if there is one, and its answer."""
        path = self.path()
        until = monotonic() + _PATIENCE_SECONDS
        frame = frame_of(request)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(_PATIENCE_SECONDS)
            try:
                link.connect(path)
                try:
                    sent = socket.send_fds(link, [frame], [] if folder is None else [folder])
                    link.sendall(frame[sent:])
                except BrokenPipeError:
                    # Who is refused is told so before the request is read.
                    pass
                return read_answer(link, path, until)
            except Error:
                # Some are errors of the system too.
                raise
            except OSError as error:
                raise unreachable(error, path) from error


def frame_of(request: Mapping[str, Any]) -> bytes:
    """A request, as it goes over the socket."""
    text = json.dumps(dict(request)).encode()
    return struct.pack("<I", len(text)) + text


def read_answer(link: socket.socket, path: str, until: float) -> Any:
    """The next answer; `path` is what errors call the agent. Errors: the agent's; `OSError`; `TimeoutError` after
    `until`."""
    (length,) = struct.unpack("<I", _received(link, 4, until))
    if length > _ANSWER_BYTES_MAX:
        raise make("unsupported", f"an answer of {length} bytes", path)
    try:
        answer = json.loads(_received(link, length, until))
    except ValueError as error:
        raise make("unsupported", f"not understood: {error}", path) from error
    return _told(answer, path)


def _told(answer: Any, path: str) -> Any:
    """What an answer says. Errors: the agent's."""
    if not isinstance(answer, Mapping) or ("ok" not in answer and "error" not in answer):
        hint = "agent and package should be of one version"
        raise make("unsupported", "the agent's answer is not understood", path, [hint])
    if "error" not in answer:
        return answer["ok"]
    refusal = answer["error"]
    code, what = str(refusal.get("code")), str(refusal.get("what"))
    raise make(code, f"the agent refuses: {what}", refusal.get("place"), refusal.get("hints") or [])


def _received(link: socket.socket, count: int, until: float) -> bytes:
    """So many bytes. Errors: `OSError`, `TimeoutError` among them."""
    data = bytearray()
    while len(data) < count:
        left = until - monotonic()
        if left <= 0:
            raise TimeoutError("no answer in time")
        link.settimeout(left)
        piece = link.recv(min(count - len(data), 1 << 20))
        if not piece:
            raise ConnectionResetError("the agent has ended the connection")
        data += piece
    return bytes(data)


def unreachable(error: OSError, path: str) -> Error:
    """Why an agent cannot be talked to, with what to do."""
    hint = "`forebay agent` starts one; agent.socket of forebay.toml says where, or agent=PATH"
    if path != _SERVICE_SOCKET and os.path.exists(_SERVICE_SOCKET):
        # A service has no XDG_RUNTIME_DIR, and the session of a job may have one.
        hint = f"agent={_SERVICE_SOCKET!r} would be that of a service: there is one"
    if isinstance(error, FileNotFoundError | ConnectionRefusedError | NotADirectoryError):
        return make("not_found", "no agent listens", path, [hint])
    if isinstance(error, PermissionError):
        return make("permission_denied", "the agent's socket is not for this user", path, [hint])
    if isinstance(error, TimeoutError):
        return make("timeout", f"the agent does not answer within {_PATIENCE_SECONDS:.0f} s", path)
    return make("io", f"cannot talk to the agent: {error}", path)


def damage_in(status: Mapping[str, Any], step: int) -> str | None:
    """What a status says of damage to a step on the first tier: it can never be moved from there."""
    for error in status.get("errors", ()):
        if error["tier"] == 0 and error["step"] == step and error["code"] == "checksum":
            return str(error["what"])
    return None


def _is_done(status: Mapping[str, Any], newest: int | None) -> bool:
    """Whether an agent has seen all tiers and the newest step, and has nothing left to move."""
    steps = status["steps"]
    if any(tier["health"] in _UNSEEN for tier in status["tiers"]):
        return False
    seen = newest is None or any(
        step["step"] == newest and step["copies"][0] in _SAVED for step in steps
    )
    left = status["waiting"] or status["transfers"]
    return (
        seen
        and not left
        and not any(copy in _UNDER_WAY for step in steps for copy in step["copies"])
    )
