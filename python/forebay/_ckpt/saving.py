"""One run of saves: from a checkpointer's first save to its close.

A save on the training thread: see whether the one before is in the way, recognise the structure (or describe it and
agree on it), take the addresses, let the native part start, and return. Everything after that happens in native
threads; one Python thread waits for the end (`handle.Watcher`). It makes no collective calls; nor does the training
thread, once a structure is known.
"""

from __future__ import annotations

import contextlib
import logging
import platform
import warnings
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from math import prod
from time import monotonic, perf_counter, sleep
from typing import Any

import torch

from forebay import _native
from forebay._ckpt import layout
from forebay._ckpt.asked import Asked
from forebay._ckpt.handle import Report, Running, SaveHandle, Watcher, settle
from forebay._ckpt.held import Plain
from forebay._ckpt.natives import Natives
from forebay._ckpt.plans import Plan
from forebay._ckpt.quiet import quiet
from forebay._ckpt.ranks import Ranks
from forebay._ckpt.settings import Settings
from forebay._ckpt.snapshot import Snapshot, Snapshots, device_of
from forebay._ckpt.stall import Stall
from forebay._ckpt.structures import Ready, Structures
from forebay._ckpt.tiers import PATIENCE_SECONDS
from forebay._ckpt.training import Training
from forebay._errors import Error, make, usage

_log = logging.getLogger("forebay")

#: How long a rank that cannot save waits until others know, and how long it looks for what they save.
_WITHDRAW_SECONDS = 5.0
_LOOK_SECONDS = 2.0

#: How much longer than rank 0 the others wait for what it says of room.
_ROOM_SECONDS = 60.0

#: What follows a save, on the watching thread.
After = Callable[[SaveHandle], None]


class Run:
    """See the module. It holds nothing of the checkpointer that has it, so that both go when nobody needs them; while a
    save is under way, that holds both."""

    def __init__(self, settings: Settings, after: After, training: Training) -> None:
        self.settings = settings
        self.training = training
        self.ranks = Ranks(settings.process_group)
        self.natives = Natives(settings)
        self.structures = Structures(self.ranks, settings.threads, settings.directory)
        self.snapshots = Snapshots(settings.shadow, training, survival=settings.survival)
        self.stall = Stall()
        self.watcher = Watcher()
        self._after = weakref.WeakMethod(after)
        self.last: SaveHandle | None = None
        #: The step that the state came from: the last one restored or committed.
        self.parent: int | None = None
        self._counter = 0

    def save(self, asked: Asked) -> SaveHandle:
        """Starts a save; see `Checkpointer.save`."""
        began = perf_counter()
        # Before anything can go wrong: ranks must go on counting alike.
        self._counter += 1
        step, files, failure = asked.checked()
        try:
            if self.ranks.stale:
                self._find_ranks()
            goes = self._make_way()
            if not goes:
                _log.info("forebay: step %s is left out: the save before is under way", step)
            elif not self._admitted():
                goes = False
                level = logging.WARNING if self.ranks.rank == 0 else logging.INFO
                _log.log(level, "forebay: step %s is left out: the first tier has no room", step)
            waited = perf_counter()
            if goes:
                with quiet():
                    ready = self._ready(step, asked, failure)
                    planned = perf_counter()
                    assert step is not None
                    snapshot = self._snapshot(ready.tensors, asked)
                    running = self._start(step, ready, snapshot, files, asked.blocking)
        except BaseException as error:
            self._withdraw(step, error)
            raise
        if not goes and failure is not None:
            raise failure
        assert step is not None
        if not goes:
            return SaveHandle(step, None, {"counter": self._counter}, skipped=True)
        facts = self._facts(ready, snapshot)
        facts["busy_seconds"] = waited - began
        facts["plan_seconds"] = planned - waited
        facts["start_seconds"] = perf_counter() - planned
        rank = None if self.ranks.alone else self.ranks.rank
        handle = SaveHandle(step, running, facts, snapshot.settled, rank=rank, link=snapshot.link)
        try:
            self.last = self.training.handle = handle
            self._watch(handle)
            if asked.blocking:
                handle.wait()
            elif not asked.overlap or (asked.owned is not None and not snapshot.rest_settled):
                handle.settle()
        except Error:
            raise
        except BaseException:
            # The caller's memory is still read, and may change as soon as it has this.
            handle.abandon()
            raise
        finally:
            facts["stall_seconds"] = perf_counter() - began
        return handle

    def _ready(self, step: int | None, asked: Asked, failure: Exception | None) -> Ready:
        """What is to be written. Collective, if it is the first of its kind. Raises at least `failure`."""
        state, own = asked.state, asked.per_rank
        return self.structures.prepare(self._counter, step or 0, state, own, self._open, failure)

    def _watch(self, handle: SaveHandle) -> None:
        """Lets the end of a save be seen. Without a thread for that there is no save."""
        try:
            self.watcher.watch(handle, self._after() or _nothing)
        except RuntimeError as error:
            handle.cancel()
            settle(handle)
            hint = "raise the limit on processes"
            raise make("io", f"no thread for a save: {error}", None, [hint]) from error

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
        self.structures = Structures(self.ranks, self.settings.threads, self.settings.directory)

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
        self.finish(6)
        return True

    def finish(self, level: int) -> None:
        """Waits for the end of the last save. `level`: the caller's, of a warning about it."""
        last, self.last = self.last, None
        if last is not None:
            try:
                last._ended()
            except BaseException:
                self.last = last
                raise
            self._learn(last, level)

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

    def _admitted(self) -> bool:
        """Whether the first tier has room, or gets some: rank 0 asks, the others hear. Errors: none comes in time, on all
        ranks alike."""
        tiers, run_id = self.settings.tiers, self.natives.run_id
        if tiers is None:
            return True
        if self.ranks.alone:
            return tiers.admit()
        store = self.ranks.store()
        if store is None or run_id is None:
            # Nothing to tell the others by, yet: a full disk is told as any.
            return True
        key = f"forebay/room/{run_id}/{self._counter}"
        if self.ranks.rank == 0:
            try:
                told = "go" if tiers.admit() else "skip"
            except Error as error:
                store.set(key, error.what)
                raise
            store.set(key, told)
            return told == "go"
        store.wait([key], timedelta(seconds=PATIENCE_SECONDS + _ROOM_SECONDS))
        heard: str = store.get(key).decode(errors="replace")
        if heard not in ("go", "skip"):
            raise make("no_space", f"rank 0: {heard}", str(self.settings.directory))
        return heard == "go"

    def _learn(self, last: SaveHandle, level: int) -> None:
        """What the save before means for the next one."""
        error = last._error
        if error is not None and error.code == "structure_mismatch":
            # All ranks have this error, so all agree anew.
            self.structures.renew()
        if error is None:
            self.parent = last.step
            self.stall.learn(last.result())
        elif not last._seen and not last.cancelled:
            last._seen = True
            warnings.warn(f"the save of step {last.step} failed: {error}", stacklevel=level)

    def _snapshot(self, tensors: Sequence[torch.Tensor], asked: Asked) -> Snapshot:
        self.snapshots.staging_bytes = self.natives.staging_bytes
        self.snapshots.device = self._device(tensors)
        return self.snapshots.take(tensors, asked.blocking, asked.owned)

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
        plan, memory, link = ready.plan, snapshot.memory, snapshot.link
        assert plan.agreed is not None and plan.structure is not None
        bequeath = None
        if memory is not None and link is not None:
            give = partial(link.hand_over, memory)
            bequeath = (memory.offsets(snapshot.keep), memory.bytes, give)
        try:
            return self._started(step, ready, snapshot, side_files, blocking, bequeath)
        except BaseException:
            if link is not None:
                link.abandon()
            raise

    def _started(
        self,
        step: int,
        ready: Ready,
        snapshot: Snapshot,
        side_files: list[tuple[str, bytes]],
        blocking: bool,
        bequeath: Any,
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
            # What is staged stays as it is too.
            in_place=blocking or snapshot.memory is not None,
            side_files=side_files if self.ranks.rank == 0 else [],
            torch=torch.__version__,
            python=platform.python_version(),
            host=platform.node(),
            hints=self.natives.hints,
            keep=snapshot.keep,
            bequeath=bequeath,
        )

    def _withdraw(self, step: int | None, error: BaseException) -> None:
        """Lets other ranks, which may have started this save or wait for this rank, see at once that it does not take
        part: it contributes a structure that no other has. Whatever goes wrong with that, `error` is what counts.
        `step` is None where this rank was not told it: then it is the one that others have begun."""
        if self.ranks.alone or not self.structures.known:
            return
        # The others hear of a structure that is not theirs, and agree anew.
        self.structures.renew()
        with contextlib.suppress(Exception):
            self.structures.stay_away(self._counter, _as_error(error))
        until, pause = monotonic() + _LOOK_SECONDS, 0.05
        while step is None and monotonic() < until:
            with contextlib.suppress(Exception):
                step = self.structures.step_of(self._counter)
            sleep(0.0 if step is not None else pause)
            pause *= 1.5
        if step is None:
            return
        with contextlib.suppress(Exception):
            empty = _native.Structure([], rank=self.ranks.rank, world=self.ranks.size)
            running = self.natives.witness(self.snapshots.device, self.ranks).start(
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
        if stepped:
            self.training.stepped = True
        plan, pieces = self.structures.describe(state)
        device, size = self._device(pieces), _share(plan, self.ranks.size)
        pool, staging = self.natives.pool(device), self.natives.staging_bytes
        self.settings.directory.mkdir(parents=True, exist_ok=True)
        self.snapshots.device, self.snapshots.staging_bytes = device, staging
        mode = self.snapshots.mode_for(pieces, size)
        if mode == "staged":
            self.snapshots.prepare_staged(size, pieces)
            # Copies never wait for the disk.
            staging = size
        if mode == "shadow" and (stepped or self.settings.shadow is True):
            self.snapshots.prepare(pieces)
        if mode != "shadow":
            self.stall.measure(device, self.settings.directory, pool, pieces, size, staging)
        return mode, self.stall.predict(mode, size, len(pieces), staging)

    def rebase(self, step: int) -> None:
        """The state is now that of `step`: saves go on from there, as a new run, so that what was saved after that step
        is not taken for newer. Always, and so on all ranks: they may not agree on what was saved last."""
        self.structures.forget()
        self.natives.forget()
        self.parent = step

    def release(self) -> None:
        """Gives back staging memory and shadows; the next save takes some again."""
        if self.last is not None:
            self.last._ended()
        self.snapshots.release()
        self.natives.release()

    def close(self, timeout: float | None) -> bool:
        """Waits for the save under way; False if it still is after `timeout` seconds."""
        last = self.last
        if last is not None and not last._ended(timeout):
            return False
        self.watcher.close(timeout)
        if last is not None and last._error is None:
            self.parent = last.step
        self.release()
        self.natives.forget()
        return True

    def failure(self) -> Error | None:
        """The error of the last save, if it ended with one that nobody has seen or caused; from now on it is seen."""
        last = self.last
        if last is None or last._seen or last.cancelled:
            return None
        last._seen = True
        return last._error


def _nothing(_: SaveHandle) -> None:
    """What follows a save whose checkpointer is gone."""


def _as_error(error: BaseException) -> Error:
    if isinstance(error, Error):
        return error
    return usage(f"the save failed: {type(error).__name__}: {error}")


def _share(plan: Plan, size: int) -> int:
    """Bytes that a rank will write, before ranks agreed: its share of what all hold, and what it holds of the rest."""
    held = 0
    for place in plan.held:
        bytes_ = sum(prod(sizes) for _, sizes in place.regions) * layout.element_bytes(place.dtype)
        held += bytes_ // size if isinstance(place.layout, Plain) else bytes_
    return held
