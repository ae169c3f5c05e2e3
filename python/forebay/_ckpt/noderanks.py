"""The ranks of one host, among those that restore together.

With several hosts each host's ranks get a gloo group of their own, made once: what they say to one another is no business
of thousands of others.
"""

from __future__ import annotations

import os
import socket
import weakref
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from forebay._ckpt import nodememory
from forebay._ckpt.ranks import Ranks, describe, raise_any
from forebay._errors import Error, usage

#: Less than this is read apart: agreeing would take longer.
WORTH_BYTES = 1 << 20


@dataclass(slots=True)
class Node:
    """The ranks of this host."""

    ranks: Ranks
    #: Their numbers in the group that restores.
    members: list[int]
    #: Ranks in that group.
    size: int

    def exchange(self, failure: Exception | None, **message: Any) -> list[Any]:
        """Everyone's message; raises what any rank failed with. A collective call."""
        told: dict[str, Any] | None = None
        if failure is not None:
            text = f"restoring failed: {type(failure).__name__}: {failure}"
            told = describe(failure if isinstance(failure, Error) else usage(text))
        answers = self.ranks.exchange({"error": told, **message})
        if failure is not None:
            raise failure
        errors: list[dict[str, Any] | None] = [None] * self.size
        for member, answer in zip(self.members, answers, strict=True):
            errors[member] = answer["error"]
        raise_any(errors, self.ranks.rank, None)
        return answers


def host_identity() -> str:
    """The same for ranks that can share memory: same kernel, same /dev/shm, same user."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        device = os.stat(nodememory.FOLDER).st_dev
    except OSError:
        # Nothing to share: no two ranks are alike.
        return f"{socket.gethostname()}/{os.getpid()}/{os.urandom(8).hex()}"
    return f"{socket.gethostname()}/{boot}/{device}/{os.geteuid()}"


def find(ranks: Ranks, wanted_bytes: int) -> Node | None:
    """The ranks of this host; `None` if there is nothing to share. A collective call."""
    message = {
        "error": None,
        "host": host_identity(),
        "bytes": wanted_bytes,
        "groups": _group_count(),
    }
    answers = ranks.exchange(message)
    raise_any([answer["error"] for answer in answers], ranks.rank, None)
    mine = answers[ranks.rank]
    members = [rank for rank, answer in enumerate(answers) if answer["host"] == mine["host"]]
    here = [answers[rank] for rank in members]
    if len(members) < 2 or sum(one["bytes"] for one in here) < WORTH_BYTES:
        return None
    if len(members) == ranks.size:
        return Node(ranks, members, ranks.size)
    # torch names a group after those in it and the number of groups that each has: ranks that differ would never meet.
    if any(one["groups"] != mine["groups"] for one in here):
        return None
    return Node(_ranks_of_host(ranks, members), members, ranks.size)


def _group_count() -> int:
    world = getattr(torch.distributed.distributed_c10d, "_world", None)
    return len(getattr(world, "pg_names", ()))


#: By the group that restores, and the members of it on this host.
_of_host: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Ranks]] = weakref.WeakKeyDictionary()


def _ranks_of_host(ranks: Ranks, members: list[int]) -> Ranks:
    """A group of these ranks alone, made once for all who restore with that group. A collective call of theirs."""
    distributed = torch.distributed
    whole = ranks.whole
    known = _of_host.setdefault(whole, {})
    key = tuple(members)
    if key not in known:
        numbers = distributed.get_process_group_ranks(whole)
        known[key] = Ranks(
            distributed.new_group(
                [numbers[member] for member in members],
                timeout=timedelta(minutes=30),
                backend="gloo",
                use_local_synchronization=True,
            )
        )
    return known[key]
