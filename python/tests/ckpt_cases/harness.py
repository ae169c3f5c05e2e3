"""Runs a function on several ranks, each a process with gloo between them.

Processes are forked from a server that has imported torch and done nothing with it, so that a test of four ranks takes
tenths of a second, not four imports of torch.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

_context = multiprocessing.get_context("forkserver")
# The first DTensor of a process imports torch._dynamo, which takes longer than torch.
_context.set_forkserver_preload(["torch._dynamo", "torch.distributed.tensor", "forebay.dcp"])

#: A rank that takes longer hangs.
TIMEOUT_SECONDS = 90.0


def run(case: Callable[..., Any], world: int, *arguments: Any, store: bool = True) -> list[Any]:
    """What `case(rank, *arguments)` returned on each rank. The first failure is raised with its traceback."""
    from torch.distributed import TCPStore

    seconds = timedelta(seconds=TIMEOUT_SECONDS)
    master = TCPStore("127.0.0.1", 0, None, True, seconds, wait_for_workers=False)
    ranks = []
    for rank in range(world):
        ours, theirs = _context.Pipe(duplex=False)
        # No daemon: a rank may start a process of its own.
        process = _context.Process(
            target=_entry,
            args=(rank, world, master.port if store else 0, theirs, case, arguments),
        )
        process.start()
        theirs.close()
        ranks.append((process, ours))
    try:
        return _collect(ranks)
    finally:
        for process, ours in ranks:
            process.join(5)
            if process.is_alive():
                process.kill()
            ours.close()


def _collect(ranks: list[tuple[Any, Connection]]) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[str] = []
    left = {ours: rank for rank, (_, ours) in enumerate(ranks)}
    while left:
        ready = wait(list(left), TIMEOUT_SECONDS)
        if not ready:
            raise AssertionError(f"ranks {sorted(left.values())} hang; {failures}")
        for ours in ready:
            rank = left.pop(ours)  # type: ignore[call-overload]
            try:
                well, value = ours.recv()  # type: ignore[union-attr]
            except EOFError:
                # Killed, by itself or by the test.
                results[rank] = None
                continue
            if well:
                results[rank] = value
            else:
                failures.append(f"rank {rank}:\n{value}")
    if failures:
        raise AssertionError("\n".join(failures))
    return [results[rank] for rank in sorted(results)]


def _entry(
    rank: int, world: int, port: int, theirs: Connection, case: Callable[..., Any], arguments: Any
) -> None:
    import torch
    from torch.distributed import TCPStore

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    try:
        seconds = timedelta(seconds=TIMEOUT_SECONDS)
        if port:
            store = TCPStore("127.0.0.1", port, None, False, seconds)
            torch.distributed.init_process_group(
                "gloo", store=store, rank=rank, world_size=world, timeout=seconds
            )
        answer = (True, case(rank, *arguments))
    except BaseException:  # noqa: BLE001
        answer = (False, traceback.format_exc())
    with contextlib.suppress(BrokenPipeError):
        theirs.send(answer)
    theirs.close()
    if port:
        with contextlib.suppress(Exception):
            torch.distributed.destroy_process_group()


@contextlib.contextmanager
def recorded() -> Iterator[list[str]]:
    """The texts of the warnings inside."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        texts: list[str] = []
        yield texts
        texts += [str(one.message) for one in caught]
