"""One run of saves: from a checkpointer's first save to its close.

A save on the training thread: see whether the one before is in the way, recognise the structure (or describe it and agree on
it), take the addresses, let the native part start, and return. Everything after that happens in native threads; one Python
thread waits for the end (`handle.Watcher`). It makes no collective calls; nor does the training thread, once a structure is
known.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import secrets
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from forebay import _native
from forebay._ckpt import plans
from forebay._ckpt.agreement import Agreed, Description, Told, agree
from forebay._ckpt.handle import Report, Running, SaveHandle, Watcher
from forebay._ckpt.held import Describer, Plain
from forebay._ckpt.objects import Stored, pack
from forebay._ckpt.plans import Own, Plan
from forebay._ckpt.quiet import quiet
from forebay._ckpt.ranks import Ranks
from forebay._ckpt.settings import STAGING_BYTES, Settings
from forebay._ckpt.snapshot import Snapshot, Snapshots, current_device, device_of
from forebay._ckpt.stall import Stall
from forebay._errors import Error, make, quoted, usage
from forebay._options import Options, engine

_log = logging.getLogger("forebay")

#: Structures that are kept: a state with and one without the optimizer, and two more.
_PLANS = 4

#: How long a rank waits for the others when its structure changed after the first save.
PATIENCE_SECONDS = 120.0

#: How long a rank looks for what rank 0 wrote into the directory: networked file systems show new names late.
_LOOK_SECONDS = 10.0

#: With what the native part puts before it, a name has to fit 255 bytes.
_SIDE_NAME_BYTES = 200

SideFiles = Mapping[str, bytes]


class Run:
    """See the module."""

    def __init__(self, settings: Settings, after: Callable[[SaveHandle], None]) -> None:
        self.settings = settings
        self.ranks = Ranks(settings.process_group)
        self.watcher = Watcher(after)
        self.last: SaveHandle | None = None
        self.snapshots = Snapshots(settings.shadow)
        self.stall = Stall()
        self._describer = Describer(self.ranks.rank, self.ranks.group_rank)
        self._plans: list[Plan] = []
        #: By the hash of this rank's description.
        self._agreed: dict[str, Agreed] = {}
        self._savers: dict[str, _native.Saver] = {}
        self._pools: dict[str, _native.Pool] = {}
        self._counter = 0
        #: The step that the state came from: the last one restored or committed.
        self.parent: int | None = None
        self._run_id: str | None = None
        self._epoch: int | None = None
        self._told: set[str] = set()

    # One save

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
        with quiet():
            plan, tensors, objects, new = self._prepare(step, state, per_rank)
        planned = perf_counter()
        snapshot = self._snapshot(tensors, blocking)
        running = self._start(step, plan, snapshot, objects, files, blocking)
        started = perf_counter()
        facts: Report = {
            "snapshot": snapshot.mode,
            "busy_seconds": waited - began,
            "plan_seconds": planned - waited,
            "start_seconds": started - planned,
            "agreed": new,
            "empty": plan.empty,
            "warnings": plan.agreed.warnings if plan.agreed else [],
            "predicted_stall_s": self.stall.predict(
                snapshot.mode, plan.bytes_here, len(tensors), self._staging_bytes
            ),
        }
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

    def _find_ranks(self) -> None:
        """torch.distributed was initialized after this was made."""
        if self._agreed:
            what = "torch.distributed was initialized after the first save"
            raise usage(what, "call close() before, then every rank starts anew")
        self.ranks = Ranks(self.settings.process_group)
        self._describer = Describer(self.ranks.rank, self.ranks.group_rank)

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

    def _learn(self, last: SaveHandle) -> None:
        """What the save before means for the next one."""
        if last._error is None:
            self.parent = last.step
            self.stall.learn(last.result())
        else:
            self._complain(last)

    def _go(self, done: bool) -> bool:
        """Whether this save happens: the rank that comes first decides for all of them."""
        store = self.ranks.store()
        if self.ranks.alone or store is None:
            return done
        key = f"forebay/save/{self._run_id}/{self._counter}"
        decided: bytes = store.compare_set(key, "", "go" if done else "skip")
        return decided == b"go"

    def _complain(self, handle: SaveHandle) -> None:
        error = handle._error
        if error is not None and not handle._seen and error.code != "cancelled":
            handle._seen = True
            warnings.warn(f"the save of step {handle.step} failed: {error}", stacklevel=5)

    def _snapshot(self, tensors: Sequence[torch.Tensor], blocking: bool) -> Snapshot:
        self.snapshots.staging_bytes = self._staging_bytes
        self.snapshots.device = self._device(tensors)
        return self.snapshots.take(tensors, blocking)

    @property
    def _staging_bytes(self) -> int:
        return self.settings.staging_bytes or STAGING_BYTES

    def prepare(self, state: Any) -> tuple[str, float | None]:
        """Makes memory ready for saves of a state and measures what they will take; returns the kind of snapshot and the
        predicted stall in seconds. Not a collective call."""
        plan, values = plans.describe(state, self._describer, plans.resolve(state))
        pieces = [piece for group in plans.memory(plan, values) for piece in group]
        device = self._device(pieces)
        size = _share(plan, self.ranks.size)
        pool = self.pool(device)
        self.settings.directory.mkdir(parents=True, exist_ok=True)
        self.snapshots.device, self.snapshots.staging_bytes = device, self._staging_bytes
        mode = self.snapshots.mode_for(pieces, size)
        if mode != "shadow":
            directory = self.settings.directory
            self.stall.measure(device, directory, pool, size, self._staging_bytes)
        return mode, self.stall.predict(mode, size, len(pieces), self._staging_bytes)

    def warm(self) -> None:
        """Makes the staging memory that was asked for now, where the device is known."""
        if self.settings.staging_bytes is None:
            return
        device = self.settings.device or current_device()
        if device is not None:
            self.pool(device)

    def _device(self, tensors: Sequence[torch.Tensor]) -> str:
        return self.settings.device or device_of(tensors)

    def _start(
        self,
        step: int,
        plan: Plan,
        snapshot: Snapshot,
        objects: list[Stored],
        side_files: list[tuple[str, bytes]],
        blocking: bool,
    ) -> Running:
        assert plan.agreed is not None and plan.structure is not None
        saver = self.saver(self.snapshots.device)
        return saver.start(
            step,
            plan.structure,
            snapshot.addresses,
            snapshot.places,
            objects,
            agreed=plan.agreed.hash or plan.structure.hash,
            counter=self._counter,
            epoch=self._epoch or 0,
            parent=self.parent,
            stream=snapshot.stream,
            in_place=blocking,
            side_files=side_files if self.ranks.rank == 0 else [],
            torch=torch.__version__,
            python=platform.python_version(),
            host=platform.node(),
            keep=snapshot.keep,
        )

    # Structures

    def _prepare(
        self, step: int, state: Any, per_rank: Any
    ) -> tuple[Plan, list[torch.Tensor], list[Stored], bool]:
        states = plans.resolve(state)
        for place, plan in enumerate(self._plans):
            found = plans.fits(plan, state, self._describer, states)
            if found is not None:
                self._plans.insert(0, self._plans.pop(place))
                values, pieces = found
                own = self._own(per_rank)
                packed = plans.pack_objects(plan, values, plan.writes_objects)
                return (plan, *self._gather(plan, own, pieces, packed), False)
        return self._describe(step, state, per_rank, states)

    def _describe(
        self, step: int, state: Any, per_rank: Any, states: Mapping[int, Any]
    ) -> tuple[Plan, list[torch.Tensor], list[Stored], bool]:
        """A structure that was not seen before, or not lately."""
        plan: Plan | None = None
        values: list[Any] = []
        packed: dict[int, Stored] = {}
        own: Own | None = None
        failure: BaseException | None = None
        try:
            plan, values = plans.describe(state, self._describer, states)
            packed = plans.pack_objects(plan, values, plan.objects)
            own = self._own(per_rank)
        except Exception as error:  # noqa: BLE001
            if self.ranks.alone or self._agreed:
                # Later on, others may have nothing to agree on: they see this rank's save missing.
                raise
            failure = error
        new = self._agree(step, plan, values, packed, own, failure)
        assert plan is not None
        self._plans.insert(0, plan)
        del self._plans[_PLANS:]
        packed = {place: packed[place] for place in plan.writes_objects}
        return (plan, *self._gather(plan, own, plans.memory(plan, values), packed), new)

    def _own(self, per_rank: Any) -> Own | None:
        if not per_rank:
            return None
        return plans.describe_own(self.ranks.rank, per_rank, self._describer)

    def _gather(
        self,
        plan: Plan,
        own: Own | None,
        pieces: Sequence[Sequence[torch.Tensor]],
        packed: Mapping[int, Stored],
    ) -> tuple[list[torch.Tensor], list[Stored]]:
        """Tensors and objects that this rank writes, in the order of the native structure's items."""
        if plan.structure is None or plan.own_signature != (own and own.signature()):
            plans.lay_out(plan, own, self.ranks.rank, self.ranks.size, self.settings.threads)
        tensors = [pieces[at][number] for at, number in plan.writes]
        objects = [packed[place] for place in plan.writes_objects]
        if own is not None:
            for name, value, held in zip(own.flat.names, own.flat.values, own.held, strict=True):
                if held is None:
                    objects.append(pack(name, value))
                else:
                    tensors.append(value)
        return tensors, objects

    def _agree(
        self,
        step: int,
        plan: Plan | None,
        values: Sequence[Any],
        packed: Mapping[int, Stored],
        own: Own | None,
        failure: BaseException | None,
    ) -> bool:
        """Finds or makes the agreement on a plan's structure; True if ranks had to talk about it."""
        ranks = self.ranks
        first = not self._agreed
        error = _as_error(failure)
        lone = plan is None or ranks.alone
        description = Description() if plan is None or lone else plans.description(plan)
        digest = "alone" if ranks.alone else _digest(description)
        known = self._agreed.get(digest)
        if plan is not None and known is not None and not ranks.alone:
            plan.agreed = known
            return False
        if not first:
            ranks.meet(f"{self._run_id}/{self._counter}", PATIENCE_SECONDS, _left_alone)
        told = Told(
            description,
            {} if plan is None or lone else plans.checksums(plan, values, packed),
            plans.element_bytes,
            step,
            error,
            {"run": secrets.token_hex(4)} if first else {},
            {} if plan is None or lone else plans.readings(plan),
        )
        try:
            agreed = agree(
                ranks, told, lambda found: plans.reread(_some(plan), self._describer, found)
            )
        except Error as raised:
            if failure is not None and not isinstance(failure, Error):
                raise failure from raised
            raise
        plan = _some(plan)
        if first:
            self._open(str(agreed.first["run"]), device_of([values[at] for at in plan.tensors]))
        if ranks.alone:
            agreed.ties = {plan.names[plan.tensors[at]]: True for at in plan.ties}
        plan.agreed = agreed
        ranks.raise_first(self._lay_out(plan, own))
        self._agreed[digest] = agreed
        self._tell(plan, agreed)
        return not ranks.alone

    def _lay_out(self, plan: Plan, own: Own | None) -> Error | None:
        """Makes the native structure; the error if that cannot be, for the others to hear of."""
        try:
            plans.lay_out(plan, own, self.ranks.rank, self.ranks.size, self.settings.threads)
        except Error as error:
            return error
        return None

    def _tell(self, plan: Plan, agreed: Agreed) -> None:
        """What is worth a warning, once."""
        lines = list(agreed.warnings) if self.ranks.rank == 0 else []
        if plan.empty and self.ranks.rank == 0:
            shown = ", ".join(plan.empty[:8]) + (", ..." if len(plan.empty) > 8 else "")
            lines.append(
                f"these parts of the state hold nothing, so nothing of them is saved: {shown}"
            )
        for line in lines:
            if line not in self._told:
                self._told.add(line)
                warnings.warn(line, stacklevel=8)

    # What native saves need

    def _open(self, run_id: str, device: str) -> None:
        """Makes the run known in the directory. A collective call."""
        self._run_id = run_id
        self._epoch = None
        self._savers.clear()
        error: Error | None = None
        epoch: int | None = None
        if self.ranks.rank == 0:
            try:
                epoch = self.saver(self.settings.device or device).claim(self.parent)
            except Error as raised:
                error = raised
        if self.ranks.alone:
            if error is not None:
                raise error
            self._epoch = epoch
            return
        answers = self.ranks.exchange({"error": None, "epoch": epoch})
        self.ranks.raise_first(error)
        self._epoch = int(answers[0]["epoch"])
        if self.ranks.rank:
            try:
                self._see_rank_0()
                self.saver(self.settings.device or device)
            except Error as raised:
                error = raised
        self.ranks.raise_first(error)

    def _see_rank_0(self) -> None:
        """Whether the directory here is the one that rank 0 writes to."""
        until = time.monotonic() + _LOOK_SECONDS
        while not any(_listed(self.settings.directory)):
            if time.monotonic() > until:
                what = "what rank 0 wrote does not show here: the directory is not shared"
                hint = "checkpoints of several nodes need a file system that all of them mount"
                raise make("not_found", what, str(self.settings.directory), [hint])
            time.sleep(0.05)

    def saver(self, device: str) -> _native.Saver:
        """The native saver of a device."""
        found = self._savers.get(device)
        if found is None:
            assert self._run_id is not None
            found = self._savers[device] = _native.Saver(
                self.settings.directory,
                rank=self.ranks.rank,
                world=self.ranks.size,
                run_id=self._run_id,
                engine=engine(device, Options()),
                pool=self.pool(device),
                takers=self.settings.threads,
                overwrite=self.settings.overwrite,
                who=f"rank {self.ranks.rank} on {platform.node()}, process {os.getpid()}",
            )
        return found

    def pool(self, device: str) -> _native.Pool:
        """The staging pool of a device."""
        found = self._pools.get(device)
        if found is None:
            size = self.settings.staging_bytes
            found = self._pools[device] = _native.Pool(
                engine(device, Options()), size or STAGING_BYTES, prewarm=size is not None
            )
        return found

    def release(self) -> None:
        """Gives back staging memory and shadows; the next save takes some again."""
        if self.last is not None:
            self.last._over.wait()
        self.snapshots.release()
        # A saver holds its pool.
        self._savers.clear()
        self._pools.clear()

    def close(self, timeout: float | None) -> bool:
        """Waits for the save under way; False if it still is after `timeout` seconds."""
        last = self.last
        over = last is None or last._over.wait(timeout)
        if over:
            self.watcher.close(timeout)
            if last is not None:
                self._learn(last)
            self.release()
        return over


def _share(plan: Plan, size: int) -> int:
    """Bytes that a rank will write, before ranks agreed: its share of what all hold, and what it holds of the rest."""
    held = 0
    for place in plan.held:
        bytes_ = sum(prod(sizes) for _, sizes in place.regions) * plans.element_bytes(place.dtype)
        held += bytes_ // size if isinstance(place.layout, Plain) else bytes_
    return held


def _left_alone(came: int, size: int) -> Error:
    what = (
        f"the structure of the state changed on {came} of {size} ranks: "
        f"the others saved it as before, or not at all"
    )
    hint = "what differs from rank to rank belongs into per_rank="
    return make("structure_mismatch", what, None, [hint])


def _some(plan: Plan | None) -> Plan:
    assert plan is not None
    return plan


def _digest(description: Description) -> str:
    text = json.dumps(description.message(), separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _as_error(failure: BaseException | None) -> Error | None:
    if failure is None or isinstance(failure, Error):
        return failure
    return usage(f"describing the state failed: {type(failure).__name__}: {failure}")


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


def _listed(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []
