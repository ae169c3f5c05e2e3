"""What ranks do in the tests of hints: they die, stop, hold the GIL, or have a store that lies."""

from __future__ import annotations

import ctypes
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import torch

import forebay
from forebay._ckpt import natives

#: How a save ended: code (empty: committed), text, seconds.
Ended = tuple[str, str, float]

#: A rank that is silent for so long is taken for dead.
LATE_SECONDS = 14


def _state(value: float) -> dict[str, Any]:
    return {"w": torch.full((300, 100), value), "b": torch.full((7,), value)}


def _save(checkpoints: forebay.Checkpointer, step: int, value: float) -> Ended:
    began = time.monotonic()
    try:
        error = checkpoints.save(step, _state(value)).exception(150)
    except forebay.Error as raised:
        error = raised
    took = time.monotonic() - began
    return ("", "", took) if error is None else (error.code, str(error), took)


def _first(checkpoints: forebay.Checkpointer) -> None:
    """A save in which ranks agree, and hints are made."""
    code, text, _ = _save(checkpoints, 1, 1.0)
    assert not code, text
    torch.distributed.barrier()


def _at_seal(what: Any) -> None:
    """Does something in the middle of this rank's next save: when its first data file is about to be made durable."""
    done = []

    def hook(event: str, _: Any) -> None:
        if event == "forebay.seal" and not done:
            done.append(event)
            what()

    sys.addaudithook(hook)


def killed(rank: int, directory: str, within: bool, dead: int) -> tuple[Ended, int | None, float]:
    """The second save, in which a rank is killed; what is the latest step then, and what it holds."""
    checkpoints = forebay.Checkpointer(directory)
    _first(checkpoints)
    if rank == dead:
        if within:
            _at_seal(lambda: os.kill(os.getpid(), signal.SIGKILL))
        else:
            os.kill(os.getpid(), signal.SIGKILL)
    ended = _save(checkpoints, 1 if within else 2, 2.0)
    latest = checkpoints.latest()
    with forebay.safe_open(f"{directory}/step-1", framework="pt") as stored:
        held = float(stored.get_tensor("b")[0])
    checkpoints.close()
    return ended, latest, held


def stopped(rank: int, directory: str, within: bool, seconds: float) -> Ended:
    """The second save, in which rank 1 stands still for a while."""
    with forebay.Checkpointer(directory) as checkpoints:
        _first(checkpoints)
        if rank == 1:
            own = os.getpid()
            script = f"kill -STOP {own}; sleep {seconds}; kill -CONT {own}"

            def stop() -> None:
                subprocess.run(["sh", "-c", script], check=True)

            if within:
                _at_seal(stop)
            else:
                stop()
        return _save(checkpoints, 2, 2.0)


def gil_held(rank: int, directory: str, seconds: int) -> Ended:
    """The second save, before which rank 1 runs code that lets no other Python thread run."""
    with forebay.Checkpointer(directory) as checkpoints:
        _first(checkpoints)
        if rank == 1:
            ctypes.PyDLL(None).sleep(seconds)
        return _save(checkpoints, 2, 2.0)


def closed(rank: int, directory: str) -> Ended:
    """The second save, which rank 1 does not make."""
    checkpoints = forebay.Checkpointer(directory)
    _first(checkpoints)
    if rank == 1:
        checkpoints.close()
        # It lives on.
        time.sleep(12)
        return "", "", 0.0
    ended = _save(checkpoints, 2, 2.0)
    checkpoints.close()
    return ended


def threads_end(rank: int, directory: str) -> list[list[str]]:
    """Threads of hints during a run, and after it."""
    checkpoints = forebay.Checkpointer(directory)
    _first(checkpoints)
    told = [_hint_threads()]
    checkpoints.close()
    return [*told, _hint_threads()]


def _hint_threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name == "forebay-hints"]


def without_a_store(rank: int, path: str, world: int, directory: str) -> tuple[list[Ended], str]:
    """Saves of ranks whose process group knows one another by a file."""
    lines = _logged()
    store = torch.distributed.FileStore(path, world)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)
    with forebay.Checkpointer(directory) as checkpoints:
        ended = [_save(checkpoints, step, float(step)) for step in (1, 2)]
        assert checkpoints._run is not None and checkpoints._run.natives.hints is None
    torch.distributed.destroy_process_group()
    return ended, "\n".join(lines)


def _logged() -> list[str]:
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "hints" in record.getMessage():
                lines.append(record.getMessage())

    log = logging.getLogger("forebay")
    log.addHandler(Keep())
    log.setLevel(logging.INFO)
    return lines


class Liar:
    """A client whose store loses, garbles or makes up what it is told."""

    def __init__(self, inner: Any, how: str, rank: int) -> None:
        self._inner = inner
        self._how = how
        self._chance = random.Random(rank)
        self._calls = 0
        self._first: dict[str, bytes] = {}

    def _noise(self) -> bytes:
        return bytes(self._chance.randrange(256) for _ in range(self._chance.randrange(80)))

    def _fail(self) -> None:
        self._calls += 1
        if self._how == "fails" and self._calls > 5:
            raise RuntimeError("the store has gone")

    def add(self, key: str, by: int) -> Any:
        self._fail()
        if self._how == "drops":
            return 0
        if self._how == "garbles":
            return self._chance.choice([-1, 1 << 62, 0, "7", None])
        return self._inner.add(key, by)

    def set(self, key: str, value: bytes) -> None:
        self._fail()
        if self._how != "drops":
            self._inner.set(key, self._noise() if self._how == "garbles" else value)

    def check(self, keys: list[str]) -> bool:
        self._fail()
        return self._how in ("garbles", "stale") or (
            self._how != "drops" and bool(self._inner.check(keys))
        )

    def get(self, key: str) -> Any:
        self._fail()
        return self._noise()

    def multi_get(self, keys: list[str]) -> Any:
        self._fail()
        if self._how == "drops":
            return [b""] * len(keys)
        if self._how == "garbles":
            return [self._noise() for _ in keys][: self._chance.randrange(len(keys) + 2)]
        # As it was at first, for ever.
        return [self._first.setdefault(key, self._inner.get(key)) for key in keys]

    def delete_key(self, key: str) -> bool:
        self._fail()
        return False


def lied_to(rank: int, directory: str, how: str) -> tuple[Ended, Ended]:
    """A save to which rank 1 comes late, then one in which it fails; through clients that lie."""
    real = natives.connect
    natives.connect = lambda ranks, run_id: Liar(real(ranks, run_id), how, rank)  # type: ignore[assignment]
    with forebay.Checkpointer(directory) as checkpoints:
        _first(checkpoints)
        if rank == 1:
            time.sleep(LATE_SECONDS)
        ended = _save(checkpoints, 2, 2.0)
        if rank == 1:
            _at_seal(_refuse)
        return ended, _save(checkpoints, 3, 3.0)


def _refuse() -> None:
    raise OSError("no more of this")
