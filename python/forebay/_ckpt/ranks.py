"""The ranks that save together, and the few things that they tell one another.

`exchange` is the one collective call of the package: every rank gives a message and gets all of them. It is called from
the main thread only, at the first save of a structure and at a restore. It uses the process group given (or the default
one) where that has a CPU backend; a group of NCCL alone gets a gloo group beside it, made once, because plans have no
business in GPU memory.

`meet` comes before a collective that only some ranks might call, as when the state of one rank alone was rebuilt:
ranks count themselves in torch's store and go on when all are there. If others stay away the caller gets an error that
says so, instead of a collective that hangs, or meets another one's. A rank that failed on its way tells those who wait
(`stay_away`), so that they fail with its error, and at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from forebay._ckpt import frames
from forebay._errors import Error, make

#: How often `meet` looks.
_LOOK_SECONDS = 0.005
_LOOK_SECONDS_MAX = 0.25

#: The groups that were made beside groups without a CPU backend, by those: a job that makes many checkpointers, or
#: closes and opens them, makes each once.
_beside: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


class Ranks:
    """A process group, or one process alone."""

    def __init__(self, process_group: Any = None) -> None:
        distributed = torch.distributed
        self._alone = not (distributed.is_available() and distributed.is_initialized())
        self._group = process_group
        self._channel: Any = None
        self.rank = 0
        self.size = 1
        self._members: dict[int, int] | None = None
        if self._alone:
            if process_group is not None:
                raise make("usage", "torch.distributed is not initialized, process_group was given")
            return
        self.rank = distributed.get_rank(process_group)
        self.size = distributed.get_world_size(process_group)
        if self.rank < 0:
            raise make("usage", "this rank is not in the process group given")
        if process_group is not None:
            members = distributed.get_process_group_ranks(process_group)
            self._members = {member: place for place, member in enumerate(members)}

    @property
    def alone(self) -> bool:
        """Whether there is nobody to talk to."""
        return self.size == 1

    @property
    def stale(self) -> bool:
        """Whether torch.distributed was initialized since."""
        distributed = torch.distributed
        return self._alone and distributed.is_available() and distributed.is_initialized()

    def group_rank(self, rank: int) -> int | None:
        """The rank in this group of a rank of the job; `None` if it is not in it."""
        if self._members is not None:
            return self._members.get(rank)
        return rank if 0 <= rank < self.size else None

    def exchange(self, message: object) -> list[Any]:
        """Everyone's message, by rank. A collective call."""
        if self.alone:
            return [message]
        distributed = torch.distributed
        channel = self._open_channel()
        try:
            head, body = frames.encode(message)
        except Error as error:
            # The others wait for this rank whatever happens here.
            head, body = frames.encode({"error": describe(error)})
        heads = [_room(frames.HEAD_BYTES) for _ in range(self.size)]
        distributed.all_gather(heads, _bytes(head), group=channel)
        raw = [bytes(one.tolist()) for one in heads]
        # Everyone sees the same heads, so everyone stops here or nobody does.
        lengths = [frames.body_bytes(one, f"rank {rank}") for rank, one in enumerate(raw)]
        longest = max(lengths)
        bodies = [_room(longest) for _ in range(self.size)]
        distributed.all_gather(bodies, _bytes(body.ljust(longest, b"\0")), group=channel)
        return [
            frames.decode(raw[rank], ctypes.string_at(one.data_ptr(), longest), f"rank {rank}")
            for rank, one in enumerate(bodies)
        ]

    def raise_first(self, error: Error | None) -> None:
        """Raises the error of the lowest rank that has one, on every rank. A collective call."""
        if self.alone:
            if error is not None:
                raise error
            return
        told = None if error is None else describe(error)
        raise_any([answer["error"] for answer in self.exchange({"error": told})], self.rank, error)

    def meet(
        self,
        name: str,
        patience_seconds: float,
        in_vain: Callable[[], bool],
        left: Callable[[int, int], Error],
    ) -> None:
        """Waits until every rank has come to `name`. `left(came, size)` makes the error if some do not, or `in_vain`
        says that they will not."""
        if self.alone:
            return
        store = self.store()
        if store is None:
            return
        key = _meeting(name)
        came = int(store.add(key, 1))
        until = time.monotonic() + patience_seconds
        pause = _LOOK_SECONDS
        while came < self.size:
            _raise_absence(store, key)
            if time.monotonic() > until or (pause >= _LOOK_SECONDS_MAX and in_vain()):
                raise left(came, self.size)
            time.sleep(pause)
            pause = min(pause * 1.5, _LOOK_SECONDS_MAX)
            came = int(store.add(key, 0))

    def stay_away(self, name: str, error: Error) -> None:
        """Tells those who wait at `name`, or will, that this rank does not come, and why. The first to say so is
        heard."""
        store = None if self.alone else self.store()
        if store is not None:
            text = json.dumps({"rank": self.rank, "error": describe(error)})
            with contextlib.suppress(RuntimeError):
                store.compare_set(_meeting(name) + _ABSENCE, "", text)

    def store(self) -> Any:
        """torch's key-value store of the group; `None` where there is none."""
        if self._alone:
            return None
        distributed = torch.distributed.distributed_c10d
        try:
            group = self._group or distributed._get_default_group()
            found = distributed._world.pg_map.get(group)
            return found[1] if found else distributed._get_default_store()
        except (AttributeError, RuntimeError, ValueError):
            return None

    @property
    def whole(self) -> Any:
        """The group of these ranks, as torch has it."""
        return self._group or torch.distributed.distributed_c10d._get_default_group()

    def _open_channel(self) -> Any:
        if self._channel is None:
            whole = self.whole
            self._channel = whole if _has_cpu_backend(whole) else _beside.get(whole)
            if self._channel is None:
                own = self._group is not None
                self._channel = torch.distributed.new_group(
                    torch.distributed.get_process_group_ranks(whole) if own else None,
                    timeout=timedelta(minutes=30),
                    backend="gloo",
                    use_local_synchronization=own,
                )
                _beside[whole] = self._channel
        return self._channel


#: After the key of a meeting: who does not come.
_ABSENCE = "/away"


def _meeting(name: str) -> str:
    return f"forebay/meet/{name}"


def _raise_absence(store: Any, key: str) -> None:
    """Raises what keeps a rank away from a meeting, if one said so."""
    if store.check([key + _ABSENCE]):
        told = json.loads(store.get(key + _ABSENCE))
        raise _made(told["error"], int(told["rank"]))


def _has_cpu_backend(group: Any) -> bool:
    try:
        return torch.device("cpu") in group._device_types
    except (AttributeError, RuntimeError):
        return torch.distributed.get_backend(group) == "gloo"


def _room(size: int) -> torch.Tensor:
    # On the host, wherever torch's default device is.
    return torch.empty(size, dtype=torch.uint8, device="cpu")


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def describe(error: Error) -> dict[str, Any]:
    """An error as a message."""
    return {
        "code": error.code,
        "what": error.what,
        "where": error.where,
        "hints": list(error.hints),
        "causes": list(error.causes),
    }


def named_after(error: Error, rank: int) -> Error:
    """An error as other ranks see it."""
    told = describe(error)
    return _made(told, rank)


def raise_any(errors: list[dict[str, Any] | None], rank: int, own: Error | None) -> None:
    """Raises the first error of a list by rank; this rank's own with its traceback."""
    for sender, told in enumerate(errors):
        if told is None:
            continue
        made = _made(told, sender)
        if sender == rank and own is not None:
            raise made from own
        raise made


def _made(told: dict[str, Any], rank: int) -> Error:
    what = str(told["what"])
    if not what.startswith("rank "):
        what = f"rank {rank}: {what}"
    return make(str(told["code"]), what, told.get("where"), told["hints"], told["causes"])
