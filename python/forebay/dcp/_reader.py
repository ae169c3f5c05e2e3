"""`Reader`: torch plans, the native part reads the ranges that the plan names.

What metadata torch gets is made from the native catalog, so that no pickle is executed. Objects are read by a restricted
unpickler, and the planner, which executes pickles, gets new ones of what came out, unless `weights_only=False`.

Like `Writer` it holds no native object when it is pickled.
"""

from __future__ import annotations

import io
import os
import secrets
from pathlib import Path
from traceback import extract_tb
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from forebay import _native
from forebay._catalog import PathLike
from forebay._ckpt.kinds import dtype_of
from forebay._ckpt.objects import harmless, load, unpack_all
from forebay._ckpt.reading import read_regions
from forebay._errors import Error, make, quoted
from forebay._urls import Place, home_of, place_of
from forebay.dcp._alone import read_metadata


class Reader(StorageReader):
    """A StorageReader that reads natively: checkpoints of Forebay and of torch.

    Args:
        path: the checkpoint's folder, or its URL in a bucket; `checkpoint_id` of `dcp.load` replaces it.
        threads: worker threads.
        weights_only: refuse objects whose classes are not known to be harmless, as `torch.load` does.
    """

    def __init__(
        self, path: PathLike, *, threads: int | None = None, weights_only: bool = True
    ) -> None:
        super().__init__()
        self.path = place_of(path)
        self.threads = threads
        self.weights_only = weights_only
        self.load_id = secrets.token_hex(16)
        self._opened: _Opened | None = None
        #: Why the whole checkpoint could not be read, for when that of this rank cannot either.
        self._refused: Error | None = None
        self._stock: FileSystemReader | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None, "_stock": None, "_refused": None}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new load, from another folder if one is given."""
        if checkpoint_id:
            self.path = place_of(checkpoint_id)
        self.load_id = secrets.token_hex(16)
        self._opened = self._stock = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata. With `rank` that of the checkpoint that this rank wrote for itself."""
        rank = kwargs.get("rank")
        self._opened = self._stock = None
        if rank is None:
            self._refused = None
            try:
                return self._describe(self.path)
            except Error as error:
                self._refused = error
                raise
        try:
            return self._rank_metadata(int(rank))
        except Exception as error:
            if self._refused is None:
                raise
            # Torch goes on after any exception, to an assertion that says nothing; not after its own, which is none.
            found = isinstance(error, Error) and error.code != "not_found"
            told: BaseException = error if found else self._refused
            failures = {int(rank): (told, extract_tb(told.__traceback__))}
            raise CheckpointException("the checkpoint cannot be read", failures) from told

    def _rank_metadata(self, rank: int) -> Metadata:
        home = self.path / f"__{rank}"
        # Every prefix of a bucket is a folder.
        if home.is_dir() if isinstance(home, Path) else (home / ".metadata").is_file():
            return self._describe(home)
        folder = home_of(self.path, "a checkpoint that torch wrote without collective calls")
        # Written by torch: its reader follows the metadata, which is read without executing it.
        metadata = read_metadata(folder / f"__{rank}.metadata")
        self._stock = FileSystemReader(folder)
        self._stock.storage_data = metadata.storage_data
        return metadata

    def _describe(self, folder: Place) -> Metadata:
        opened = self._opened = _Opened(folder)
        entries: dict[str, Any] = {}
        paths: dict[str, Any] = {}
        for name, path, kind, dtype, shape in opened.checkpoint.entries:
            if path:
                paths[name] = path
            if kind != 0:
                entries[name] = BytesStorageMetadata()
                continue
            chunks = [
                ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                for offsets, sizes in opened.checkpoint.chunks(name)
            ]
            properties = TensorProperties(dtype_of(dtype or ""))
            entries[name] = TensorStorageMetadata(properties, torch.Size(shape), chunks)
        meta = StorageMeta(checkpoint_id=str(self.path), load_id=self.load_id)
        metadata = Metadata(entries, paths or None, {}, meta)
        # A field since torch 2.9.
        metadata.version = "1.0.0"
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Opens what `read_metadata` of another process or object described."""
        if self._opened is None and self._stock is None:
            self._opened = _Opened(self.path)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing to add."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads what the plan lists; every byte that has a checksum is compared with it: of torch's
        checkpoints those of items that are read whole."""
        if self._stock is not None:
            vetted: Any = _Vetting(planner) if self.weights_only else planner
            return self._stock.read_data(plan, vetted)
        opened = self._opened = self._opened or _Opened(self.path)
        objects: list[ReadItem] = []
        by_device: dict[str, list[_Wanted]] = {}
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                objects.append(item)
            else:
                wanted = _Wanted(opened, item, planner)
                by_device.setdefault(wanted.device, []).append(wanted)
        self._load_objects(opened, planner, objects)
        for device, group in by_device.items():
            self._read(opened, planner, device, group)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _load_objects(self, opened: _Opened, planner: LoadPlanner, items: list[ReadItem]) -> None:
        """Hands objects to the planner, which runs what a pickle says: so it never gets the bytes of the file, but those
        of the value that was read from them, unless the caller trusts the file."""
        names = [item.storage_index.fqn for item in items]
        if not self.weights_only:
            for item, name in zip(items, names, strict=True):
                planner.load_bytes(item, io.BytesIO(opened.checkpoint.object(name)))
            return
        wanted = [(opened.number(name), name) for name in names]
        values = unpack_all(opened.checkpoint, wanted, True)
        for item, value in zip(items, values, strict=True):
            planner.load_bytes(item, io.BytesIO(harmless(value)))

    def _read(
        self, opened: _Opened, planner: LoadPlanner, device: str, group: list[_Wanted]
    ) -> None:
        filled = [one for one in group if one.memory.numel()]
        if filled:
            wants = [one.want for one in filled]
            memory = [one.memory for one in filled]
            read_regions(opened.checkpoint, wants, memory, device, self.threads)
        for one in group:
            one.commit(planner)

    @property
    def checkpoint_id(self) -> str:
        """The folder."""
        return str(self.path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a name is a folder, or a prefix of a bucket."""
        try:
            return place_of(checkpoint_id).is_dir()
        except Error:
            return False


class _Opened:
    """An open checkpoint, and its entries by name."""

    def __init__(self, folder: Place) -> None:
        self.checkpoint = _native.Checkpoint(folder)
        entries = self.checkpoint.entries
        self.numbers = {entry[0]: number for number, entry in enumerate(entries)}
        self.dtypes = [entry[3] for entry in entries]

    def number(self, name: str) -> int:
        """An entry's. Errors: `no_such_tensor`."""
        found = self.numbers.get(name)
        if found is None:
            raise make("no_such_tensor", f"the checkpoint has no {quoted(name)}")
        return found


class _Vetting:
    """A planner that is given harmless objects only, by torch's own reader."""

    def __init__(self, planner: LoadPlanner) -> None:
        self._planner = planner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Errors: `forbidden_global`."""
        found = load(read_item.storage_index.fqn, value.read(), True)
        self._planner.load_bytes(read_item, io.BytesIO(harmless(found)))


class _Wanted:
    """One item of a plan: a region, and memory for it."""

    def __init__(self, opened: _Opened, item: ReadItem, planner: LoadPlanner) -> None:
        self.item = item
        name = item.storage_index.fqn
        number = opened.number(name)
        start = item.storage_index.offset or (0,) * len(item.storage_offsets)
        offsets = [low + more for low, more in zip(start, item.storage_offsets, strict=True)]
        self.want = (number, offsets, list(item.lengths))
        self.target: torch.Tensor = planner.resolve_tensor(item).detach()
        if self.target.shape != item.lengths:
            what = f"{quoted(name)}: the plan says {list(item.lengths)}, the planner gives "
            raise make("structure_mismatch", f"{what}{list(self.target.shape)}")
        dtype = dtype_of(opened.dtypes[number] or "")
        place = self.target.device
        self.device = f"cuda:{place.index}" if place.type == "cuda" else "host"
        direct = (
            self.target.dtype == dtype
            and place.type in ("cpu", "cuda")
            and self.target.is_contiguous()
            and not self.target.is_conj()
            and not self.target.is_neg()
        )
        if direct:
            self.memory = self.target
        else:
            made_on = place if place.type == "cuda" else "cpu"
            self.memory = torch.empty(self.target.shape, dtype=dtype, device=made_on)

    def commit(self, planner: LoadPlanner) -> None:
        """Hands the tensor to the planner; casts and copies as torch's reader does."""
        if self.memory is not self.target:
            with torch.no_grad():
                self.target.copy_(self.memory)
        planner.commit_tensor(self.item, self.target)
