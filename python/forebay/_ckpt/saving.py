"""One run of saves: from a checkpointer's first save to its close.

A save on the training thread: see whether the one before is in the way, recognise the structure (or describe it and
agree on it), take the addresses, let the native part start, and return. Everything after that happens in native
threads; one Python thread waits for the end (`handle.Watcher`). It makes no collective calls; nor does the training
thread, once a structure is known.
"""

from __future__ import annotations

import contextlib
import platform
import warnings
from collections.abc import Callable, Mapping, Sequence
from math import prod
from time import perf_counter
from typing import Any

import torch

from forebay import _native
from forebay._ckpt import layout
from forebay._ckpt.handle import Report, Running, SaveHandle, Watcher
from forebay._ckpt.held import Plain
from forebay._ckpt.natives import Natives
from forebay._ckpt.plans import Plan
from forebay._ckpt.quiet import quiet
from forebay._ckpt.ranks import Ranks
from forebay._ckpt.settings import Settings
from forebay._ckpt.snapshot import Snapshot, Snapshots, device_of
from forebay._ckpt.stall import Stall
from forebay._ckpt.structures import Ready, Structures
from forebay._errors import Error, quoted, usage

#: With what the native part puts before it, a name has to fit 255 bytes.
_SIDE_NAME_BYTES = 200

#: How long a rank that cannot save waits until others know.
_WITHDRAW_SECONDS = 5.0

SideFiles = Mapping[str, bytes]


class Run:
    """See the module."""

    def __init__(self, settings: Settings, after: Callable[[SaveHandle], None]) -> None:
        self.settings = settings
        self.ranks = Ranks(settings.process_group)
        self.natives = Natives(settings)
        self.structures = Structures(self.ranks, settings.threads, self._open)
        self.snapshots = Snapshots(settings.shadow)
        self.stall = Stall()
        self.watcher = Watcher(after)
        self.last: SaveHandle | None = None
        #: The step that the state came from: the last one restored or committed.
        self.parent: int | None = None
        self._counter = 0

    def save(
        self,
        step: int,
        state: Any,
        per_rank: Any,
        side_files: SideFiles | None,
        blocking: bool,
        overlap: bool,
    ) -> SaveHandle:
        """Starts a save; see `Checkpointer.save`."""
        began = perf_counter()
        if self.ranks.stale:
            self._find_ranks()
        files = _side_files(side_files)
        self._counter += 1
        if not self._make_way():
            return SaveHandle(step, None, {"counter": self._counter}, skipped=True)
        waited = perf_counter()
        try:
            with quiet():
                ready = self.structures.prepare(self._counter, step, state, per_rank)
                planned = perf_counter()
                snapshot = self._snapshot(ready.tensors, blocking)
                running = self._start(step, ready, snapshot, files, blocking)
        except BaseException as error:
            self._withdraw(step, error)
            raise
        facts = self._facts(ready, snapshot)
        facts["busy_seconds"] = waited - began
        facts["plan_seconds"] = planned - waited
        facts["start_seconds"] = perf_counter() - planned
        rank = None if self.ranks.alone else self.ranks.rank
        handle = SaveHandle(step, running, facts, snapshot.settled, rank=rank)
        self.last = handle
        self.watcher.watch(handle)
        try:
            if blocking:
                handle.wait()
            elif not overlap:
                handle.settle()
        finally:
            facts["stall_seconds"] = perf_counter() - began
        return handle

    def _facts(self, ready: Ready, snapshot: Snapshot) -> Report:
        """What the report says beside the native part's numbers."""
        plan = ready.plan
        predicted = self.stall.predict(
            snapshot.mode, plan.bytes_here, len(ready.tensors), self.natives.staging_bytes
        )
        return {
            "snapshot": snapshot.mode,
            "agreed": ready.talked,
            "empty": plan.empty,
            "warnings": plan.agreed.warnings if plan.agreed else [],
            "predicted_stall_s": predicted,
        }

    def _find_ranks(self) -> None:
        """torch.distributed was initialized after this was made."""
        if self.structures.known:
            what = "torch.distributed was initialized after the first save"
            raise usage(what, "call close() before, then every rank starts anew")
        self.ranks = Ranks(self.settings.process_group)
        self.structures = Structures(self.ranks, self.settings.threads, self._open)

    def _make_way(self) -> bool:
        """Deals with the save before; False if this one is to be left out."""
        last = self.last
        if last is None:
            return True
        policy = self.settings.on_busy
        if policy == "skip" and not self._go(last.done()):
            return False
        if policy == "supersede":
            last.cancel()
        # Its memory is used again: it must be over, however it ended.
        last._over.wait()
        self._learn(last)
        return True

    def _go(self, done: bool) -> bool:
        """Whether this save happens: the rank that comes first decides for all of them."""
        if self.ranks.alone:
            return done
        store = self.ranks.store()
        if store is None:
            # Nothing to decide by: all ranks wait.
            return True
        key = f"forebay/save/{self.natives.run_id}/{self._counter}"
        decided: bytes = store.compare_set(key, "", "go" if done else "skip")
        return decided == b"go"

    def _learn(self, last: SaveHandle) -> None:
        """What the save before means for the next one."""
        error = last._error
        if error is None:
            self.parent = last.step
            self.stall.learn(last.result())
        elif not last._seen and not last.cancelled:
            last._seen = True
            warnings.warn(f"the save of step {last.step} failed: {error}", stacklevel=5)

    def _snapshot(self, tensors: Sequence[torch.Tensor], blocking: bool) -> Snapshot:
        self.snapshots.staging_bytes = self.natives.staging_bytes
        self.snapshots.device = self._device(tensors)
        return self.snapshots.take(tensors, blocking)

    def _device(self, tensors: Sequence[torch.Tensor]) -> str:
        return self.settings.device or device_of(tensors)

    def _open(self, run_id: str, tensors: Sequence[torch.Tensor]) -> None:
        self.natives.open(run_id, self.ranks, self._device(tensors), self.parent)

    def _start(
        self,
        step: int,
        ready: Ready,
        snapshot: Snapshot,
        side_files: list[tuple[str, bytes]],
        blocking: bool,
    ) -> Running:
        plan = ready.plan
        assert plan.agreed is not None and plan.structure is not None
        return self.natives.saver(self.snapshots.device, self.ranks).start(
            step,
            plan.structure,
            snapshot.addresses,
            snapshot.places,
            ready.objects,
            agreed=plan.agreed.hash or plan.structure.hash,
            counter=self._counter,
            epoch=self.natives.epoch or 0,
            parent=self.parent,
            stream=snapshot.stream,
            in_place=blocking,
            side_files=side_files if self.ranks.rank == 0 else [],
            torch=torch.__version__,
            python=platform.python_version(),
            host=platform.node(),
            hints=self.natives.hints,
            keep=snapshot.keep,
        )

    def _withdraw(self, step: int, error: BaseException) -> None:
        """Lets other ranks, which may have started this save, see at once that this one does not: it contributes a
        structure that no other has."""
        if self.ranks.alone or not self.structures.known:
            return
        with contextlib.suppress(Error):
            empty = _native.Structure([], rank=self.ranks.rank, world=self.ranks.size)
            running = self.natives.saver("host", self.ranks).start(
                step,
                empty,
                [],
                b"",
                [],
                agreed=f"rank {self.ranks.rank} has none: {error}",
                counter=self._counter,
                epoch=self.natives.epoch or 0,
                parent=self.parent,
                hints=self.natives.hints,
            )
            # The process may end because of the error: then others must know by then.
            running.wait(_WITHDRAW_SECONDS)

    def prepare(self, state: Any, stepped: bool) -> tuple[str, float | None]:
        """Makes memory ready for saves of a state and measures what they will take; returns the kind of snapshot and
        the predicted stall in seconds. Not a collective call.

        `stepped`: a full step of training has run, so what is free of the GPU's memory now is free for good. Before
        that a shadow takes memory only if it was asked for by name."""
        plan, pieces = self.structures.describe(state)
        device, size = self._device(pieces), _share(plan, self.ranks.size)
        pool, staging = self.natives.pool(device), self.natives.staging_bytes
        self.settings.directory.mkdir(parents=True, exist_ok=True)
        self.snapshots.device, self.snapshots.staging_bytes = device, staging
        mode = self.snapshots.mode_for(pieces, size)
        if mode == "shadow" and (stepped or self.settings.shadow is True):
            self.snapshots.prepare(pieces)
        if mode != "shadow":
            self.stall.measure(device, self.settings.directory, pool, pieces, size, staging)
        return mode, self.stall.predict(mode, size, len(pieces), staging)

    def rebase(self, step: int) -> None:
        """The state is now that of `step`: saves go on from there. From another step than the last they are a new run,
        so that what was saved after that step is not taken for newer. The same on all ranks."""
        if self.last is not None:
            self.last._over.wait()
            self._learn(self.last)
            self.last = None
        if self.parent != step and self.structures.known:
            self.structures.forget()
            self.natives.forget()
        self.parent = step

    def release(self) -> None:
        """Gives back staging memory and shadows; the next save takes some again."""
        if self.last is not None:
            self.last._over.wait()
        self.snapshots.release()
        self.natives.release()

    def close(self, timeout: float | None) -> bool:
        """Waits for the save under way; False if it still is after `timeout` seconds."""
        last = self.last
        over = last is None or last._over.wait(timeout)
        if over:
            self.watcher.close(timeout)
            if last is not None:
                self._learn(last)
            self.release()
            self.natives.forget()
        return over


def _share(plan: Plan, size: int) -> int:
    """Bytes that a rank will write, before ranks agreed: its share of what all hold, and what it holds of the rest."""
    held = 0
    for place in plan.held:
        bytes_ = sum(prod(sizes) for _, sizes in place.regions) * layout.element_bytes(place.dtype)
        held += bytes_ // size if isinstance(place.layout, Plain) else bytes_
    return held


def _side_files(files: SideFiles | None) -> list[tuple[str, bytes]]:
    """Side files as the native part takes them. Errors: `usage`."""
    listed = []
    for name, data in (files or {}).items():
        if not isinstance(name, str) or not isinstance(data, bytes | bytearray | memoryview):
            raise usage(f"side file {name!r} is {type(data).__name__}, a name and bytes are needed")
        plain = name.isprintable() and not set(name) & set("/\\") and name[:1] not in ("", ".")
        if not plain or len(name.encode()) > _SIDE_NAME_BYTES:
            hint = "one name without folders, that does not start with a dot"
            raise usage(f"a side file cannot be called {quoted(name)}", hint)
        listed.append((name, bytes(data)))
    return listed
