"""Checkpoints that ranks wrote each for itself (`use_collectives=False`).

Stock readers look for a `__RANK.metadata` in the checkpoint's folder. Ours is the metadata of the rank's own folder
with that folder's name before each file's; it is written beside it and renamed once it is on the disk.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from forebay._errors import Error, make

#: What metadata may name: torch's own classes for it, its dtypes, and paths. None of them does anything when it is
#: made.
_ALLOWED_MODULES = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed._shard.sharded_tensor.metadata",
)
_ALLOWED = frozenset(
    (
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "PosixPath"),
        ("pathlib", "PurePosixPath"),
        ("pathlib._local", "PosixPath"),
        ("pathlib._local", "PurePosixPath"),
    )
)


class _MetadataUnpickler(pickle.Unpickler):
    """Reads metadata; refuses whatever else a pickle names."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "pathlib._local":
            module = "pathlib"
        known = (module, name) in _ALLOWED or (module in _ALLOWED_MODULES and "." not in name)
        if module == "torch" and not known:
            import torch

            known = isinstance(getattr(torch, name, None), torch.dtype)
        if not known:
            what = f"metadata names {module}.{name}, which is not on the list of harmless classes"
            raise make("forbidden_global", what)
        return super().find_class(module, name)


def read_metadata(path: Path) -> Metadata:
    """Metadata in the form of a pickle. Errors: `not_found`, `forbidden_global`, `invalid_metadata`."""
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise make("not_found", "no metadata", str(path)) from error
    try:
        found = _MetadataUnpickler(io.BytesIO(data)).load()
    except Error as error:
        raise make(error.code, error.what, str(path)) from error
    except (pickle.UnpicklingError, EOFError, AttributeError, ValueError, TypeError) as error:
        what = f"metadata cannot be read: {error}"
        raise make("invalid_metadata", what, str(path)) from error
    if not isinstance(found, Metadata):
        what = f"metadata is {type(found).__name__}"
        raise make("invalid_metadata", what, str(path))
    return found


def publish_alone(folder: Path, home: str, metadata: Metadata) -> None:
    """Writes `__RANK.metadata` for the checkpoint in the folder `home`."""
    written = read_metadata(folder / home / ".metadata")
    told = dataclasses.replace(
        metadata,
        storage_data={
            index: dataclasses.replace(info, relative_path=f"{home}/{info.relative_path}")
            for index, info in written.storage_data.items()
        },
    )
    temporary = folder / f"{home}.metadata.tmp"
    with open(temporary, "wb") as file:
        pickle.dump(told, file, 4)
        file.flush()
        os.fsync(file.fileno())
    os.rename(temporary, folder / f"{home}.metadata")
    entry = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(entry)
    finally:
        os.close(entry)
