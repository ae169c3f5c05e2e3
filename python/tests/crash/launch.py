"""Starts the ranks of a job, listens to them, and kills them: really, with signal 9."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from time import monotonic
from types import TracebackType
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch._dynamo", "torch.distributed.tensor", "forebay.dcp"])

#: A job that says nothing for so long hangs.
SILENCE_SECONDS = 180.0

#: What a rank told: the rank, what, and the number of the save (or a traceback).
Report = tuple[int, str, Any]


class Job:
    """Ranks that run `case(rank, pipe, *arguments)`; with several, gloo is between them."""

    def __init__(self, case: Callable[..., None], world: int, *arguments: Any) -> None:
        self.reports: list[Report] = []
        self._store = _store() if world > 1 else None
        self._pipes: dict[Connection, int] = {}
        self.processes: list[Any] = []
        port = self._store.port if self._store is not None else 0
        for rank in range(world):
            ours, theirs = _context.Pipe(duplex=False)
            process = _context.Process(
                target=_entry, args=(rank, world, port, theirs, case, arguments), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes[ours] = rank
            self.processes.append(process)

    def listen(self, until: Callable[[Report], bool] | None = None) -> bool:
        """Takes reports until one is what is waited for (true), or all ranks have ended (false)."""
        while self._pipes:
            ready = wait(list(self._pipes), SILENCE_SECONDS)
            assert ready, f"ranks {sorted(self._pipes.values())} hang; told so far: {self.reports}"
            # All that are ready are read, or a rank that talks a lot would hide the others.
            if any([self._take(one, until) for one in ready]):  # noqa: C419
                return True
        return False

    def drain(self, seconds: float) -> None:
        """Takes what is told within a time."""
        until = monotonic() + seconds
        while self._pipes and (left := until - monotonic()) > 0:
            for one in wait(list(self._pipes), left):
                self._take(one, None)

    def _take(self, pipe: Any, until: Callable[[Report], bool] | None) -> bool:
        try:
            what, value = pipe.recv()
        except (EOFError, ConnectionResetError):
            del self._pipes[pipe]
            pipe.close()
            return False
        report = (self._pipes[pipe], what, value)
        self.reports.append(report)
        return until is not None and until(report)

    def kill(self, ranks: list[int]) -> None:
        """Kills ranks, and sees them dead."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, signal.SIGKILL)
        for rank in ranks:
            self.processes[rank].join(30)
            assert self.processes[rank].exitcode is not None

    def told(self, what: str) -> list[Any]:
        """All that was told of one kind."""
        return [value for _, kind, value in self.reports if kind == what]

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join(30)
        for pipe in self._pipes:
            pipe.close()


def run(case: Callable[..., None], world: int, *arguments: Any) -> Job:
    """Runs a job to its end; all ranks must end well. What it told is in the job."""
    with Job(case, world, *arguments) as job:
        job.listen()
        failed = job.told("raised") + job.told("failed")
        assert not failed, "\n".join(map(str, failed))
        for process in job.processes:
            process.join(60)
            assert process.exitcode == 0, f"a rank ended with {process.exitcode}"
    return job


def _store() -> Any:
    from torch.distributed import TCPStore

    seconds = timedelta(seconds=SILENCE_SECONDS)
    return TCPStore("127.0.0.1", 0, None, True, seconds, wait_for_workers=False)


def _entry(
    rank: int, world: int, port: int, pipe: Connection, case: Callable[..., None], arguments: Any
) -> None:
    import torch
    from torch.distributed import TCPStore

    torch.set_num_threads(1)
    try:
        if port:
            seconds = timedelta(seconds=SILENCE_SECONDS)
            store = TCPStore("127.0.0.1", port, None, False, seconds)
            torch.distributed.init_process_group(
                "gloo", store=store, rank=rank, world_size=world, timeout=seconds
            )
        case(rank, pipe, *arguments)
    except BaseException:  # noqa: BLE001
        with contextlib.suppress(OSError):
            pipe.send(("raised", traceback.format_exc()))
        os._exit(1)
    finally:
        pipe.close()
    if port:
        with contextlib.suppress(Exception):
            torch.distributed.destroy_process_group()
