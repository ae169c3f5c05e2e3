"""Starts the ranks of a job, watches them, and stops them all when one ends badly: what a launcher does on one node.

Ranks are forked from a server that has imported torch once. Importing it and what FSDP2 brings takes some four seconds of CPU
a process, most of the time that these small jobs would take. Each rank writes to a log of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

_context = multiprocessing.get_context("forkserver")

#: A run that takes longer hangs.
RUN_SECONDS = 300.0
#: Ranks that are told to end get so long before they are killed.
END_SECONDS = 5.0
#: After a rank has ended with an error, another that was killed is looked for so long.
ROOT_CAUSE_SECONDS = 1.0
_LOG_LINES = 12


class RanksFailed(Exception):
    """How a job ended. Its text has the end of the log of the rank that ended first."""

    def __init__(self, what: str, rank: int | None, signal_number: int | None, log: Path) -> None:
        self.rank = rank
        self.signal_number = signal_number
        self.log = log
        super().__init__(f"{what}\nlogs: {log.parent}/rank-*.log\n{_end_of(log)}".rstrip())


def run(
    world: int, logs: Path, work: Callable[[Any], None], job: Any, seconds: float = RUN_SECONDS
) -> None:
    """Runs `work(job)` on `world` ranks to their end. Errors: `RanksFailed`; no rank is left running then."""
    from torch.distributed import TCPStore

    _context.set_forkserver_preload(["torch._dynamo", "torch.distributed.fsdp", "forebay.dcp"])
    logs.mkdir(parents=True, exist_ok=True)
    patience = timedelta(seconds=seconds)
    # The system picks the port, so no other program can take it first.
    store = TCPStore("127.0.0.1", 0, None, True, patience, wait_for_workers=False)
    processes = []
    try:
        for rank in range(world):
            log = logs / f"rank-{rank}.log"
            arguments = (rank, world, store.port, seconds, log, work, job)
            process = _context.Process(target=_entry, args=arguments, name=f"rank {rank}")
            process.start()
            processes.append(process)
        _watch(processes, logs, time.monotonic() + seconds)
    finally:
        _stop(processes)


def _watch(processes: list[Any], logs: Path, until: float) -> None:
    """Waits until all have ended well, or raises."""
    running = list(processes)
    while running:
        if not _one_ends(running, until):
            names = ", ".join(process.name for process in running)
            log = logs / f"rank-{processes.index(running[0])}.log"
            raise RanksFailed(f"{names} did not end in time", None, None, log)
        if any(process.exitcode for process in processes):
            raise _first_failure(processes, logs)
        running = [process for process in running if process.exitcode is None]


def _one_ends(running: list[Any], until: float) -> bool:
    left = max(until - time.monotonic(), 0.0)
    return bool(wait([process.sentinel for process in running], left))


def _first_failure(processes: list[Any], logs: Path) -> RanksFailed:
    """Ranks that lose another end with an error, and may be seen to end before it: the one that a signal ended is meant."""
    until = time.monotonic() + ROOT_CAUSE_SECONDS
    while not any((process.exitcode or 0) < 0 for process in processes):
        running = [process for process in processes if process.exitcode is None]
        if not running or not _one_ends(running, until):
            break
    codes = [process.exitcode or 0 for process in processes]
    code = min(codes) if min(codes) < 0 else max(codes)
    return _failed(codes.index(code), code, logs)


def _failed(rank: int, code: int, logs: Path) -> RanksFailed:
    log = logs / f"rank-{rank}.log"
    if code < 0:
        name = signal.Signals(-code).name
        return RanksFailed(f"rank {rank} was ended by {name}", rank, -code, log)
    return RanksFailed(f"rank {rank} ended with status {code}", rank, None, log)


def _stop(processes: list[Any]) -> None:
    """Ends what still runs: asked first, then killed."""
    for process in processes:
        if process.is_alive():
            process.terminate()
    until = time.monotonic() + END_SECONDS
    for process in processes:
        process.join(max(until - time.monotonic(), 0.0))
        if process.is_alive():
            process.kill()
            process.join(END_SECONDS)


def _entry(
    rank: int,
    world: int,
    port: int,
    seconds: float,
    log: Path,
    work: Callable[[Any], None],
    job: Any,
) -> None:
    from torch import distributed

    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    patience = timedelta(seconds=seconds)
    try:
        store = distributed.TCPStore("127.0.0.1", port, None, False, patience)
        distributed.init_process_group(
            "gloo", store=store, rank=rank, world_size=world, timeout=patience
        )
        work(job)
        distributed.destroy_process_group()
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        sys.stderr.flush()
        # Without what Python does at exit: saves that wait for lost ranks must not hold the process.
        os._exit(1)


def _end_of(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(f"  {line}" for line in lines[-_LOG_LINES:])
