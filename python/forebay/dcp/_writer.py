"""`Writer`: torch plans, the native part writes and commits.

The coordinator names an attempt when it plans, and the names travel to the ranks with their plans. Each rank writes
its files, makes them durable, and hands its part back as the one result of `write_data`; `finish` commits all parts in
one step. Until then a checkpoint that was in the folder stays what readers see.

With planner caching (`enable_plan_caching`) ranks are handed plans of an earlier save, with the name of an earlier
attempt. So an attempt is that name and how often this process used it, which is the same on all ranks.

Without collective calls (`use_collectives=False`) each rank has a checkpoint of its own in a folder `__RANK`, and a
`__RANK.metadata` beside it that stock readers follow.

An object of this class holds no native object: it may be pickled, as `async_save` in process mode does.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import platform
import secrets
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from forebay import _native
from forebay._catalog import PathLike
from forebay._ckpt.background import Background
from forebay._ckpt.kinds import dtype_name
from forebay._ckpt.layout import Item
from forebay._ckpt.quiet import quiet
from forebay._ckpt.retention import LEFTOVER_SECONDS
from forebay._ckpt.settings import STAGING_BYTES
from forebay._ckpt.snapshot import Snapshots, device_of
from forebay._errors import Error, make, quoted, usage
from forebay._options import Options, engine
from forebay._save import parse_size
from forebay._urls import Place, home_of, place_of
from forebay.dcp._alone import publish_alone
from forebay.dcp._memory import lent

_log = logging.getLogger("forebay")

_METADATA = ".metadata"

#: What is written to folders alone.
_ALONE = "a save without collective calls"

#: Of the metadata files that ranks write for themselves, as torch has it.
_VERSION = "1.0.0"

_lock = threading.Lock()
#: How often this process used the name of an attempt.
_uses: dict[str, int] = {}
#: The name that this process last gave as the coordinator of so many ranks: writers are often made for one save each,
#: torch's cache of plans is there as long as the process.
_last: dict[int, str] = {}
#: Collects what overwritten checkpoints were made of.
_collector = Background("forebay-dcp-gc")


@dataclasses.dataclass(frozen=True)
class _Ticket:
    """What the coordinator tells a rank."""

    run_id: str
    rank: int
    world: int


class Writer(StorageWriter):
    """A StorageWriter that writes natively.

    Args:
        path: the checkpoint's folder, or its URL in a bucket; `checkpoint_id` of `dcp.save` replaces it.
        threads: files that a rank writes at a time.
        overwrite: whether a checkpoint in the folder may be replaced; it stays until the new one is committed.
        staging_bytes: memory that bytes of a GPU go through. What a save took of it is kept for the next one, until
            `forebay.release_memory()`.
        grace_s: how long what a checkpoint was made of stays after it was overwritten, in seconds: for readers that have
            it open. After each save older leftovers in the folder are removed, beside the caller; those of the last
            overwrite stay for the next, or for `forebay ckpt gc`. A save by others to the same folder that has been
            silent for so long counts as dead.
    """

    def __init__(
        self,
        path: PathLike,
        *,
        threads: int | None = None,
        overwrite: bool = True,
        staging_bytes: int | str | None = None,
        grace_s: float = LEFTOVER_SECONDS,
    ) -> None:
        super().__init__()
        if grace_s < 0:
            raise usage(f"grace_s is {grace_s!r}, seconds from 0 are needed")
        self.path = _folder(path)
        self.threads = threads
        self.overwrite = overwrite
        self.staging_bytes = STAGING_BYTES if staging_bytes is None else parse_size(staging_bytes)
        self.grace_s = grace_s
        self.save_id = secrets.token_hex(16)
        self.rank: int | None = None
        self.use_collectives = True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new save, to another folder if one is given."""
        if checkpoint_id:
            self.path = _folder(checkpoint_id)
        self.save_id = secrets.token_hex(16)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Takes `rank` and `use_collectives`."""
        self.rank = kwargs.get("rank")
        self.use_collectives = kwargs.get("use_collectives", True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuses folders that are not to be written to. Errors: `already_exists`."""
        if not self.use_collectives:
            home_of(self.path, _ALONE)
        self.path.mkdir(parents=True, exist_ok=True)
        if not self.overwrite and (self.path / self._metadata_name()).exists():
            what = "there is a checkpoint, and overwrite=False"
            raise make("already_exists", what, str(self.path))
        if not self.use_collectives:
            ticket = _Ticket(secrets.token_hex(4), self.rank or 0, 1)
            plan = dataclasses.replace(plan, storage_data=ticket)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Names the attempt. Ranks whose plan torch has cached (`usable=False`) get no other name than the one in that
        plan, which is the last that was given; so the others get it too."""
        if not self.use_collectives:
            return plans
        with _lock:
            run_id = _last.get(len(plans))
            if run_id is None or all(getattr(plan, "usable", True) for plan in plans):
                run_id = _last[len(plans)] = secrets.token_hex(4)
        return [
            dataclasses.replace(plan, storage_data=_Ticket(run_id, rank, len(plans)))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes what the plan lists and makes it durable. The one result is the rank's part."""
        ticket = plan.storage_data
        if not isinstance(ticket, _Ticket):
            raise usage("the plan was not prepared by this kind of writer")
        with _lock:
            counter = _uses[ticket.run_id] = _uses.get(ticket.run_id, 0) + 1
        with quiet():
            ready = self._ready(plan, planner, ticket)
        native = engine(ready.device, Options())
        with lent(ready.device, native, self._pool_bytes(ready.structure.bytes)) as pool:
            with quiet():
                saving = self._start(ready, ticket, counter, native, pool)
            try:
                while not saving.wait(None):
                    pass
            except BaseException:
                saving.cancel()
                raise
            part = _Part(ticket.run_id, counter, saving.part())
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(MetadataIndex(_METADATA), ready.structure.bytes, part)])
        return future

    def _ready(self, plan: SavePlan, planner: SavePlanner, ticket: _Ticket) -> _Ready:
        """What to write of a plan."""
        items, tensors, objects = self._resolve(plan, planner)
        rank, world = self._place(ticket)
        structure = _native.Structure(items, rank=rank, world=world, files_per_rank=self.threads)
        return _Ready(structure, tensors, objects, device_of(tensors))

    def _place(self, ticket: _Ticket) -> tuple[int, int]:
        """This rank's number among those of one checkpoint, and how many they are."""
        return (ticket.rank, ticket.world) if self.use_collectives else (0, 1)

    def _start(
        self,
        ready: _Ready,
        ticket: _Ticket,
        counter: int,
        native: _native.Engine,
        pool: _native.Pool,
    ) -> _native.CheckpointSave:
        """Starts the native save."""
        rank, world = self._place(ticket)
        saver = _native.Saver(
            self._home(),
            rank=rank,
            world=world,
            run_id=ticket.run_id,
            engine=native,
            pool=pool,
            takers=self.threads,
            flat=True,
            commit="external",
            overwrite=self.overwrite,
        )
        # The state stays as it is until torch has the result: nothing is copied but what must be.
        snapshot = Snapshots(False, device=ready.device).take(ready.tensors, blocking=True)
        return saver.start(
            0,
            ready.structure,
            snapshot.addresses,
            snapshot.places,
            ready.objects,
            agreed=ticket.run_id,
            counter=counter,
            stream=snapshot.stream,
            in_place=True,
            keep=snapshot.keep,
        )

    def _pool_bytes(self, state_bytes: int) -> int:
        return max(min(self.staging_bytes, state_bytes), 8 << 20)

    def _resolve(
        self, plan: SavePlan, planner: SavePlanner
    ) -> tuple[list[Item], list[torch.Tensor], list[tuple[bytes, bool]]]:
        paths = plan.planner_data if isinstance(plan.planner_data, dict) else {}
        items: list[Item] = []
        tensors: list[torch.Tensor] = []
        objects: list[tuple[bytes, bool]] = []
        # The native part takes tensors and objects apart, each in the order of the items.
        for item in plan.items:
            name = item.index.fqn
            path = tuple(paths.get(name, ()))
            if item.type == WriteItemType.BYTE_IO:
                data = planner.resolve_data(item)
                items.append((name, path, 1, None, (), (), (), True))
                objects.append((bytes(data.getbuffer()), True))  # type: ignore[union-attr]
                continue
            data_ = item.tensor_data
            assert data_ is not None
            shape, chunk = tuple(data_.size), data_.chunk
            if 0 in chunk.sizes and 0 not in shape:
                # A shard of nothing.
                continue
            tensor = _checked(name, item, planner.resolve_data(item))
            dtype = dtype_name(tensor.dtype)
            region = (tuple(chunk.offsets), tuple(chunk.sizes))
            items.append((name, path, 0, dtype, shape, *region, True))
            tensors.append(tensor)
        return items, tensors, objects

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits the checkpoint: from here on readers see it."""
        parts = [_part_of(result) for result in results]
        metadata.storage_meta = self.storage_meta()
        metadata.version = _VERSION
        if len({(part.run_id, part.counter) for part in parts}) != 1:
            what = "the ranks wrote different attempts"
            hint = "a rank failed in an earlier save with cached plans: make new planners"
            raise make("structure_mismatch", what, str(self.path), [hint])
        paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
        _native.commit_parts(
            self._home(),
            [part.data for part in parts],
            run_id=parts[0].run_id,
            counter=parts[0].counter,
            paths={name: tuple(path) for name, path in paths.items()},
            overwrite=self.overwrite,
            torch=torch.__version__,
            python=platform.python_version(),
            host=platform.node(),
        )
        if not self.use_collectives:
            publish_alone(home_of(self.path, _ALONE), self._home().name, metadata)
        _collector.put(partial(_collect, self._home(), self.grace_s))

    def storage_meta(self) -> StorageMeta | None:
        """What torch's logs say of the save."""
        return StorageMeta(checkpoint_id=str(self.path), save_id=self.save_id)

    @property
    def checkpoint_id(self) -> str:
        """The folder."""
        return str(self.path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a name can be a folder, or a prefix of a bucket."""
        try:
            _folder(checkpoint_id)
        except Error:
            return False
        return True

    def _metadata_name(self) -> str:
        return _METADATA if self.use_collectives else f"__{self.rank or 0}{_METADATA}"

    def _home(self) -> Place:
        """The folder that the native part writes to."""
        return self.path if self.use_collectives else self.path / f"__{self.rank or 0}"


@dataclasses.dataclass(frozen=True)
class _Ready:
    """What a rank writes."""

    structure: _native.Structure
    tensors: list[torch.Tensor]
    objects: list[tuple[bytes, bool]]
    device: str


@dataclasses.dataclass(frozen=True)
class _Part:
    """What one rank hands to the coordinator."""

    run_id: str
    counter: int
    data: bytes


def _part_of(results: Sequence[WriteResult]) -> _Part:
    for result in results:
        if isinstance(result.storage_data, _Part):
            return result.storage_data
    raise usage("a result was not made by this kind of writer")


def _checked(name: str, item: WriteItem, tensor: Any) -> torch.Tensor:
    assert item.tensor_data is not None
    wanted = (tuple(item.tensor_data.chunk.sizes), item.tensor_data.properties.dtype)
    if (tuple(tensor.shape), tensor.dtype) != wanted:
        what = f"the plan says {list(wanted[0])} of {wanted[1]}, the planner gives "
        what += f"{list(tensor.shape)} of {tensor.dtype}"
        raise make("structure_mismatch", what, f"tensor {quoted(name)}")
    found: torch.Tensor = tensor
    return found


def _collect(folder: Place, grace_s: float) -> None:
    """Removes what is left of attempts that are not the checkpoint; a failure is logged, the next save tries again."""
    try:
        _native.gc(folder, grace_s=grace_s)
    except Error as error:
        _log.warning("forebay: leftovers in %s were not removed: %s", folder, error)


def _folder(path: str | os.PathLike[str]) -> Place:
    return place_of(path)
